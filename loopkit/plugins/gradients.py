"""Plugins for gradients, between backward and the optimizer: clip, measure, disturb."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_float
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from loopkit.base import checks, devices, sharded
from loopkit.base.options import Shown
from loopkit.errors import PluginError
from loopkit.hooks import hookimpl
from loopkit.plugin import provided
from loopkit.plugins.late import read

if TYPE_CHECKING:
    from loopkit import Epoch, Step
    from loopkit.learner import Learner
    from loopkit.phases import Phase


def gradients(params: Sequence[Tensor]) -> list[Tensor]:
    """The gradients that there are."""
    return [grad for p in params if (grad := p.grad) is not None]


def alike(grads: list[Tensor]) -> bool:
    """Whether all are plain dense tensors of one device and dtype, so that one call can take them together."""
    kinds = {(type(grad), grad.device, grad.dtype, grad.layout) for grad in grads}
    return len(kinds) == 1 and type(grads[0]) is Tensor and grads[0].layout is torch.strided


def norm_of(grads: list[Tensor], norm_type: float) -> Tensor:
    """The norm of gradients that are alike, as a scalar on their device."""
    norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads, norm_type)), norm_type)
    return norm


def total_norm(grads: list[Tensor], norm_type: float = 2.0) -> Tensor:
    """The norm of all gradients together, as one scalar tensor; bitwise ``torch.nn.utils.get_total_norm``.

    Of sharded gradients it is the norm of the whole, equal in all processes; of sparse ones, the norm of their values.
    """
    if alike(grads):
        return norm_of(grads, norm_type)
    if any(map(is_sparse, grads)):
        grads = sharded.with_values(grads)
    if any(map(sharded.is_sharded, grads)):
        return sharded.total_norm(grads, norm_type)
    return torch.nn.utils.get_total_norm(grads, norm_type)


def is_sparse(grad: Tensor) -> bool:
    """Whether a gradient is sparse, as of ``nn.Embedding(sparse=True)``."""
    return grad.layout is not torch.strided


def coalesce(params: Sequence[Tensor]) -> None:
    """Let sparse gradients hold each index once, so that what is done to their values is done to them."""
    for p in params:
        if p.grad is not None and is_sparse(p.grad):
            p.grad = p.grad.coalesce()


def clip(grads: list[Tensor], norm: Tensor, max_norm: float) -> None:
    """Multiply gradients of this norm, which are alike, by ``max_norm / (norm + 1e-6)``, if that is below 1.

    It is reciprocal, then product, as torch computes ``max_norm / norm``. On the host Python numbers do it: float64
    operations, each rounded to float32, equal float32's: four calls of torch take as long as a small layer.
    """
    if norm.__class__ is Tensor and norm.is_cpu and norm.dtype is torch.float32:
        share = single(1.0 / single(norm.item() + single(1e-6))) * single(max_norm)
        if not share >= 1.0:  # nan is none
            torch._foreach_mul_(grads, share)
    else:
        torch._foreach_mul_(grads, norm.add(1e-6).reciprocal_().mul_(max_norm).clamp_(max=1.0))


def single(number: float) -> float:
    """The number in float32 that is nearest."""
    return c_float(number).value


def _valued(params: Sequence[Tensor]) -> Sequence[Tensor]:
    """Parameters whose gradients are dense: in the place of sparse ones stand their values, in the same memory."""
    if not any(p.grad is not None and is_sparse(p.grad) for p in params):
        return params
    made = []
    for p in params:
        if p.grad is not None and is_sparse(p.grad):
            values = sharded.values(p.grad)
            p = torch.empty_like(values)
            p.grad = values
        made.append(p)
    return made


class ClipGradNorm(Shown):
    """Scale the gradients of each update so that their norm is at most ``max_norm``.

    Equal, bitwise, to ``torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type)`` of the optimizer's parameters, in
    their order, and never waits for the device. With several optimizers, the gradients of each are clipped by
    themselves, or by one norm over all. Sharded gradients are clipped by the norm of the whole.

    Args:
        max_norm: The largest norm, above 0.
        norm_type: The order of the norm, above 0; ``math.inf`` for the largest absolute value.
        name: The plugin's name.
        over: ``"each"`` optimizer has its own norm; ``"all"``: one norm over the parameters of all optimizers that
            the step updates, in the models' order, as of Muon and AdamW for one model.

    Raises:
        PluginError: An option is out of range; at ``fit_begin``, the gradients of one of several optimizers are
            unscaled or averaged only in its own update, after the first one was clipped.
    """

    provides = "clip"
    volatile = ("_*", "norm")

    def __init__(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        name: str = "clip_grad_norm",
        *,
        over: Literal["each", "all"] = "each",
    ) -> None:
        checks.positive("ClipGradNorm", max_norm=max_norm, norm_type=norm_type, infinite=True)
        checks.one_of("ClipGradNorm", ("each", "all"), over=over)
        self.over = over
        self.max_norm = max_norm
        self.norm_type = norm_type
        self.name = name
        self.norm: Tensor | None = None
        """The norm of the last update's gradients before clipping, on the device; None if there were none."""
        self._params: Sequence[Tensor] = ()
        self._alike = False

    @hookimpl
    def fit_begin(self, learner: Learner) -> None:
        """Raise for one norm over gradients that are not all ready in the first optimizer's update."""
        if self.over == "each" or len(learner.optimizers) < 2:
            return
        for name, plugin in learner.plugins.items():
            does = ""
            fix = "give over='each'"
            if getattr(plugin, "loss_scale", 1.0) != 1.0:  # host sync: before a fit
                does = "unscales"
                fix += ", or train in bfloat16"
            elif provided(plugin) == "sync" and learner.world.size > 1 and not _are_sharded(learner):
                does = "averages"
            if does:
                raise PluginError(
                    f"ClipGradNorm(over='all'): plugin {name!r} {does} the gradients of each of "
                    f"{len(learner.optimizers)} optimizers in its own update, so there is no norm over all "
                    f"before the first: {fix}"
                )

    @hookimpl(updates=("grads",), traced=("norm",))
    def update_begin(self, learner: Learner, step: Step) -> None:
        """Clip."""
        if self.over == "all":
            self._clip_all(learner, step)
            return
        grads = gradients(step.params)
        if not grads:
            self.norm = None
            return
        if step.params is not self._params:  # once: gradients are of their parameters' kind
            self._alike = alike(grads)
            self._params = step.params
        if self._alike:
            norm = self.norm = norm_of(grads, self.norm_type)
            clip(grads, norm, self.max_norm)
        else:
            self._clip_any(step.params)

    def _clip_any(self, params: Sequence[Tensor]) -> None:
        """Clip gradients of any kind."""
        coalesce(params)
        grads = gradients(params)
        self.norm = total_norm(grads, self.norm_type) if grads else None
        if self.norm is not None:
            torch.nn.utils.clip_grads_with_norm_(_valued(params), self.max_norm, self.norm)

    def _clip_all(self, learner: Learner, step: Step) -> None:
        """Clip the gradients of all optimizers that the step updates, at the first one's update."""
        keep = step.epoch.keep(self)
        if keep.get("index") != step.index:
            keep.update(index=step.index, names=set())
        if step.optimizer_name in keep["names"]:
            return
        due = _due(step)
        keep["names"].update(window.name for window in due)
        updated = dict.fromkeys(p for window in due for p in window.params)
        params = [
            p for p in dict.fromkeys((*learner.models.parameters(), *updated)) if p in updated
        ]  # as clip_grad_norm_(model.parameters())
        self._clip_any(params)


