"""Record: one logged value, and when; Place: where; Records: the records of one write."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, overload

Place = tuple[str, int, int, int]
"""Where in a fit something is logged: the phase, epoch, step and update of a `Record`."""


class Record(NamedTuple):
    """One thing that was logged."""

    name: str
    value: Any
    """A number, a scalar tensor that is still on its device, or a kind. Backends get floats and kinds."""
    phase: str = ""
    """The phase whose epoch is running or has just ended; empty outside of one."""
    epoch: int = 0
    """The number, from 1, of the training epoch that is running or was the last to run; 0 before the first."""
    step: int = 0
    """``learner.progress.steps``; inside a training step, the number that it will have."""
    update: int = 0
    """``learner.progress.updates``."""
    time: float = 0.0
    """Seconds since 1970, to a millisecond."""

    def packed(self) -> Packed:
        """In the form in which many are kept."""
        return self.name, self.value, self[2:6], self.time


Packed = tuple[str | None, Any, Place, float]
"""The values of one call: a name and a value, or None and several by their names; where; and when."""


def unpacked(packed: Packed) -> Iterator[Record]:
    """The records of one call."""
    name, value, place, time = packed
    several = value if name is None else {name: value}
    for each, number in several.items():
        yield Record(each, number, *place, time)


class Group:
    """Records of one place and one millisecond, each of another name: most records of a step.

    Args:
        place: Of all of them.
        time: Of the first of them.
        values: Of the first of them, by name.
    """

    __slots__ = ("kinds", "place", "time", "values")

    def __init__(self, place: Place, time: float, values: dict[str, Any]) -> None:
        self.place = place
        self.time = time
        self.values = values
        self.kinds: set[type] = set()
        """The types of the values."""

    def find_kinds(self) -> None:
        """Look at the values, which have changed."""
        self.kinds = set(map(type, self.values.values()))

    def __iter__(self) -> Iterator[Record]:
        return unpacked((None, self.values, self.place, self.time))


class Records(Sequence[Record]):
    """Records in the order in which they were logged; ``groups`` has them together, which is faster to read.

    Args:
        packed: The logged values.
    """

    def __init__(self, packed: Iterable[Packed]) -> None:
        self.groups: list[Group] = []
        at = None
        begun = 0.0
        over = 0.0
        values = {}
        for name, value, place, time in packed:
            joins = (place is at or place == at) and begun <= time < over
            if joins and name is not None and name not in values:
                values[name] = value
            elif joins and name is None and values.keys().isdisjoint(value):
                values |= value
            else:
                at = place
                begun = time
                over = time + 0.001
                values = dict(value) if name is None else {name: value}
                self.groups.append(Group(place, time, values))
        for group in self.groups:
            group.find_kinds()

    @classmethod
    def of(cls, records: Sequence[Record]) -> Records:
        """Any records, in groups."""
        return records if isinstance(records, cls) else cls([record.packed() for record in records])

    @property
    def kinds(self) -> set[type]:
        """The types of the values."""
        return set().union(*(group.kinds for group in self.groups))

    def __len__(self) -> int:
        return sum(len(group.values) for group in self.groups)

    def __iter__(self) -> Iterator[Record]:
        for group in self.groups:
            yield from group

    @overload
    def __getitem__(self, index: int) -> Record: ...
    @overload
    def __getitem__(self, index: slice) -> list[Record]: ...
    def __getitem__(self, index: int | slice) -> Record | list[Record]:
        return list(self)[index]
