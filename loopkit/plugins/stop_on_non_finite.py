"""A guard against infinite and undefined numbers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from loopkit.batches import describe
from loopkit.errors import NonFiniteError
from loopkit.hooks import hookimpl
from loopkit.plugins.late import LateValues

if TYPE_CHECKING:
    from loopkit.learner import Learner
    from loopkit.phases import Phase
    from loopkit.step import Step

__all__ = ["StopOnNonFinite"]


class StopOnNonFinite:
    """Raise `NonFiniteError` when the loss is infinite or not a number.

    On the CPU the error comes before backward, so the parameters are those of the last good update. On an
    accelerator the loss is read when it has arrived, so that no step waits: the error comes some steps later and says
    which step it was.
    """

    name = "stop_on_non_finite"
    provides = "non_finite"
    syncs = ("backward_begin",)
    """Reads the loss in this hook; on the CPU that waits for nothing."""

    def __init__(self) -> None:
        self._late = LateValues()
        self._sum: torch.Tensor | None = None
        self._first = self._sent = 0
        """The steps that the transfer under way covers; none if ``_sent`` is behind."""

    @hookimpl(reads=("loss",))
    def backward_begin(self, learner: Learner, phase: Phase, step: Step) -> None:
        """Look at the loss, or at earlier ones that have arrived."""
        loss = step.loss.detach()
        if loss.device.type == "cpu":
            if not math.isfinite(loss.item()):
                raise NonFiniteError(
                    f"the loss is {loss.item()} ({learner.where(phase, step)}; batch: {describe(step.batch)}). Its "
                    f"backward has not run: the parameters are those before this step. Look at this batch, or lower lr"
                )
            return
        zero = loss * 0  # nan for a loss that is not finite, and it stays nan in the sum
        self._sum = zero if self._sum is None else self._sum + zero
        values = self._late.arrived()
        if values or step.index == 0:
            self._check(values, learner, phase)
            self._late.send({"sum": self._sum})
            self._first, self._sent = self._sent, step.index

    @hookimpl(reads=("loss",))
    def epoch_end(self, learner: Learner, phase: Phase) -> None:
        """Look at the losses that were still on their way."""
        if self._sum is not None:
            self._late.send({"sum": self._sum})
            self._check(self._late.wait(), learner, phase)
            self._sum, self._first, self._sent = None, 0, 0

    def _check(self, values: dict[str, float], learner: Learner, phase: Phase) -> None:
        if math.isnan(values.get("sum", 0.0)):
            raise NonFiniteError(
                f"the loss was not finite in one of the steps since step {self._first} "
                f"({learner.where(phase, None)}). Here it is read late, so updates since then have used it"
            )