def _due(step: Step) -> list[Any]:
    """Return the windows that the step updates; their gradients are the windows' as they are."""
    due = [each for each in step.epoch.windows if each.count and (each.count >= each.size or step.last)]
    for window in due:
        factor = 1.0 if window.name == step.optimizer_name else window.take_factor()
        if isinstance(factor, Tensor) or factor != 1.0:
            devices.scale(gradients(window.params), factor)
    return due


def _are_sharded(learner: Learner) -> bool:
    return all(sharded.is_sharded(p) for model in learner.models.values() for p in model.parameters())


class ClipGradValue(Shown):
    """Limit every element of the gradients to ``[-max_value, max_value]``.

    It is what ``torch.nn.utils.clip_grad_value_`` does.

    Args:
        max_value: The largest absolute value, above 0.
        name: The plugin's name.

    Raises:
        PluginError: ``max_value`` is no number above 0, or (when the fit begins) a trained parameter is complex.
    """

    provides = "clip"

    def __init__(self, max_value: float, name: str = "clip_grad_value") -> None:
        checks.positive("ClipGradValue", max_value=max_value, infinite=True)
        self.max_value = max_value
        self.name = name

    @hookimpl
    def fit_begin(self, learner: Learner) -> None:
        """Raise for complex parameters, whose gradients have no order."""
        for name, parameter in learner.models.named_parameters():
            if parameter.is_complex() and parameter.requires_grad:
                raise PluginError(
                    f"plugin {self.name!r}: parameter {name!r} is {str(parameter.dtype).removeprefix('torch.')}, and "
                    f"complex numbers have no largest value: use ClipGradNorm, which limits the norm"
                )

    @hookimpl(updates=("grads",), traced=())
    def update_begin(self, step: Step) -> None:
        """Clip."""
        if any(p.grad is not None for p in step.params):  # torch's function fails without any
            coalesce(step.params)
            torch.nn.utils.clip_grad_value_(_valued(step.params), self.max_value)


