"""The strategy that averages gradients when an update begins."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from loopkit.base import devices
from loopkit.distributed.buckets import average
from loopkit.distributed.gradient_sync import GradientSync
from loopkit.distributed.weighting import Weighting
from loopkit.errors import WorldError

if TYPE_CHECKING:
    from loopkit.engine.step.step import Step
    from loopkit.learner import Learner
    from loopkit.phases import Phase


class AtUpdate(GradientSync):
    """Gradients are averaged over the processes when an update begins.

    Args:
        weighting: How much each process counts.
        unused: Whether parameters may get no gradient in a step.
        bucket_bytes: As in `average`.
        dtype: Likewise.
    """

    def __init__(self, weighting: Weighting, unused: bool, bucket_bytes: int, dtype: torch.dtype | None) -> None:
        self.weighting = weighting
        self.bucket_bytes = bucket_bytes
        self.dtype = dtype
        self._unused = unused
        self._without: dict[tuple[str, str], set[int]] = {}
        """Which parameters of an optimizer get no gradient in any process, by phase and optimizer."""

    def update(self, learner: Learner, phase: Phase, step: Step) -> None:
        """Average the gradients of an update."""
        grads = gradients(self.params(learner, phase, step))
        weight = self.weight(learner, phase, step)
        self.average(learner, step, grads, weight)

    def weight(self, learner: Learner, phase: Phase, step: Step) -> float | Tensor | None:
        """Return the weight of this process in an update; None if the average does not go by weights."""
        window = step.epoch.window(step.optimizer_name)
        weight = window.total if window.weighted else window.last.weight
        steps = window.count if window.weighted else 1
        return weight if self.weighting.weighs(learner, phase, step, weight, steps) else None

    def average(self, learner: Learner, step: Step, grads: list[Tensor], weight: float | Tensor | None) -> None:
        """Average gradients, by weights if there is one."""
        size = learner.world.size
        if grads and weight is not None:
            share = self.weighting.share(weight, grads[0].device, size)
            devices.scale(grads, share.to(grads[0].dtype))
            self.weighting.skip_void(step)
        average(grads, size, bucket_bytes=self.bucket_bytes, dtype=self.dtype)

    def params(self, learner: Learner, phase: Phase, step: Step) -> list[Tensor]:
        """The parameters that get a gradient in any process, the last first; zeros where it is another process."""
        without = self._without_gradient(learner, phase, step)
        params = [p for index, p in enumerate(step.params) if p.requires_grad and index not in without][::-1]
        for p in params:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        return params

    def _without_gradient(self, learner: Learner, phase: Phase, step: Step) -> set[int]:
        """The parameters, by index, that get no gradient in any process."""
        missing = {index for index, p in enumerate(step.params) if p.requires_grad and p.grad is None}
        if self._unused:
            return set.intersection(*learner.world.gather(missing))
        key = phase.name, step.optimizer_name
        if key not in self._without:
            gathered = learner.world.gather(missing)
            self._without[key] = gathered[0]
            missing = next((each for each in gathered if each != gathered[0]), missing)
        without = self._without[key]
        changed = sorted(missing ^ without)
        if changed:
            shape = tuple(step.params[changed[0]].shape)
            raise WorldError(
                f"parameter {changed[0]} (shape {shape}) of optimizer {step.optimizer_name!r} gets a gradient in "
                f"some updates or processes, and in others it gets none (phase {phase.name!r}, step {step.index}): "
                f"give DDP(find_unused_parameters=True) if that is meant"
            )
        return without


def gradients(params: list[Tensor]) -> list[Tensor]:
    """Return the gradients that parameters have."""
    return [p.grad for p in params if p.grad is not None]
