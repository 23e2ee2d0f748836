"""The exponential mean of a curve, over all of its points, without a bias at its beginning."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from loopkit_monitor.series import BLOCK, Series

__all__ = ["Mean", "Means"]

PART = 16_384
"""Values that are summed up together: they fit into a processor's cache."""
NOTHING = 1e-18
"""A weight below which a value does not change a mean."""
MOST_WEIGHTS = 16
"""Weights of which the sums of a curve are kept."""


@dataclass
class Mean:
    """An exponential mean that goes through a curve once, in as many parts as it comes in.

    ``mean = weight * mean + (1 - weight) * value``, divided by ``1 - weight ** count``. A value that is infinite or
    undefined stays as it is, and does not count.

    Args:
        weight: Of the past, from 0 to below 1.

    Example::

        >>> Mean(0.5).of(np.array([1.0, 2.0, np.nan, 2.0])).round(3).tolist()
        [1.0, 1.667, nan, 1.857]
    """

    weight: float
    sum: float = 0.0
    """The mean so far, before it is divided."""
    count: int = 0
    """The values that it has seen."""

    def __post_init__(self) -> None:
        if not 0 <= self.weight < 1:
            raise ValueError(f"Mean: weight is {self.weight}: it is from 0 to below 1")

    def of(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """The means at the next values, ``(n,)``."""
        finite = np.isfinite(values)
        if finite.all():
            return self._of_finite(values)
        means = values.copy()
        means[finite] = self._of_finite(values[finite])
        return means

    def _of_finite(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        if self.weight == 0:
            return values.copy()
        means = np.empty(len(values))
        for begin in range(0, len(values), PART):
            part = values[begin : begin + PART]
            sums = self._sums(part)
            self._correct(sums, means[begin : begin + PART])
            self.sum, self.count = float(sums[-1]), self.count + len(part)
        return means

    def _correct(self, sums: NDArray[np.float64], means: NDArray[np.float64]) -> None:
        """Divide the sums by the weight of the values so far, as far as that is below 1."""
        means[:] = sums
        first = max(min(self._reach() - self.count, len(sums)), 0)
        passed = np.arange(self.count + 1, self.count + first + 1)
        means[:first] /= -np.expm1(passed * math.log(self.weight))

    def _reach(self) -> int:
        """Return after how many values a value no longer changes the mean."""
        return math.ceil(math.log(NOTHING) / math.log(self.weight))

    def _sums(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """The weighted sums: of one value, of two, of four and so on, until the weights are negligible."""
        sums = (1 - self.weight) * values
        reach, weight = 1, self.weight
        while reach < len(sums) and weight > NOTHING:
            sums[reach:] += weight * sums[:-reach]
            reach *= 2
            weight *= weight
        if self.sum:
            near = min(self._reach(), len(sums))
            sums[:near] += self.sum * self.weight ** np.arange(1, near + 1)
        return sums


@dataclass
class Sums:
    """The sums of a mean of one curve."""

    before: list[Mean]
    """The mean before each block, as far as it was made."""
    last: Mean | None = None
    """The mean after the last point."""
    length: int = 0
    """How many points the curve had then."""


class Means:
    """The means of curves, with the sums before each block: a zoom begins there, and not at the first point."""

    def __init__(self) -> None:
        self._known: WeakKeyDictionary[Series, tuple[int, dict[float, Sums]]] = WeakKeyDictionary()

    def blocks(self, series: Series, weight: float, begin: int, end: int) -> Iterator[NDArray[np.float64]]:
        """The means at the points between two indices, a block at a time."""
        known, length = self._sums(series, weight), len(series)
        at = min(begin // BLOCK, len(known.before) - 1)
        for values in series.blocks(at * BLOCK):
            place = at * BLOCK
            if place >= end:
                return
            mean = Mean(weight, known.before[at].sum, known.before[at].count)
            means = mean.of(values)
            at += 1
            if at == len(known.before) and len(values) == BLOCK:
                known.before.append(mean)
            if place + len(values) == length:
                known.last, known.length = mean, length
            if (inside := means[max(begin - place, 0) : end - place]).size:
                yield inside

    def last(self, series: Series, weight: float) -> Mean:
        """The sums that continue the mean after the last point."""
        known, length = self._sums(series, weight), len(series)
        if known.last is None or known.length != length:
            for _ in self.blocks(series, weight, length - 1, length):
                pass
        return known.last or Mean(weight)

    def _sums(self, series: Series, weight: float) -> Sums:
        """The sums of a weight."""
        version, weights = self._known.get(series, (series.version, {}))
        if version != series.version:
            weights = {}
        self._known[series] = series.version, weights
        if weight not in weights:
            while len(weights) >= MOST_WEIGHTS:
                del weights[next(iter(weights))]
            weights[weight] = Sums([Mean(weight)])
        return weights[weight]
