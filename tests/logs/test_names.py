"""A log that takes a name for a folder gets each value, under another name where it has to."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from helpers import batches, make_learner, on

from loopkit.logs import Backend, JsonLines, Record, read_log
from loopkit.plugins import Checkpoint, LogMetrics, LogTo, Metrics


class Folders(Backend):
    """Keeps each name in a file of its own, below the folders that the name has."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, records: Sequence[Record]) -> None:
        for record in records:
            path = self.folder / record.name
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a") as file:
                file.write(f"{record.step} {record.value}\n")

    def state_dict(self) -> dict[str, Any]:
        return {"folder": str(self.folder)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where it is."""


def written(folder: Path) -> dict[str, int]:
    """The lines of each file."""
    return {str(p.relative_to(folder)): len(p.read_text().splitlines()) for p in folder.rglob("*") if p.is_file()}


def counts(log: Path, **names: str) -> dict[str, int]:
    """How often each name is in a log."""
    found = read_log(log)
    return {names.get(name.replace("/", "_"), name): len(found.values(name)) for name in found.names()}


def logged(names: Sequence[str]) -> Any:
    return on("step_end", lambda learner, step, **_: [learner.log(f"{name}", step.index) for name in names], "logs")


ABOVE = "cannot write 'train/loss' beside the names above or below it .IsADirectoryError: .*writes 'train/loss.value'"


def test_every_row_of_steps_and_epochs_is_written(tmp_path):
    learner = make_learner(LogTo(Folders(tmp_path / "live"), tmp_path / "log.jsonl"), LogMetrics(every=2), Metrics())
    with pytest.warns(UserWarning, match=ABOVE):
        learner.fit(batches(8), batches(2), epochs=3)
    found = written(tmp_path / "live")
    assert found == counts(tmp_path / "log.jsonl", train_loss="train/loss.value")
    assert (found["train/loss/step"], found["train/loss.value"], found["val/loss"]) == (12, 3, 3)


@pytest.mark.parametrize(
    ("names", "other"),
    [
        (("a", "a/b"), {"a/b": "a.b"}),
        (("a/b", "a"), {"a": "a.value"}),
        (("a/b", "a/b/c/d", "a/b/c"), {"a/b/c/d": "a/b.c.d", "a/b/c": "a/b.c"}),
    ],
)
@pytest.mark.filterwarnings("ignore:log 'folders' cannot write")
def test_a_name_gets_another_one_only_where_it_has_to(names, other, tmp_path):
    make_learner(LogTo(Folders(tmp_path)), logged([*names, "c/d"])).fit(batches(4), epochs=1)
    expected = {other.get(name, name): 4 for name in [*names, "c/d"]}
    assert written(tmp_path) == expected


@pytest.mark.filterwarnings("ignore:log 'folders' cannot write")
def test_a_resumed_run_keeps_the_names(tmp_path):
    def run(epochs: int) -> None:
        plugins = [LogTo(Folders(tmp_path / "live")), Checkpoint(tmp_path / "saved", resume="auto")]
        make_learner(LogMetrics(every=2), Metrics(), *plugins).fit(batches(4), epochs=epochs)

    run(1)
    run(3)
    assert written(tmp_path / "live")["train/loss.value"] == 3


class Flat(Backend):
    """Takes any name, and counts how often it is called."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []

    def write(self, records: Sequence[Record]) -> None:
        self.calls.append([record.name for record in records])


def test_a_log_that_takes_any_names_gets_them_in_order_and_as_they_are():
    flat = Flat()
    make_learner(LogTo(flat), logged(["a/b", "a", "c"])).fit(batches(2), epochs=2)
    assert flat.calls == [["a/b"], ["a"], ["c", "a/b", "a", "c"], ["a/b", "a", "c"] * 2]
    assert JsonLines.any_names


class Full(Flat):
    def write(self, records: Sequence[Record]) -> None:
        super().write(records)
        if any(record.name.startswith("a") for record in records) and len(self.calls) > 1:
            raise OSError("no space left")


def test_a_log_that_fails_for_another_reason_is_disabled():
    full = Full()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        make_learner(LogTo(full), logged(["a/b", "a"])).fit(batches(2), epochs=2)
    assert [str(each.message)[:25] for each in found] == [
        "log 'full' cannot write '",
        "log 'full' is disabled for"[:25],
    ]
    assert len(full.calls) == 3
