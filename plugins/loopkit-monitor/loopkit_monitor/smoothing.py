"""The exponential mean of a curve, over all of its points, without a bias at its beginning."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Mean"]

PART = 16_384
"""Values that are summed up together: they fit into a processor's cache."""
NOTHING = 1e-18
"""A weight below which a value does not change a mean."""


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
            passed = np.arange(self.count + 1, self.count + len(part) + 1)
            means[begin : begin + PART] = sums / -np.expm1(passed * math.log(self.weight))
            self.sum, self.count = float(sums[-1]), self.count + len(part)
        return means

    def _sums(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """The weighted sums: of one value, of two, of four and so on, until the weights are negligible."""
        sums = (1 - self.weight) * values
        reach, weight = 1, self.weight
        while reach < len(sums) and weight > NOTHING:
            sums[reach:] += weight * sums[:-reach]
            reach *= 2
            weight *= weight
        if self.sum:
            sums += self.sum * self.weight ** np.arange(1, len(sums) + 1)
        return sums
