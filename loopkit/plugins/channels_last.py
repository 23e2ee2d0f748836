"""Images in the memory layout in which convolutions on tensor cores are fastest."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from loopkit.base.batches import map_tensors
from loopkit.base.options import Shown
from loopkit.hooks import hookimpl

if TYPE_CHECKING:
    from loopkit.learner import Learner


class ChannelsLast(Shown):
    """Keep the models and the images of every batch in ``torch.channels_last``.

    Values and shapes are the same, ``(batch, channels, height, width)``; only the order in memory is another. It is
    the floating tensors with 4 dimensions that are changed, inside nested tuples, lists, mappings and dataclasses too.
    A batch that comes in this layout is not copied. Rounding may differ, since other kernels run.
    """

    name = "channels_last"
    provides = "memory_format"
    before = ("freeze", "compile", "sync")
    after = ("device",)

    def leave(self, learner: Learner) -> None:
        """Put the models back into the layout of torch."""
        for model in learner.models.values():
            model.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]

    @hookimpl(updates=("model",))
    def setup_model(self, model: nn.Module) -> nn.Module:
        """Change the module's parameters and buffers."""
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return model

    @hookimpl(updates=("batch",))
    def move_batch(self, batch: Any) -> Any:
        """Change the batch's images."""
        return map_tensors(batch, _channels_last)


def _channels_last(tensor: Tensor) -> Tensor:
    if tensor.ndim == 4 and tensor.is_floating_point():
        return tensor.contiguous(memory_format=torch.channels_last)
    return tensor
