"""Blocks of tokens for language models, read from a file as they are asked for."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from loopkit.author import Shares, checks
from loopkit.data import Loader, LoaderError
from loopkit.errors import EmptyDataError

MASKED = -100
"""A target that ``cross_entropy`` leaves out."""


class Tokens(Loader):
    """Batches of blocks of tokens, of a file of whole numbers one after the other, such as ``array.tofile`` writes.

    A batch is ``(inputs, targets)``, both ``(batch, block)`` of int64: targets are the tokens one later. Only blocks of
    a batch are read, so memory does not grow with the file. The place of each block follows from the seed, the epoch
    and its number, so processes share an epoch, and a run resumes in mid-epoch without drawing anything again.

    Args:
        path: The file.
        block: Tokens of an input, from 1.
        batch_size: Blocks of a batch, from 1.
        order: ``"random"``: each block begins anywhere; an epoch has as many as fit in the file. ``"sequential"``: one
            block after the other, without gaps.
        dtype: The numbers in the file.
        seed: For ``order="random"``.
        boundary: The token that ends a document. A batch is then a mapping with ``"inputs"``, ``"targets"``,
            ``"documents"`` (which document of its block a token is of, from 0) and ``"positions"`` (its place there).
            The target of the last token of a document is -100, which ``cross_entropy`` leaves out.

    Raises:
        LoaderError: An option is out of range, or the file has no whole number of tokens.
        EmptyDataError: It is shorter than a block and one token.

    Example::

        Tokens("train.bin", block=256, batch_size=32)
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        block: int,
        batch_size: int,
        order: Literal["random", "sequential"] = "random",
        dtype: str = "uint16",
        seed: int = 0,
        boundary: int | None = None,
    ) -> None:
        checks.whole("Tokens", block=block, batch_size=batch_size, error=LoaderError)
        checks.one_of("Tokens", ("random", "sequential"), order=order, error=LoaderError)
        self.path, self.block, self.batch_size, self.order = Path(path), block, batch_size, order
        self.seed, self.boundary = seed, boundary
        self._file = TokenFile("Tokens", self.path, dtype)
        self.dtype, self.tokens = self._file.dtype, self._file.tokens
        self.samples = (self.tokens - 1) // block
        if self.samples < 1:
            raise EmptyDataError(f"Tokens: {path} has {self.tokens} tokens, a block takes {block + 1}")
        super().__init__(Shares(self.samples, batch_size))

    def __repr__(self) -> str:
        own = f"block={self.block}, batch_size={self.batch_size}, order={self.order!r}, seed={self.seed}"
        return f"Tokens({str(self.path)!r}, {self.tokens:,} tokens, {own})"

    def identity(self) -> dict[str, Any]:  # noqa: D102
        shared = {"processes": self._shares.size, "tail": self._shares.tail} if self._shares.size > 1 else {}
        own = {"tokens": self.tokens, "block": self.block, "order": self.order, "seed": self.seed}
        return {**own, "batch_size": self.batch_size, **shared}

    def places(self, epoch: int, low: int, high: int) -> NDArray[np.int64]:
        """The tokens at which the blocks from ``low`` up to ``high`` of an epoch begin."""
        numbers = np.arange(low, high) % self.samples
        if self.order == "sequential":
            return numbers * self.block
        drawn: NDArray[np.uint64] = mixed(
            numbers.astype(np.uint64) + mixed(np.uint64(epoch) + mixed(np.uint64(self.seed)))
        )
        places: NDArray[np.int64] = (drawn % np.uint64(self.tokens - self.block)).astype(np.int64)
        return places

    def batches(self, epoch: int, start: int, indices: Tensor | None = None) -> Iterator[Any]:  # noqa: D102
        for step in range(self._shares.steps(start)):
            yield self._batch(self.places(epoch, *self._shares.part(self._rank, start, step)))

    def _batch(self, places: NDArray[np.int64]) -> Any:
        tokens = torch.from_numpy(self._file.read(places.tolist(), self.block + 1).reshape(len(places), -1))
        inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        return (inputs, targets) if self.boundary is None else self._packed(self.boundary, inputs, targets)

    def _packed(self, boundary: int, inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        ends = inputs.eq(boundary)
        documents = ends.cumsum(1) - ends.long()
        count = torch.arange(self.block).expand_as(inputs)
        begins = torch.where(documents.diff(dim=1, prepend=documents[:, :1]) > 0, count, 0).cummax(1).values
        masked = targets.masked_fill(ends, MASKED)
        return {"inputs": inputs, "targets": masked, "documents": documents, "positions": count - begins}


class TokenFile:
    """A file of tokens that is read in places; a copy of it in another process opens it anew.

    Args:
        what: The loader that reads it, for errors.
        path: The file.
        dtype: Of its tokens.

    Raises:
        LoaderError: Tokens of this dtype are no whole numbers, or the file has no whole number of them.
    """

    def __init__(self, what: str, path: Path, dtype: str) -> None:
        if np.dtype(dtype).kind not in "iu":
            raise LoaderError(f"{what}: dtype is {dtype!r}: tokens are whole numbers, such as 'uint16'")
        self.path, self.dtype = path, np.dtype(dtype)
        size = path.stat().st_size
        self.tokens, rest = divmod(size, self.dtype.itemsize)
        """How many there are."""
        if rest:
            raise LoaderError(f"{what}: {path} has {size} bytes, no whole number of {dtype}: give its dtype")
        self._open()

    def _open(self) -> None:
        self._file = os.open(self.path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._file)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_file"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._open()

    def read(self, places: Sequence[int], count: int) -> NDArray[np.int64]:
        """So many tokens from each place on, one place behind the other."""
        width = self.dtype.itemsize
        read = b"".join([os.pread(self._file, count * width, place * width) for place in places])
        return np.frombuffer(read, self.dtype).astype(np.int64)


def mixed(number: Any) -> Any:
    """Numbers of 64 bits that look drawn, one for each number. Source: Steele, Lea and Flood 2014, SplitMix64."""
    with np.errstate(over="ignore"):
        number = number + np.uint64(0x9E3779B97F4A7C15)
        number = (number ^ (number >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        number = (number ^ (number >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return number ^ (number >> np.uint64(31))
