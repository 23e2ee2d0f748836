"""Buffers, such as running statistics, copied and put back."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from loopkit.base.options import Shown
from loopkit.errors import NonFiniteError

if TYPE_CHECKING:
    from loopkit.learner import Learner


def cells(learner: Learner) -> list[tuple[dict[str, Tensor | None], str]]:
    """Where the buffers are kept, which modules may replace as well as change."""
    modules = {module: None for model in learner.models.with_extras().values() for module in model.modules()}
    return [
        (m._buffers, key)
        for m in modules
        for key, buffer in m._buffers.items()
        if buffer is not None and not is_lazy(buffer)
    ]


def extra_states(learner: Learner) -> dict[str, Any]:
    """Copies of the modules' ``get_extra_state``, by model and path."""
    return {
        f"{name}.{path}": copy.deepcopy(module.get_extra_state()) for name, path, module in _with_extra_state(learner)
    }


def put_extra_states(learner: Learner, kept: Mapping[str, Any]) -> None:
    """Hand copies of `extra_states` to the modules."""
    for name, path, module in _with_extra_state(learner):
        if f"{name}.{path}" in kept:
            module.set_extra_state(copy.deepcopy(kept[f"{name}.{path}"]))


def _with_extra_state(learner: Learner) -> Iterator[tuple[str, str, nn.Module]]:
    for name, model in learner.models.with_extras().items():
        for path, module in model.named_modules():
            if type(module).get_extra_state is not nn.Module.get_extra_state:
                yield name, path, module


class Buffers(Shown):
    """A copy of all buffers.

    Args:
        copies: A list to keep it in; it holds an earlier copy.
    """

    def __init__(self, copies: list[Tensor] | None = None) -> None:
        self.copies: list[Tensor] = [] if copies is None else copies

    def take(self, learner: Learner) -> None:
        """Copy the buffers, into the memory of the last copies if they fit."""
        tensors = [holder[key] for holder, key in cells(learner)]
        live = [tensor.detach() for tensor in tensors if tensor is not None]
        if [_looks(each) for each in live] != [_looks(each) for each in self.copies]:
            self.copies[:] = [tensor.clone() for tensor in live]
        elif live:
            torch._foreach_copy_(self.copies, live)

    def restore(self, learner: Learner) -> None:
        """Put the buffers back."""
        now = cells(learner)
        if len(now) != len(self.copies):
            raise NonFiniteError(f"there are {len(now)} buffers, and were {len(self.copies)}: they cannot go back")
        for (holder, key), saved in zip(now, self.copies, strict=True):
            live = holder[key]
            assert live is not None
            if _looks(live) == _looks(saved):
                live.detach().copy_(saved)
            else:
                holder[key] = saved.to(live.device, copy=True)


def _looks(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.device
