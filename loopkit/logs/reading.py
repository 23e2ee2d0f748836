"""Logs that `JsonLines` has written, read back."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from loopkit.base.tabular import aligned, html, paragraph
from loopkit.base.words import nearest
from loopkit.errors import LogError
from loopkit.logs.record import Record

PLACE = ("phase", "epoch", "step", "update", "time")
"""Where and when a record was made."""


@dataclass(repr=False)
class Log:
    """The content of a log."""

    path: Path
    records: list[Record] = field(default_factory=list)
    """All records, in order. The ``value`` of a scalar is a float, of another kind the line's dict with ``"kind"``, in
    which ``"file"`` is a path relative to the log's directory."""
    runs: list[dict[str, Any]] = field(default_factory=list)
    """A line for each fit that started or resumed: versions, host, seed."""
    ends: list[dict[str, Any]] = field(default_factory=list)
    """A line for each fit that ended."""
    directions: dict[str, str] = field(default_factory=dict)
    """Which way metrics are better, ``"min"`` or ``"max"``, of those whose direction a plugin declares."""

    def __repr__(self) -> str:
        fits = f"{len(self.runs)} begun, {len(self.ends)} ended"
        return f"Log({str(self.path)!r}, {len(self.records):,} records of {len(self.names())} names, {fits})"

    def __str__(self) -> str:
        return f"{self!r}\n\n{aligned(*self._table())}"

    def _repr_html_(self) -> str:
        return paragraph(repr(self)) + html(*self._table())

    def _table(self) -> tuple[Sequence[str], list[tuple[Any, ...]]]:
        """How many records each name has, and the last: a number, or its kind."""
        counts = Counter(record.name for record in self.records)
        last = {record.name: record for record in self.records}
        rows = [
            (name, count, value["kind"] if isinstance(value := last[name].value, dict) else value, last[name].step)
            for name, count in counts.items()
        ]
        return ("name", "records", "last", "step"), rows

    def names(self) -> list[str]:
        """The names in the order in which they first came."""
        return list(dict.fromkeys(record.name for record in self.records))

    def of(self, name: str, phase: str | None = None) -> list[Record]:
        """The records of one name.

        Args:
            name: Any name that was logged.
            phase: Only records of this phase, ``""`` for records outside of an epoch; by default, of all.

        Raises:
            LogError: There is no such name, or not in that phase; the message has the nearest name.
        """
        named = [record for record in self.records if record.name == name]
        if not named:
            names = self.names()
            raise LogError(f"{self.path} has no {name!r:.100}{nearest(name, names)}; it has {', '.join(names)[:500]}")
        found = [record for record in named if phase in (None, record.phase)]
        if not found:
            phases = list(dict.fromkeys(record.phase for record in named))
            raise LogError(
                f"{self.path} has no {name!r:.100} of the phase {phase!r:.100}{nearest(str(phase), phases)}; "
                f"it has it for {', '.join(map(repr, phases))[:500]}"
            )
        return found

    def values(self, name: str, phase: str | None = None) -> list[Any]:
        """The values of one name, in order; with a phase, only values that were logged in it."""
        return [record.value for record in self.of(name, phase)]

    def frame(self, phase: str | None = None) -> Any:
        """The metrics of epochs as a table of pandas, as `History.frame`: a row an epoch and phase.

        A phase's metrics are what was logged where its first epoch ended. Values logged only by steps are not in it:
        ``pandas.DataFrame(log.records)`` has a row for each record.

        Raises:
            ImportError: There is no pandas.
            ValueError: No epoch of this phase was logged.
        """
        rows: dict[tuple[Any, ...], dict[str, Any]] = {}
        for name, value, *at, time in self.records:
            is_of_a_step = name.count("/") > 1 and name.endswith(("/step", "/running"))
            if isinstance(value, (int, float)) and name.startswith(f"{at[0]}/") and not is_of_a_step:
                place = dict(zip(PLACE[:-1], at, strict=True))
                rows.setdefault(tuple(at), {**place, "time": time})[name] = value
        phases = {row["phase"] for row in rows.values()}
        metrics = {name: _of_epochs([row for row in rows.values() if row["phase"] == name]) for name in phases}
        ends = [row for row in rows.values() if not metrics[row["phase"]].isdisjoint(row)]
        return frame([{k: row[k] for k in row if k in PLACE or k in metrics[row["phase"]]} for row in ends], phase)


def _of_epochs(rows: list[dict[str, Any]]) -> set[str]:
    """The names that a phase logs at the end of its epochs: steps of its first epoch have logged none of them.

    A phase that has logged the same names everywhere, such as validations within an epoch, logs all of them at an end.
    """
    first = min((row["epoch"] for row in rows if row["epoch"]), default=0)  # steps in older logs count from 0
    *before, last = [row for row in rows if row["epoch"] == first]
    names = {*last} - {*PLACE}
    return names.difference(*before) or names


def frame(rows: list[dict[str, Any]], phase: str | None) -> Any:
    """A table of pandas of epochs' rows, in which metrics have no phase in their names; of one phase if that is given.

    Raises:
        ImportError: There is no pandas.
        ValueError: No row is of this phase.
    """
    try:
        pandas = import_module("pandas")
    except ImportError as error:
        raise ImportError("frame() needs pandas: pip install pandas") from error
    phases = list(dict.fromkeys(row["phase"] for row in rows))
    if phase is not None and phase not in phases:
        raise ValueError(f"no row is of the phase {phase!r}{nearest(phase, phases)}; there are {', '.join(phases)}")
    chosen = [row for row in rows if phase in (None, row["phase"])]
    return pandas.DataFrame([{key.removeprefix(f"{row['phase']}/"): row[key] for key in row} for row in chosen])


def read_log(path: str | Path) -> Log:
    """Read a log of `JsonLines`, one that is being written too: a last line that is not complete is left out.

    Args:
        path: The file, or the directory that has a ``log.jsonl``.

    Raises:
        LogError: There is none, or a line is malformed.

    Example::

        losses = read_log("runs/run").values("train/loss")
    """
    path = Path(path)
    path = path / "log.jsonl" if path.is_dir() else path
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise LogError(f"there is no log {path}") from None
    log = Log(path)
    for number, line in enumerate(content.split(b"\n")[:-1], 1):
        try:
            said = json.loads(line)
            kind = said.get("kind")
            if kind == "run":
                log.runs.append(said)
            elif kind == "end":
                log.ends.append(said)
            elif kind == "directions":
                log.directions.update(said["modes"])
            else:
                log.records += _records(said)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise LogError(f"{path}, line {number} is no record of a log ({type(error).__name__}: {error})") from error
    return log


def _records(said: dict[str, Any]) -> list[Record]:
    """The records of a line: several numbers, or one value of another kind."""
    at = [said.pop(key) for key in ("phase", "epoch", "step", "update", "time")]
    if "kind" in said:
        return [Record(said.pop("name"), said, *at)]
    return [Record(name, float(value), *at) for name, value in said["values"].items()]
