"""Training: what a phase that trains has to do, and what it leaves to the engine."""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING, Any

from loopkit.errors import PhaseError, StepResultError
from loopkit.events import BackwardBegin, UpdateBegin
from loopkit.notes import line_with

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

    from loopkit.engine.step import Step
    from loopkit.engine.window import Window
    from loopkit.phases import Phase


class Proof:
    """Watches the first steps of a phase, until it has shown that it trains, and through the engine.

    A phase whose ``emits`` lacks the events of a backward, or of an update, is free to do that in its own way.

    Args:
        phase: A phase that trains.
        optimizers: The learner's.
    """

    def __init__(self, phase: Phase, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        self._phase = phase
        hooks = {event.hook for event in phase.emits}
        self._backward, self._update = BackwardBegin.hook in hooks, UpdateBegin.hook in hooks
        refuse = partial(_refuse_own, phase)
        self._handles = [each.register_step_pre_hook(refuse) for each in optimizers] if self._update else []

    def look(self, step: Step, overdue: bool, windows: Iterable[Window]) -> bool:
        """Look at a step that has ended; returns whether it has shown what there is to show.

        Raises:
            StepResultError: It called no ``step.backward``, or no ``step.update`` after the last step of a window.
        """
        cls = type(self._phase).__name__
        if self._backward and not step.had_backward:
            kept = line_with(self._phase, ".backward(", unless="step.backward(")
            instead = f"write step.backward(loss) in the place of {kept}" if kept else "end it with both calls"
            raise StepResultError(
                f"{cls}.step called no step.backward(loss), so nothing is learned, or no plugin takes part in it. A "
                f"training step has step.backward(loss) and step.update(): {instead}. A phase that differentiates in "
                f"its own way leaves BackwardBegin out of {cls}.emits"
            )
        if self._update and overdue:
            raise StepResultError(
                f"{cls}.step called step.backward(loss) but not step.update(), so no parameter changes: call it "
                f"after backward, in every step; it updates when an update is due"
            )
        return not (self._update and any(window.count for window in windows))

    def end(self) -> None:
        """Stop watching the optimizers."""
        for handle in self._handles:
            handle.remove()


def _refuse_own(phase: Phase, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Refuse a step of an optimizer that the engine does not make."""
    frame = sys._getframe(1)
    cls = type(phase)
    while frame is not None and frame.f_code is not getattr(cls.step, "__code__", None):
        if frame.f_globals.get("__name__") == "loopkit.engine.step":
            return
        frame = frame.f_back  # type: ignore[assignment]
    if frame is not None:
        raise PhaseError(
            f"{cls.__name__}.step calls optimizer.step(), past the plugins and the count of updates: write "
            f"step.update() in its place, which updates when an update is due. A phase that updates in its own way "
            f"leaves UpdateBegin out of {cls.__name__}.emits"
        )