class GradNorm(Shown):
    """Record the norm of the gradients, by optimizer and by parameter group.

    The mean over the updates of an epoch is put into ``learner.metrics`` at its end, as ``"train/grad_norm"``, with
    several optimizers ``"train/grad_norm_<optimizer>"``, with several groups also ``"..._group<i>"``. Skipped updates
    do not count. The device is read only at the end.

    Args:
        norm_type: The order of the norm, above 0; ``math.inf`` for the largest absolute value.
        clipped: Measure what the optimizer gets; by default what a clipping plugin gets.
        name: The plugin's name, with which the names of its metrics begin.

    Raises:
        PluginError: ``norm_type`` is no number above 0.
    """

    provides = "norm"
    volatile = ("_*", "last")

    def __init__(self, norm_type: float = 2.0, clipped: bool = False, name: str = "grad_norm") -> None:
        checks.positive("GradNorm", norm_type=norm_type, infinite=True)
        self.norm_type = norm_type
        self.name = name
        self.clipped = clipped
        self.before = () if clipped else ("clip",)
        self.last: dict[str, Tensor] = {}
        """The norms of each optimizer's last update, on the device, under the names of the metrics."""
        self._measured: dict[str, Tensor] = {}

    @hookimpl(reads=("grads",), traced=("last", "_measured"))
    def update_begin(self, learner: Learner, step: Step) -> None:
        """Measure."""
        name = self.name if len(learner.optimizers) == 1 else f"{self.name}_{step.optimizer_name}"
        groups = step.optimizer.param_groups
        self._measured = {name: total_norm(gradients(step.params), self.norm_type)}
        if len(groups) > 1:
            for number, group in enumerate(groups):
                self._measured[f"{name}_group{number}"] = total_norm(gradients(group["params"]), self.norm_type)
        self.last.update(self._measured)

    @hookimpl
    def update_end(self, step: Step) -> None:
        """Count what was measured: the update was applied."""
        sums = step.epoch.store(self)  # next to a norm, it costs nothing to look it up here
        for key, value in self._measured.items():
            total, count = sums.get(key, (0.0, 0))
            sums[key] = total + value, count + 1

    @hookimpl(writes=lambda plugin: (f"metrics.*/{plugin.name}*",))
    def epoch_end(self, learner: Learner, phase: Phase, epoch: Epoch) -> None:
        """Read the means."""
        values = read({key: total / count for key, (total, count) in epoch.store(self).items()})
        learner.metrics.update({f"{phase.name}/{key}": value for key, value in values.items()})


class GradNoise(Shown):
    """Add Gaussian noise to the gradients, less with each update.

    Its standard deviation falls as ``(1 + updates) ** -decay``. ``updates`` is ``learner.progress.updates``, so it
    counts the updates of all optimizers. The noise changes gradients as clipping does, so with a clipping plugin the
    order has to be given: ``Learner(order=["clip_grad_norm", "grad_noise"])``.

    Args:
        std: The first update's standard deviation, at least 0.
        decay: At least 0.
        seed: Seeds its generators, one per device; the global ones stay as they are.

    Raises:
        PluginError: An option is out of range.

    Source: Neelakantan et al., "Adding Gradient Noise Improves Learning for Very Deep Networks" (2015), equation 1,
    with ``std ** 2 = eta`` and ``2 * decay = gamma``.

    Of a sparse gradient the values get noise, and the other rows stay without.
    """

    name = "grad_noise"
    provides = "noise"

    def __init__(self, std: float = 0.1, decay: float = 0.275, seed: int = 0) -> None:
        checks.not_negative("GradNoise", std=std, decay=decay)
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise PluginError(f"GradNoise(seed={seed!r}): it must be a whole number")
        self.std = std
        self.decay = decay
        self.seed = seed
        self._generators: dict[str, torch.Generator] = {}
        self._states: dict[str, Tensor] = {}
        """Restored, for generators that are not made yet."""

    @hookimpl(updates=("grads",), reads=("progress",))
    def update_begin(self, learner: Learner, step: Step) -> None:
        """Add the noise."""
        std = self.std * (1 + learner.progress.updates) ** -self.decay
        coalesce(step.params)
        for grad in gradients(_valued(step.params)):
            if sharded.is_sharded(grad):  # each process draws the noise of the whole
                noise = torch.empty(grad.shape, dtype=grad.dtype, device=grad.device)
            else:
                noise = torch.empty_like(grad)
            grad.add_(sharded.like(noise.normal_(generator=self._generator(grad.device)), grad), alpha=std)

    def _generator(self, device: torch.device) -> torch.Generator:
        key = str(device)
        if key not in self._generators:
            generator = torch.Generator(device).manual_seed(self.seed)
            if key in self._states:
                generator.set_state(self._states.pop(key))
            self._generators[key] = generator
        return self._generators[key]

    def state_dict(self) -> dict[str, Any]:
        """The states of its generators."""
        states = {key: value.clone() for key, value in self._states.items()}
        for key, generator in self._generators.items():
            states[key] = generator.get_state()
        return {"generators": states}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the return value of `state_dict`."""
        self._generators = {}
        self._states = {key: value.clone() for key, value in state["generators"].items()}
