"""Record: one thing that was logged, and when; Records: what is written at a time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, overload

__all__ = ["Group", "Record", "Records"]


class Record(NamedTuple):
    """One thing that was logged."""

    name: str
    value: Any
    """A number, a scalar tensor that is still on its device, or a kind. Backends get floats and kinds."""
    phase: str = ""
    """The phase whose pass is running or has just ended; empty outside of one."""
    epoch: int = 0
    """``learner.progress.epochs``: how many were complete."""
    step: int = 0
    """``learner.progress.steps``; inside a training step, the number that it will have."""
    update: int = 0
    """``learner.progress.updates``."""
    time: float = 0.0
    """Seconds since 1970, to a millisecond."""


class Group:
    """Records of one place and one millisecond, which is most of what a step logs, in columns.

    Args:
        phase, epoch, step, update, time: Of the first of them.
    """

    __slots__ = ("epoch", "mixed", "names", "phase", "step", "time", "update", "values")

    def __init__(self, phase: str, epoch: int, step: int, update: int, time: float) -> None:
        self.phase, self.epoch, self.step, self.update, self.time = phase, epoch, step, update, time
        self.names: list[str] = []
        self.values: list[Any] = []
        self.mixed = False
        """Some values are no floats."""

    def __iter__(self) -> Iterator[Record]:
        for name, value in zip(self.names, self.values, strict=True):
            yield Record(name, value, self.phase, self.epoch, self.step, self.update, self.time)


class Records(Sequence[Record]):
    """Records in the order in which they were logged; ``groups`` has the same in columns, which is faster to read.

    Args:
        packed: Records, or tuples of their fields.
    """

    def __init__(self, packed: Iterable[tuple[Any, ...]] = ()) -> None:
        self.groups: list[Group] = []
        self._count = 0
        self.add(packed)

    def add(self, packed: Iterable[tuple[Any, ...]]) -> None:
        """Add records, or tuples of their fields."""
        groups = self.groups
        last = groups[-1] if groups else Group("", 0, 0, 0, math.inf)
        at, begun, over = (last.phase, last.epoch, last.step, last.update), last.time, last.time + 0.001
        names, values = last.names, last.values
        for name, value, phase, epoch, step, update, time in packed:
            here = phase, epoch, step, update
            if here != at or not begun <= time < over:
                last = Group(*here, time)
                at, begun, over = here, time, time + 0.001
                names, values = last.names, last.values
                groups.append(last)
            if value.__class__ is not float:
                last.mixed = True
            names.append(name)
            values.append(value)
            self._count += 1

    @classmethod
    def of(cls, records: Sequence[Record]) -> Records:
        """Any records, in groups."""
        return records if isinstance(records, cls) else cls(records)

    @property
    def kinds(self) -> set[type]:
        """The types of the values."""
        found: set[type] = set()
        for group in self.groups:
            found |= {value.__class__ for value in group.values} if group.mixed else {float}
        return found

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Record]:
        for group in self.groups:
            yield from group

    @overload
    def __getitem__(self, index: int) -> Record: ...
    @overload
    def __getitem__(self, index: slice) -> list[Record]: ...
    def __getitem__(self, index: int | slice) -> Record | list[Record]:
        return list(self)[index]
