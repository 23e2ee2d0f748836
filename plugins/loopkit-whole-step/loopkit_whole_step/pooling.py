"""Max pooling of few channels on the CPU: vectors are filled along the batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

aten = torch.ops.aten
LEAST = 8
"""Samples in a batch from which on it pays."""
_library: Any = torch.library.Library("loopkit_whole_step", "DEF")  # type: ignore[no-untyped-call]
_SIZES = "int[2] kernel_size, int[2] stride=[], int[2] padding=0, int[2] dilation=1, bool ceil_mode=False"


def _turned(images: Tensor) -> Tensor:
    """The images with batch and channels exchanged, and the batch innermost in memory."""
    return images.transpose(0, 1).contiguous(memory_format=torch.channels_last)


def max_pool2d(
    images: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0, 0),
    dilation: Sequence[int] = (1, 1),
    ceil_mode: bool = False,
) -> tuple[Tensor, Tensor]:
    """As ``aten.max_pool2d_with_indices``."""
    found = aten.max_pool2d_with_indices(_turned(images), kernel_size, stride, padding, dilation, ceil_mode)
    return found[0].transpose(0, 1).contiguous(), found[1].transpose(0, 1)


def max_pool2d_backward(
    grad: Tensor,
    images: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
    indices: Tensor,
) -> Tensor:
    """As ``aten.max_pool2d_with_indices_backward``, with the indices of `max_pool2d`."""
    like = torch.empty_like(images.transpose(0, 1), memory_format=torch.channels_last)  # only its layout is read
    sizes = kernel_size, stride, padding, dilation, ceil_mode
    made: Tensor = aten.max_pool2d_with_indices_backward(_turned(grad), like, *sizes, indices.transpose(0, 1))
    return made.transpose(0, 1).contiguous()


def _register(function: Callable[..., Any], arguments: str, returns: str) -> Any:
    name = function.__name__
    _library.define(f"{name}({arguments}) -> {returns}")
    _library.impl(name, function, "CPU")
    torch.library.register_fake(f"{_library.ns}::{name}", function, lib=_library)
    return getattr(getattr(torch.ops, _library.ns), name).default


TURNED = {
    aten.max_pool2d_with_indices.default: _register(max_pool2d, f"Tensor images, {_SIZES}", "(Tensor, Tensor)"),
    aten.max_pool2d_with_indices_backward.default: _register(
        max_pool2d_backward,
        "Tensor grad, Tensor images, int[2] kernel_size, int[2] stride, int[2] padding, int[2] dilation, "
        "bool ceil_mode, Tensor indices",
        "Tensor",
    ),
}


def pool_along_batch(graph: fx.Graph) -> None:
    """Let poolings of large enough batches of images on the CPU go by these functions."""
    for node in graph.nodes:
        if node.op == "call_function" and node.target in TURNED:
            value = node.args[0].meta["val"]
            if value.device.type == "cpu" and value.ndim == 4 and value.shape[0] >= LEAST:
                node.target = TURNED[node.target]
