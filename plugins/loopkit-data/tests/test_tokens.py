"""Blocks of tokens: their contents, shares, position, documents, and the memory that they take."""

import pickle
import resource

import numpy as np
import pytest
import torch

from loopkit.data import LoaderError
from loopkit.errors import EmptyDataError
from loopkit_data import Tokens

BLOCK = 8


@pytest.fixture
def file(tmp_path):
    np.arange(1000, dtype=np.uint16).tofile(tmp_path / "train.bin")
    return tmp_path / "train.bin"


def tokens(file, **options):
    return Tokens(file, **{"block": BLOCK, "batch_size": 4, **options})


@pytest.mark.parametrize("order", ["random", "sequential"])
def test_targets_are_the_tokens_one_later(file, order):
    loader = tokens(file, order=order)
    batches = list(loader)
    assert len(batches) == len(loader) == 31
    for inputs, targets in batches:
        assert inputs.dtype is targets.dtype is torch.int64
        assert torch.equal(inputs + 1, targets)
        assert torch.equal(inputs - inputs[:, :1], torch.arange(BLOCK).expand_as(inputs))


def test_sequential_blocks_have_no_gaps(file):
    inputs = torch.cat([batch[0] for batch in tokens(file, order="sequential")])
    assert torch.equal(inputs.flatten(), torch.arange(len(inputs) * BLOCK))


def test_random_blocks_begin_everywhere_and_anew_in_each_epoch(file):
    loader = tokens(file, batch_size=100)
    first, second = (torch.cat([batch[0][:, 0] for batch in loader]) for _ in range(2))
    assert not torch.equal(first, second)
    places = np.concatenate([loader.places(epoch, 0, loader.samples) for epoch in range(200)])
    counts = np.bincount(places, minlength=992)
    assert len(counts) == 992  # the last block ends with the file
    expected = len(places) / 992
    assert ((counts - expected) ** 2 / expected).sum() < 991 + 4 * (2 * 991) ** 0.5  # four deviations of chi square


@pytest.mark.parametrize("order", ["random", "sequential"])
def test_processes_share_an_epoch(file, order):
    parts = [tokens(file, order=order, batch_size=2).shard(rank, 2) for rank in range(2)]
    joined = torch.cat([torch.cat([one[0], other[0]]) for one, other in zip(*parts, strict=True)])
    assert torch.equal(joined, torch.cat([batch[0] for batch in tokens(file, order=order)]))


@pytest.mark.parametrize("order", ["random", "sequential"])
def test_position_is_exact_also_for_another_number_of_processes(file, order):
    loader = tokens(file, order=order)
    batches = iter(loader)
    for _ in range(5):
        next(batches)
    rest = torch.cat([batch[0] for batch in tokens_from(file, order, loader.state_dict())])
    assert torch.equal(rest, torch.cat([batch[0] for batch in batches]))
    parts = [tokens(file, order=order, batch_size=2).shard(rank, 2) for rank in range(2)]
    for part in parts:
        part.load_state_dict(tokens_at(file, order, 5).state_dict())
    joined = torch.cat([torch.cat([one[0], other[0]]) for one, other in zip(*parts, strict=True)])
    assert torch.equal(joined, rest)


def tokens_at(file, order, steps):
    loader = tokens(file, order=order)
    batches = iter(loader)
    for _ in range(steps):
        next(batches)
    return loader


def tokens_from(file, order, state):
    loader = tokens(file, order=order)
    loader.load_state_dict(state)
    return loader


def test_documents_are_told_apart(tmp_path):
    np.array([5, 6, 0, 7, 0, 0, 8, 9, 4, 3], dtype=np.uint16).tofile(tmp_path / "t.bin")
    (batch,) = Tokens(tmp_path / "t.bin", block=9, batch_size=1, order="sequential", boundary=0)
    assert batch["inputs"].tolist() == [[5, 6, 0, 7, 0, 0, 8, 9, 4]]
    assert batch["targets"].tolist() == [[6, 0, -100, 0, -100, -100, 9, 4, 3]]
    assert batch["documents"].tolist() == [[0, 0, 0, 1, 1, 2, 3, 3, 3]]
    assert batch["positions"].tolist() == [[0, 1, 2, 0, 1, 0, 0, 1, 2]]


def test_file_of_ten_gigabytes_takes_no_more_memory(tmp_path):
    with open(tmp_path / "large.bin", "wb") as file:
        file.truncate(10 * 2**30)  # sparse: it takes no space
    loader = Tokens(tmp_path / "large.bin", block=256, batch_size=32)
    batches = iter(loader)
    next(batches)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(500):
        next(batches)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 16 * 1024  # kB
    assert len(loader) > 600_000


def test_loader_can_be_sent_to_another_process(file):
    again = pickle.loads(pickle.dumps(tokens(file)))
    assert torch.equal(next(iter(again))[0], next(iter(tokens(file)))[0])


@pytest.mark.parametrize(
    "options", [{"block": 0}, {"batch_size": 2.5}, {"order": "shuffled"}, {"dtype": "float32"}, {"dtype": "S3"}]
)
def test_tokens_refuse_options(file, options):
    with pytest.raises(LoaderError, match=f"{next(iter(options))} is"):
        tokens(file, **options)


def test_tokens_refuse_a_file_that_is_too_short_or_of_another_dtype(file):
    with pytest.raises(EmptyDataError, match="has 1000 tokens, a block takes 1001"):
        tokens(file, block=1000)
    file.write_bytes(b"123")
    with pytest.raises(LoaderError, match="has 3 bytes, no whole number of uint16"):
        tokens(file)


def test_tokens_are_shown_in_a_line(tmp_path):
    np.arange(1000, dtype="uint16").tofile(tmp_path / "a")
    shown = repr(Tokens(tmp_path / "a", block=16, batch_size=4))
    assert shown == f"Tokens('{tmp_path}/a', 1,000 tokens, block=16, batch_size=4, order='random', seed=0)"
