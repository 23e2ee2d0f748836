"""Iterators and tensors whose change no version shows: those that a phase, plugin or loss steps through are named."""

import itertools
import random

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from engine.kept.witnessed import named_by, named_in
from loopkit import Learner, TrainingPhase, every, hookimpl
from loopkit.plugins import Checkpoint

X = torch.arange(24.0)


def counting():
    number = 0
    while True:
        number += 1
        yield number


def noise(rng):
    while True:
        yield rng.random()


def over(loader):
    while True:
        yield from loader


def loader():
    return DataLoader(TensorDataset(X), batch_size=2)


ITERATORS = {
    "a cycle of a loader": lambda: itertools.cycle(loader()),
    "an iterator of a loader": lambda: iter(loader()),
    "a generator over a loader": lambda: over(loader()),
    "a generator that counts": counting,
    "a generator that draws": lambda: noise(random.Random(0)),
    "an iterator of a list": lambda: iter(list(range(99))),
    "an iterator of tensors": lambda: iter(X.split(1)),
    "zip": lambda: zip(itertools.count(), iter(range(99)), strict=False),
    "map": lambda: map(abs, iter(range(99))),
    "enumerate": lambda: enumerate(iter(range(99))),
    "chain": lambda: itertools.chain(iter([1] * 50), iter([2] * 50)),
    "islice": lambda: itertools.islice(itertools.cycle(iter(range(9))), 50),
}


def named_with(directory, loss_fn, *plugins, model=None):
    """What is warned of in a run of two epochs with this loss function."""
    saving = Checkpoint(directory, save=every(updates=1))
    model = nn.Linear(3, 1) if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return named_by(Learner(model, loss_fn, optimizer, plugins=[saving, *plugins], standard=False))


class Steps(TrainingPhase):
    """Takes an item of its own iterator in each step."""

    def __init__(self, items):
        super().__init__()
        self.items = items

    def step(self, learner, step):
        next(self.items)
        super().step(learner, step)


@pytest.mark.parametrize("kind", ITERATORS)
def test_iterator_that_a_phase_steps_through_is_named(kind, tmp_path):
    [message] = named_in(tmp_path, phases=[Steps(ITERATORS[kind]())])
    assert "has changed its 'items' since the fit began" in message


def test_iterator_of_a_plugin_and_of_a_loss_is_named(tmp_path):
    class Draws:
        name = "draws"

        def __init__(self):
            self.items = itertools.cycle(loader())

        @hookimpl(phase="training")
        def step_end(self):
            next(self.items)

    weights = counting()
    messages = named_with(tmp_path, lambda outputs, targets: nn.MSELoss()(outputs, targets) / next(weights), Draws())
    assert any("plugin 'draws'" in each and "'items'" in each for each in messages)
    assert any("the loss function" in each and "weights" in each for each in messages)


class Anew:
    """Makes its iterator anew in each epoch."""

    name = "anew"
    items = None

    @hookimpl(phase="training")
    def epoch_begin(self):
        self.items = itertools.cycle(loader())

    @hookimpl(phase="training")
    def step_end(self):
        next(self.items)


def test_iterator_that_is_made_anew_in_each_epoch_is_named_if_it_is_saved_on_the_way(tmp_path):
    [message] = named_with(tmp_path, nn.MSELoss(), Anew())
    assert "plugin 'anew' (Anew) has changed its 'items' since" in message


def unused():
    phase = Steps(itertools.count())
    phase.other = itertools.cycle(loader())
    phase.items = itertools.repeat(0)
    return phase


def test_iterator_that_stays_is_not_named(tmp_path):
    assert named_in(tmp_path, phases=[unused()]) == []


# Tensors


class Center:
    """A loss with a running mean in a plain tensor."""

    def __init__(self, change):
        self.center = torch.zeros(1)
        self.change = change

    def __call__(self, outputs, targets):
        self.change(self.center, outputs.detach().mean(0)[:1])
        return (outputs - targets).square().mean() + (outputs.mean() - self.center).square().mean()


def assign_data(center, mean):
    center.data = 0.9 * center + 0.1 * mean


def fill_memory(center, mean):
    center.numpy()[:] = mean.numpy()


CHANGES = {
    "in place through data": lambda center, mean: center.data.mul_(0.9).add_(0.1 * mean),
    "other data": assign_data,
    "memory that numpy shares": fill_memory,
    "in place": lambda center, mean: center.mul_(0.9).add_(0.1 * mean),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_tensor_that_changes_without_a_version_is_named(kind, tmp_path):
    [message] = named_with(tmp_path, Center(CHANGES[kind]))
    assert "the loss function (Center) has changed its 'center' since the fit began" in message


def test_tensor_of_a_module_that_changes_without_a_version_is_named(tmp_path):
    class Queue(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 1)
            self.queue = torch.zeros(2000)

        def forward(self, inputs):
            self.queue.data.add_(1)
            return self.layer(inputs)

    [message] = named_with(tmp_path, nn.MSELoss(), model=Queue())
    assert "has changed its 'queue' since the fit began" in message


@pytest.mark.parametrize(
    "tensor", [torch.full((3,), torch.nan), torch.zeros(0), torch.zeros(2, 3).t(), torch.eye(2).bool()]
)
def test_tensor_that_stays_is_not_named(tensor, tmp_path):
    phase = TrainingPhase()
    phase.table = tensor
    assert named_in(tmp_path, phases=[phase]) == []


# Attributes of functions


def weighted():
    def loss(outputs, targets):
        loss.calls += 1
        return nn.MSELoss()(outputs, targets) / loss.calls

    loss.calls = 0
    return loss


def with_history():
    def loss(outputs, targets):
        loss.history["mean"].mul_(0.9).add_(outputs.detach().mean())
        return nn.MSELoss()(outputs, targets) + loss.history["mean"]

    loss.history = {"mean": torch.zeros(())}
    return loss


def with_noise():
    def loss(outputs, targets):
        return nn.MSELoss()(outputs, targets) * loss.rng.random()

    loss.rng = random.Random(0)
    return loss


@pytest.mark.parametrize(("make", "name"), [(weighted, "calls"), (with_history, "history"), (with_noise, "rng")])
def test_attribute_of_a_function_that_moves_is_named(make, name, tmp_path):
    [message] = named_with(tmp_path, make())
    assert f"the loss function (function) has changed its '{name}" in message.replace('"', "'")
