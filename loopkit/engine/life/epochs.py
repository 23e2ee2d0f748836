"""Epochs: makes the epochs of a learner."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from loopkit.engine.life.epoch import Epoch
from loopkit.engine.life.epoch_contexts import EpochContexts
from loopkit.engine.life.epoch_stages import EpochLife
from loopkit.engine.life.running import Running
from loopkit.engine.life.sources import Source
from loopkit.engine.step.loops import Loops

if TYPE_CHECKING:
    from loopkit.engine.compile.registry import Registry
    from loopkit.engine.life.models import Models
    from loopkit.phases import Phase


class Epochs:
    """Makes epochs, each with a loop and contexts of its own.

    Args:
        life: How epochs begin and end.
        running: The fit that is running.
        loops: Makes the loop of an epoch.
        models: The models, which are put in the mode of the phase.
        registry: The plugins, whose contexts are entered.
    """

    def __init__(self, life: EpochLife, running: Running, loops: Loops, models: Models, registry: Registry) -> None:
        self._life = life
        self._running = running
        self._loops = loops
        self._models = models
        self._registry = registry

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
        contexts = EpochContexts(phase, self._models, self._registry, self._running.where)
        return kind(phase, source, length, self._registry.store_of, self._loops.make, contexts, self._life)

    def next(self, phase: Phase, source: Source | None, length: int | None = None) -> Epoch:
        """An epoch that somebody asks for: by itself, or in the fit that is running."""
        fit = self._running.fit
        return self.make(phase, source, length) if fit is None else fit.turn(phase, source, length)
