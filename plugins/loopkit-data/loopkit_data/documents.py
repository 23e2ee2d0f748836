"""Batches of whole documents of alike lengths, for language models."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from loopkit.author import Shares, checks
from loopkit.data import Loader, LoaderError
from loopkit.errors import EmptyDataError
from loopkit_data.tokens import MASKED, TokenFile, mixed

CHUNK = 1 << 22
"""Tokens that are looked at in one go, for the ends of documents."""


class Documents(Loader):
    """Batches of whole documents, each of documents of alike lengths, so that little of a batch is padding.

    A batch is a mapping: ``"inputs"`` and ``"targets"``, both ``(batch, longest of the batch)`` of int64, and
    ``"lengths"`` ``(batch,)``. Targets are the tokens one later; where a document has ended, inputs are ``padding``
    and targets -100, which ``cross_entropy`` leaves out. The order of an epoch follows from the seed and its number, so
    processes share an epoch, and a run resumes in mid-epoch without drawing anything again.

    Args:
        documents: Documents by index, each a sequence of tokens; or a file of tokens, as `Tokens` takes it, with
            ``boundary``. Of a file, 16 bytes are kept of each document, and a batch reads its own.
        batch_size: Documents of a batch, from 1.
        boundary: For a file: the token that ends a document, which is a part of it.
        dtype: For a file: the numbers in it.
        longest: Tokens of an input at most; the rest of a longer document is left out.
        window: Documents of the shuffled order that are sorted by length together.
        group: Documents that then stay together, while groups are shuffled: a multiple of the batch size of all
            processes together, so that the documents of one step are alike.
        shuffle: False: the order of the documents, each window sorted.
        padding: The token that fills inputs up.
        seed: For the order.

    Documents of fewer than two tokens, which have no target, are left out.

    Raises:
        LoaderError: An option is out of range, or the file has no whole number of tokens.
        EmptyDataError: There is no document of two tokens.

    Example::

        >>> batches = Documents([[1, 2, 3], [4, 5], [6, 7, 8, 9], [1, 2]], batch_size=2, shuffle=False)
        >>> [batch["inputs"].tolist() for batch in batches]
        [[[4], [1]], [[1, 2, 0], [6, 7, 8]]]
    """

    def __init__(
        self,
        documents: Sequence[Any] | str | os.PathLike[str],
        *,
        batch_size: int,
        boundary: int | None = None,
        dtype: str = "uint16",
        longest: int | None = None,
        window: int = 8192,
        group: int = 256,
        shuffle: bool = True,
        padding: int = 0,
        seed: int = 0,
    ) -> None:
        checks.whole("Documents", batch_size=batch_size, window=window, group=group, error=LoaderError)
        if longest is not None:
            checks.whole("Documents", longest=longest, error=LoaderError)
        self.batch_size, self.longest, self.window, self.group = batch_size, longest, window, group
        self.shuffle, self.padding, self.seed = shuffle, padding, seed
        is_file = isinstance(documents, (str, os.PathLike))
        if is_file is (boundary is None):
            fix = "give boundary=, the token that ends a document" if is_file else "boundary is for a file of tokens"
            raise LoaderError(f"Documents: boundary is {boundary!r}, and documents {type(documents).__name__}: {fix}")
        self._documents: Any = documents
        if isinstance(documents, (str, os.PathLike)) and boundary is not None:
            self._documents = _File(Path(documents), dtype, boundary)
        lengths = self._documents.lengths if is_file else np.asarray([len(each) for each in self._documents])
        self._numbers = np.flatnonzero(lengths > 1)
        self._lengths = lengths[self._numbers] if longest is None else lengths[self._numbers].clip(max=longest + 1)
        self.samples = len(self._numbers)
        if not self.samples:
            raise EmptyDataError(f"Documents: none of {len(lengths)} documents has two tokens, one to predict")
        self._made: tuple[int, NDArray[np.int64]] | None = None
        """The last epoch that was put into order, and its order."""
        super().__init__(Shares(self.samples, batch_size))

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_made": None}

    def __repr__(self) -> str:
        own = f"batch_size={self.batch_size}, shuffle={self.shuffle}, seed={self.seed}"
        return f"Documents({self.shares.samples:,} documents, {own})"

    def identity(self) -> dict[str, Any]:  # noqa: D102
        shared = {"processes": self._shares.size, "tail": self._shares.tail} if self._shares.size > 1 else {}
        own = {"samples": self.samples, "tokens": int(self._lengths.sum()), "window": self.window, "group": self.group}
        return {**own, "shuffle": self.shuffle, "seed": self.seed, "batch_size": self.batch_size, **shared}

    def order(self, epoch: int) -> NDArray[np.int64]:
        """The documents of an epoch, in the order in which they come, counted without the documents left out."""
        if self._made is None or self._made[0] != epoch:
            key = mixed(np.uint64(epoch) + mixed(np.uint64(self.seed)))
            order = _shuffled(self.samples, key) if self.shuffle else np.arange(self.samples)
            windows = np.arange(self.samples) // self.window
            order = order[np.lexsort((self._lengths[order], windows))]
            if self.shuffle:
                groups = [order[low : low + self.group] for low in range(0, self.samples, self.group)]
                order = np.concatenate([groups[each] for each in _shuffled(len(groups), mixed(key))])
            self._made = epoch, order
        return self._made[1]

    def batches(self, epoch: int, start: int, indices: Tensor | None = None) -> Iterator[Any]:  # noqa: D102
        order = self.order(epoch)
        for step in range(self._shares.steps(start)):
            low, high = self._shares.part(self._rank, start, step)
            yield self._batch(order[np.arange(low, high) % self.samples])

    def _batch(self, chosen: NDArray[np.int64]) -> dict[str, Tensor]:
        lengths = torch.from_numpy(self._lengths[chosen]) - 1
        shape = len(chosen), int(lengths.max())
        inputs, targets = torch.full(shape, self.padding), torch.full(shape, MASKED)
        for row, number in enumerate(chosen.tolist()):
            length = int(lengths[row])
            document = torch.as_tensor(self._documents[int(self._numbers[number])])[: length + 1]
            if document.is_floating_point() or document.shape != (length + 1,):
                raise LoaderError(
                    f"Documents: document {self._numbers[number]} is {document.dtype} of shape "
                    f"{tuple(document.shape)}: give {length + 1} whole numbers, one more than its len()"
                )
            inputs[row, :length], targets[row, :length] = document[:-1], document[1:]
        return {"inputs": inputs, "targets": targets, "lengths": lengths}


class _File:
    """The documents of a file of tokens, read one by one."""

    def __init__(self, path: Path, dtype: str, boundary: int) -> None:
        self._tokens = TokenFile("Documents", path, dtype)
        tokens, ends = self._tokens.tokens, [np.zeros(1, np.int64)]
        for low in range(0, tokens, CHUNK):
            chunk = self._tokens.read([low], min(CHUNK, tokens - low))
            ends.append(np.flatnonzero(chunk == boundary) + low + 1)
        if ends[-1].size == 0 or ends[-1][-1] != tokens:
            ends.append(np.array([tokens]))  # the last document may lack its end
        places = np.unique(np.concatenate(ends))
        self.begins, self.lengths = places[:-1], np.diff(places)

    def __getitem__(self, number: int) -> NDArray[np.int64]:
        return self._tokens.read([int(self.begins[number])], int(self.lengths[number]))


def _shuffled(count: int, key: Any) -> NDArray[np.int64]:
    """The numbers below a count in an order that looks drawn."""
    return np.argsort(mixed(np.arange(count).astype(np.uint64) + key), kind="stable")
