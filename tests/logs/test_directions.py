"""The direction of metrics, and the commit of the source, in the log."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import batches, make_learner

from loopkit import Learner, hookimpl, metrics
from loopkit.logs import read_log
from loopkit.plugins import Checkpoint, EarlyStopping, LogMetrics, LogTo, Metrics, Plateau


class Score(metrics.Metric):
    """A number that says which way it is better."""

    def __init__(self, higher: bool | None) -> None:
        super().__init__()
        self.higher_is_better = higher

    def reset(self) -> None:
        self.total = torch.zeros(())

    def update(self, outputs: torch.Tensor, targets: torch.Tensor) -> None:
        self.total = self.total + (outputs - targets).abs().sum()

    @property
    def is_empty(self) -> bool:
        return not bool(self.total)

    def compute(self) -> torch.Tensor:
        return self.total

    def merge(self, states: Any) -> None:
        self.load_state_dict({"total": sum(state["total"] for state in states)})


def directions(path: Path, *plugins: Any) -> dict[str, str]:
    make_learner(LogTo(path), LogMetrics(), *plugins).fit(batches(2), batches(1), epochs=1)
    return read_log(path).directions


@pytest.mark.parametrize("name", ["dice", "mAP", "reward", "ndcg"])
@pytest.mark.parametrize(("higher", "mode"), [(True, "max"), (False, "min")])
def test_direction_that_a_metric_declares_is_in_the_log(tmp_path: Path, name: str, higher: bool, mode: str) -> None:
    found = directions(tmp_path, Metrics(**{name: Score(higher)}))
    assert found == {"train/loss": "min", "val/loss": "min", f"train/{name}": mode, f"val/{name}": mode}


def test_direction_that_no_plugin_declares_is_not_in_the_log(tmp_path: Path) -> None:
    class Logs:
        @hookimpl
        def phase_end(self, learner: Learner) -> None:
            learner.log({"accuracy": 1.0, "own_loss": 2.0})

    assert directions(tmp_path, Metrics(accuracy=Score(None)), Logs()) == {"train/loss": "min", "val/loss": "min"}


@pytest.mark.parametrize("kind", ["checkpoint", "early_stopping", "plateau"])
@pytest.mark.parametrize("mode", ["min", "max"])
def test_mode_of_a_plugin_that_monitors_a_metric_is_in_the_log(tmp_path: Path, kind: str, mode: Any) -> None:
    made = {
        "checkpoint": lambda: Checkpoint(tmp_path / "saved", best="val/dice", mode=mode),
        "early_stopping": lambda: EarlyStopping("val/dice", mode=mode),
        "plateau": lambda: Plateau("val/dice", mode=mode),
    }
    assert directions(tmp_path, Metrics(dice=Score(None)), made[kind]())["val/dice"] == mode


def test_direction_is_in_the_log_once_a_fit(tmp_path: Path) -> None:
    directions(tmp_path, Metrics(dice=Score(True)))
    lines = (tmp_path / "log.jsonl").read_text().splitlines()
    kinds = [line.startswith('{"kind":"directions"') for line in lines]
    assert sum(kinds) == 2  # the training's names, then those of the validation
    assert kinds.index(True) == 1


def git(folder: Path, *words: str) -> str:
    about = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    return subprocess.run(
        ["git", *about, *words], cwd=folder, check=True, capture_output=True, text=True
    ).stdout.strip()


def test_commit_of_the_script_is_in_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "source" / "train.py"
    script.parent.mkdir()
    script.write_text("a = 1\n")
    monkeypatch.setattr(sys, "argv", [str(script)])

    def logged(name: str) -> Any:
        make_learner(LogTo(tmp_path / name)).fit(batches(1), epochs=1)
        return read_log(tmp_path / name).runs[0]["git"]

    assert logged("a") is None
    for words in (("init", "-q"), ("add", "."), ("commit", "-qm", "one")):
        git(script.parent, *words)
    head = git(script.parent, "rev-parse", "HEAD")
    assert logged("b") == {"commit": head, "dirty": False}
    script.write_text("a = 2\n")
    assert logged("c") == {"commit": head, "dirty": True}


def test_epochs_of_a_log_count_from_one_wherever_they_are_logged(tmp_path: Path) -> None:
    class Logs:
        def __init__(self) -> None:
            self.name = "logs"

        @hookimpl
        def step_end(self, learner: Learner, phase: Any) -> None:
            learner.log(f"{phase.name}/step", 1.0)

        @hookimpl
        def epoch_end(self, learner: Learner, phase: Any) -> None:
            learner.log(f"{phase.name}/end", torch.ones(()))

        @hookimpl
        def phase_end(self, learner: Learner, phase: Any) -> None:
            learner.log(f"{phase.name}/over", 1.0)

    make_learner(LogTo(tmp_path), Logs()).fit(batches(2), batches(1), epochs=3)
    log = read_log(tmp_path)
    for name in ("train/end", "train/over", "val/step", "val/end", "val/over"):
        assert [record.epoch for record in log.of(name)] == [1, 2, 3], name
    assert [record.epoch for record in log.of("train/step")] == [1, 1, 2, 2, 3, 3]


def test_metrics_of_a_validation_inside_the_first_epoch_are_of_epoch_one(tmp_path: Path) -> None:
    from loopkit import every

    learner = make_learner(LogTo(tmp_path), LogMetrics(), Metrics())
    learner.fit(batches(4), batches(1), epochs=1, validate=every(updates=2))
    assert [record.epoch for record in read_log(tmp_path).of("val/loss")] == [1, 1]
