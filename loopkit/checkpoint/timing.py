"""When a run is saved: the intervals between saves, and how far the run was at the last one."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

from loopkit.checkpoint import savable
from loopkit.errors import PluginError
from loopkit.every import Every

if TYPE_CHECKING:
    from loopkit.learner import Learner

Moment = tuple[Any, ...]
"""How far a run is: epochs, steps, updates, and whether a validation is due."""


class Timing:
    """The intervals at which a run is saved, and when the next save is due.

    Args:
        save: An interval, or a list of intervals.

    Raises:
        PluginError: ``save`` is something else.
    """

    def __init__(self, save: Any) -> None:
        self._intervals = intervals(save)
        self._update_counts = [each.updates for each in self._intervals if each.updates is not None]
        self._seconds = min(each.seconds for each in self._intervals)
        self.next_updates = math.inf
        """The number of updates at which the next save is due."""
        self.next_step = math.inf
        """The step of the open epoch after which a part of it is over, and the next save due."""
        self.next_time = math.inf
        """The time at which the next save is due."""
        self.saved_at: Moment | None = None
        """How far the run was at the last save."""
        self._versions = 0
        """The sum of the versions of the models' tensors at the last save."""

    def begin(self, learner: Learner) -> None:
        """Count from here: the first state of a fit needs no save."""
        self.saved_at = moment(learner)
        self.note_values(learner)
        self.plan(learner)

    def note_values(self, learner: Learner) -> None:
        """Note the models' values, before a save."""
        self._versions = savable.versions(learner)

    def plan(self, learner: Learner) -> None:
        """Plan the next save, after one was made."""
        done = learner.progress.updates
        self.next_updates = min(((done // count + 1) * count for count in self._update_counts), default=math.inf)
        self.plan_part(learner)
        self.next_time = time.monotonic() + self._seconds

    def plan_part(self, learner: Learner) -> None:
        """Plan the next save after a part of the open training epoch.

        Raises:
            PluginError: The epoch has no known length.
        """
        self.next_step = math.inf
        parts = [each for each in self._intervals if each.in_parts]
        running = [] if learner.current is None else learner.current.open_epochs
        epoch = next((each for each in running if each.trains), None)
        if not parts or epoch is None:
            return
        if epoch.length is None:
            raise PluginError(
                f"Checkpoint: save is {parts[0]!r}, and the training data have no len(): give every(updates=100)"
            )
        steps = [each.next_part(learner.progress.epochs, epoch.steps, epoch.length) for each in parts]
        self.next_step = min((each for each in steps if each < epoch.length), default=math.inf)

    def is_due(self, learner: Learner, steps: int) -> bool:
        """Whether a save is due after so many updates of the run and steps of its training epoch."""
        return learner.progress.updates >= self.next_updates or steps >= self.next_step

    def has_moved(self, learner: Learner) -> bool:
        """Whether the run has trained since the last save."""
        return self.saved_at != moment(learner)

    def has_changed(self, learner: Learner) -> bool:
        """Whether the models' values changed since the last save."""
        return self._versions != savable.versions(learner)

    def is_epoch_due(self, learner: Learner) -> bool:
        """Whether a save is due at the end of an epoch."""
        return any(each.is_end(learner.progress.epochs) for each in self._intervals) and self.has_moved(learner)

    def is_behind(self, learner: Learner) -> bool:
        """Whether a save has been due for a whole interval."""
        counts = self._update_counts
        behind = bool(counts) and learner.progress.updates >= self.next_updates + min(counts)
        return behind or time.monotonic() >= self.next_time + self._seconds


def moment(learner: Learner) -> Moment:
    """Return how far a run is."""
    fit = learner.current
    counts = learner.progress
    return counts.epochs, counts.steps, counts.updates, fit is not None and fit.position.validate


def intervals(save: Any) -> tuple[Every, ...]:
    """Return the intervals between saves."""
    given: tuple[Any, ...] = ()
    if isinstance(save, Every):
        given = (save,)
    elif isinstance(save, (list, tuple)):
        given = tuple(save)
    if not given or not all(isinstance(each, Every) for each in given):
        raise PluginError(f"Checkpoint: save is {save!r}: give every(epochs=1), every(updates=100), or a list of such")
    for each in given:
        if each.first:
            raise PluginError(
                f"Checkpoint: save is {each!r}: before the first update the model is untrained; leave out first"
            )
    return given
