"""The lines of a log, many at a time.

Nearly all lines of a long log are lines of values, as `loopkit.logs.JsonLines` writes them: msgspec reads these, in a
fraction of the time that `json` takes. Where many lines have the same names, it reads them as records of these names,
without a dictionary for each. Other lines are left to `json`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Annotated, Any, Literal, Protocol

import msgspec
import numpy as np
from msgspec.structs import astuple
from numpy.typing import NDArray

__all__ = ["Lines", "Points", "Values", "parse", "parse_line", "parse_values"]

DEEPEST = 50
"""Lists and objects in each other that a line may have."""
PHASES = {"train", "val", "test"}
"""A name that begins with one of these, or with the phase that logs it, names its phase itself."""
SHARED = {"lr", "resources", "run"}
"""First parts of names that belong to the whole run, whichever phase logs them."""

MOST_VALUES = 1 << 20
"""More than a line can have."""
OWN_LINES = ("run", "end", "directions")
"""Kinds of lines that have no name."""

FEW = 8
"""Lines of the same names, from which on the others of them are read as records."""
MOST_FIELDS = 250
"""Names of a record."""
MOST_FAILURES = 10
"""Lines of other names that are tried as records of one kind."""

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


Columns = tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.float64], NDArray[np.int64]]
"""Steps, values, times, and the places of the points in the whole."""
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
    """The content of some lines."""

    points: dict[str, Points] = field(default_factory=dict)
    """By the name of the curve."""
    others: list[tuple[int, int, dict[str, Any]]] = field(default_factory=list)
    """Lines of other kinds: the begin, the length and the content of each."""
    foreign: int = 0
    """Lines that are none of a log."""
    step: int = 0
    """Where the last values were logged."""
    epoch: int = 0
    time: float = 0.0
    epochs: list[tuple[int, int]] = field(default_factory=list)
    """Each number of epochs, and the first step with which it was logged."""
    ends: list[tuple[int, int]] = field(default_factory=list)
    """The same numbers, and the last step with which each was logged."""


class Line(Protocol):
    """The place of a line of values."""

    epoch: int
    step: int
    time: float


@lru_cache(maxsize=64)
def record(phase: str, names: tuple[str, ...]) -> Callable[[bytes], Any]:
    """A decoder of lines of one phase that have finite values of exactly these names."""
    strict: dict[str, Any] = {"gc": False, "forbid_unknown_fields": True}
    columns = [(f"f{place}", float, msgspec.field(name=name)) for place, name in enumerate(names)]
    values = msgspec.defstruct("Row", columns, **strict)
    place = [("phase", Literal[phase]), ("epoch", Count), ("step", Count), ("update", Count), ("time", float)]
    return msgspec.json.Decoder(msgspec.defstruct("Record", [*place, ("values", values)], **strict)).decode


class Layout:
    """Lines of one phase with values of the same names: a table."""

    def __init__(self, curves: list[str | None]) -> None:
        self.curves = curves
        """The curve of each column; None for what is left out."""
        self.lines: list[Line] = []
        self.rows: list[tuple[float | str, ...]] = []
        self.numbers: list[int] = []
        """The numbers of the lines in the whole log."""

    def add(self, number: int, line: Line, row: tuple[float | str, ...]) -> None:
        """Append a line."""
        self.lines.append(line)
        self.rows.append(row)
        self.numbers.append(number)

    def columns(self) -> Iterator[tuple[str, Columns]]:
        """Each curve with its points, and the place of each in the whole."""
        step = np.array([line.step for line in self.lines])
        time = np.array([line.time for line in self.lines])
        values = np.ascontiguousarray(np.array(self.rows, np.float64).T)
        order = np.array(self.numbers) * MOST_VALUES
        for place, curve in enumerate(self.curves):
            if curve is not None:
                yield curve, (step, values[place], time, order + place)


def parse(data: bytes, phases: Mapping[str, str] | None = None, *, most_names: int = 10_000) -> Lines:
    """Read whole lines.

    Where several phases log the same name, the first of them has the curve of that name; the other curves are called
    ``phase/name``.

    Args:
        data: Lines, each with its end.
        phases: The phase of each curve in the lines before these. By default, that is not known, and a name has one
            curve, whichever phases log it.
        most_names: Values of more curves than that are left out, counted as foreign.
    """
    made = Lines()
    last: Line | None = None
    records = Records()
    names = _Names(None if phases is None else dict(phases), most_names)
    layouts: dict[tuple[str, ...], Layout] = {}
    begin = 0
    for number, line in enumerate(data.split(b"\n")[:-1]):
        found = records.read(number, line)
        said = parse_values(line) if found is None else None
        if isinstance(said, Values):
            key = (said.phase, *said.values)
            layout = layouts.get(key)
            if layout is None:
                layout = layouts[key] = Layout([names.curve(name, said.phase) for name in said.values])
            layout.add(number, said, tuple(said.values.values()))
            if len(layout.lines) == FEW:
                records.expect(line, layout, said)
            found = said
        if found is not None:
            if last is None or found.epoch != last.epoch:
                made.epochs.append((found.epoch, found.step))
                if last is not None:
                    made.ends.append((last.epoch, last.step))
            last = found
        elif isinstance(said, dict) and _is_other(said):
            made.others.append((begin, len(line), said))
        elif line:
            made.foreign += 1
        begin += len(line) + 1
    made.points = _points(layouts, names)
    made.foreign += sum(len(layout.lines) * layout.curves.count(None) for layout in layouts.values())
    if last is not None:
        made.ends.append((last.epoch, last.step))
        made.step, made.epoch, made.time = last.step, last.epoch, last.time
    return made


class Records:
    """Reads lines that are like earlier ones; which these are, the number of their quotation marks tells at once."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Layout, Callable[[bytes], Any]]] = {}
        self._failures = dict[int, int]()

    def expect(self, line: bytes, layout: Layout, said: Values) -> None:
        """Read the lines to come that have the names of this one."""
        marks = line.count(b'"')
        if len(said.values) <= MOST_FIELDS and self._failures.get(marks, 0) < MOST_FAILURES:
            self._known[marks] = layout, record(said.phase, tuple(said.values))

    def read(self, number: int, line: bytes) -> Line | None:
        """Add a line to its layout; None if it is not like an earlier one."""
        if not self._known:
            return None
        marks = line.count(b'"')
        if marks not in self._known:
            return None
        layout, decode = self._known[marks]
        try:
            said: Any = decode(line)
        except (ValueError, RecursionError):
            self._failures[marks] = self._failures.get(marks, 0) + 1
            if self._failures[marks] == MOST_FAILURES:
                del self._known[marks]
            return None
        layout.add(number, said, astuple(said.values))
        return said  # type: ignore[no-any-return]


