"""Metrics that keep all values of an epoch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from loopkit.author import wide
from loopkit.metrics import Metric


class Kept(Metric):
    """Base of metrics that need all values at once. They stay on their device."""

    def reset(self) -> None:  # noqa: D102
        self.kept: list[tuple[Tensor, ...]] = []

    def keep(self, *values: Tensor) -> None:
        """Keep one batch: tensors ``(samples, ...)``, the same number of them each time."""
        self.kept.append(tuple(value.detach().clone() for value in values))

    def columns(self) -> tuple[Tensor, ...]:
        """The kept values of all batches, joined."""
        if len(self.kept) > 1:
            self.kept = [tuple(map(torch.cat, zip(*self.kept, strict=True)))]
        return self.kept[0]

    @property
    def is_empty(self) -> bool:  # noqa: D102
        return not self.kept

    def state_dict(self) -> dict[str, Any]:  # noqa: D102
        return {"kept": [] if self.is_empty else [column.clone() for column in self.columns()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: D102
        self.kept = [tuple(column.clone() for column in state["kept"])] if state["kept"] else []

    def merge(self, states: Sequence[dict[str, Any]]) -> None:  # noqa: D102
        self.kept = [tuple(state["kept"]) for state in states if state["kept"]]

    def to(self, device: torch.device) -> None:  # noqa: D102
        self.kept = [tuple(column.to(device) for column in each) for each in self.kept]


class Quantile(Kept):
    """Quantiles of a function's value for each sample, such as the error below which 95 % of the samples are.

    Args:
        function: ``function(outputs, targets) -> (batch, ...)``; its name is the metric's.
        q: Between 0 and 1, or several, as ``"val/error/0.95"``.
        name: Another name.

    It keeps one number for each sample of an epoch. Between two samples it is interpolated.

    Source: ``numpy.quantile``.
    """

    def __init__(
        self, function: Callable[[Any, Any], Tensor], q: float | Sequence[float] = 0.5, name: str | None = None
    ) -> None:
        self.function = function
        self.q = q
        self.several = isinstance(q, Sequence)
        self._at = [float(each) for each in q] if isinstance(q, Sequence) else [float(q)]
        if not self._at or not all(0 <= each <= 1 for each in self._at):
            raise ValueError(f"Quantile: q is {q!r}: it is between 0 and 1, or a list of such")
        self.labels = [f"{each:g}" for each in self._at] if self.several else None
        self.name = name or str(getattr(function, "__name__", "quantile"))
        super().__init__()

    def update(self, outputs: Any, targets: Any) -> None:
        """Keep one batch."""
        self.keep(self.function(outputs, targets).reshape(-1))

    def compute(self) -> Tensor | float:  # noqa: D102
        if self.is_empty:
            return math.nan
        (values,) = self.columns()
        values = wide(values).sort().values
        found = []
        for q in self._at:
            place = q * (len(values) - 1)
            low = math.floor(place)
            found.append(values[low].lerp(values[min(low + 1, len(values) - 1)], place - low))
        return torch.stack(found) if self.several else found[0]
