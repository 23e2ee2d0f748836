"""Endless data that are shuffled anew on the way: a run that resumes in the middle of them is exact, or names them."""

import itertools

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from engine.kept.witnessed import said
from engine.life.runs import at, tensors
from loopkit import Learner
from loopkit.plugins import Checkpoint

STEPS = 24


def loader(generator=None):
    return DataLoader(TensorDataset(*tensors(20)), batch_size=5, shuffle=True, generator=generator)


def generated(generator=None):
    batches = loader(generator)
    while True:
        yield from batches


class Endless:
    def __init__(self, generator=None):
        self.loader = loader(generator)

    def __iter__(self):
        while True:
            yield from self.loader


class Stream(IterableDataset):
    def __iter__(self):
        inputs, targets = tensors(20)
        while True:
            for index in torch.randperm(len(inputs)).tolist():
                yield inputs[index], targets[index]


LAPS = {
    "generator": generated,
    "function": lambda: generated,
    "class": Endless,
    "chain": lambda: itertools.chain.from_iterable(itertools.repeat(loader(), 100)),
    "slice": lambda: itertools.islice(generated(), 100),
    "stream": lambda: DataLoader(Stream(), batch_size=5),
}
EXACT = {
    "cycle, which keeps the first lap": lambda: itertools.cycle(loader()),
    "generator with its own random numbers": lambda: generated(torch.Generator()),
    "class with its own random numbers": lambda: Endless(torch.Generator()),
}


def run(directory, data, stop, drop=0.5):
    """Train to the end or to a pause; returns the warnings and the parameters."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 6), nn.Dropout(drop), nn.Linear(6, 1))
    pause = at(lambda learner: learner.pause(), index=stop - 1) if stop else None
    plugins = [Checkpoint(directory, resume="auto"), *([pause] if stop else [])]
    learner = Learner(
        model, nn.MSELoss(), lambda params: torch.optim.SGD(params, lr=0.01), plugins=plugins, standard=False
    )
    messages = said(lambda: learner.fit(data(), max_steps=STEPS, on_interrupt="return"))
    return messages, [p.detach().clone() for p in model.parameters()]


def resumed(directory, data, stop, **options):
    """Returns what was warned of, and whether the run ended as one that nothing interrupts."""
    messages, _ = run(directory / "paused", data, stop, **options)
    assert messages == []
    messages, found = run(directory / "paused", data, None, **options)
    _, whole = run(directory / "whole", data, None, **options)
    return messages, all(map(torch.equal, found, whole))


@pytest.mark.parametrize("kind", LAPS)
def test_order_that_depends_on_numbers_of_training_is_named_once_when_it_resumes(kind, tmp_path):
    messages, exact = resumed(tmp_path, LAPS[kind], 14)
    assert not exact
    [message] = messages
    assert message.startswith("the data of phase 'train' (")
    assert "draw from the global random generators in mid-epoch, as training does" in message
    assert "DataLoader(generator=torch.Generator())" in message


@pytest.mark.parametrize("kind", LAPS)
def test_pause_in_the_first_lap_is_exact_and_not_named(kind, tmp_path):
    assert resumed(tmp_path, LAPS[kind], 3) == ([], True)


@pytest.mark.parametrize("kind", LAPS)
def test_training_that_draws_nothing_is_exact_and_not_named(kind, tmp_path):
    assert resumed(tmp_path, LAPS[kind], 14, drop=0.0) == ([], True)


@pytest.mark.parametrize("kind", EXACT)
def test_data_that_draw_for_themselves_are_exact_and_not_named(kind, tmp_path):
    assert resumed(tmp_path, EXACT[kind], 14) == ([], True)


class Noisy(TensorDataset):
    def __getitem__(self, index):
        inputs, targets = super().__getitem__(index)
        return inputs + 0.1 * torch.randn(3), targets


def test_random_transforms_under_a_shuffle_of_torch_are_exact_and_not_named(tmp_path):
    def data():
        return DataLoader(Noisy(*tensors(120)), batch_size=5, shuffle=True)

    assert resumed(tmp_path, data, 14) == ([], True)
