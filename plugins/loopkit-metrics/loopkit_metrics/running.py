"""Numbers of a running epoch: a mean that forgets, and how fast it is."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from loopkit.author import added, as_tensor, count_samples, wide
from loopkit.metrics import Mean, Metric


class ExponentialMean(Mean):
    """Mean of a number that the phase puts on its steps, in which each step counts ``beta`` times the one after it.

    It is weighted by ``step.weight`` too, so with several processes it is the mean of the whole batches. The first
    steps are not drawn to 0.

    Args:
        attribute: The step's attribute, such as ``"loss"``.
        beta: From 0 up to, but not, 1; at 0.98 the last 50 steps make 64 % of the mean.
        name: The default is ``"smooth_<attribute>"``.

    Source: ``pandas.Series.ewm(alpha=1 - beta, adjust=True).mean()``, for steps of equal weight.
    """

    def __init__(self, attribute: str = "loss", beta: float = 0.98, name: str | None = None) -> None:
        if not 0 <= beta < 1:
            raise ValueError(f"ExponentialMean: beta is {beta!r}: it is from 0 up to, but not, 1")
        super().__init__(attribute)
        self.beta = beta
        self.name = name or f"smooth_{attribute}"

    def reset(self) -> None:  # noqa: D102
        self.total: Tensor | None = None
        self.weight: Tensor | float = 0.0

    def add(self, value: Tensor | float, weight: Tensor | float) -> None:
        """Add one value."""
        one = Mean(self.attribute)
        one.sums = self.sums
        one.add(value, weight)
        total = as_tensor(one.total, torch.float64, "cpu")
        self.total = total if self.total is None else self.total * self.beta + total
        self.weight = self.weight * self.beta + one.weight

    def state_dict(self) -> dict[str, Any]:  # noqa: D102
        return Metric.state_dict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: D102
        Metric.load_state_dict(self, state)

    def merge(self, states: Sequence[dict[str, Any]]) -> None:  # noqa: D102
        self.load_state_dict(added(states))

    def compute(self) -> Tensor | float:  # noqa: D102
        return math.nan if self.total is None else wide(self.total) / self.weight


class SamplesPerSecond(Metric):
    """Samples of the epoch, of all processes, by the seconds since it began.

    The time of a resumed epoch is the sum of its parts. It goes by the clock: no two runs have the same.
    """

    name = "samples_per_second"
    higher_is_better = True

    def reset(self) -> None:  # noqa: D102
        self.samples = 0
        self._since = time.monotonic()

    def update(self, outputs: Any, targets: Any) -> None:
        """Count one batch."""
        self.samples += count_samples(outputs) or 0

    @property
    def is_empty(self) -> bool:  # noqa: D102
        return not self.samples

    def compute(self) -> float:  # noqa: D102
        return self.samples / max(time.monotonic() - self._since, 1e-9)

    def state_dict(self) -> dict[str, Any]:  # noqa: D102
        return {"samples": self.samples, "seconds": time.monotonic() - self._since}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: D102
        self.samples, self._since = state["samples"], time.monotonic() - state["seconds"]

    def merge(self, states: Sequence[dict[str, Any]]) -> None:  # noqa: D102
        seconds = max(state["seconds"] for state in states)
        self.load_state_dict({"samples": sum(state["samples"] for state in states), "seconds": seconds})
