"""How far numbers are from numbers: sums over an epoch, in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from loopkit.author import added, describe, wide
from loopkit.metrics import Metric


def paired(outputs: Tensor, targets: Tensor) -> Tensor:
    """The outputs in the shape of the targets.

    Raises:
        ValueError: They differ in more than axes of length 1, so that one would be repeated along the other.
    """
    if [n for n in outputs.shape if n != 1] != [n for n in targets.shape if n != 1]:
        raise ValueError(f"outputs are {describe(outputs)}, targets {describe(targets)}: give them the same shape")
    return outputs.reshape(targets.shape)


class MSE(Metric):
    """Mean squared error over all elements.

    Shapes: outputs and targets of the same shape, but for axes of length 1.

    Source: ``sklearn.metrics.mean_squared_error``.
    """

    name = "mse"
    higher_is_better = False

    def reset(self) -> None:  # noqa: D102
        self.total: Tensor | None = None
        self.count = 0

    def error(self, difference: Tensor) -> Tensor:
        """The error of each element."""
        return difference * difference

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Add one batch."""
        error = self.error(wide(paired(outputs, targets)) - wide(targets)).sum()
        self.total = error if self.total is None else self.total + error
        self.count += targets.numel()

    def merge(self, states: Sequence[dict[str, Any]]) -> None:  # noqa: D102
        self.load_state_dict(added(states))

    @property
    def is_empty(self) -> bool:  # noqa: D102
        return self.total is None

    def compute(self) -> Tensor | float:  # noqa: D102
        return math.nan if self.total is None else self.total / self.count


class MAE(MSE):
    """Mean absolute error over all elements. Source: ``sklearn.metrics.mean_absolute_error``."""

    name = "mae"

    def error(self, difference: Tensor) -> Tensor:  # noqa: D102
        return difference.abs()


class RMSE(MSE):
    """Root of the mean squared error over all elements, of one column ``sklearn.metrics.root_mean_squared_error``."""

    name = "rmse"

    def compute(self) -> Tensor | float:  # noqa: D102
        value = super().compute()
        return value.sqrt() if isinstance(value, Tensor) else value


class R2(Metric):
    """Share of the targets' variance that the outputs explain; the mean of the columns' shares.

    It is nan where the targets of a column are all the same.

    Shapes: outputs and targets ``(samples)`` or ``(samples, columns)``.

    Source: ``sklearn.metrics.r2_score``. The variance of batches is put together by Chan, Golub and LeVeque's formula,
    which keeps its digits where the mean is large.
    """

    name = "r2"
    higher_is_better = True

    def reset(self) -> None:  # noqa: D102
        self.count = 0
        self.mean: Tensor | None = None
        self.spread: Tensor | None = None
        """Sum of squares of the targets' differences from their mean, for each column."""
        self.error: Tensor | None = None

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Add one batch."""
        given = wide(targets).reshape(len(targets), -1)
        error = (wide(paired(outputs, targets)).reshape(given.shape) - given).square().sum(0)
        mean = given.mean(0)
        self._add(len(given), mean, (given - mean).square().sum(0), error)

    def _add(self, count: int, mean: Tensor, spread: Tensor, error: Tensor) -> None:
        if self.mean is None or self.spread is None or self.error is None:
            self.count, self.mean, self.spread, self.error = count, mean, spread, error
            return
        total, apart = self.count + count, mean - self.mean
        self.spread = self.spread + spread + apart.square() * (self.count * count / total)
        self.mean = self.mean + apart * (count / total)
        self.error = self.error + error
        self.count = total

    def merge(self, states: Sequence[dict[str, Any]]) -> None:  # noqa: D102
        self.reset()
        for state in states:
            if state["count"]:
                self._add(state["count"], state["mean"], state["spread"], state["error"])

    @property
    def is_empty(self) -> bool:  # noqa: D102
        return self.mean is None

    def compute(self) -> Tensor | float:  # noqa: D102
        if self.spread is None or self.error is None:
            return math.nan
        return (1 - self.error / self.spread.where(self.spread > 0, math.nan)).mean()
