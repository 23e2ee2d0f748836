"""Fits that no plugin stops too early."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from loopkit import hookimpl
from loopkit.author import Shown, checks
from loopkit.errors import PluginError

if TYPE_CHECKING:
    from loopkit import Learner, Phase


class AtLeast(Shown):
    """Put off stops of plugins until a fit has made so many updates or epochs.

    The first one that was asked for takes effect then, with its reason, be it that the metric is better again; one for
    an infinite or undefined value waits, too. Limits of the fit, errors, pauses and
    ``learner.stop`` in your code, without ``by=``, are not put off. `loopkit.criteria.warmup` lets a criterion
    forget the first values instead.

    Args:
        updates: Updates of the fit, from 1.
        epochs: Training epochs of the fit, from 1. With both, both are waited for.
        name: The plugin's name.

    A resumed run counts from its own begin, and knows what was put off.

    Raises:
        PluginError: Neither is given, or one is no count.

    Example::

        plugins = [EarlyStopping("val/loss", patience=2), AtLeast(updates=1000)]
    """

    provides = "at_least"
    per_process = ()

    def __init__(self, updates: int | None = None, epochs: int | None = None, name: str = "at_least") -> None:
        if updates is None and epochs is None:
            raise PluginError("AtLeast: give updates=, epochs= or both")
        if updates is not None:
            checks.whole("AtLeast", updates=updates)
        if epochs is not None:
            checks.whole("AtLeast", epochs=epochs)
        self._updates, self._epochs, self.name = updates, epochs, name
        self.held: tuple[str, str] | None = None
        """The stop that was put off: why, and who asked for it."""

    def hold_stop(self, learner: Learner, reason: str, by: str) -> bool:
        """Whether it is too early for this stop."""
        if not by or learner.current is None or self._is_enough(learner):
            return False
        self.held = self.held or (reason, by)
        return True

    def _is_enough(self, learner: Learner) -> bool:
        assert learner.current is not None
        start, now = learner.current.position.start, learner.progress
        return now.updates - start.updates >= (self._updates or 0) and now.epochs - start.epochs >= (self._epochs or 0)

    @hookimpl
    def fit_begin(self, learner: Learner) -> None:
        """Forget the stop of another fit."""
        if learner.current is not None and not learner.current.resumed:
            self.held = None

    @hookimpl(reads=("progress",))
    def step_end(self, learner: Learner, phase: Phase) -> None:
        """Ask for what was put off, if it is time."""
        if phase.training:
            self._ask(learner)

    @hookimpl(reads=("progress",))
    def phase_end(self, learner: Learner, phase: Phase) -> None:
        """The same, at the end of an epoch."""
        if phase.training:
            self._ask(learner)

    def _ask(self, learner: Learner) -> None:
        if self.held is not None and learner.current is not None and self._is_enough(learner):
            (reason, by), self.held = self.held, None
            learner.stop(reason, by)

    def state_dict(self) -> dict[str, Any]:
        """The stop that was put off."""
        return {"held": None if self.held is None else list(self.held)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state."""
        self.held = None if state["held"] is None else (state["held"][0], state["held"][1])
