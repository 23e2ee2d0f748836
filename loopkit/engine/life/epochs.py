"""Epochs: makes the epochs of a learner."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from loopkit.engine.life.epoch import Epoch
from loopkit.engine.life.epoch_contexts import EpochContexts
from loopkit.engine.life.epoch_stages import EpochLife
from loopkit.engine.life.running import Running
from loopkit.engine.life.sources import Source
from loopkit.engine.step.loop import Loop

if TYPE_CHECKING:
    from loopkit.phases import Phase


class MakeLoop(Protocol):
    """Makes the loop of an epoch's steps."""

    def __call__(self, epoch: Epoch, length: int | None) -> Loop:
        """Make it for an epoch of so many steps."""


class Epochs:
    """Makes epochs, each with a loop and contexts of its own.

    Args:
        life: How epochs begin and end.
        running: The fit that is running.
        loop: Makes the loop of an epoch.
        contexts: Makes the contexts of an epoch of a phase.
        name_of: Returns the name of a plugin.
    """

    def __init__(
        self,
        life: EpochLife,
        running: Running,
        loop: MakeLoop,
        contexts: Callable[[Phase], EpochContexts],
        name_of: Callable[[Any], str],
    ) -> None:
        self._life = life
        self._running = running
        self._loop = loop
        self._contexts = contexts
        self._name_of = name_of

    def make(
        self,
        phase: Phase,
        source: Source | None = None,
        length: int | None = None,
        kind: Callable[..., Epoch] = Epoch,
    ) -> Epoch:
        """Make an epoch.

        Args:
            phase: The phase.
            source: Its data; None in the user's own loop.
            length: How many steps there will be, if that is known.
            kind: The class of the epoch.
        """
        return kind(phase, source, length, self._name_of, self._loop, self._contexts(phase), self._life)

    def next(self, phase: Phase, source: Source | None, length: int | None = None) -> Epoch:
        """An epoch that somebody asks for: by itself, or in the fit that is running."""
        fit = self._running.fit
        return self.make(phase, source, length) if fit is None else fit.turn(phase, source, length)
