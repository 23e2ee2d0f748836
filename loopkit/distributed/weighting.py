"""How much each process counts in an average of gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from loopkit.base import devices
from loopkit.data.shards import Parts, parts_of
from loopkit.errors import WorldError
from loopkit.losses import is_sum

if TYPE_CHECKING:
    from loopkit.engine.life.epoch import Epoch
    from loopkit.engine.step.step import Step
    from loopkit.learner import Learner
    from loopkit.phases import Phase


class Weighting:
    """Decides whether an average goes by weights, and computes each process's share of it.

    Args:
        weighted: As in `DDP`.
    """

    def __init__(self, weighted: bool | str) -> None:
        self._weighted = weighted
        self._sets_weight: dict[str, bool] = {}
        """Whether a phase sets ``step.weight``, in any process."""
        self._void = False
        """Whether the weights of an update were found to sum to 0 over all processes."""

    def begin_epoch(self, epoch: Epoch) -> None:
        """Keep the known parts of an epoch's data."""
        epoch.keep(self)["parts"] = None if epoch.resumed else parts_of(epoch.data)

    def weighs(self, learner: Learner, phase: Phase, step: Step, weight: float | Tensor, steps: int) -> bool:
        """Whether the average of an update goes by weights; all processes decide alike.

        Args:
            learner, phase, step: The step that makes the update.
            weight: The weight of this process in the update.
            steps: The number of steps in the update.
        """
        parts = self._parts(step)
        if self._weighted == "auto" and not is_sum(learner.loss_fn) and parts is not None:
            known = parts.each * (steps - 1) + (parts.last if step.last else parts.each)
            other = isinstance(weight, Tensor) or weight != known
            if phase.name not in self._sets_weight:
                self._sets_weight[phase.name] = learner.world.highest(float(other)) == [1.0]
            if other and not self._sets_weight[phase.name]:
                raise WorldError(
                    f"the weight of {steps} steps is {weight} in phase {phase.name!r}, step {step.index}, where "
                    f"{known} samples were shared out, as many as there were in the first update: the other processes "
                    f"do not know of it. Give DDP(weighted=True)"
                )
        return self.is_weighted(learner, phase, step)

    def is_weighted(self, learner: Learner, phase: Phase, step: Step) -> bool:
        """Whether the average of a step's update goes by weights, as far as all know before it."""
        if self._weighted != "auto" or is_sum(learner.loss_fn):
            return self._weighted is True
        parts = self._parts(step)
        if parts is None or self._sets_weight.get(phase.name, False):
            return True
        return bool(step.last) and not parts.even

    def share(self, weight: float | Tensor, device: torch.device, size: int) -> Tensor:
        """Return the factor for a mean over processes, ``size * w / sum(w)``, after one reduction of one number."""
        mine = devices.scalar(weight, device, torch.float32).reshape(1)
        total = mine.clone()
        dist.all_reduce(total)
        self._void = total.is_cpu and not total.any()
        total += total.eq(0)  # where no process has anything that counts, the gradients are 0
        return (mine * size / total).squeeze()  # exactly 1 if all are equal

    def skip_void(self, step: Step) -> None:
        """Skip an update whose weights sum to 0 over all processes; on an accelerator without reading them."""
        if self._void:
            step.skip_update("the weights of all processes sum to 0")
            self._void = False

    def _parts(self, step: Step) -> Parts | None:
        kept: dict[str, Any] = step.epoch.keep(self)
        parts: Parts | None = kept["parts"]
        return parts
