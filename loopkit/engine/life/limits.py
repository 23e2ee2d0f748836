"""Limits: how far a fit goes; Terms: all arguments of a fit, beside its data."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from loopkit.base.words import is_count
from loopkit.errors import ArgumentError
from loopkit.result import Planned

INTERRUPTS = ("raise", "return", None)


@dataclass(frozen=True)
class Limits:
    """The limits of a fit, in epochs, steps, updates and minutes.

    Raises:
        ValueError: One is not a count from 1, or ``minutes`` is not a number above 0.
    """

    epochs: int | float | None = None
    max_steps: int | None = None
    max_updates: int | None = None
    minutes: float | None = None

    def __post_init__(self) -> None:
        check_count("epochs", self.epochs, endless=True)
        check_count("max_steps", self.max_steps)
        check_count("max_updates", self.max_updates)
        number = isinstance(self.minutes, (int, float)) and not isinstance(self.minutes, bool)
        if self.minutes is not None and not (number and 0 < self.minutes < math.inf):
            raise ArgumentError(f"minutes is {self.minutes!r}: give a number above 0, as in fit(minutes=30)")

    @property
    def seconds(self) -> float:
        """The minutes as seconds; infinite without."""
        return math.inf if self.minutes is None else 60.0 * self.minutes

    @property
    def between_steps(self) -> bool:
        """Whether one of them can end a fit in the middle of an epoch."""
        return not (self.max_steps is None and self.max_updates is None and self.minutes is None)

    def saved(self) -> dict[str, float | None]:
        """The saved form; an infinite number of epochs is saved as no limit."""
        return {name: None if value == math.inf else value for name, value in vars(self).items()}

    def raised_from(self, before: dict[str, float | None]) -> bool:
        """Whether any is higher than it was, or gone."""
        now = self.saved()
        return any(limit is not None and (now[name] or math.inf) > limit for name, limit in before.items())

    def planned(self, length: int | None, accumulate: int, optimizers: int = 1) -> Planned:
        """How far a fit over so many batches an epoch goes, in which each window updates so many optimizers."""
        finite = int(self.epochs) if self.epochs is not None and self.epochs != math.inf else None
        steps = self.max_steps
        most = self.max_updates
        most = updates = None if most is None else math.ceil(most / max(optimizers, 1))
        if finite is not None and length is not None:
            steps = min(finite * length, steps or finite * length)
        if steps is not None and length is not None:
            full, rest = divmod(steps, length)
            updates = full * math.ceil(length / accumulate) + math.ceil(rest / accumulate)
            updates = min(updates, most or updates)
        return Planned(finite, steps, updates)


@dataclass(frozen=True)
class Terms:
    """The arguments of a fit, beside its data.

    Raises:
        ArgumentError: ``on_interrupt`` is none of the three.
    """

    limits: Limits
    planned: Planned
    """How far it is meant to go, for displays and schedules."""
    on_interrupt: str | None
    """The action after ``fit_end`` when a signal or a pause ended it; None: signals are not caught."""
    timeout: float | None = None
    """Seconds that the workers of a ``DataLoader`` may take for a batch."""

    def __post_init__(self) -> None:
        if self.on_interrupt not in INTERRUPTS:
            raise ArgumentError(f"on_interrupt is {self.on_interrupt!r}: it is 'raise', 'return' or None")


def check_count(name: str, value: Any, endless: bool = False) -> None:
    """Check that it is a count from 1.

    Raises:
        ArgumentError: It is not.
    """
    if value is not None and not is_count(value) and not (endless and value == math.inf):
        raise ArgumentError(f"{name} is {value!r}: it counts from 1" + (", or is math.inf" if endless else ""))
