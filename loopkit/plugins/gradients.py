"""What is done to gradients between backward and the optimizer: clip, measure, disturb."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from loopkit.errors import PluginError
from loopkit.hooks import hookimpl
from loopkit.plugins.late import read

if TYPE_CHECKING:
    from loopkit.learner import Learner
    from loopkit.phases import Phase
    from loopkit.step import Step

__all__ = ["ClipGradNorm", "ClipGradValue", "GradNoise", "GradNorm"]


def gradients(params: Sequence[Tensor]) -> list[Tensor]:
    """The gradients that there are."""
    return [p.grad for p in params if p.grad is not None]


def total_norm(grads: list[Tensor], norm_type: float = 2.0) -> Tensor:
    """The norm of all gradients together, as one scalar tensor; bitwise ``torch.nn.utils.get_total_norm``."""
    if not grads:
        return torch.zeros(())
    if any(grad.device != grads[0].device or type(grad) is not Tensor for grad in grads):
        return torch.nn.utils.get_total_norm(grads, norm_type)
    norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads, norm_type)), norm_type)
    return norm


class ClipGradNorm:
    """Scale the gradients of each update so that their norm is at most ``max_norm``.

    Equal, bitwise, to ``torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type)``, and never waits for the device.

    Args:
        max_norm: The largest norm, above 0.
        norm_type: The order of the norm, above 0; ``inf`` for the largest absolute value.
        name: The plugin's name.
    """

    provides = "clip"

    def __init__(self, max_norm: float, norm_type: float = 2.0, name: str = "clip_grad_norm") -> None:
        if not max_norm > 0 or not norm_type > 0:
            raise PluginError(f"ClipGradNorm(max_norm={max_norm}, norm_type={norm_type}): both are numbers above 0")
        self.max_norm = max_norm
        self.norm_type = norm_type
        self.name = name
        self.norm: Tensor | None = None
        """The norm of the last update's gradients before clipping, on the device."""

    @hookimpl(updates=("grads",))
    def update_begin(self, step: Step) -> None:
        """Clip."""
        grads = gradients(step.params)
        if not grads:
            return
        norm = self.norm = total_norm(grads, self.norm_type)
        factor = norm.add(1e-6).reciprocal_().mul_(self.max_norm).clamp_(max=1.0)
        if any(grad.device != factor.device for grad in grads):
            for grad in grads:
                grad.mul_(factor.to(grad.device))
        else:
            torch._foreach_mul_(grads, factor)


class ClipGradValue:
    """Limit every element of the gradients to ``[-max_value, max_value]``, as ``torch.nn.utils.clip_grad_value_`` does.

    Args:
        max_value: The largest absolute value, above 0.
        name: The plugin's name.
    """

    provides = "clip"

    def __init__(self, max_value: float, name: str = "clip_grad_value") -> None:
        if not max_value > 0:
            raise PluginError(f"ClipGradValue(max_value={max_value}): it is a number above 0")
        self.max_value = max_value
        self.name = name

    @hookimpl(updates=("grads",))
    def update_begin(self, step: Step) -> None:
        """Clip."""
        torch.nn.utils.clip_grad_value_(step.params, self.max_value)


class GradNorm:
    """Record the norm of the gradients, of each optimizer and of each of its parameter groups.

    The mean over the updates of a pass is put into ``learner.metrics`` at its end, as ``"train/grad_norm"``, with
    several optimizers ``"train/grad_norm_<optimizer>"``, with several groups also ``"..._group<i>"``. Nothing is read
    from the device before.

    Args:
        norm_type: The order of the norm.
        clipped: Measure what the optimizer gets; by default what a clipping plugin gets.
    """

    name = "grad_norm"
    provides = "norm"

    def __init__(self, norm_type: float = 2.0, clipped: bool = False) -> None:
        if not norm_type > 0:
            raise PluginError(f"GradNorm(norm_type={norm_type}): it is a number above 0")
        self.norm_type = norm_type
        self.before = () if clipped else ("clip",)
        self.last: dict[str, Tensor] = {}
        """The norms of the last update, on the device, under the names of the metrics."""
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, int] = {}

    @hookimpl(reads=("grads",))
    def update_begin(self, learner: Learner, step: Step) -> None:
        """Measure."""
        name = "grad_norm" if len(learner.optimizers) == 1 else f"grad_norm_{step.optimizer_name}"
        groups = step.optimizer.param_groups
        self.last[name] = total_norm(gradients(step.params), self.norm_type)
        measured = {name: self.last[name]}
        if len(groups) > 1:
            for number, group in enumerate(groups):
                measured[f"{name}_group{number}"] = total_norm(gradients(group["params"]), self.norm_type)
        for key, value in measured.items():
            self._sums[key] = self._sums[key] + value if key in self._sums else value
            self._counts[key] = self._counts.get(key, 0) + 1
        self.last = {**self.last, **measured}

    @hookimpl(writes=("metrics.*/grad_norm*",))
    def epoch_end(self, learner: Learner, phase: Phase) -> None:
        """Read the means."""
        if phase.training:
            values = read({key: value / self._counts[key] for key, value in self._sums.items()})
            learner.metrics.update({f"{phase.name}/{key}": value for key, value in values.items()})
            self._sums, self._counts = {}, {}

    def state_dict(self) -> dict[str, Any]:
        """The sums of the pass that is running."""
        return {"sums": {key: value.clone() for key, value in self._sums.items()}, "counts": dict(self._counts)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
        self._sums = {key: value.clone() for key, value in state["sums"].items()}
        self._counts = dict(state["counts"])


class GradNoise:
    """Add Gaussian noise to the gradients, with a standard deviation that falls as ``(1 + updates) ** -decay``.

    It changes gradients as clipping does, so with a clipping plugin the order has to be given:
    ``Learner(order=["clip_grad_norm", "grad_noise"])``.

    Args:
        std: The first update's standard deviation, at least 0.
        decay: At least 0.
        seed: Of its own generators, one per device; the global ones are left alone.

    Source: Neelakantan et al., "Adding Gradient Noise Improves Learning for Very Deep Networks" (2015), equation 1,
    with ``std ** 2 = eta`` and ``2 * decay = gamma``.
    """

    name = "grad_noise"
    provides = "noise"

    def __init__(self, std: float = 0.1, decay: float = 0.275, seed: int = 0) -> None:
        if std < 0 or decay < 0:
            raise PluginError(f"GradNoise(std={std}, decay={decay}): both are at least 0")
        self.std = std
        self.decay = decay
        self.seed = seed
        self._generators: dict[str, torch.Generator] = {}

    @hookimpl(updates=("grads",), reads=("progress",))
    def update_begin(self, learner: Learner, step: Step) -> None:
        """Add the noise."""
        std = self.std * (1 + learner.progress.updates) ** -self.decay
        for grad in gradients(step.params):
            generator = self._generator(grad.device)
            grad.add_(torch.empty_like(grad).normal_(generator=generator), alpha=std)

    def _generator(self, device: torch.device) -> torch.Generator:
        key = str(device)
        if key not in self._generators:
            self._generators[key] = torch.Generator(device).manual_seed(self.seed)
        return self._generators[key]

    def state_dict(self) -> dict[str, Any]:
        """The states of its generators."""
        return {"generators": {key: generator.get_state() for key, generator in self._generators.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
        for key, value in state["generators"].items():
            self._generator(torch.device(key)).set_state(value)
