"""Documents in batches of alike lengths: their contents, how little is padding, shares, position, files."""

import pickle

import numpy as np
import pytest
import torch
from distributed.processes import run
from helpers import on
from torch import nn

from loopkit import Learner, TrainingPhase
from loopkit.data import LoaderError
from loopkit.errors import EmptyDataError
from loopkit.plugins import DDP
from loopkit_data import Documents

NUMBERS = np.random.default_rng(0)
DOCUMENTS = [[n + 1] * (2 + int(NUMBERS.exponential(20))) for n in range(200)]
"""Most are short, few long; each of a token of its own."""


def made(**options):
    return Documents(DOCUMENTS, **{"batch_size": 4, "window": 64, "group": 16, "seed": 3, **options})


def rows(loader):
    """The documents that came, batch after batch, without what fills them up."""
    found = []
    for batch in loader:
        for inputs, targets, length in zip(batch["inputs"], batch["targets"], batch["lengths"], strict=True):
            assert inputs[length:].eq(0).all()
            assert targets[length:].eq(-100).all()
            found.append([*inputs[:length].tolist(), int(targets[length - 1])])
            assert found[-1][1:] == targets[:length].tolist()
    return found


@pytest.mark.parametrize("shuffle", [False, True])
def test_every_document_comes_once_an_epoch_and_whole(shuffle):
    loader = made(shuffle=shuffle)
    first, second = rows(loader), rows(loader)
    assert sorted(first) == sorted(second) == DOCUMENTS
    assert (first == second) is not shuffle
    assert len(loader) == 50


def test_batches_are_of_alike_lengths():
    def padded(**options):
        batches = list(made(**options))
        return 1 - sum(int(b["lengths"].sum()) for b in batches) / sum(b["inputs"].numel() for b in batches)

    assert padded() < 0.12
    assert padded(window=1, group=1) > 0.45  # as shuffled


def test_order_of_the_batches_does_not_go_by_length():
    lengths = torch.cat([batch["lengths"] for batch in made(window=200)]).float().reshape(-1, 40).mean(1)
    assert not lengths.sort().values.equal(lengths)
    assert not lengths.sort(descending=True).values.equal(lengths)


@pytest.mark.parametrize("at", [0, 1, 17, 49, 50])
def test_position_is_exact_also_for_another_number_of_processes(at):
    loader = made()
    list(loader)
    batches = iter(loader)
    for _ in range(at):
        next(batches)
    state = loader.state_dict()
    again, parts = made(), [made(batch_size=2).shard(rank, 2) for rank in range(2)]
    for each in (again, *parts):
        each.load_state_dict(state)
    rest = [batch["lengths"] for batch in batches]
    assert [batch["lengths"].tolist() for batch in again] == [each.tolist() for each in rest]
    joined = [torch.cat([a["lengths"], b["lengths"]]) for a, b in zip(*parts, strict=True)]
    assert [each.tolist() for each in joined] == [each.tolist() for each in rest]


@pytest.mark.parametrize(("options", "other"), [({}, {"group": 8}), ({"seed": 1}, {}), ({}, {"longest": 5})])
def test_state_of_another_order_is_refused(options, other):
    with pytest.raises(LoaderError, match="the state is not one of this Documents"):
        made(**other).load_state_dict(made(**options).state_dict())


def test_documents_longer_than_the_longest_are_cut_and_those_without_a_target_left_out():
    loader = Documents([[1], [], [1, 2, 3, 4, 5], [6, 7]], batch_size=2, longest=3, shuffle=False)
    assert rows(loader) == [[6, 7], [1, 2, 3, 4]]


def test_documents_of_a_file_are_those_of_a_list(tmp_path, monkeypatch):
    monkeypatch.setattr("loopkit_data.documents.CHUNK", 100)
    listed = [[*each, 0] for each in DOCUMENTS]
    np.concatenate(listed).astype(np.uint16).tofile(tmp_path / "t.bin")
    loader = Documents(tmp_path / "t.bin", boundary=0, batch_size=4)
    expected = list(Documents(listed, batch_size=4))
    for found in (loader, pickle.loads(pickle.dumps(loader))):
        for one, other in zip(found, expected, strict=True):
            assert all(torch.equal(one[name], other[name]) for name in other)
    np.array([5, 6, 0, 0, 7, 8], dtype=np.uint16).tofile(tmp_path / "open.bin")  # the last one has no end
    assert rows(Documents(tmp_path / "open.bin", boundary=0, batch_size=1, shuffle=False)) == [[7, 8], [5, 6, 0]]


class Predict(TrainingPhase):
    """Predicts the next token."""

    def unpack(self, batch):
        return batch["inputs"], batch["targets"]

    def forward(self, learner, inputs):
        return learner.model(inputs).mT


def learner(*plugins):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(201, 8), nn.Dropout(0.2), nn.Linear(8, 201))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return Learner(model, nn.CrossEntropyLoss(), optimizer, plugins=plugins, phases=[Predict("train")], standard=False)


@pytest.mark.parametrize("at", [3, 10, 14])
def test_run_goes_on_in_mid_epoch_with_the_same_bits(at):
    whole = learner()
    whole.fit(made(batch_size=20), epochs=2)
    first = learner()
    first.add(on("step_end", lambda learner: learner.progress.steps == at and learner.pause("test"), "pausing"))
    first.fit(made(batch_size=20), epochs=2, on_interrupt="return")
    first.remove("pausing")
    again = learner()
    again.load_state_dict(first.state_dict())
    again.fit(made(batch_size=20), epochs=2)
    assert again.progress == whole.progress
    for one, other in zip(again.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(one, other)


def lengths_of(rank):
    seen = []
    made_by = learner(DDP(), on("step_end", lambda step: seen.append(step.batch["lengths"].tolist()), "seen"))
    made_by.fit(made(batch_size=2), epochs=1)
    return seen


def test_processes_share_an_epoch_in_a_fit():
    one, other = run(lengths_of, 2)
    assert [a + b for a, b in zip(one, other, strict=True)] == [batch["lengths"].tolist() for batch in made()]


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        (DOCUMENTS, {"batch_size": 0}, "batch_size is 0"),
        (DOCUMENTS, {"window": True}, "window is True"),
        (DOCUMENTS, {"longest": 1.5}, "longest is 1.5"),
        (DOCUMENTS, {"boundary": 0}, "boundary is for a file of tokens"),
        ("t.bin", {}, "give boundary=, the token that ends a document"),
    ],
)
def test_documents_refuse_options(given, options, message):
    with pytest.raises(LoaderError, match=message):
        Documents(given, **{"batch_size": 2, **options})


def test_documents_refuse_what_holds_none(tmp_path):
    with pytest.raises(EmptyDataError, match="none of 2 documents has two tokens"):
        Documents([[1], []], batch_size=1)
    with pytest.raises(LoaderError, match=r"is torch\.float32 of shape"):
        next(iter(Documents([[0.5, 1.5]], batch_size=1)))
    (tmp_path / "t.bin").write_bytes(b"123")
    with pytest.raises(LoaderError, match="has 3 bytes, no whole number of uint16"):
        Documents(tmp_path / "t.bin", boundary=0, batch_size=1)
