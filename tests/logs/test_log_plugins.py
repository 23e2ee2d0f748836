"""The plugins that log, together: the weights stay as they are, and a run that goes on logs what a whole one does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from distributed.processes import run
from helpers import differences, on
from loopkit_testing import Case
from loopkit_testing.processes import compared, train_together
from torch import nn

from logs.together import FAILURES, fit, fit_in_two, make, trained
from loopkit import Learner
from loopkit.logs import read_log
from loopkit.plugins import LogHyperparameters, LogMetrics, LogTo


def logging(log: Path) -> list[Any]:
    """All of them."""
    return [LogTo(log, every=3), LogMetrics(every=2), LogHyperparameters(width=6)]


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("dtype", [None, "bfloat16", "float16"])
def test_weights_are_bitwise_those_without_logging(tmp_path: Path, dtype: str | None, accumulate: int) -> None:
    log = tmp_path / "log.jsonl"
    one, other = trained([], dtype, accumulate), trained(logging(log), dtype, accumulate)
    assert list(differences(one, other)) == []
    assert len(read_log(log).records) > 30


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return fit(tmp_path_factory.mktemp("whole"), logging)


@pytest.mark.parametrize("saves", [False, True])
@pytest.mark.parametrize("failure", FAILURES, ids=str)
def test_log_of_a_run_that_failed_and_goes_on_is_that_of_a_whole_one(
    tmp_path: Path, whole: list[Any], failure: tuple[str, int, int], saves: bool
) -> None:
    resumed, said = fit_in_two(tmp_path, logging, failure, saves)
    assert resumed == (saves or failure != ("train", 1, 1))
    assert said == whole


def test_plugin_keeps_its_contract_in_two_processes() -> None:
    assert compared(run(lambda rank: train_together(Case(LogHyperparameters)), 2, timeout=60)) == []


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
