"""Long columns of numbers in little memory."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from loopkit_monitor.downsample import extremes
from loopkit_monitor.lines import Points

__all__ = ["FEWEST", "References", "Series"]

GROWTH = 1.25
FEWEST = 5
"""Points of a series that always stay."""
MOST = 10_000
"""Lines of one name that are remembered."""


class Series:
    """The values of one name, in the order of the log: 24 bytes each."""

    def __init__(self) -> None:
        self.total = 0
        """How many the log has; more than are kept here after `thin`."""
        self.phase = ""
        self._count = 0
        self._step = np.empty(16, np.int64)
        self._value = np.empty(16)
        self._time = np.empty(16)

    def __len__(self) -> int:
        return self._count

    @property
    def step(self) -> NDArray[np.int64]:
        """Training steps."""
        return self._step[: self._count]

    @property
    def value(self) -> NDArray[np.float64]:
        """What was logged."""
        return self._value[: self._count]

    @property
    def time(self) -> NDArray[np.float64]:
        """Seconds since 1970."""
        return self._time[: self._count]

    def add(self, points: Points) -> None:
        """Append."""
        count = self._count + len(points.step)
        if count > len(self._step):
            self._resize(max(count, int(count * GROWTH)))
        for column, new in ((self._step, points.step), (self._value, points.value), (self._time, points.time)):
            column[self._count : count] = new
        self.total += len(points.step)
        self._count, self.phase = count, points.phase

    def thin(self) -> None:
        """Forget half of the points, and no extreme."""
        kept = extremes(self.value, max(self._count // 2, FEWEST))
        for column in (self._step, self._value, self._time):
            column[: len(kept)] = column[kept]
        self._count = len(kept)
        self._resize(self._count)

    def _resize(self, size: int) -> None:
        for column in (self._step, self._value, self._time):
            column.resize(size, refcheck=False)  # no view outlives a call


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
