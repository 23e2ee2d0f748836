"""Models and batches on a device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from loopkit.hooks import hookimpl

if TYPE_CHECKING:
    from loopkit.learner import Learner

__all__ = ["ToDevice", "move"]


class ToDevice:
    """Move the models once and every batch to a device.

    Args:
        device: A torch device, such as ``"cuda:0"``; ``"auto"`` is the accelerator if there is one, else the CPU.

    Batches can be nested tuples, lists, mappings and dataclasses; anything with a ``to(device)`` is moved. Pinned
    memory is copied without waiting.
    """

    name = "to_device"
    provides = "device"
    before = ("memory_format", "freeze", "compile", "sync")

    def __init__(self, device: str | torch.device = "auto") -> None:
        if device == "auto":
            found = torch.accelerator.current_accelerator()
            device = "cpu" if found is None else found
        self.device = torch.device(device)

    @hookimpl(updates=("model",))
    def setup_model(self, learner: Learner, model: nn.Module) -> nn.Module:
        """Move the module, and the state of optimizers that were there before."""
        model.to(self.device)
        for optimizer in learner.optimizers.values():
            optimizer.load_state_dict(optimizer.state_dict())  # puts the state where the parameters are
        return model

    @hookimpl(updates=("batch",))
    def move_batch(self, batch: Any) -> Any:
        """Move the batch."""
        return move(batch, self.device)


def move(value: Any, device: torch.device) -> Any:
    """A copy of a nested batch with everything that can be moved on the device; what is there stays as it is."""
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=value.device.type == "cpu" and value.is_pinned())
    if callable(getattr(value, "to", None)):
        return value.to(device)
    if isinstance(value, Mapping):
        moved = {key: move(part, device) for key, part in value.items()}
        return moved if type(value) is dict else type(value)(moved)  # type: ignore[call-arg]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(move(part, device) for part in value))
    if isinstance(value, (tuple, list)):
        return type(value)(move(part, device) for part in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: move(getattr(value, f.name), device) for f in fields(value) if f.init})
    return value
