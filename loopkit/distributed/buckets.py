"""Averages over the processes by few large collectives, and copies from rank 0."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["average", "copy_from_first"]


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


def copy_from_first(tensors: Sequence[Tensor], *, bucket_bytes: int) -> None:
    """Copy the tensors of rank 0 to all others, in place."""
    _exchange(tensors, lambda flat: dist.broadcast(flat, src=0, async_op=True), bucket_bytes, None)


def _exchange(tensors: Sequence[Tensor], send: Callable[[Tensor], Any], size: int, dtype: torch.dtype | None) -> None:
    sent = []
    with torch.no_grad():
        for bucket in _buckets(tensors, size):
            flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
            flat = flat if dtype is None else flat.to(dtype)
            sent.append((bucket, flat, send(flat)))
        for bucket, flat, work in sent:
            if work is not None:
                work.wait()
            parts = torch.split(flat, [tensor.numel() for tensor in bucket])
            for tensor, part in zip(bucket, parts, strict=True):
                tensor.copy_(part.view(tensor.shape))


def _buckets(tensors: Sequence[Tensor], size: int) -> Iterator[list[Tensor]]:
    """Tensors of one device and dtype together, in the order in which they came, up to ``size`` bytes."""
    open_buckets: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        kind = tensor.device, tensor.dtype
        bucket = open_buckets.setdefault(kind, [])
        if bucket and sum(each.nbytes for each in bucket) + tensor.nbytes > size:
            yield bucket
            bucket = open_buckets[kind] = []
        bucket.append(tensor)
    yield from (bucket for bucket in open_buckets.values() if bucket)
