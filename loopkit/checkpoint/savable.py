"""Whether a learner can be saved now: no parameters without a shape, and none that is not finite."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from loopkit.base import devices, sharded
from loopkit.errors import NonFiniteError

if TYPE_CHECKING:
    from loopkit.learner import Learner


def has_lazy(learner: Learner) -> bool:
    """Whether a model has parameters without a shape: no batch went through it, so it cannot be saved."""
    return any(map(is_lazy, _parameters(learner)))


def is_sharded(learner: Learner) -> bool:
    """Whether parameters are spread over processes."""
    return any(map(sharded.is_sharded, _parameters(learner)))


def versions(learner: Learner) -> int:
    """Return a number that changes with any change in place of parameters and buffers."""
    tensors = (t for model in learner.models.with_extras().values() for t in (*model.parameters(), *model.buffers()))
    return sum(tensor._version for tensor in tensors if not is_lazy(tensor) and not tensor.is_inference())


def settle(learner: Learner) -> None:
    """Let plugins look at the numbers that they have not read yet."""
    for plugin in learner.plugins.values():
        act = getattr(plugin, "settle", None)
        if act is not None:
            act(learner)


def check_finite(learner: Learner) -> None:
    """Raise for parameters that are not finite; of sharded ones, in all processes or in none."""
    bad = _not_finite(learner)
    if is_sharded(learner):
        bad = next(filter(None, learner.world.gather(bad)), "")
    if bad:
        raise NonFiniteError(
            f"parameter {bad} is not finite at step {learner.progress.steps}: no checkpoint was saved, earlier ones "
            f"stay. StopOnNonFinite(gradients=True) finds the first cause"
        )


def _parameters(learner: Learner) -> Iterator[nn.Parameter]:
    for model in learner.models.with_extras().values():
        yield from model.parameters()


def _not_finite(learner: Learner) -> str:
    """Return the first parameter here that is not finite."""
    for model, module in learner.models.with_extras().items():
        held = [(name, sharded.part(p)) for name, p in module.named_parameters()]
        named = [(name, p) for name, p in held if p.is_floating_point() and p.numel()]
        for device in {p.device for _, p in named}:
            here = [(name, p) for name, p in named if p.device == device]
            finite = _are_finite([p for _, p in here], device)
            if not all(finite):
                owner = f"model {model!r}" if model in learner.models else f"the {model}"
                return f"{here[finite.index(False)][0]!r} of {owner}"
    return ""


def _are_finite(params: list[Tensor], device: torch.device) -> list[bool]:
    """Return which tensors of one device are finite."""
    largest = torch._foreach_norm([p.detach() for p in params], math.inf)
    norms = torch.stack([each.to(devices.exact(device)) for each in largest])
    finite: list[bool] = torch.isfinite(norms).tolist()  # host sync: a save is one anyway
    return finite
