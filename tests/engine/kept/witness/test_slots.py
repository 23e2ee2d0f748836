"""Values in ``__slots__``, which are read without running code."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from engine.kept.witnessed import named_by, named_in
from loopkit import Learner, TrainingPhase, every, hookimpl
from loopkit.plugins import Checkpoint


@dataclasses.dataclass(slots=True)
class Record:
    count: int = 0
    kept: Any = None


class Plain:
    __slots__ = ("count", "empty")

    def __init__(self) -> None:
        self.count = 0


class Below(Plain):
    __slots__ = ("other",)


class Declared:
    __slots__ = ("count",)
    volatile = ("count",)

    def __init__(self) -> None:
        self.count = 0


class Counts:
    name = "counts"

    def __init__(self, held: Any) -> None:
        self.held = held

    @hookimpl(phase="training")
    def step_end(self) -> None:
        self.held.count += 1


class CountingPhase(TrainingPhase):
    def __init__(self) -> None:
        super().__init__()
        self.held = Record(kept=[Plain()])

    def step(self, learner: Any, step: Any) -> None:
        self.held.kept[0].count += 1
        super().step(learner, step)


@pytest.mark.parametrize("kind", [Record, Plain, Below])
def test_slot_that_moves_is_named(tmp_path, kind):
    (message,) = named_in(tmp_path, plugins=[Counts(kind())])
    assert "'held.count'" in message


def test_slot_of_an_object_in_a_slot_is_named(tmp_path):
    (message,) = named_in(tmp_path, phases=[CountingPhase()])
    assert "'held.kept[0].count'" in message


def test_slot_that_is_volatile_is_not_named(tmp_path):
    assert named_in(tmp_path, plugins=[Counts(Declared())]) == []


class Gate(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.held = inner, Record()

    def forward(self, x: Any) -> Any:
        self.held.count += self.training
        return self.inner(x)


def test_slot_of_an_object_of_a_model_is_named(tmp_path):
    model = Gate(nn.Linear(3, 1))
    learner = Learner(
        model,
        nn.MSELoss(),
        torch.optim.SGD(model.parameters(), lr=0.1),
        plugins=[Checkpoint(tmp_path, save=every(updates=1))],
        standard=False,
    )
    (message,) = named_by(learner)
    assert "'held.count'" in message
