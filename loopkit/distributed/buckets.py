"""Averages over the processes by few large collectives, and copies from rank 0."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from loopkit.sharded import is_sharded

BUCKET_BYTES = 25 << 20


def average(tensors: Sequence[Tensor], size: int, *, bucket_bytes: int, dtype: torch.dtype | None = None) -> None:
    """Put the mean over all processes into each tensor, in place.

    Args:
        tensors: Of the same number, shapes and dtypes in every process.
        size: How many processes there are.
        bucket_bytes: At most so much is sent at a time, but always one whole tensor.
        dtype: What is sent, such as ``torch.bfloat16``; by default what the tensors are.
    """

    def reduce(flat: Tensor) -> Any:
        return dist.all_reduce(flat.div_(size), async_op=True)

    _exchange(tensors, reduce, bucket_bytes, dtype)


def copy_state(models: Iterable[nn.Module]) -> None:
    """Copy the parameters and buffers of rank 0's models to all others', in place."""
    _copy_from_first([tensor for model in models for tensor in (*model.parameters(), *model.buffers())])


def copy_buffers(models: Iterable[nn.Module]) -> None:
    """Copy the buffers of rank 0's models to all others', in place."""
    _copy_from_first([buffer for model in models for buffer in model.buffers()])


def _copy_from_first(tensors: Sequence[Tensor]) -> None:
    whole = [tensor for tensor in tensors if not is_sharded(tensor)]
    _exchange(whole, lambda flat: dist.broadcast(flat, src=0, async_op=True), BUCKET_BYTES, None)


def _exchange(tensors: Sequence[Tensor], send: Callable[[Tensor], Any], size: int, dtype: torch.dtype | None) -> None:
    sent = []
    with torch.no_grad():
        for indices in bucketed(tensors, size):
            bucket = [tensors[index] for index in indices]
            flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
            flat = flat if dtype is None else flat.to(dtype)
            sent.append((bucket, flat, send(flat)))
        for bucket, flat, work in sent:
            if work is not None:
                work.wait()
            parts = torch.split(flat, [tensor.numel() for tensor in bucket])
            for tensor, part in zip(bucket, parts, strict=True):
                tensor.copy_(part.view(tensor.shape))


def bucketed(tensors: Sequence[Tensor], size: int) -> list[list[int]]:
    """The indices of tensors that are sent together: of one device and dtype, in their order, up to ``size`` bytes."""
    filled: list[list[int]] = []
    current: dict[Any, tuple[list[int], int]] = {}
    for index, tensor in enumerate(tensors):
        kind = tensor.device, tensor.dtype
        bucket, held = current.get(kind, ([], 0))
        if bucket and held + tensor.nbytes > size:
            bucket, held = [], 0
        if not bucket:
            filled.append(bucket)
        bucket.append(index)
        current[kind] = bucket, held + tensor.nbytes
    return filled
