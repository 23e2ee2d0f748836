"""The plugins that log, together: the weights stay as they are, and a run that goes on logs what a whole one does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from distributed.processes import run
from helpers import differences, on
from torch import nn

from loopkit import Learner, every
from loopkit.data import TensorLoader
from loopkit.logs import read_log
from loopkit.plugins import (
    Checkpoint,
    ClipGradNorm,
    LogGradients,
    LogHistograms,
    LogHyperparameters,
    LogMetrics,
    LogPredictions,
    LogResources,
    LogTo,
    MixedPrecision,
    Schedule,
    WeightAverage,
)
from loopkit.schedules import cosine
from loopkit.testing import Case
from loopkit.testing.processes import compared, train_together

SAVES: dict[str, Any] = {"save": every(updates=3), "resume": "auto"}


def logging(log: Path, every: float = 60) -> list[Any]:
    """All of them."""
    return [
        LogTo(log, every=3),
        LogMetrics(every=2),
        LogHyperparameters(width=6),
        LogHistograms(every=2, gradients=True),
        LogGradients(depth=1, ratio=True),
        LogPredictions(count=3),
        LogPredictions("table", count=2, worst=False, every=2, name="first_predictions"),
        LogResources(every=every),
    ]


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


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("dtype", [None, "bfloat16", "float16"])
def test_weights_are_bitwise_those_without_logging(tmp_path: Path, dtype: str | None, accumulate: int) -> None:
    states = []
    for more in ([], logging(tmp_path / "log.jsonl", every=0.001)):
        precision = [] if dtype is None else [MixedPrecision(dtype)]
        learner, train, val = make(*precision, WeightAverage(), *more, accumulate=accumulate)
        learner.fit(train, val, epochs=3)
        own = learner.state_dict()
        states.append({part: own[part] for part in ("models", "optimizers", "progress", "generators", "metrics")})
    assert list(differences(*states)) == []
    assert len(read_log(tmp_path / "log.jsonl").records) > 100


def said(path: Path) -> list[Any]:
    """What a log says, without times and resources."""
    records = read_log(path).records
    return [tuple(record[:-1]) for record in records if not record.name.startswith("resources/")]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    at = tmp_path_factory.mktemp("whole")
    learner, train, val = make(*logging(at / "log.jsonl"), Checkpoint(at / "run", **SAVES))
    learner.fit(train, val, epochs=3)
    return said(at / "log.jsonl")


@pytest.mark.parametrize("saves", [False, True])
@pytest.mark.parametrize(("phase", "index", "nth"), [("train", 1, 1), ("train", 5, 2), ("val", 1, 1), ("val", 2, 3)])
def test_log_of_a_run_that_failed_and_goes_on_is_that_of_a_whole_one(
    tmp_path: Path, whole: list[Any], phase: str, index: int, nth: int, saves: bool
) -> None:
    """It goes on from the last regular checkpoint, or from one right before the step that fails."""
    passes = {"train": 0, "val": 0}

    def fail(learner: Learner, step: Any, **given: Any) -> None:
        name = given["phase"].name
        passes[name] += step.index == 0
        if (name, passes[name]) == (phase, nth):
            if step.index == index:
                raise RuntimeError("test")
            if saves and step.index == index - 1:
                learner.request_save()

    learner, train, val = make(*logging(tmp_path / "log.jsonl"), Checkpoint(tmp_path / "run", **SAVES))
    learner.add(on("step_begin", fail, "~fails"))
    with pytest.raises(RuntimeError, match="test"):
        learner.fit(train, val, epochs=3)
    learner, train, val = make(*logging(tmp_path / "log.jsonl"), Checkpoint(tmp_path / "run", **SAVES))
    learner.fit(train, val, epochs=3)
    assert read_log(tmp_path / "log.jsonl").runs[-1]["resumed"] == (saves or (phase, nth) != ("train", 1))
    assert said(tmp_path / "log.jsonl") == whole


ALONE = {
    "LogGradients": lambda: LogGradients(depth=1, ratio=True),
    "LogHistograms": lambda: LogHistograms(every=2, gradients=True),
    "LogHyperparameters": LogHyperparameters,
    "LogPredictions": lambda: LogPredictions(count=3),
    "LogResources": lambda: LogResources(every=0.01),
}


@pytest.mark.parametrize("name", ALONE)
def test_plugin_keeps_its_contract_in_two_processes(name: str) -> None:
    assert compared(run(lambda rank: train_together(Case(ALONE[name])), 2, timeout=60)) == []


def test_logged_learning_rate_is_that_of_the_update(tmp_path: Path) -> None:
    used: list[float] = []

    def keep(learner: Learner, **given: Any) -> None:
        used.append(learner.optimizers["optimizer"].param_groups[0]["lr"])

    learner, train, _ = make(LogTo(tmp_path), LogMetrics(every=1), on("update_begin", keep, reads=("optimizer.lr",)))
    learner.fit(train, epochs=2)
    assert len(set(used)) == len(used) == learner.progress.updates  # the schedule moves it after each update
    assert read_log(tmp_path).values("lr") == used


@pytest.mark.parametrize("tensor", [False, True])
def test_logged_learning_rate_is_in_force_in_its_step(tmp_path: Path, tensor: bool) -> None:
    in_force: list[float] = []

    def keep(learner: Learner, **given: Any) -> None:
        in_force.append(float(learner.optimizers["optimizer"].param_groups[0]["lr"]))

    learner, train, _ = make(LogTo(tmp_path), LogMetrics(every=1), on("step_begin", keep), accumulate=2)
    if tensor:  # a schedule changes it in place
        group = learner.optimizers["optimizer"].param_groups[0]
        group["lr"], group["capturable"] = torch.tensor(group["lr"]), False
    learner.fit(train, epochs=2)
    assert learner.progress.updates == 8
    assert read_log(tmp_path).values("lr") == in_force


def test_rate_of_an_update_after_the_last_step_is_not_that_of_the_next_step(tmp_path: Path) -> None:
    in_force: list[float] = []

    def group(learner: Learner) -> dict[str, Any]:
        return learner.optimizers["optimizer"].param_groups[0]

    def keep(learner: Learner, **given: Any) -> None:
        in_force.append(group(learner)["lr"])

    def halve(learner: Learner, **given: Any) -> None:
        group(learner)["lr"] /= 2

    halves = on("update_end", halve, name="halves", writes=("optimizer.lr",))
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    learner = Learner(
        model,
        nn.CrossEntropyLoss(),
        torch.optim.SGD(model.parameters(), lr=0.5),
        plugins=[LogTo(tmp_path), LogMetrics(every=1), on("step_begin", keep, name="keeps"), halves],
        standard=False,
        accumulate=2,
    )
    data = [(torch.randn(4, 5), torch.randint(3, (4,))) for _ in range(3)]
    learner.fit(lambda: iter(data), epochs=2)  # of no known length: that a step is the last is known after it
    assert (learner.progress.steps, learner.progress.updates) == (6, 4)
    assert read_log(tmp_path).values("lr") == in_force == [0.5, 0.5, 0.25, 0.125, 0.125, 0.0625]
