"""Batches of single samples: those of torch's loader, and runs that go on in the middle of an epoch."""

from __future__ import annotations

import doctest

import numpy as np
import pytest
import torch
from helpers import make_learner, on
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from loopkit.data import LoaderError, TensorLoader
from loopkit_data import batched, elements

INPUTS = torch.randn(11, 3, generator=torch.Generator().manual_seed(0))
TARGETS = INPUTS.sum(1, keepdim=True)


class Stream(IterableDataset):
    """Samples one by one."""

    def __init__(self, samples):
        self.samples = samples

    def __iter__(self):
        return iter(self.samples)


KINDS = {
    "pairs": list(zip(INPUTS, TARGETS, strict=True)),
    "mappings": [{"x": x, "id": i} for i, x in enumerate(INPUTS)],
    "tensors": list(INPUTS),
    "numbers": [0.5 * i for i in range(11)],
    "arrays": [np.full(2, i) for i in range(11)],
    "texts": [(x, str(i)) for i, x in enumerate(INPUTS)],
}


def flat(batch):
    if isinstance(batch, dict):
        return [(key, flat(value)) for key, value in batch.items()]
    return (
        [flat(each) for each in batch]
        if isinstance(batch, (tuple, list))
        else getattr(batch, "tolist", lambda: batch)()
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 4, 11, 20])
@pytest.mark.parametrize("drop_last", [False, True])
def test_batches_are_those_of_a_dataloader_over_the_stream(kind, size, drop_last):
    stream = Stream(KINDS[kind])
    expected = [flat(batch) for batch in DataLoader(stream, batch_size=size, drop_last=drop_last)]
    assert [flat(batch) for batch in batched(stream, size, drop_last=drop_last)] == expected
    known = batched(KINDS[kind], size, drop_last=drop_last)
    assert len(known) == len(expected)


def test_fit_on_single_samples_is_the_fit_on_their_batches():
    ends = []
    for data in (batched(KINDS["pairs"], 4), TensorLoader(INPUTS, TARGETS, batch_size=4)):
        learner = make_learner()
        learner.fit(data, epochs=2)
        assert learner.progress.samples == 22
        ends.append([p.tolist() for p in learner.model.parameters()])
    assert ends[0] == ends[1]


@pytest.mark.parametrize("kind", ["list", "stream", "function"])
@pytest.mark.parametrize("at", [1, 2, 4])
def test_run_goes_on_in_mid_epoch_with_the_same_bits(kind, at):
    def data():
        if kind == "function":
            return lambda: batched((pair for pair in KINDS["pairs"]), 4)
        return batched(KINDS["pairs"] if kind == "list" else Stream(KINDS["pairs"]), 4)

    whole, first, again = make_learner(), make_learner(), make_learner()
    whole.fit(data(), epochs=2)
    first.add(on("step_end", lambda learner: learner.pause() if learner.progress.steps == at else None, "pausing"))
    first.fit(data(), epochs=2, on_interrupt="return")
    first.remove("pausing")
    again.load_state_dict(first.state_dict())
    again.fit(data(), epochs=2)
    assert [p.tolist() for p in again.model.parameters()] == [p.tolist() for p in whole.model.parameters()]


def test_stream_is_told_its_epoch():
    class Told(Stream):
        def set_epoch(self, epoch):
            seen.append(epoch)

    seen = []
    make_learner().fit(batched(Told(KINDS["pairs"]), 4), epochs=3)
    assert seen == [0, 1, 2]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: batched([1], 0), "batch_size is 0: it is a whole number, from 1"),
        (lambda: batched([1], True), "batch_size is True"),
        (lambda: batched(TensorLoader(INPUTS, batch_size=2), 2), "gives batches already"),
        (lambda: batched(TensorDataset(INPUTS), 2), r"samples by index: DataLoader\(dataset, batch_size=2\)"),
        (lambda: batched(3, 2), "cannot be iterated"),
    ],
)
def test_data_that_are_no_samples_raise(make, message):
    with pytest.raises(LoaderError, match=message):
        make()


def test_examples_in_docstrings_are_true():
    failed, tried = doctest.testmod(elements, extraglobs={"torch": torch})
    assert tried
    assert not failed
