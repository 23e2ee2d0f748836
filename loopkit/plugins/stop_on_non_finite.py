"""A guard against infinite and undefined numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

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
    """Raise `NonFiniteError` when a loss is infinite or not a number as its backward begins, or a gradient is.

    On the CPU the error comes before the optimizer moves, so the parameters are those of the last good update. On an
    accelerator losses and gradients are read when they have arrived, so that no step waits: the error comes some steps
    later, by the end of the pass at the latest, and says between which steps it was; updates since then have used it.

    Args:
        gradients: Look at the gradients of each update, too, and name the first bad parameter; it takes one more pass
            over them. Without it a bad gradient is noticed by the loss of the next step, after an update that used
            it. An update that another plugin skips is not looked at.
        late: False: look before each backward on an accelerator too, where each step then waits for its loss. True:
            look late on the CPU too.
    """

    name = "stop_on_non_finite"
    provides = "non_finite"
    syncs = ("backward_begin", "update_begin")
    """Reads one number in these hooks; on the CPU that waits for nothing."""

    def __init__(self, gradients: bool = False, late: bool | None = None) -> None:
        if not gradients:
            vars(self)["update_begin"] = None  # no listener: a hook that does nothing would cost its call
        self._late = late
        self._pending = _Pending()

    @hookimpl
    @contextmanager
    def epoch_context(self) -> Iterator[None]:
        """Begin with no losses on their way, whatever became of those of an earlier pass."""
        outer, self._pending = self._pending, _Pending()
        try:
            yield
        finally:
            self._pending = outer

    @hookimpl(reads=("loss",))
    def backward_begin(self, learner: Learner, phase: Phase, step: Step) -> None:
        """Look at the loss, or at earlier ones that have arrived."""
        loss = getattr(step, "loss", None)
        if not isinstance(loss, Tensor):
            return
        if self._is_late(loss):
            self._look_later(loss.detach(), learner, phase, step)
        elif not math.isfinite(value := loss.item()):  # host sync: on an accelerator, where late=False asks for it
            raise NonFiniteError(
                f"the loss is {value} ({learner.where(phase, step)}; batch: {describe(step.batch)}). Its backward has "
                f"not run: the parameters are those before this step. Look at this batch, or lower lr"
            )

    @hookimpl(reads=("grads",))
    def update_begin(self, learner: Learner, phase: Phase, step: Step) -> None:
        """Look at the gradients as the optimizer will get them."""
        grads = [p.grad for p in step.params if p.grad is not None]
        if not grads or step.skip_reason is not None:
            return
        largest = torch.stack(torch._foreach_norm(grads, math.inf)).sum()
        if self._is_late(largest):
            self._look_later(largest, learner, phase, step)
        elif not math.isfinite(largest.item()):  # host sync: on an accelerator, where late=False asks for it
            name, value = _first_bad(learner)
            if name:
                raise NonFiniteError(
                    f"the gradient of parameter {name!r} holds {value} ({learner.where(phase, step)}; batch: "
                    f"{describe(step.batch)}) although the loss is finite. The optimizer has not run: the parameters "
                    f"are those before this update. Look for a division or root of 0, or clip what it is applied to"
                )

    def _is_late(self, value: Tensor) -> bool:
        return value.device.type != "cpu" if self._late is None else self._late

    def _look_later(self, value: Tensor, learner: Learner, phase: Phase, step: Step) -> None:
        pending = self._pending
        pending.add(value, step.index)
        values = pending.values.arrived()
        if values or not pending.under_way:
            self._check(values, learner, phase)
            pending.send()

    @hookimpl(reads=("loss",))
    def epoch_end(self, learner: Learner, phase: Phase) -> None:
        """Look at the losses that were still on their way."""
        if self._pending.sum is not None:
            self._pending.send()
            self._check(self._pending.values.wait(), learner, phase)

    def _check(self, values: dict[str, float], learner: Learner, phase: Phase) -> None:
        pending = self._pending
        if math.isnan(values.get("sum", 0.0)):
            raise NonFiniteError(
                f"the loss or a gradient was infinite or not a number in one of the steps {pending.good} to "
                f"{pending.sent} "
                f"({learner.where(phase, None)}). On an accelerator it is read late, so updates since then have used "
                f"it; StopOnNonFinite(late=False) stops before them, and is slower"
            )
        if values:
            pending.good = pending.sent + 1


def _first_bad(learner: Learner) -> tuple[str, float]:
    """The first parameter, in the models' order, whose gradient is not finite, and the first such number in it."""
    for model, module in learner.models.items():
        for name, p in module.named_parameters():
            if p.grad is not None and not bool((finite := torch.isfinite(p.grad)).all()):
                return name if len(learner.models) == 1 else f"{model}.{name}", p.grad[~finite][0].item()
    return "", 0.0


class _Pending:
    """The losses of a pass, and its largest gradients: multiplied by 0 and added up on the device.

    The sum is nan from the first of them on that is not finite.
    """

    def __init__(self) -> None:
        self.values = LateValues()
        self.sum: Tensor | None = None
        self.under_way = False
        self.index = self.sent = -1
        """The last step in the sum, and the last in the transfer under way."""
        self.good = 0
        """The first step that is not known to be good."""

    def add(self, loss: Tensor, index: int) -> None:
        zero = loss * 0
        self.sum = zero if self.sum is None else self.sum + zero
        self.index = index

    def send(self) -> None:
        assert self.sum is not None
        self.values.send({"sum": self.sum})
        self.sent, self.under_way = self.index, True
