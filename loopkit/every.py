"""Every: how often something is done, such as a validation or a save."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from fractions import Fraction
from typing import Any

from loopkit.base.words import is_count, takes
from loopkit.errors import ArgumentError


@dataclass(frozen=True, kw_only=True, repr=False)
class Every:
    """How often something is done: after so many epochs, updates or minutes. Exactly one of the three is given.

    Args:
        epochs: At the end of each such training epoch, counted from the begin of the fit. Or a part of one, between 0
            and 1: 0.25 is four times an epoch, between two steps. The training data then need a length.
        updates: Between two steps, after so many updates since the last time.
        minutes: Between two steps, after so many minutes since the last time; fractions are fine. Rank 0's clock
            decides for all processes. **Not reproducible**: a second run does it after other steps.
        first: Also once before the first update.

    Raises:
        ValueError: None of the three is given, or several; or one is not a count from 1, or minutes above 0.

    Example::

        learner.fit(train, val, epochs=3, validate=every(updates=100, first=True))
    """

    epochs: float | None = None
    updates: int | None = None
    minutes: float | None = None
    first: bool = False

    def __post_init__(self) -> None:
        given = [f"{name}={value!r}" for name, value in self._intervals().items()]
        if len(given) != 1:
            seen = f"every({', '.join(given)})"
            raise ArgumentError(f"{seen}: give exactly one of epochs, updates and minutes, as in every(epochs=1)")
        for name, count in (("epochs", self.epochs), ("updates", self.updates)):
            if count is not None and not is_count(count) and not (name == "epochs" and self.in_parts):
                part = ", or a part of one, as in every(epochs=0.25)" if name == "epochs" else ""
                raise ArgumentError(f"every({name}={count!r}): {name} are counted from 1, as in every({name}=1){part}")
        if (minutes := self.minutes) is not None:
            number = isinstance(minutes, (int, float)) and not isinstance(minutes, bool)
            if not number or not 0 < minutes < math.inf:
                raise ArgumentError(f"every(minutes={minutes!r}): give a number above 0, as in every(minutes=10)")
        if not isinstance(self.first, bool):
            raise ArgumentError(f"every(first={self.first!r}): it is True or False")

    @property
    def in_parts(self) -> bool:
        """Whether it is done several times an epoch, after parts of it."""
        return isinstance(self.epochs, float) and 0 < self.epochs < 1

    def is_end(self, epochs: int) -> bool:
        """Whether it is due at the end of this training epoch, counted from 1."""
        return self.epochs is not None and epochs % Fraction(str(self.epochs)) == 0

    def parts_done(self, epochs: int, steps: int = 0, length: int | None = None) -> int:
        """How often it was due after so many epochs, and so many steps of one with this length; only ``in_parts``."""
        if length is None:
            return math.floor(epochs / self._part(1))
        return math.ceil((epochs * length + steps + 1) / self._part(length)) - 1

    def next_part(self, epochs: int, steps: int, length: int) -> int:
        """The step of an epoch, counted from 1, after which it is due again: above its length in a later epoch."""
        due = self.parts_done(epochs, steps, length) + 1
        return math.floor(due * self._part(length)) - epochs * length

    def _part(self, length: int) -> Fraction:
        """How many steps of an epoch are one part, exactly: 0.1 is a tenth."""
        return Fraction(str(self.epochs)) * length

    @property
    def seconds(self) -> float:
        """The minutes, as seconds; infinite if it does not go by the clock."""
        return math.inf if self.minutes is None else 60.0 * self.minutes

    def options(self) -> dict[str, Any]:
        """The options it was made with, as a file or a state holds them: ``Every(**options)`` is equal to it."""
        return {**self._intervals(), **({"first": True} if self.first else {})}

    def _intervals(self) -> dict[str, Any]:
        """The intervals that were given, out of epochs, updates and minutes."""
        values = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "first"}
        return {name: value for name, value in values.items() if value is not None}

    def __repr__(self) -> str:
        return f"every({', '.join(f'{name}={value!r}' for name, value in self.options().items())})"


Every.__init__ = takes(steps="every takes epochs, updates or minutes")(Every.__init__)  # type: ignore[method-assign]
every = Every
"""`Every`, as people write it: ``every(updates=100)``."""