class _Names:
    """Gives each name of a phase its curve."""

    def __init__(self, first: dict[str, str] | None, most: int) -> None:
        self.first = first
        """The phase that logged a name first; None if that is not known."""
        self._most = most
        self.known: dict[str, None] = {}
        """The curves, as they came."""

    def curve(self, name: str, phase: str) -> str | None:
        """The curve; None if there are too many."""
        curve = name if self.first is None else _curve(name, phase, self.first)
        if curve not in self.known and len(self.known) >= self._most:
            return None
        self.known[curve] = None
        return curve

    def phase(self, curve: str) -> str:
        return (self.first or {}).get(curve, "")


def _points(layouts: Mapping[tuple[str, ...], Layout], names: _Names) -> dict[str, Points]:
    """The points of each curve, in the order of the lines."""
    found: dict[str, list[Columns]] = {curve: [] for curve in names.known}
    phases: dict[str, tuple[int, str]] = {}
    for (phase, *_), layout in layouts.items():
        for curve, columns in layout.columns():
            found[curve].append(columns)
            last = int(columns[3][-1])
            if curve not in phases or phases[curve][0] < last:
                phases[curve] = last, phase
    made = {}
    for curve, parts in found.items():
        if not parts:
            continue
        step, value, time, _ = parts[0]
        if len(parts) > 1:
            order = np.argsort(np.concatenate([part[3] for part in parts]), kind="stable")
            step, value, time = (np.concatenate([part[at] for part in parts])[order] for at in range(3))
        made[curve] = Points(phases[curve][1] or names.phase(curve), step, value, time)
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
    """Parse one line; None if it is no line of a log."""
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
    return isinstance(kind, str) and (kind in OWN_LINES or isinstance(said.get("name"), str))


def _curve(name: str, phase: str, phases: dict[str, str]) -> str:
    """The curve to which values belong; notes the first phase of each name."""
    first = phases[name] = phases.get(name) or phase
    if phase in ("", first):
        return name
    begin, slash, _ = name.partition("/")
    own = begin in SHARED or (slash and (begin in PHASES or begin in (phase, first)))
    return name if own else f"{phase}/{name}"
