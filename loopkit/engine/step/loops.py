"""Loops: makes the loops of epochs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from loopkit.engine.step.agreement import Agreement
from loopkit.engine.step.loop import Loop, WithLoss
from loopkit.engine.step.phase_watch import OwnUpdates, PhaseWatch, ShownPhases
from loopkit.engine.step.samples import Samples

if TYPE_CHECKING:
    from loopkit.base.notices import Notices
    from loopkit.engine.compile.registry import Registry
    from loopkit.engine.kept.flags import Flags
    from loopkit.engine.life.epoch import Epoch
    from loopkit.engine.life.logbook import Logbook
    from loopkit.engine.life.models import Models
    from loopkit.engine.life.requests import Requests
    from loopkit.engine.life.running import Running


@dataclass(frozen=True)
class Loops:
    """Makes the loop of each epoch."""

    learner: WithLoss
    models: Models
    registry: Registry
    running: Running
    logbook: Logbook
    flags: Flags
    requests: Requests
    answer: Callable[[], None]
    """Acts on requests between two steps."""
    shown: ShownPhases
    own_updates: OwnUpdates
    notices: Notices

    def make(self, epoch: Epoch, length: int | None) -> Loop:
        """Make the loop of an epoch of so many steps."""
        phase = epoch.phase
        return Loop(
            epoch,
            length,
            self.learner,
            self.models,
            self.registry,
            self.running,
            self.logbook,
            self.flags,
            Agreement(self.requests, self.answer, self.running.progress),
            PhaseWatch(phase, self.shown, self.own_updates, self.notices),
            Samples(phase, self.notices.say_once),
        )
