"""Batches of data that give single samples, one after the other."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.utils.data import Dataset, IterableDataset, default_collate

from loopkit.author import checks, describe
from loopkit.data import Loader, LoaderError


def batched(
    elements: Iterable[Any],
    batch_size: int,
    *,
    drop_last: bool = False,
    collate: Callable[[list[Any]], Any] = default_collate,
) -> Any:
    """Batches of a stream of single samples, such as lines of a file, rows of a table or events.

    Each batch has one more dimension than a sample, also with ``batch_size=1``: loopkit counts samples by it. The
    stream runs in this process; for workers use ``DataLoader(stream, batch_size=32)``. A resumed run reads an epoch
    again up to where it was, as of any iterable.

    Args:
        elements: Samples one by one, of an iterable that begins again for each epoch. Of a generator function, train
            on ``lambda: batched(samples(), 32)``.
        batch_size: Samples of a batch, from 1.
        drop_last: Leave out a last batch that is not full.
        collate: Makes a batch of a list of samples; by default torch's ``default_collate``.

    Returns:
        An iterable of batches, with a length if the stream has one.

    Raises:
        LoaderError: ``batch_size`` is no count, or the data are a dataset by index or a loader of batches.

    Source: ``DataLoader`` over an ``IterableDataset``, without workers.

    Example::

        >>> pairs = [(torch.ones(2) * number, number) for number in range(3)]
        >>> [(inputs.tolist(), targets.tolist()) for inputs, targets in batched(pairs, 2)]
        [([[0.0, 0.0], [1.0, 1.0]], [0, 1]), ([[2.0, 2.0]], [2])]
    """
    checks.whole("batched", batch_size=batch_size, error=LoaderError)
    if isinstance(elements, Loader):
        raise LoaderError(f"batched: {describe(elements)} gives batches already: train on it as it is")
    if isinstance(elements, Dataset) and not isinstance(elements, IterableDataset):
        raise LoaderError(
            f"batched: {describe(elements)} has samples by index: DataLoader(dataset, batch_size={batch_size}) "
            f"can shuffle them"
        )
    if not hasattr(elements, "__iter__"):
        raise LoaderError(f"batched: {describe(elements)} cannot be iterated: give samples one by one")
    return Batched(elements, batch_size, drop_last, collate)


class Batched:
    """Batches of samples that come one by one."""

    def __init__(
        self, elements: Iterable[Any], batch_size: int, drop_last: bool, collate: Callable[[list[Any]], Any]
    ) -> None:
        self.elements = elements
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.collate = collate

    @property
    def source(self) -> Any:
        """The samples, one by one."""
        return self.elements

    def __repr__(self) -> str:
        return f"batched({describe(self.elements)}, {self.batch_size})"

    def __len__(self) -> int:
        full, left = divmod(len(self.elements), self.batch_size)  # type: ignore[arg-type]  # TypeError: it is unknown
        return full + bool(left and not self.drop_last)

    def __iter__(self) -> Iterator[Any]:
        elements = iter(self.elements)
        while samples := list(itertools.islice(elements, self.batch_size)):
            if len(samples) == self.batch_size or not self.drop_last:
                yield self.collate(samples)
