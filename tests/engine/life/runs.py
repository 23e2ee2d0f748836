"""A small run that uses random numbers, shuffled data and momentum, and what interrupts it."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from helpers import differences, on
from torch import nn

from loopkit import Learner, every, hookimpl
from loopkit.checkpoint import Manifest, listing
from loopkit.data import TensorLoader
from loopkit.plugins import Checkpoint, History, Metrics

STEPS = 4
"""Steps of a training epoch; the last batch is smaller."""
VALIDATED = 3
"""Steps of a validation."""


SAVERS = [pytest.param({}, id="every_epoch"), pytest.param({"save": every(updates=3)}, id="every_3_updates")]
"""Options of `Checkpoint`."""
PLACES = {
    "at_the_first_step": {"index": 0},
    "in_mid_epoch": {"index": 1},
    "at_the_last_step": {"index": STEPS - 1},
    "at_epoch_end": {"hook": "epoch_end"},
    "when_the_epoch_has_ended": {"hook": "phase_end", "epochs": 2},
    "in_validation": {"phase": "val", "epochs": 2, "index": 0},
    "when_the_validation_has_ended": {"hook": "phase_end", "phase": "val", "epochs": 2},
}
"""Where something is asked for, in the second epoch; for `at`."""


def tensors(count: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 3, generator=generator), torch.randn(count, 1, generator=generator)


def train() -> Any:
    return TensorLoader(*tensors(18), batch_size=5, shuffle=True, seed=1)


def val() -> Any:
    return TensorLoader(*tensors(11, 7), batch_size=4)


def make(*plugins: Any, seed: int = 1, **options: Any) -> Learner:
    """A learner with metrics and history; another seed gives other weights and other generators."""
    for each in (torch.manual_seed, random.seed, numpy.random.seed):
        each(seed)
    model = nn.Sequential(nn.Linear(3, 6), nn.Dropout(0.2), nn.Tanh(), nn.Linear(6, 1))
    return Learner(
        model,
        nn.MSELoss(),
        lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
        plugins=[Metrics(), History(), *plugins],
        standard=False,
        **options,
    )


def script(directory: Path, *plugins: Any, again: bool = False, accumulate: int = 1, **saver: Any) -> Learner:
    """The learner of a script that saves and resumes; when the script runs again, the generators are others."""
    saving = Checkpoint(directory, resume="auto", **saver)
    return make(saving, *plugins, seed=99 if again else 1, accumulate=accumulate)


def end(learner: Learner) -> dict[str, Any]:
    """What a run has come to."""
    state = learner.state_dict()
    kept = {part: state[part] for part in ("models", "optimizers", "progress", "metrics")}
    return {**kept, "rows": rows(learner)}


def rows(learner: Learner) -> list[dict[str, Any]]:
    """The rows of its history, but durations."""
    return [{key: value for key, value in row.items() if key != "seconds"} for row in learner.plugins["history"].rows]


def phases(learner: Learner) -> list[str]:
    """The phases that its history has rows of, in their order."""
    return [row["phase"] for row in learner.plugins["history"].rows]


def same(one: Any, other: Any) -> None:
    """Assert that two ends have the same bits."""
    assert list(differences(one, other)) == []


@cache
def whole(epochs: int = 2, accumulate: int = 1) -> dict[str, Any]:
    """The end of the run that nothing interrupts."""
    learner = make(accumulate=accumulate)
    learner.fit(train(), val(), epochs=epochs)
    return end(learner)


def at(
    act: Callable[[Learner], Any],
    hook: str = "step_end",
    phase: str = "train",
    epochs: int = 0,
    index: int | None = None,
    name: str = "acting",
    **declared: Any,
) -> Any:
    """A plugin that acts once, at a hook of a phase.

    Args:
        act: Called with the learner.
        hook: Where.
        phase: In whose epoch.
        epochs: The training epochs that are complete by then.
        index: Of the step, for hooks of a step.
        name: The plugin's name.
        declared: What ``hookimpl`` takes.
    """
    done: list[bool] = []

    def maybe(learner: Learner, phase: Any = None, step: Any = None, **_: Any) -> None:
        here = "" if phase is None else phase.name, learner.progress.epochs, None if step is None else step.index
        if here == (wanted, epochs, index) and not done:
            done.append(True)
            act(learner)

    wanted = phase if hook not in ("fit_begin", "fit_end") else ""
    return on(hook, maybe, name, **declared)


def placed(act, place):
    return at(act, **{"epochs": 1, **PLACES[place]})


class Killed(BaseException):
    """Stands for what ends a process at once: nothing is saved after it."""


def kill(learner: Learner) -> None:
    raise Killed


@contextmanager
def killed() -> Iterator[None]:
    """A block that is left by `kill`."""
    with pytest.raises(Killed):
        yield


def sigterm(learner: Learner) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def saved(directory: Path) -> list[Manifest]:
    """The checkpoints, the newest first."""
    return list(listing(directory))


class Steps:
    """Counts the steps of each phase in this process."""

    volatile = ("counts",)

    def __init__(self):
        self.counts = {}

    @hookimpl
    def step_begin(self, phase):
        self.counts[phase.name] = self.counts.get(phase.name, 0) + 1
