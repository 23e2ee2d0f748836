"""raw: the contents of a tensor: its bytes, in the order of its elements, and its data without a subclass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


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


def plain(value: Any) -> Any:
    """A tensor as one of torch's own class, with the same memory; any other value as it is.

    So is a tensor whose class handles operations itself, such as a distributed one: its data may be elsewhere.
    """
    kind = type(value)
    if kind is Tensor or not isinstance(value, Tensor) or isinstance(value, nn.Parameter):
        return value
    own = kind.__torch_dispatch__ is not Tensor.__torch_dispatch__
    return value if own else value.as_subclass(Tensor)
