"""tensor_content: the content of a tensor, which can change through ``.data`` without a new version."""

from __future__ import annotations

import torch
from torch import Tensor, nn

KINDS = (Tensor, nn.Parameter, nn.Buffer)
"""Kinds of tensors whose content is read: not subclasses, whose own code would answer."""


def content_of(tensor: Tensor, most: int) -> bytes | None:
    """Return the elements of a tensor in main memory, of a large one a sample; None if they cannot be read.

    Args:
        tensor: The tensor.
        most: How many elements are read, about.
    """
    if type(tensor) not in KINDS or tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        return None
    size = tensor.numel()
    if size > most and not tensor.is_contiguous():  # a copy of all of it would be needed
        return None
    try:
        few = tensor.detach().reshape(-1)[:: max(1, size // most)]
        return few.contiguous().view(torch.uint8).numpy().tobytes()
    except (RuntimeError, NotImplementedError):  # a quantized one, or one inside a transform of torch.func
        return None
