"""Averages over the processes by few large collectives, and copies from rank 0."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from loopkit.base.sharded import is_sharded

BUCKET_BYTES = 25 << 20


def average(tensors: Sequence[Tensor], size: int, *, bucket_bytes: int, dtype: torch.dtype | None = None) -> None:
    """Put the mean over all processes into each tensor, in place.

    Args:
        tensors: Of the same number, shapes and dtypes in every process.
        size: How many processes there are.
        bucket_bytes: At most so much is sent at a time, but always one whole tensor.
        dtype: The dtype on the wire, such as ``torch.bfloat16``; by default the tensors' own.
    """

    _exchange(tensors, partial(_reduce, size=size), bucket_bytes, dtype)


class Overlap:
    """`average` of gradients, sent bucket by bucket while a backward makes them; the bits are the same.

    A bucket is sent when it and those before it are complete, the last one in `finish`. So each process sends the same
    in the same order, whatever its backward does. A process that did not do what it is to do writes NaN into the last
    bucket.

    Args:
        params: Whose gradients are averaged; the order equals the tensors' of `average`.
        size, bucket_bytes, dtype: As in `average`.
    """

    def __init__(self, params: Sequence[Tensor], size: int, bucket_bytes: int, dtype: torch.dtype | None) -> None:
        self.listening = False
        """Whether the backward that comes is to send."""
        self.sends = False
        """Whether `finish`, or `cancel`, is to come."""
        self._params = params
        self._size = size
        self._dtype = dtype
        self._buckets = bucketed(params, bucket_bytes)
        self._bucket_of: dict[int, int] = {}
        for number, bucket in enumerate(self._buckets):
            self._bucket_of.update(dict.fromkeys(bucket, number))
        devices = {p.device for p in params}
        can_mark = any(params[index].numel() for index in self._buckets[-1])
        self.serves = can_mark and len(devices) == 1 and len(self._buckets) > 1
        """Whether there is something to be sent early."""
        own = weakref.ref(self)

        def made(index: int, p: Any) -> None:
            overlap = own()
            if overlap is not None and overlap.listening:
                overlap._made(index, p)

        self._hooks: list[Any] = []
        if self.serves:
            for index, p in enumerate(params):
                hook = p.register_post_accumulate_grad_hook(partial(made, index))  # type: ignore[no-untyped-call]
                self._hooks.append(hook)

    def remove(self) -> None:
        """Stop watching the parameters."""
        for hook in self._hooks:
            hook.remove()

    def begin(self, listen: bool) -> None:
        """A step begins whose gradients make an update."""
        self.listening = listen
        self.sends = True
        self._odd = ""
        self._grads: list[tuple[int, int] | None] = [None] * len(self._params)
        self._left = [len(bucket) for bucket in self._buckets]
        self._sent: list[tuple[Tensor, Any]] = []

    def _made(self, index: int, p: Tensor) -> None:
        if self._grads[index] is not None or p.grad is None:
            self._odd = "made a second backward"
            return
        self._grads[index] = id(p.grad), p.grad._version
        self._left[self._bucket_of[index]] -= 1
        while len(self._sent) < len(self._buckets) - 1 and not self._left[len(self._sent)]:
            self._send()

    def _send(self, mark: bool = False) -> None:
        tensors = [self._params[index] for index in self._buckets[len(self._sent)]]
        with torch.no_grad():
            flat = _flat([torch.zeros_like(p) if p.grad is None else p.grad for p in tensors], self._dtype)
            if mark:
                flat[0] = torch.nan
            self._sent.append((flat, _reduce(flat, self._size)))

    def complete(self) -> None:
        """A backward is over: send what it left, but for the last bucket."""
        if self.listening and None in self._grads:
            self._odd = "left parameters without a gradient"
        while self.listening and len(self._sent) < len(self._buckets) - 1:
            self._send()

    def finish(self, grads: Sequence[Tensor]) -> tuple[str, bool | None]:
        """Average the gradients, in place; where something is odd they stay as they are.

        Returns:
            What is odd in this process, in words; and whether it is in any, None where that is not read.
        """
        if [id(grad) for grad in grads] != [id(p.grad) for p in self._params]:
            self._odd = self._odd or "had gradients of other parameters"
        elif self.listening and self._grads != [(id(grad), grad._version) for grad in grads]:
            self._odd = self._odd or "changed its gradients after the backward"
        self.listening = self.sends = False
        while len(self._sent) < len(self._buckets):
            self._send(mark=bool(self._odd) and len(self._sent) == len(self._buckets) - 1)
        for _, work in self._sent:
            work.wait()
        last = self._sent[-1][0]
        return self._odd, bool(last[0].isnan()) if last.device.type == "cpu" else None

    def take(self) -> None:
        """Put the averages into the gradients."""
        for bucket, (flat, _) in zip(self._buckets, self._sent, strict=True):
            _put(flat, [g for index in bucket if (g := self._params[index].grad) is not None])

    def cancel(self) -> None:
        """There is no update after all: send what the others may have sent."""
        if self.sends:
            self.finish(())


def copy_state(models: Iterable[nn.Module]) -> None:
    """Copy the parameters and buffers of rank 0's models to all others', in place."""
    tensors: list[Tensor] = []
    for model in models:
        tensors += model.parameters()
        tensors += model.buffers()
    _copy_from_first(tensors)


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
            flat = _flat(bucket, dtype)
            sent.append((bucket, flat, send(flat)))
        for bucket, flat, work in sent:
            if work is not None:
                work.wait()
            _put(flat, bucket)


def _flat(tensors: Sequence[Tensor], dtype: torch.dtype | None) -> Tensor:
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    return flat if dtype is None else flat.to(dtype)


def _put(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    for tensor, part in zip(tensors, torch.split(flat, [tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(part.view(tensor.shape))


def _reduce(flat: Tensor, size: int) -> Any:
    return dist.all_reduce(flat.div_(size), async_op=True)


def bucketed(tensors: Sequence[Tensor], size: int) -> list[list[int]]:
    """The indices of tensors that are sent together: of one device and dtype, in their order, up to ``size`` bytes."""
    filled: list[list[int]] = []
    current: dict[Any, tuple[list[int], int]] = {}
    for index, tensor in enumerate(tensors):
        kind = tensor.device, tensor.dtype
        bucket, held = current.get(kind, ([], 0))
        if bucket and held + tensor.nbytes > size:
            bucket = []
            held = 0
        if not bucket:
            filled.append(bucket)
        bucket.append(index)
        current[kind] = bucket, held + tensor.nbytes
    return filled
