"""The run whose log is compared: two fits of one learner, with something logged wherever that can be."""

from __future__ import annotations

import csv
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from helpers import batches
from torch import nn

from loopkit import Learner, every, hookimpl
from loopkit.data import TensorLoader
from loopkit.logs import Hyperparameters, Text, read_log
from loopkit.plugins import Checkpoint, LogMetrics, LogTo

TAKEN_OVER = r".*\.lock was left by process"


class LogEverywhere:
    """Logs in every hook that it can."""

    name = "log_everywhere"

    @hookimpl
    def fit_begin(self, learner: Learner) -> None:
        learner.log("fit/begin", 1.0)
        learner.log("fit/options", Hyperparameters({"lr": 0.1}))

    @hookimpl
    def epoch_begin(self, learner: Learner, phase: Any) -> None:
        learner.log(f"{phase.name}/begin", learner.progress.epochs)

    @hookimpl
    def step_begin(self, learner: Learner, phase: Any, step: Any) -> None:
        learner.log(f"{phase.name}/index", step.index)

    @hookimpl
    def step_end(self, learner: Learner, phase: Any, step: Any) -> None:
        learner.log(f"{phase.name}/loss <step>\n", step.loss)

    @hookimpl
    def epoch_end(self, learner: Learner, phase: Any) -> None:
        learner.log(f"{phase.name}/end", Text(f"epoch {learner.progress.epochs}"))

    @hookimpl(reads=("metrics",))
    def phase_end(self, learner: Learner, phase: Any) -> None:
        learner.log(f"{phase.name}/phase", learner.metrics[f"{phase.name}/loss"])

    @hookimpl
    def fit_end(self, learner: Learner) -> None:
        learner.log("fit/end", 1.0)


def make(directory: Path, *plugins: Any, **options: Any) -> tuple[Learner, Any, Any]:
    """A learner that logs, and its data."""
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.2), nn.Linear(4, 1))
    inputs, targets = (torch.cat(part) for part in zip(*batches(6), strict=True))
    logs = LogTo(directory / "log.jsonl", directory / "log.csv", every=3)
    learner = Learner(
        model,
        nn.MSELoss(),
        lambda params: torch.optim.SGD(params, lr=0.1),
        plugins=[logs, LogMetrics(every=2), LogEverywhere(), *plugins],
        seed=7,
        **options,
    )
    return learner, TensorLoader(inputs, targets, batch_size=4, shuffle=True, seed=3), batches(2, seed=1)


def train(directory: str) -> None:
    """Two fits, each from where its last checkpoint was; between them an evaluation, which is not logged."""
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", TAKEN_OVER, RuntimeWarning)
    warnings.filterwarnings("ignore", "log 'csv' cannot write")
    at = Path(directory)
    options: dict[str, Any] = {"save": every(updates=4), "resume": "auto"}
    (at / "begun").touch()
    learner, data, val = make(at, Checkpoint(at / "one", **options))
    learner.fit(data, val, epochs=2)
    learner.log("outside", 1.0)
    learner.evaluate(val)
    learner.replace("checkpoint", Checkpoint(at / "two", **options))
    learner.fit(data, val, epochs=2, validate=every(updates=5))


def warm() -> None:
    """Do once what is slow the first time."""
    with tempfile.TemporaryDirectory() as directory:
        train(directory)


def said(directory: Path) -> list[tuple[Any, ...]]:
    """What the JSON lines of a run say, times aside."""
    return [tuple(record[:-1]) for record in read_log(directory / "log.jsonl").records]


def table(directory: Path) -> list[dict[str, str]]:
    """What the CSV file of a run says, times aside."""
    with open(directory / "log.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    return [{name: cell for name, cell in row.items() if name != "time"} for row in rows]
