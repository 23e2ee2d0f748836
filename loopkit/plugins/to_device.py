"""Models and batches on a device."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from loopkit.errors import PluginError
from loopkit.hooks import hookimpl
from loopkit.words import nearest

if TYPE_CHECKING:
    from loopkit.learner import Learner

__all__ = ["ToDevice", "map_tensors", "move"]


class ToDevice:
    """Move the models once and every batch to a device.

    Args:
        device: A torch device, such as ``"cuda:0"``; ``"auto"`` is the accelerator if there is one, else the CPU.

    Batches can be nested tuples, lists, mappings and dataclasses; anything with a ``to(device)`` is moved. Pinned
    memory is copied without waiting. The state of an optimizer that was used before moves when a pass begins.

    Raises:
        PluginError: ``device`` is no torch device.
    """

    name = "to_device"
    provides = "device"
    before = ("memory_format", "freeze", "compile", "sync")

    def __init__(self, device: str | torch.device = "auto") -> None:
        if device == "auto":
            found = torch.accelerator.current_accelerator(check_available=True)
            device = "cpu" if found is None else found
        try:
            self.device = torch.device(device)
        except (RuntimeError, TypeError) as error:
            raise PluginError(
                f"ToDevice: device is {device!r:.80}: it is a torch device, such as 'cuda:0', or 'auto'{_near(device)}"
            ) from error

    @hookimpl(updates=("model",))
    def setup_model(self, learner: Learner, model: nn.Module) -> nn.Module:
        """Move the module."""
        model.to(self.device)
        return model

    @hookimpl(updates=("optimizer.state",))
    def epoch_begin(self, learner: Learner) -> None:
        """Move the state of optimizers that were used before."""
        for optimizer in learner.optimizers.values():
            if _has_state_elsewhere(optimizer):
                optimizer.load_state_dict(optimizer.state_dict())  # puts the state where the parameters are

    @hookimpl(updates=("batch",))
    def move_batch(self, batch: Any) -> Any:
        """Move the batch."""
        return move(batch, self.device)


def _near(device: Any) -> str:
    word = str(device).lower().partition(":")[0]
    return nearest("cuda" if word == "gpu" else word, ("auto", "cpu", "cuda", "mps", "xpu"))


def _has_state_elsewhere(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a tensor of the state is not with its parameter; scalars, such as counts of steps, may be anywhere."""
    return any(
        isinstance(value, Tensor) and value.ndim > 0 and value.device != p.device
        for p, state in optimizer.state.items()
        for value in state.values()
    )


def move(value: Any, device: torch.device) -> Any:
    """A copy of a nested batch with everything that can be moved on the device; what is there stays as it is."""
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=device.type != "cpu" and value.device.type == "cpu" and value.is_pinned())
    if callable(getattr(value, "to", None)) and not isinstance(value, type):
        return value.to(device)
    return map_parts(value, lambda part: move(part, device))


def map_tensors(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """A copy of a nested batch with ``function`` applied to its tensors; what stays the same is not copied."""
    if isinstance(value, Tensor):
        return function(value)
    return map_parts(value, lambda part: map_tensors(part, function))


def map_parts(value: Any, function: Callable[[Any], Any]) -> Any:
    """A copy of a mapping, tuple, list or dataclass with ``function`` applied to its parts; others as they are."""
    if isinstance(value, Mapping):
        parts = {key: function(part) for key, part in value.items()}
        if all(parts[key] is part for key, part in value.items()):
            return value
        if not isinstance(value, MutableMapping):
            return type(value)(parts)  # type: ignore[call-arg]
        moved = copy.copy(value)
        moved.update(parts)
        return moved
    if isinstance(value, (tuple, list)):
        items = [function(part) for part in value]
        if all(item is part for item, part in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if is_dataclass(value) and not isinstance(value, type):
        found = {f.name: function(getattr(value, f.name)) for f in fields(value)}
        if all(getattr(value, name) is part for name, part in found.items()):
            return value
        changed = copy.copy(value)
        for name, part in found.items():
            object.__setattr__(changed, name, part)  # a frozen one too
        return changed
    return value
