"""Fewer points of a curve, that still look like it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

__all__ = ["extremes", "extremes_of"]

AT_ONCE = 32_768
"""Values that are looked at together: they fit into a processor's cache."""


def extremes(values: NDArray[np.float64], points: int) -> NDArray[np.int64]:
    """The indices of points to draw: the first, the last, and the lowest and highest of each of many equal parts.

    What is undefined is neither low nor high; the first of it in each part is kept as well, so that it shows.

    Args:
        values: ``(n,)``, in the order of the steps.
        points: The most indices to return; at least 5.

    Returns:
        Indices, rising; all of them if there are no more than ``points``.

    Example::

        >>> extremes(np.array([0.0, 5.0, 0.0, 0.0, -3.0, 0.0, 0.0]), 5).tolist()
        [0, 1, 4, 6]
    """
    return extremes_of([values], len(values), points, undefined=bool(np.isnan(values).any()))[0]


def extremes_of(
    blocks: Iterable[NDArray[np.float64]], count: int, points: int, *, undefined: bool
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The same for a curve that comes in blocks, of which only one is in memory at a time.

    Args:
        blocks: The values, in their order.
        count: How many there are in all.
        points: As for `extremes`.
        undefined: Whether any of them is undefined.

    Returns:
        The indices, and the values there.
    """
    if points < 5:
        raise ValueError(f"extremes: points is {points}: at least 5 are needed")
    if count <= points:
        return np.arange(count), np.concatenate([np.empty(0), *blocks])
    size = -(-count // ((points - 2) // (3 if undefined else 2)))
    indices, values = [], []
    begin = 0
    for block in _of_whole_parts(blocks, size):
        ends = [0] * (begin == 0) + [len(block) - 1] * (begin + len(block) == count)
        picked = np.unique(np.concatenate([*_picked(block, size, undefined), np.array(ends, np.int64)]))
        picked = picked[picked < len(block)]
        indices.append(begin + picked)
        values.append(block[picked])
        begin += len(block)
    return np.concatenate(indices), np.concatenate(values)


def _of_whole_parts(blocks: Iterable[NDArray[np.float64]], size: int) -> Iterator[NDArray[np.float64]]:
    """The values in blocks of whole parts; only the last one may end in the midst of a part."""
    held: list[NDArray[np.float64]] = []
    length = 0
    for block in blocks:
        held.append(block)
        length += len(block)
        if length >= max(size, AT_ONCE):
            joined = np.concatenate(held)
            whole = length - length % size
            yield joined[:whole]
            held, length = [joined[whole:]], length - whole
    if length:
        yield np.concatenate(held)


def _picked(values: NDArray[np.float64], size: int, undefined: bool) -> list[NDArray[np.int64]]:
    """The indices of the lowest, the highest and the first undefined value of each part."""
    parts = -(-len(values) // size)
    table = np.full((parts, size), np.nan)
    table.reshape(-1)[: len(values)] = values
    missing = np.isnan(table)
    base = np.arange(parts) * size
    table[missing] = np.inf
    picked = [base + table.argmin(axis=1)]
    table[missing] = -np.inf
    picked.append(base + table.argmax(axis=1))
    if undefined:
        first = base + missing.argmax(axis=1)
        picked.append(first[np.isnan(values[np.minimum(first, len(values) - 1)])])
    return picked
