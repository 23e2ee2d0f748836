"""Position: where a fit is."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from loopkit.progress import Progress


@dataclass
class Position:
    """Where a fit is: its counts, and which epoch comes next or is under way."""

    start: Progress
    """The counters when the fit began."""
    number: int = 1
    """Which of the learner's fits it is, from 1."""
    by_fit: bool = False
    """Whether ``fit`` runs the loop, so that it is known which epoch comes next."""
    epochs: int = 0
    """Rounds that are complete but for a validation: training epochs, in a loop of ``fit``."""
    done: int = 0
    """In a loop of the user's own: epochs of this round that are over."""
    due: list[str] = field(default_factory=list)
    """The phases whose validations are due, in their order; the first may be under way."""
    mid_epoch: bool = False
    """They come in the middle of a training epoch."""
    validated: dict[str, int] = field(default_factory=dict)
    """By phase: updates when its last validation began."""
    parts: dict[str, int] = field(default_factory=dict)
    """By phase: for ``every(epochs=0.25)``, how many parts of epochs were over when its last validation began."""
    clock: dict[str, float] = field(default_factory=dict)
    """By phase: for how many seconds the fit had run when its last validation was over."""
    seconds: float = 0.0
    """How long the fit had run when it was saved; those since then are not in it."""
    stop: tuple[str, str] | None = None
    """The request for an end that was there when it was saved: its reason, and by whom."""
    ended: str = ""
    """Why the run is over, as `FitResult.reason`; empty if it is not."""
    limits: dict[str, float | None] = field(default_factory=dict)
    """``epochs``, ``max_steps``, ``max_updates`` and ``minutes`` of the fit that was saved."""
    counted: bool = True
    """Whether its rounds were counted; the first form of a loop of the user's did not."""
    cycle: bool = False
    """In a loop of ``fit``: whether a training epoch is over whose ``cycle_end`` has not fired yet."""

    @property
    def validate(self) -> bool:
        """Whether a validation that follows a training epoch is due or under way."""
        return bool(self.due) and not self.mid_epoch

    def count_epoch(self) -> None:
        """A training epoch is over."""
        self.epochs += 1
        self.cycle = True

    def end_cycle(self) -> None:
        """The ``cycle_end`` of a training epoch fires now."""
        self.cycle = False

    def want(self, phases: list[str], mid_epoch: bool) -> None:
        """These validations are due: before the next training epoch, or now, in the middle of one."""
        self.due = phases
        self.mid_epoch = mid_epoch

    def begin_validation(self, phase: str, updates: int, parts: int = 0) -> None:
        """A validation begins, after these updates and parts of epochs."""
        self.validated[phase] = updates
        if parts:
            self.parts[phase] = parts

    def end_validation(self, phase: str, seconds: float) -> None:
        """A validation is over, after these seconds of the fit."""
        self.due = [name for name in self.due if name != phase]
        self.clock[phase] = seconds

    def end_round(self) -> None:
        """A round of the user's loop is complete."""
        self.epochs += 1
        self.done = 0

    def end_turn(self, turn: int) -> None:
        """So many epochs of a round of the user's loop are over."""
        self.done = turn

    @classmethod
    def of(cls, saved: Mapping[str, Any]) -> Position:
        """The position that `saved` was made of; missing entries have their defaults."""
        known = {each.name for each in fields(cls)}
        given = {name: copy.copy(value) for name, value in saved.items() if name in known}
        made = cls(**{**given, "start": Progress(**saved["start"])})
        if "cycle" not in saved:  # a state of a version without the event
            made.cycle = made.by_fit and made.validate
        return made

    def saved(self, seconds: float, stop: tuple[str, str] | None) -> dict[str, Any]:
        """The saved form of the position."""
        return {**asdict(self), "seconds": seconds, "stop": None if stop is None else tuple(stop)}
