"""The lines of a log, many at a time.

Nearly all lines of a long log are lines of values, as `loopkit.logs.JsonLines` writes them: msgspec reads these, in a
fraction of the time that `json` takes. What it refuses is left to `json`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

__all__ = ["Lines", "Points", "Values", "parse", "parse_line", "parse_values"]

DEEPEST = 50
"""Lists and objects in each other that a line may have."""
PHASES = {"train", "val", "test"}
"""A name that begins with one of these, or with the phase that logs it, says itself whose it is."""
SHARED = {"lr", "resources", "run"}
"""What begins so is of the whole run, whichever phase logs it."""

Count = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]


class Values(msgspec.Struct, gc=False):
    """A line of all values that were logged at one place."""

    phase: str
    epoch: Count
    step: Count
    update: Count
    time: float
    values: dict[str, float | Literal["inf", "-inf", "nan"]]
    kind: None = None
    """Lines of another kind have one."""


DECODER = msgspec.json.Decoder(Values)


@dataclass(frozen=True)
class Points:
    """Values of one curve, in the order of the log."""

    phase: str
    step: NDArray[np.int64]
    value: NDArray[np.float64]
    time: NDArray[np.float64]


@dataclass
class Lines:
    """What some lines say."""

    points: dict[str, Points] = field(default_factory=dict)
    """By the name of the curve."""
    others: list[tuple[int, int, dict[str, Any]]] = field(default_factory=list)
    """Lines of other kinds: where each begins, its length, and what it says."""
    foreign: int = 0
    """Lines that are none of a log."""
    step: int = 0
    """Where the last values were logged."""
    epoch: int = 0
    time: float = 0.0
    epochs: list[tuple[int, int]] = field(default_factory=list)
    """Each number of complete epochs, and the first step with which it was logged."""


class Column:
    """Values of one curve, while lines are read."""

    def __init__(self) -> None:
        self.lines: list[Values] = []
        self.values: list[float | str] = []

    def points(self, phase: str) -> Points:
        """The points; if the last line has no phase, it is the given one."""
        step = np.array([line.step for line in self.lines])
        time = np.array([line.time for line in self.lines])
        return Points(self.lines[-1].phase or phase, step, np.array(self.values, np.float64), time)


def parse(data: bytes, phases: Mapping[str, str] | None = None, *, most_names: int = 10_000) -> Lines:
    """Read whole lines.

    Where several phases log the same name, the first of them has the curve of that name; those of the others are called
    ``phase/name``.

    Args:
        data: Lines, each with its end.
        phases: The phase of each curve in the lines before these. By default, that is not known, and a name has one
            curve, whichever phases log it.
        most_names: Values of more curves than that are left out, counted as foreign.
    """
    made = Lines()
    last: Values | None = None
    first = None if phases is None else dict(phases)
    curves: dict[str, Column] = {}
    by_phase: dict[str, dict[str, Column]] = {}
    left_out = Column()
    begin = 0
    for line in data.split(b"\n")[:-1]:
        said = parse_values(line)
        if isinstance(said, Values):
            if last is None or said.epoch != last.epoch:
                made.epochs.append((said.epoch, said.step))
            last = said
            columns = by_phase.setdefault(said.phase, {})
            for name, value in said.values.items():
                column = columns.get(name)
                if column is None:
                    curve = name if first is None else _curve(name, said.phase, first)
                    column = curves.get(curve, left_out)
                    if column is left_out and len(curves) < most_names:
                        column = curves[curve] = Column()
                    columns[name] = column
                column.lines.append(said)
                column.values.append(value)
        elif said is not None and _is_other(said):
            made.others.append((begin, len(line), said))
        elif line:
            made.foreign += 1
        begin += len(line) + 1
    made.points = {curve: column.points((first or {}).get(curve, "")) for curve, column in curves.items()}
    made.foreign += len(left_out.lines)
    if last is not None:
        made.step, made.epoch, made.time = last.step, last.epoch, last.time
    return made


def parse_values(line: bytes) -> Values | dict[str, Any] | None:
    """A line of values, or else what `parse_line` gives."""
    try:
        return DECODER.decode(line)
    except (ValueError, RecursionError):
        said = parse_line(line)
    if said is None or "values" not in said or said.get("kind") is not None:
        return said
    try:  # half of a surrogate pair in a name
        return msgspec.convert(said, Values)
    except ValueError:
        return None


def parse_line(line: bytes) -> dict[str, Any] | None:
    """What one line says, or None if it is none of a log."""
    try:
        said = json.loads(line, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    if not isinstance(said, dict) or (line.count(b"[") + line.count(b"{") > DEEPEST and _depth(said) > DEEPEST):
        return None
    return said


def _depth(said: Any) -> int:
    """How many lists and objects are in each other."""
    depth, level = 0, [said]
    while level:
        depth += 1
        level = [
            inner
            for each in level
            for inner in (each.values() if isinstance(each, dict) else each)
            if isinstance(inner, (dict, list))
        ]
    return depth


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def _is_other(said: dict[str, Any]) -> bool:
    kind = said.get("kind")
    return isinstance(kind, str) and (kind in ("run", "end") or isinstance(said.get("name"), str))


def _curve(name: str, phase: str, phases: dict[str, str]) -> str:
    """The curve to which values belong; notes the first phase of each name."""
    first = phases[name] = phases.get(name) or phase
    if phase in ("", first):
        return name
    begin, slash, _ = name.partition("/")
    own = begin in SHARED or (slash and (begin in PHASES or begin in (phase, first)))
    return name if own else f"{phase}/{name}"
