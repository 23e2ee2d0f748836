"""Skip steps whose loss is far above the recent ones."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from loopkit.base.notes import say
from loopkit.base.options import Shown
from loopkit.base.world import must_agree
from loopkit.errors import CancelStep, PluginError
from loopkit.hooks import hookimpl

if TYPE_CHECKING:
    from loopkit import Step
    from loopkit.learner import Learner
    from loopkit.phases import Phase


class SkipSpikes(Shown):
    """Cancel a step, before its backward, whose loss is far above the last ones.

    Far above is ``mean + threshold * std`` of the last good ones. That is the z-score rule of ZClip (arXiv:2504.02507,
    which applies it to gradient norms), on the loss and over a window; std is the population's, and at least 1 % of the
    mean's absolute value. The first ``warmup`` losses are all good. After ``max_skips`` spikes in a row the loss has a
    new level: the next step is taken, and the warm-up begins again. A loss that is infinite or not a number is left to
    `StopOnNonFinite`. Each phase has its own losses; in a step with several backwards the first one counts. Batches
    that were passed over have still moved running statistics.

    Processes that share their gradients decide alike, by the mean of their losses: that takes one reduction of one
    number, in the host's memory, in every step. A process that trains by itself between averages decides by its own.

    Args:
        threshold: In standard deviations.
        window: Losses that are remembered, in steps.
        warmup: At least so many losses must be known, in steps.
        max_skips: Steps in a row that are skipped at most.
        wait: Allow it to wait for the loss in every step, where that is on an accelerator.

    Raises:
        PluginError: An argument is out of range; or the loss is on an accelerator, and ``wait`` is False.
    """

    name = "skip_spikes"
    per_process = ()  # it talks to the others
    syncs = ("backward_begin", "step_end")
    """On the CPU reading the loss does not wait; on an accelerator it must be asked for."""

    def __init__(
        self, threshold: float = 5.0, *, window: int = 100, warmup: int = 20, max_skips: int = 5, wait: bool = False
    ) -> None:
        if not 0 < threshold < math.inf:
            raise PluginError(f"SkipSpikes(threshold={threshold}): it is a positive number of standard deviations")
        if not 2 <= warmup <= window or max_skips < 1:
            raise PluginError(
                f"SkipSpikes: warmup={warmup} must be from 2 to window={window}, max_skips={max_skips} at least 1"
            )
        self.threshold = threshold
        self.window = window
        self.warmup = warmup
        self.max_skips = max_skips
        self.wait = wait
        self.skipped = 0
        """Steps skipped so far."""
        self.limit = torch.tensor(math.inf, dtype=torch.float64)
        """A loss of the step above it is a spike. A tensor, so that a recorded step reads it."""
        self.compared = torch.zeros((), dtype=torch.float64)
        """The loss that a recorded step has compared; nan in one that has not."""
        self._row = 0
        self._losses: dict[str, list[float]] = {}

    def _usual(self, phase: Phase) -> tuple[float, float]:
        """Mean and standard deviation of a phase's last good losses; infinite while there are too few."""
        good = self._losses.get(phase.name, [])
        if len(good) < self.warmup:
            return math.inf, math.inf
        mean = math.fsum(good) / len(good)
        std = math.sqrt(math.fsum((each - mean) ** 2 for each in good) / len(good))
        return mean, max(std, 0.01 * abs(mean))

    @hookimpl(phase="training")
    def step_begin(self, phase: Phase, step: Step) -> None:
        """Set the limit by the last good losses."""
        mean, std = self._usual(phase)
        step.epoch.keep(self).update(loss=None, limit=mean + self.threshold * std)
        self.limit.fill_(mean + self.threshold * std)
        self.compared.fill_(math.nan)

    @hookimpl(reads=("loss",))
    def backward_begin(self, learner: Learner, phase: Phase, step: Step) -> None:
        """Compare the loss with the limit."""
        loss = getattr(step, "loss", None)
        keep = step.epoch.keep(self)
        if not isinstance(loss, Tensor) or step.had_backward or not step.samples:
            return
        if loss.device.type != "cpu" and not self.wait:
            raise PluginError(
                f"SkipSpikes: the loss is on {loss.device}, and every step would wait for it: give wait=True if that "
                f"is what you want"
            )
        value = loss.item()  # host sync: on an accelerator, where wait=True asks for it
        if must_agree(learner):
            value = learner.world.total(value)[0] / learner.world.size
        if math.inf > value > keep["limit"]:
            if self._row < self.max_skips:
                self._row += 1
                self.skipped += 1
                mean, std = self._usual(phase)
                what = f"the loss {value:.4g} is a spike: the last good ones are {mean:.4g} +- {std:.4g}"
                if self.skipped <= 3 and learner.world.rank == 0:  # so that a run is not drowned in lines
                    say(f"skip_spikes: {what}; the step is skipped ({self.skipped} so far)")
                raise CancelStep(what)
            self._losses[phase.name].clear()
        keep["loss"] = value

    def vote(self, hook: str) -> Callable[[Step], Tensor] | None:
        """A function that returns, in a recorded step, whether the loss is no spike."""
        return self._compare if hook == "backward_begin" else None

    def _compare(self, step: Step) -> Tensor:
        self.compared.copy_(step.loss.detach())
        return ~(step.loss > self.limit)

    @hookimpl(phase="training", reads=("loss",))
    def step_end(self, phase: Phase, step: Step) -> None:
        """Remember the loss, if it is a good one."""
        value = step.epoch.keep(self)["loss"] if step.had_backward else math.nan
        if math.isfinite(value := self.compared.item() if value is None else value):  # host sync: it was waited for
            self._row = 0
            self._losses[phase.name] = [*self._losses.get(phase.name, []), value][-self.window :]

    def state_dict(self) -> dict[str, Any]:
        """The last good losses by phase, and the counts."""
        losses = {name: list(values) for name, values in self._losses.items()}
        return {"losses": losses, "row": self._row, "skipped": self.skipped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the return value of `state_dict`."""
        self._losses = {name: list(values) for name, values in state["losses"].items()}
        self._row = state["row"]
        self.skipped = state["skipped"]
