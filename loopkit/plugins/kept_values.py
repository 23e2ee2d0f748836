"""KeptValues: the values that a plugin which writes hyperparameters found in their places, and left there."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor
from torch.optim import Optimizer


class Place(NamedTuple):
    """Where a hyperparameter is."""

    name: str
    """Such as ``optimizer.0.lr``."""
    read: Callable[[], Any]
    write: Callable[[float], Any]


class KeptValues:
    """The own values of some places, and the last ones that were left there.

    An own value is what the user gave. It changes if the user has changed the place since the last write: that is
    looked at when a fit begins, never in a step.
    """

    def __init__(self) -> None:
        self.own: dict[str, float] = {}
        self.left: dict[str, float] = {}
        """The values read back after the last write; empty while there may be more writes."""

    def find(self, place: Place) -> float:
        """Return the own value of a place: its value at the first call."""
        if place.name not in self.own:
            self.own[place.name] = float(place.read())  # host sync: once for each place, where it is a tensor
        return self.own[place.name]

    def forget(self, places: Iterable[Place]) -> None:
        """Forget places that hold another thing now, such as a new optimizer."""
        for place in places:
            self.own.pop(place.name, None)
            self.left.pop(place.name, None)

    def look(self, places: Iterable[Place], new: bool) -> dict[str, tuple[float, float]]:
        """Take over what was changed since the last write, when a fit begins.

        Args:
            places: Where to look.
            new: The fit is a new one: the present value is the own value. Else the own value changes by the same ratio.

        Returns:
            By place, the value left there, and the present one, where these differ.
        """
        changed: dict[str, tuple[float, float]] = {}
        for place in places:
            left = self.left.get(place.name)
            own = self.own.get(place.name)
            if left is None or own is None:
                continue
            now = float(place.read())
            if now != left:
                changed[place.name] = left, now
                self.own[place.name] = now if new or left == 0 else own * now / left
        return changed

    def note(self, places: Iterable[Place]) -> None:
        """Read back what was written."""
        self.left = self.read(places)

    @staticmethod
    def read(places: Iterable[Place]) -> dict[str, float]:
        """Return what is there."""
        return {place.name: float(place.read()) for place in places}  # host sync: where it is a tensor

    def put_back(self, places: Iterable[Place]) -> None:
        """Write the own values, but where the user has changed what was left."""
        for place in places:
            own = self.own.get(place.name)
            left = self.left.get(place.name)
            if own is not None and (left is None or float(place.read()) == left):
                place.write(own)


def group_places(name: str, optimizer: Optimizer, key: str = "lr") -> list[Place]:
    """The places of a hyperparameter in an optimizer's groups, without those in which it is None."""
    return [
        Place(f"{name}.{number}.{key}", partial(group.__getitem__, key), setter(group, key))
        for number, group in enumerate(optimizer.param_groups)
        if group.get(key) is not None
    ]


def setter(group: dict[str, Any], key: str) -> Callable[[float], Any]:
    """Return what replaces a value in a group; a tensor, as capturable optimizers hold, is filled."""
    if isinstance(group[key], Tensor):
        return group[key].fill_  # type: ignore[no-any-return]
    return partial(group.__setitem__, key)
