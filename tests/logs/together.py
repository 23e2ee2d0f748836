"""Plugins that log, together: a training whose weights they must leave alone, in one piece or interrupted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import on
from torch import nn

from loopkit import Learner, every
from loopkit.data import TensorLoader
from loopkit.logs import read_log
from loopkit.plugins import Checkpoint, ClipGradNorm, MixedPrecision, Schedule, WeightAverage
from loopkit.schedules import cosine

FAILURES = [("train", 1, 1), ("train", 5, 2), ("val", 1, 1), ("val", 2, 3)]
"""Phase, step of the epoch, and epoch in which a run fails."""
Logging = Callable[[Path], list[Any]]
"""Makes the plugins, which write to a path."""


def make(*plugins: Any, **options: Any) -> tuple[Learner, Any, Any]:
    """A learner that is not too simple, and its data, with batches of uneven sizes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.2), nn.Linear(6, 3))
    generator = torch.Generator().manual_seed(1)
    inputs, targets = torch.randn(38, 5, generator=generator), torch.randint(3, (38,), generator=generator)
    learner = Learner(
        model,
        nn.CrossEntropyLoss(),
        lambda params: torch.optim.AdamW(params, lr=0.02),
        plugins=[ClipGradNorm(0.5), Schedule(cosine()), *plugins],
        seed=3,
        **options,
    )
    learner.remove("progress")
    train = TensorLoader(inputs[:26], targets[:26], batch_size=4, shuffle=True, seed=2)
    return learner, train, TensorLoader(inputs[26:], targets[26:], batch_size=5)


def trained(plugins: list[Any], dtype: str | None, accumulate: int) -> dict[str, Any]:
    """What the plugins must leave alone, after a fit."""
    precision = [] if dtype is None else [MixedPrecision(dtype)]
    learner, train, val = make(*precision, WeightAverage(), *plugins, accumulate=accumulate)
    learner.fit(train, val, epochs=3)
    own = learner.state_dict()
    return {part: own[part] for part in ("models", "optimizers", "progress", "generators", "metrics")}


def fit(directory: Path, logging: Logging, *plugins: Any) -> list[Any]:
    """What the log of a run says, without times and resources; the run goes on from its last checkpoint."""
    log = directory / "log.jsonl"
    saves = Checkpoint(directory / "run", save=every(updates=3), resume="auto")
    learner, train, val = make(*logging(log), saves, *plugins)
    learner.fit(train, val, epochs=3)
    return [tuple(record[:-1]) for record in read_log(log).records if not record.name.startswith("resources/")]


def fit_in_two(directory: Path, logging: Logging, failure: tuple[str, int, int], saves: bool) -> tuple[bool, list[Any]]:
    """Whether a run that fails goes on from a checkpoint, and what its log says in the end.

    It goes on from the last regular checkpoint, or from one right before the step that fails.
    """
    phase, index, nth = failure
    epochs = {"train": 0, "val": 0}

    def fail(learner: Learner, step: Any, **given: Any) -> None:
        name = given["phase"].name
        epochs[name] += step.index == 0
        if (name, epochs[name]) == (phase, nth):
            if step.index == index:
                raise RuntimeError("test")
            if saves and step.index == index - 1:
                learner.current.request_save()

    with pytest.raises(RuntimeError, match="test"):
        fit(directory, logging, on("step_begin", fail, "~fails"))
    said = fit(directory, logging)
    return read_log(directory / "log.jsonl").runs[-1]["resumed"], said
