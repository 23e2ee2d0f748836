"""Attributes in a phase's ``saved`` that are no plain values: a run that is stopped goes on with the same bits."""

from __future__ import annotations

import dataclasses
import random
import warnings
from collections import deque
from types import SimpleNamespace

import numpy
import pytest
import torch
from helpers import batches
from torch import nn

from loopkit import Learner, TrainingPhase
from loopkit.checkpoint.encoding import decode, encode


@dataclasses.dataclass
class Tally:
    count: int = 0
    values: deque = dataclasses.field(default_factory=lambda: deque(maxlen=2))
    rng: random.Random = dataclasses.field(default_factory=lambda: random.Random(0))


@dataclasses.dataclass(frozen=True)
class Frozen:
    count: int = 0


@dataclasses.dataclass(slots=True)
class Slotted:
    count: int = 0


def add(held):
    held.count += 1
    return held.count


def add_more(held):
    held.values.append(held.rng.random())
    return add(held) + sum(held.values)


def normalize(module):
    return float(module(torch.tensor([[1.0], [2.0]])).detach().mean() + module.running_mean)


KINDS = {
    "generator of torch": (lambda: torch.Generator().manual_seed(3), lambda g: float(torch.rand(1, generator=g))),
    "Generator of NumPy": (lambda: numpy.random.default_rng(3), lambda g: float(g.normal())),
    "RandomState": (lambda: numpy.random.RandomState(3), lambda g: float(g.normal())),
    "Random": (lambda: random.Random(3), lambda g: g.gauss(0, 1)),
    "list of generators": (lambda: [random.Random(3)], lambda g: g[0].random()),
    "tuple of generators": (lambda: (random.Random(3), random.Random(4)), lambda g: g[1].random()),
    "dict of generators": (lambda: {"a": random.Random(3)}, lambda g: g["a"].random()),
    "tuple of modules": (lambda: (nn.BatchNorm1d(1),), lambda m: normalize(m[0])),
    "dataclass": (Tally, add_more),
    "slotted dataclass": (Slotted, add),
    "namespace": (lambda: SimpleNamespace(count=0), add),
}


class Scales(TrainingPhase):
    """Scales the loss by a number that it draws or counts."""

    saved = ("held",)

    def __init__(self, held, use):
        super().__init__()
        self.held, self.use = held, use

    def loss(self, learner, outputs, targets):
        return (outputs - targets).square().mean() * (1 + self.use(self.held) / 10)


class Replaces(TrainingPhase):
    """Replaces a frozen value."""

    saved = ("held",)

    def __init__(self):
        super().__init__()
        self.held = Frozen()

    def loss(self, learner, outputs, targets):
        self.held = dataclasses.replace(self.held, count=self.held.count + 1)
        return (outputs - targets).square().mean() * self.held.count


def run(phase, epochs, state=None):
    torch.manual_seed(0 if state is None else 7)
    learner = Learner(nn.Linear(3, 1), None, lambda p: torch.optim.SGD(p, lr=0.05), phases=[phase], standard=False)
    if state is not None:
        learner.load_state_dict(state)
    learner.fit(batches(3), epochs=epochs)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return learner.model.weight, decode(*encode(learner.state_dict()))


@pytest.mark.parametrize("kind", [*KINDS, "frozen dataclass"])
def test_value_of_any_kind_that_is_named_is_saved(kind):
    def phase():
        return Replaces() if kind == "frozen dataclass" else Scales(KINDS[kind][0](), KINDS[kind][1])

    whole, _ = run(phase(), 3)
    _, state = run(phase(), 2)
    resumed, _ = run(phase(), 1, state)
    assert torch.equal(resumed, whole)


def test_generator_that_is_named_stays_the_same_object():
    rng = random.Random(3)
    other = Scales(random.Random(3), lambda g: g.random())
    _, state = run(other, 1)
    phase = Scales(rng, lambda g: g.random())
    run(phase, 1, state)
    assert phase.held is rng
