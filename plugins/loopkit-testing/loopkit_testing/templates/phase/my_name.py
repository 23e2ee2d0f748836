"""A phase with its own event: a penalty on large outputs."""

from __future__ import annotations

from typing import Any

from loopkit import Event, Learner, TrainingPhase
from loopkit.events import ForwardBegin, LossBegin

__all__ = ["MyNameBegin", "MyNamePhase"]


class MyNameBegin(Event):
    """``step.task_loss`` and ``step.penalty`` exist; the penalty may be changed."""


class MyNamePhase(TrainingPhase):
    """Train with a penalty: ``loss = task_loss + penalty``, both scalars.

    The step sets ``inputs``, ``targets``, ``outputs``, ``task_loss``, ``penalty`` and
    ``loss``.

    Args:
        weight: Of the mean of the squared outputs.
    """

    emits = (*TrainingPhase.emits, MyNameBegin)

    def __init__(self, weight: float = 1e-3) -> None:
        super().__init__()
        self.weight = weight

    def step(self, learner: Learner, step: Any) -> None:
        """Forward, the two losses, backward, update."""
        step.inputs, step.targets = step.batch
        step.emit(ForwardBegin)
        step.outputs = learner.model(step.inputs)  # type: ignore[operator]
        step.emit(LossBegin)
        step.task_loss = learner.loss_fn(step.outputs, step.targets)
        step.penalty = self.weight * step.outputs.square().mean()
        step.emit(MyNameBegin)  # calls my_name_begin of every plugin
        step.loss = step.task_loss + step.penalty
        step.backward(step.loss)
        step.update()
