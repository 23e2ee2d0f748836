"""Models and batches on a device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from loopkit.base import devices
from loopkit.base.batches import move
from loopkit.base.options import Shown
from loopkit.hooks import hookimpl

if TYPE_CHECKING:
    from loopkit.learner import Learner


class ToDevice(Shown):
    """Move the models and the loss once, and every batch, to a device.

    Args:
        device: A torch device, such as ``"cuda:0"``; ``"auto"`` is the accelerator if there is one, else the CPU. Where
            no index is given, each process of a machine takes the one of its ``LOCAL_RANK``, which launchers set.

    Batches can be nested tuples, lists, mappings and dataclasses; anything with a ``to(device)`` is moved. Pinned
    memory is copied without waiting. The state of an optimizer that was used before moves when an epoch begins.

    Raises:
        PluginError: ``device`` is no torch device.
    """

    name = "to_device"
    provides = "device"
    per_process = ("device",)
    before = ("memory_format", "freeze", "compile", "sync")
    volatile = ("device",)

    def __init__(self, device: str | torch.device = "auto") -> None:
        self.device = devices.local_device() if device == "auto" else devices.parse("ToDevice", device, ("auto",))

    @hookimpl(updates=("model",))
    def setup_model(self, learner: Learner, model: nn.Module) -> nn.Module:
        """Move the module, and the modules of the loss, phases and plugins."""
        self.device = devices.indexed(self.device)
        if not any(p.is_meta for p in model.parameters()):  # else what shards it fills it, where it belongs
            model.to(self.device)
        for extra in learner.models.extras.modules.values():
            extra.to(self.device)
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


def _has_state_elsewhere(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a tensor of the state is not with its parameter; scalars, such as counts of steps, may be anywhere."""
    return any(
        isinstance(value, Tensor) and value.ndim > 0 and value.device != p.device
        for p, state in optimizer.state.items()
        for value in state.values()
    )
