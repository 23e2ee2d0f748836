"""raw: the bytes of a tensor, in the order of its elements."""

from __future__ import annotations

import torch
from torch import Tensor


def raw(tensor: Tensor) -> Tensor:
    """The bytes of a dense tensor, `(bytes,)`, where it is; a view of its memory if its elements lie in order there.

    Of a tensor that `contiguous()` calls contiguous, the stride may still be any number if it has one element or none;
    `view` of another dtype then raises, so the strides are written anew.
    """
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)


def raw_bytes(tensor: Tensor) -> bytes:
    """A copy of the bytes of a dense tensor, in the host's memory."""
    return bytes(raw(tensor.detach().cpu()).numpy().data)
