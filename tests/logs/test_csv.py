"""``Csv``: rows, columns that come later, and text that CSV and UTF-8 have trouble with."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

import pytest
from helpers import batches, make_learner, on

from loopkit.logs import Csv, Record
from loopkit.plugins import LogTo


def written(path: Path, *writes: list[Record]) -> list[list[str]]:
    """The rows of a file that these are written to."""
    backend = Csv(path)
    backend.open(None)  # type: ignore[arg-type]  # it asks the run for nothing
    for records in writes:
        backend.write(records)
    backend.flush()
    backend.close(None)
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.reader(file))


def at(step: int, name: str, value: float, phase: str = "train") -> Record:
    return Record(name, value, phase, 0, step, step, 1.5)


def test_row_holds_what_one_step_logs(tmp_path: Path) -> None:
    rows = written(tmp_path / "log.csv", [at(1, "a", 0.5), at(1, "b", 2.0), at(2, "a", 1.5)])
    assert rows == [
        ["phase", "epoch", "step", "update", "time", "a", "b"],
        ["train", "0", "1", "1", "1.500", "0.5", "2.0"],
        ["train", "0", "2", "2", "1.500", "1.5", ""],
    ]


def test_row_ends_when_a_name_comes_again(tmp_path: Path) -> None:
    rows = written(tmp_path / "log.csv", [at(3, "a", 1.0, "val"), at(3, "a", 2.0, "val"), at(3, "b", 3.0, "val")])
    assert [row[5:] for row in rows] == [["a", "b"], ["1.0", ""], ["2.0", "3.0"]]


def test_row_goes_on_in_the_next_write(tmp_path: Path) -> None:
    rows = written(tmp_path / "log.csv", [at(1, "a", 1.0)], [at(1, "b", 2.0)])
    assert [row[5:] for row in rows] == [["a", "b"], ["1.0", "2.0"]]


def test_names_beyond_the_most_columns_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loopkit.logs.csv_file.MOST_COLUMNS", 7)
    with pytest.warns(UserWarning, match=r"has 7 columns and leaves out .* such as 'name 2': log it as JSON") as seen:
        rows = written(tmp_path / "log.csv", *([at(i, f"name {i % 5}", float(i))] for i in range(8)))
    assert len(seen) == 1
    assert rows[0][5:] == ["name 0", "name 1"]
    assert [row[2] for row in rows[1:]] == [str(i) for i in range(8)]
    assert [row[5:] for row in rows[1:]] == [
        [f"{i}.0" if i % 5 == place else "" for place in range(2)] for i in range(8)
    ]


def test_new_name_adds_a_column_to_all_rows(tmp_path: Path) -> None:
    rows = written(tmp_path / "log.csv", *([at(i, f"name {i}", float(i))] for i in range(3)))
    assert [row[5:] for row in rows] == [
        ["name 0", "name 1", "name 2"],
        ["0.0", "", ""],
        ["", "1.0", ""],
        ["", "", "2.0"],
    ]


def test_values_read_back_bit_for_bit(tmp_path: Path) -> None:
    values = [0.1, -0.0, 1e-300, math.pi, math.inf, -math.inf, math.nan]
    rows = written(tmp_path / "log.csv", [at(i, "a", value) for i, value in enumerate(values)])
    assert [float(row[5]).hex() for row in rows[1:]] == [value.hex() for value in values]


@pytest.mark.parametrize("name", ["a/b", "a,b", '"', "two\nlines", "two\rlines", "\N{GRINNING FACE}", "x" * 10_000])
def test_name_reads_back(tmp_path: Path, name: str) -> None:
    rows = written(tmp_path / "log.csv", [at(1, name, 1.0), at(2, name, 2.0), at(3, "other", 3.0)])
    assert rows[0][5:] == [name.replace("\r", "\\r"), "other"]
    assert [row[5:] for row in rows[1:]] == [["1.0", ""], ["2.0", ""], ["", "3.0"]]


def test_name_that_utf8_lacks_is_escaped_and_one_of_the_first_columns_gets_a_line(tmp_path: Path) -> None:
    rows = written(tmp_path / "log.csv", [at(1, "\udc80", 1.0), at(1, "step", 2.0)])
    assert rows[0][5:] == ["\\udc80", "step_"]


def test_names_like_the_first_columns_stay_apart(tmp_path: Path) -> None:
    rows = written(tmp_path / "log.csv", [at(1, "step", 1.0), at(1, "step_", 2.0), at(1, "steps", 3.0)])
    assert rows[0][5:] == ["step_", "step__", "steps"]
    assert [row[5:] for row in rows[1:]] == [["1.0", "2.0", "3.0"]]


def test_row_count_survives_names_with_lines(tmp_path: Path) -> None:
    first = Csv(tmp_path / "log.csv")
    first.open(None)  # type: ignore[arg-type]
    first.write([at(1, "two\nlines", 1.0), at(2, "two\nlines", 2.0)])
    first.flush()
    state = first.state_dict()
    first.write([at(3, "two\nlines", 3.0), at(4, "other", 4.0)])
    first.flush()
    first.close(None)
    again = Csv(tmp_path / "log.csv")
    again.load_state_dict(state)
    again.open(None)  # type: ignore[arg-type]
    again.write([at(5, "two\nlines", 5.0)])
    again.flush()
    again.close(None)
    with open(tmp_path / "log.csv", newline="") as file:
        assert [row[5] for row in csv.reader(file)] == ["two\nlines", "1.0", "2.0", "5.0"]


def test_csv_of_a_fit(tmp_path: Path) -> None:
    def act(learner: Any, phase: Any, step: Any, **given: Any) -> None:
        learner.log(f"{phase.name}/index", step.index)

    make_learner(LogTo(tmp_path / "log.csv"), on("step_end", act)).fit(batches(2), batches(1), epochs=2)
    with open(tmp_path / "log.csv", newline="") as file:
        rows = [(row["phase"], row["step"], row["train/index"], row["val/index"]) for row in csv.DictReader(file)]
    assert rows == [
        ("train", "1", "0.0", ""),
        ("train", "2", "1.0", ""),
        ("val", "2", "", "0.0"),
        ("train", "3", "0.0", ""),
        ("train", "4", "1.0", ""),
        ("val", "4", "", "0.0"),
    ]


def test_new_run_sets_the_file_of_another_one_aside(tmp_path: Path) -> None:
    for _ in range(2):
        written(tmp_path / "log.csv", [at(1, "a", 1.0)])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log-1.csv", "log.csv"]
