"""Prefetch: the next batches are made, and copied to a device, by a thread beside the training."""

from __future__ import annotations

import copy
import itertools
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from loopkit.base import devices
from loopkit.base.batches import describe, leaves, map_tensors, move
from loopkit.base.notes import warn
from loopkit.data.loader import Loader
from loopkit.data.place import LoaderError, Tail
from loopkit.data.tensor_loader import TensorLoader


class Prefetch(Loader):
    """A loader of the same batches on a device, each of which is copied while the one before it is used.

    A thread makes the next batch and pins it, and a side stream copies it. Where both take less time than a step, no
    step waits for data. On the CPU, MPS and XPU only the thread works ahead.

    The state is the loader's own: it counts the yielded batches, not the batches made ahead.

    Args:
        loader: A loader of this module. If its first batch of an epoch draws from torch's global generator, which the
            loop draws from too, all are made in the main thread, when they are asked for. ``map(fn, seed)`` and
            `from_function` have their own generators.
        device: As for `loopkit.plugins.ToDevice`, which is then idle.
        resident: Keep the tensors of a `TensorLoader` on the device if they take at most half of the memory that is
            free there when the first epoch begins. Where that fails, batches are copied one by one.

    Raises:
        LoaderError: ``loader`` is none of this module. For a ``DataLoader``, ``pin_memory=True`` and workers do it.

    Example::

        >>> loader = Prefetch(TensorLoader(torch.arange(4), batch_size=2), "cpu")
        >>> [batch.tolist() for batch in loader]
        [[0, 1], [2, 3]]
    """

    hands_on = True

    def __init__(self, loader: Loader, device: torch.device | str = "auto", *, resident: bool = True) -> None:
        if not isinstance(loader, Loader):
            raise LoaderError(
                f"Prefetch was given {describe(loader)}: it takes a loader of loopkit.data, such as TensorLoader. A "
                f"DataLoader works ahead by itself: DataLoader(..., num_workers=2, pin_memory=True)"
            )
        super().__init__(loader)
        own = device == "auto"
        place = devices.local_device() if own else devices.parse("Prefetch", device, ("auto",), error=LoaderError)
        self.device = place if own else devices.indexed(place)
        self.resident = bool(resident)
        self._kept: Loader | None = None
        """The loader with its tensors on the device."""
        self._tried = False
        self._said = False

    def __repr__(self) -> str:
        return f"Prefetch({self.source!r}, {str(self.device)!r})"

    def _share(self, rank: int, size: int, tail: Tail, least: int) -> None:
        super()._share(rank, size, tail, least)
        self._kept = None
        self._tried = False

    def batches(self, epoch: int, start: int, indices: Tensor | None = None) -> Iterator[Any]:  # noqa: D102
        if self.resident and not self._tried:
            self._kept = self._on_device()
            self._tried = True
        if self._kept is not None:
            steps = 0
            try:
                for steps, batch in enumerate(self._kept.batches(epoch, start, indices), 1):  # noqa: B007
                    yield batch
                return
            except torch.OutOfMemoryError:
                self._kept, start = None, self._shares.used(start, steps)
        batches = self.source.batches(epoch, start, indices)
        before = torch.default_generator.get_state()
        first = list(itertools.islice(batches, 1))
        batches = itertools.chain(first, batches)
        if torch.equal(torch.default_generator.get_state(), before):
            yield from _ahead(batches, self.device)
            return
        if not self._said:
            self._said = True
            warn(
                "Prefetch: the loader draws from torch's global generator, which the loop draws from too, so its "
                "batches are not made ahead. Give map(fn, seed=...) a function that takes a generator"
            )
        for batch in batches:
            yield move(batch, self.device)

    def _on_device(self) -> Loader | None:
        source = self.source
        if type(source) is not TensorLoader or not devices.reads_late(self.device):
            return None
        kept = copy.copy(source)
        try:
            if not devices.fits(sum(tensor.nbytes for tensor in source.tensors), self.device):
                return None
            kept._tensors = [tensor.to(self.device) for tensor in source.tensors]
        except torch.OutOfMemoryError:
            return None
        return kept


def _ahead(batches: Iterator[Any], device: torch.device) -> Iterator[Any]:
    """The batches on a device: while one is used, a stream copies the next one, and a thread makes two more."""
    lane = devices.Lane(device) if devices.reads_late(device) else None

    def take() -> Any:
        batch = next(batches, _END)
        return batch if lane is None or batch is _END else map_tensors(batch, devices.pinned)

    def send(batch: Any) -> tuple[Any, Any]:
        if lane is None:
            return move(batch, device), None
        with lane.stream:
            return move(batch, device), lane.mark()

    with ThreadPoolExecutor(1, "loopkit-prefetch") as thread:
        coming = deque([thread.submit(take), thread.submit(take)])
        sent: tuple[Any, Any] | None = None
        while True:
            following = None
            if sent is None or (coming[0].done() and coming[0].exception() is None):  # else what is there comes first
                batch = coming.popleft().result()
                if batch is _END and sent is None:
                    return
                coming.append(thread.submit(take))
                following = None if batch is _END else send(batch)
            if sent is not None:
                if lane is not None:
                    lane.receive(sent[1], [leaf for leaf in leaves(sent[0]) if isinstance(leaf, Tensor)])
                yield sent[0]
            sent = following


_END = object()
