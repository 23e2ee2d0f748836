"""Fewer points of a curve, that still look like it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["extremes"]


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
    if points < 5:
        raise ValueError(f"extremes: points is {points}: at least 5 are needed")
    count = len(values)
    if count <= points:
        return np.arange(count)
    undefined = np.isnan(values)
    parts = (points - 2) // (3 if undefined.any() else 2)
    size = -(-count // parts)
    parts = -(-count // size)
    padded = np.full(parts * size, np.nan)
    padded[:count] = values
    table = padded.reshape(parts, size)
    base = np.arange(parts) * size
    missing = np.isnan(table)
    lowest = base + np.where(missing, np.inf, table).argmin(axis=1)
    highest = base + np.where(missing, -np.inf, table).argmax(axis=1)
    picked = [np.array([0, count - 1]), lowest, highest]
    if undefined.any():
        first = base + missing.argmax(axis=1)
        picked.append(first[undefined[np.minimum(first, count - 1)]])
    kept = np.unique(np.concatenate(picked))
    return kept[kept < count]
