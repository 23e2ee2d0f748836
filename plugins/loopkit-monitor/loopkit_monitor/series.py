"""Long columns of numbers in little memory."""

from __future__ import annotations

import os
import tempfile
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from loopkit_monitor.downsample import extremes
from loopkit_monitor.lines import Points

__all__ = ["BLOCK", "FEWEST", "References", "Series", "Shelf"]

BLOCK = 16_384
"""Values of a series that are read at once."""

FEWEST = 5
"""Points of a series that always stay."""
SMALL = 2048
"""Points of a part that grows when more come; a longer one stays as it is."""
MOST = 10_000
"""Lines of one name that are remembered."""
MOST_SHELVED = 4 << 30
"""Bytes of a shelf."""


class Shelf:
    """Arrays in a file that has no name, so that they take no memory; it is gone with the process.

    Raises:
        OSError: On ``put``: there is no room.
    """

    def __init__(self) -> None:
        self._file: int | None = None
        self.size = 0
        """Bytes that are in it."""

    def put(self, array: NDArray[Any]) -> Shelved:
        """Keep an array."""
        if self.size + array.nbytes > MOST_SHELVED:
            raise OSError(f"{self.size:,} bytes are kept in a temporary file, and it may have {MOST_SHELVED:,}")
        if self._file is None:
            self._file, path = tempfile.mkstemp(prefix="loopkit-monitor-")
            os.unlink(path)
            weakref.finalize(self, os.close, self._file)
        data = np.ascontiguousarray(array).tobytes()
        kept = Shelved(self._file, self.size, len(array), array.dtype.str)
        written = 0
        while written < len(data):
            written += os.pwrite(kept.file, data[written:], kept.begin + written)
        self.size += written
        return kept


@dataclass(frozen=True)
class Shelved:
    """An array in a shelf."""

    file: int
    begin: int
    count: int
    kind: str

    def read(self, begin: int = 0, end: int | None = None) -> NDArray[Any]:
        """The array, or what is between two places in it."""
        kind = np.dtype(self.kind)
        count = (self.count if end is None else end) - begin
        return np.frombuffer(os.pread(self.file, count * kind.itemsize, self.begin + begin * kind.itemsize), kind)


Column = NDArray[Any] | Shelved


@dataclass
class Part:
    """Points that came together; curves of the same lines have the same steps and times, in one array."""

    step: Column
    value: Column
    time: Column
    count: int
    last: int
    undefined: bool
    """Whether a value is undefined."""

    @property
    def shelved(self) -> bool:
        """Whether its values are in a shelf."""
        return isinstance(self.value, Shelved)


