"""The interface of the strategies that average gradients over the processes."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from loopkit.engine.step.step import Step
    from loopkit.learner import Learner
    from loopkit.phases import Phase


class GradientSync:
    """A strategy: its methods are called in this order in each training step; by default they have no effect."""

    def reset(self) -> None:
        """Drop what belongs to the last step."""

    def begin(self, learner: Learner, phase: Phase, step: Step, sends: bool) -> bool:
        """Prepare for a step, whose backward may send gradients if ``sends``.

        Returns:
            Whether the strategy serves the step. If not, its gradients are averaged when the update begins.
        """
        return True

    def backward_begin(self, learner: Learner, phase: Phase, step: Step) -> None:
        """Prepare for a backward."""

    def backward_end(self, learner: Learner, phase: Phase, step: Step) -> None:
        """Act after a backward."""

    def update(self, learner: Learner, phase: Phase, step: Step) -> None:
        """Make the gradients of an update averages."""

    def cancel(self, phase: Phase) -> None:
        """End a step that is cancelled."""

    def set_aside(self) -> AbstractContextManager[None]:
        """Keep the state of the running step, while a hook runs an epoch."""
        return nullcontext()

    def paused(self) -> AbstractContextManager[None]:
        """Do not send in a backward."""
        return nullcontext()
