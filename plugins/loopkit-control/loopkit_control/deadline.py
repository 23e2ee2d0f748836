"""Pause a run before its time is over."""

from __future__ import annotations

import os
import time
from datetime import datetime
from typing import TYPE_CHECKING

from loopkit.author import Shown, checks
from loopkit.errors import PluginError
from loopkit.hooks import hookimpl

if TYPE_CHECKING:
    from loopkit.learner import Learner

SLURM = "SLURM_JOB_END_TIME"
"""When a job of SLURM ends, in seconds since 1970."""


class Deadline(Shown):
    """Pause the fit between two steps when a time has come: `Learner.pause`, after which the next start resumes.

    Args:
        minutes: After so many minutes of a fit, counted in each process that starts.
        at: At this time: a ``datetime``, or its text as in ``"2030-01-31T18:00"``, in local time unless it names a time
            zone.
        margin: Seconds to be left for saving, before each of these ends. With neither ``minutes`` nor ``at`` this is
            the end of the SLURM job (``SLURM_JOB_END_TIME``); outside of one there is no deadline.
        name: The plugin's name.

    Of several processes the first to see that the time has come pauses all, at the same step.

    Raises:
        PluginError: Both ``minutes`` and ``at`` are given, or one is out of range or no time.

    Example::

        Deadline(minutes=110)
    """

    provides = "deadline"
    per_process = ("minutes", "at")
    volatile = ("_*",)

    def __init__(
        self,
        minutes: float | None = None,
        at: datetime | str | None = None,
        *,
        margin: float = 60.0,
        name: str = "deadline",
    ) -> None:
        if minutes is not None and at is not None:
            raise PluginError(f"Deadline: give minutes={minutes!r} or at={at!r}, not both")
        checks.not_negative("Deadline", "seconds", margin=margin, infinite=True)
        if minutes is not None:
            checks.not_negative("Deadline", minutes=minutes, infinite=True)
        self.minutes, self.at, self.margin, self.name = minutes, at, margin, name
        self._time = _time(at)
        self._end = float("inf")

    @hookimpl
    def fit_begin(self) -> None:
        """See when the time is over."""
        if self.minutes is not None:
            end = time.time() + 60 * self.minutes
        elif self._time is not None:
            end = self._time
        else:
            end = float(os.environ.get(SLURM, "inf"))
        self._end = end - self.margin

    @hookimpl
    def step_end(self, learner: Learner) -> None:
        """Look at the clock."""
        if time.time() >= self._end and learner.current is not None:
            self._end = float("inf")
            learner.pause("the deadline has come", by=self.name)


def _time(at: datetime | str | None) -> float | None:
    try:
        return None if at is None else (datetime.fromisoformat(at) if isinstance(at, str) else at).timestamp()
    except (AttributeError, ValueError):
        raise PluginError(f"Deadline: at is {at!r}: it is a datetime, or text such as '2030-01-31T18:00'") from None
