"""Modules that only the hooks of a plugin close over: no state has them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from engine.kept.witnessed import named_by
from loopkit import Learner, every, hookimpl
from loopkit.plugins import Checkpoint


def averaged(model: nn.Module, moves: bool) -> Any:
    average = torch.optim.swa_utils.AveragedModel(model)

    class Averages:
        name = "own"

        @hookimpl(phase="training")
        def step_end(self, learner: Any) -> None:
            if moves:
                average.update_parameters(learner.model)

    return Averages()


def teacher(model: nn.Module, moves: bool) -> Any:
    other = copy.deepcopy(model)

    def follow() -> None:
        with torch.no_grad():
            for own, now in zip(other.parameters(), model.parameters(), strict=True):
                own.lerp_(now, float(moves)) if moves else own.norm()

    class Follows:
        name = "own"

        @hookimpl(phase="training")
        def step_end(self) -> None:
            follow()

    return Follows()


def normalized(model: nn.Module, moves: bool) -> Any:
    norm = nn.BatchNorm1d(3).train(moves)

    class Normalizes:
        name = "own"

        @hookimpl(phase="training")
        def step_end(self, step: Any) -> None:
            norm(step.batch[0])

    return Normalizes()


def of_the_model(model: nn.Module, moves: bool) -> Any:
    class Looks:
        name = "own"

        @hookimpl(phase="training")
        def step_end(self) -> None:
            model[0].weight.norm()

    return Looks()


def named(tmp_path: Any, make: Any, moves: bool) -> list[str]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    return named_by(
        Learner(
            model,
            nn.MSELoss(),
            torch.optim.SGD(model.parameters(), lr=0.1),
            plugins=[make(model, moves), Checkpoint(tmp_path, save=every(updates=1))],
            standard=False,
        )
    )


@pytest.mark.parametrize("make", [averaged, teacher, normalized], ids=lambda make: make.__name__)
def test_module_that_moves_and_that_only_a_function_holds_is_named(tmp_path, make):
    (message,) = named(tmp_path, make, True)
    assert message.startswith("plugin 'own' ")


@pytest.mark.parametrize("make", [averaged, teacher, normalized, of_the_model], ids=lambda make: make.__name__)
def test_module_that_stays_or_is_the_models_own_is_not_named(tmp_path, make):
    assert named(tmp_path, make, False) == []
