"""Buffers that a model's ``state_dict`` leaves out, saved beside it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


def unsaved_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that ``model.state_dict()`` leaves out."""
    saved = model.state_dict()
    return {name: buffer for name, buffer in model.named_buffers() if name not in saved}


def strange_buffers(model: nn.Module, saved: Mapping[str, Any]) -> list[str]:
    """List the saved buffers that the model has no place for; a module may make others only in its forward."""
    modules = dict(model.named_modules())
    taken = dict(model.named_parameters()) | model.state_dict()
    strange = []
    for name in saved:
        owner = name.rpartition(".")[0]
        if name in taken or not isinstance(modules.get(owner), nn.Module):
            strange.append(name)
    return strange


@torch.no_grad()
def put_buffers(model: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """Put saved buffers back; those that the model makes in its forward, or has in another shape now, are made."""
    now = unsaved_buffers(model)
    modules = dict(model.named_modules())
    device = next((tensor.device for tensor in (*model.parameters(), *model.buffers())), None)
    for name, value in saved.items():
        buffer = now.get(name)
        if buffer is not None and buffer.shape == value.shape and buffer.dtype == value.dtype:
            buffer.copy_(value)
            continue
        path, _, own = name.rpartition(".")
        place = device if buffer is None else buffer.device
        modules[path].register_buffer(own, value.to(place, copy=True), persistent=False)
