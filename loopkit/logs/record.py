"""Record: one thing that was logged, and when; Place: where; Records: what is written at a time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, overload

__all__ = ["Group", "Packed", "Place", "Record", "Records", "unpacked"]


class Place(NamedTuple):
    """Where in a fit something is logged, as a `Record` has it."""

    phase: str = ""
    epoch: int = 0
    step: int = 0
    update: int = 0


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

    def packed(self) -> Packed:
        """In the form in which many are kept."""
        return self.name, self.value, Place(*self[2:6]), self.time


Packed = tuple[str | list[str], Any, Place, float]
"""What was logged by one call: a name or a list of names, a value or a list of as many, where, and when."""


def unpacked(packed: Packed) -> Iterator[Record]:
    """The records of one call."""
    name, value, place, time = packed
    names, values = (name, value) if isinstance(name, list) else ([name], [value])
    for name, value in zip(names, values, strict=True):
        yield Record(name, value, *place, time)


class Group:
    """Records of one place and one millisecond, which is most of what a step logs, in columns.

    Args:
        place: Of all of them.
        time: Of the first of them.
    """

    __slots__ = ("kinds", "names", "place", "time", "values")

    def __init__(self, place: Place, time: float) -> None:
        self.place, self.time = place, time
        self.names: list[str] = []
        self.values: list[Any] = []
        self.kinds: set[type] = set()
        """The types of the values."""

    def __iter__(self) -> Iterator[Record]:
        return unpacked((self.names, self.values, self.place, self.time))


class Records(Sequence[Record]):
    """Records in the order in which they were logged; ``groups`` has the same in columns, which is faster to read.

    Args:
        packed: What was logged.
    """

    def __init__(self, packed: Iterable[Packed]) -> None:
        self.groups: list[Group] = []
        group, over = Group(Place(), math.inf), math.inf
        for name, value, place, time in packed:
            if (place is not group.place and place != group.place) or not group.time <= time < over:
                group, over = Group(place, time), time + 0.001
                self.groups.append(group)
            if name.__class__ is list:
                group.names += name
                group.values += value
            else:
                group.names.append(name)  # type: ignore[arg-type]
                group.values.append(value)
        for group in self.groups:
            group.kinds = set(map(type, group.values))

    @classmethod
    def of(cls, records: Sequence[Record]) -> Records:
        """Any records, in groups."""
        return records if isinstance(records, cls) else cls([record.packed() for record in records])

    @property
    def kinds(self) -> set[type]:
        """The types of the values."""
        return set().union(*(group.kinds for group in self.groups))

    def __len__(self) -> int:
        return sum(len(group.names) for group in self.groups)

    def __iter__(self) -> Iterator[Record]:
        for group in self.groups:
            yield from group

    @overload
    def __getitem__(self, index: int) -> Record: ...
    @overload
    def __getitem__(self, index: slice) -> list[Record]: ...
    def __getitem__(self, index: int | slice) -> Record | list[Record]:
        return list(self)[index]