class Series:
    """The values of one name, in the order of the log: in memory, or in a `Shelf`."""

    def __init__(self) -> None:
        self.total = 0
        """How many the log has; more than are kept here after `thin`."""
        self.phase = ""
        self.parts: list[Part] = []
        self.held = 0
        """Points in memory."""
        self.version = 0
        """Rises when points are let go."""
        self.rises = True
        """Whether no step is below the one before."""

    def __len__(self) -> int:
        return sum(part.count for part in self.parts)

    @property
    def step(self) -> NDArray[np.int64]:
        """Training steps."""
        return _joined((part.step for part in self.parts), np.int64)

    @property
    def value(self) -> NDArray[np.float64]:
        """The logged values."""
        return _joined((part.value for part in self.parts), np.float64)

    @property
    def time(self) -> NDArray[np.float64]:
        """Seconds since 1970."""
        return _joined((part.time for part in self.parts), np.float64)

    @property
    def exact(self) -> bool:
        """Whether all points are kept."""
        return self.total == len(self)

    @property
    def undefined(self) -> bool:
        """Whether any value is undefined."""
        return any(part.undefined for part in self.parts)

    def between(self, low: float | None, high: float | None) -> slice:
        """The indices of the points between two steps, of a series that rises."""
        return slice(
            0 if low is None else self._place(low, "left"), len(self) if high is None else self._place(high, "right")
        )

    def _place(self, step: float, side: Literal["left", "right"]) -> int:
        """How many points are before a step; or up to it, if the side is the right one."""
        begin = 0
        for part in self.parts:
            if part.last < step or (part.last == step and side == "right"):
                begin += part.count
                continue
            return begin + int(np.searchsorted(_read(part.step), step, side))
        return begin

    def blocks(self, begin: int = 0, end: int | None = None) -> Iterator[NDArray[np.float64]]:
        """The values between two indices, `BLOCK` at a time."""
        end = len(self) if end is None else end
        held: list[NDArray[np.float64]] = []
        at = length = 0
        for part in self.parts:
            low, high = max(begin - at, 0), min(end - at, part.count)
            at += part.count
            while low < high:
                upto = min(high, low + BLOCK - length)
                held.append(_read(part.value, low, upto))
                length += upto - low
                low = upto
                if length == BLOCK:
                    yield np.concatenate(held)
                    held, length = [], 0
        if length:
            yield np.concatenate(held)

    def at(self, indices: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """The steps and times of some points, of rising indices."""
        steps: list[Column] = []
        times: list[Column] = []
        begin = 0
        for part in self.parts:
            low, high = np.searchsorted(indices, [begin, begin + part.count])
            if high > low:
                inside = indices[low:high] - begin
                steps.append(_read(part.step)[inside])
                times.append(_read(part.time)[inside])
            begin += part.count
        return _joined(steps, np.int64), _joined(times, np.float64)

    def add(self, points: Points) -> None:
        """Append."""
        count = len(points.step)
        self.total += count
        self.held += count
        self.phase = points.phase
        last = self.parts[-1] if self.parts else None
        latest = int(points.step[-1])
        undefined = bool(np.isnan(points.value).any())
        rises = bool((points.step[1:] >= points.step[:-1]).all()) and (last is None or points.step[0] >= last.last)
        self.rises = self.rises and bool(rises)
        if last is not None and not last.shelved and last.count + count <= SMALL:
            step, value, time = (
                np.concatenate([_read(old), new])
                for old, new in ((last.step, points.step), (last.value, points.value), (last.time, points.time))
            )
            self.parts[-1] = Part(step, value, time, last.count + count, latest, last.undefined or undefined)
        else:
            self.parts.append(Part(points.step, points.value, points.time, count, latest, undefined))

    def put_away(self, shelf: Shelf, known: dict[tuple[int, ...], Shelved]) -> None:
        """Move what is in memory to a shelf, as one part.

        Args:
            shelf: Where to.
            known: By the ids of arrays, where they are already: steps and times are of several curves.

        Raises:
            OSError: There is no room.
        """
        first = next((at for at, part in enumerate(self.parts) if not part.shelved), len(self.parts))
        held = self.parts[first:]
        if not held:
            return
        step, time = (
            _put(shelf, columns, known) for columns in zip(*((part.step, part.time) for part in held), strict=True)
        )
        value = _put(shelf, [part.value for part in held], {})
        count, undefined = sum(part.count for part in held), any(part.undefined for part in held)
        self.parts[first:] = [Part(step, value, time, count, held[-1].last, undefined)]
        self.held -= count

    def thin(self) -> None:
        """Forget half of the points, and no extreme."""
        value = self.value
        kept = extremes(value, max(len(value) // 2, FEWEST))
        step, time = self.at(kept)
        undefined = bool(np.isnan(value[kept]).any())
        self.parts = [Part(step, value[kept], time, len(kept), int(step[-1]), undefined)]
        self.held = len(kept)
        self.version += 1


def _read(column: Column, begin: int = 0, end: int | None = None) -> NDArray[Any]:
    return column.read(begin, end) if isinstance(column, Shelved) else column[begin:end]


def _joined(columns: Iterable[Column], kind: type) -> NDArray[Any]:
    found = [_read(column) for column in columns]
    if len(found) == 1:
        return found[0]
    return np.concatenate(found) if found else np.empty(0, kind)


def _put(shelf: Shelf, columns: Sequence[Column], known: dict[tuple[int, ...], Shelved]) -> Shelved:
    key = tuple(map(id, columns))
    if key not in known:
        known[key] = shelf.put(_joined(columns, np.float64))
    return known[key]


@dataclass
class References:
    """Where in a log the lines of one name are that are no values; the latest of very many."""

    kind: str
    phase: str = ""
    total: int = 0
    """How many the log has."""
    begin: deque[int] = field(default_factory=lambda: deque(maxlen=MOST))
    length: deque[int] = field(default_factory=lambda: deque(maxlen=MOST))
    step: deque[int] = field(default_factory=lambda: deque(maxlen=MOST))

    def add(self, begin: int, length: int, step: int) -> None:
        """Remember one more."""
        self.total += 1
        self.begin.append(begin)
        self.length.append(length)
        self.step.append(step)
