"""Criteria of overfitting: how far the validation is from its best, and whether training still makes up for it.

Source: Prechelt, "Early Stopping - But When?" (1998), section 2; his errors become any metric here.
"""

from __future__ import annotations

import math
from typing import ClassVar

from loopkit.author import checks, is_better
from loopkit.criteria import Criterion, Mode
from loopkit.errors import PluginError

__all__ = ["GeneralisationLoss", "ProgressQuotient"]


class GeneralisationLoss(Criterion):
    """The value is worse than the best one by more than ``alpha`` percent of it.

    Args:
        alpha: Percent, above 0.

    Source: Prechelt's ``GL_alpha``: ``GL(t) = 100 (E_va(t) / E_opt(t) - 1) > alpha``, where ``E_opt(t)`` is the lowest
    value up to epoch ``t``. With ``mode="max"`` it is ``100 (1 - A(t) / A_opt(t))``. A best value below 0 counts by
    its size; one of 0 makes every worse value infinitely worse.
    """

    fields: ClassVar[tuple[str, ...]] = ("best",)

    def __init__(self, alpha: float) -> None:
        if not isinstance(alpha, (int, float)) or isinstance(alpha, bool) or not 0 < alpha < math.inf:
            raise PluginError(f"{type(self).__name__}: alpha is {alpha!r}: it is a finite number above 0")
        self.alpha = float(alpha)
        self.best: float | None = None

    def loss(self, value: float, mode: Mode = "min") -> float:
        """Take in a value; return its generalisation loss in percent, 0 as long as there is no best value."""
        if is_better(value, self.best, mode):
            self.best = value
        if self.best is None:
            return 0.0
        return 100 * _share(value - self.best if mode == "min" else self.best - value, self.best)

    def update(self, value: float, mode: Mode = "min") -> str:  # noqa: D102
        loss = self.loss(value, mode)
        if not loss > self.alpha:
            return ""
        return f"{value:.6g} is {loss:.3g} % worse than the best, {self.best:.6g}; the limit is {self.alpha:g} %"


class ProgressQuotient(GeneralisationLoss):
    """The generalisation loss is more than ``alpha`` times the progress that training still makes.

    It looks at the last ``k`` training values whenever a value comes, once there are ``k``. That is
    Prechelt's criterion exactly if values come every ``k`` epochs (``fit(validate=every(epochs=k))``), so that each is
    the end of a strip.

    Args:
        alpha: Above 0.
        k: The training values of a strip, from 2 (a single value shows no progress).

    Source: Prechelt's ``PQ_alpha``: ``GL(t) / P_k(t) > alpha`` with ``P_k(t) = 1000 (sum of E_tr over the strip /
    (k min of E_tr over the strip) - 1)``. With ``mode="max"`` the maximum and the size of the difference are meant. If
    training makes no progress at all, any generalisation loss is too much.
    """

    fields = ("best", "recent")
    needs_training = True

    def __init__(self, alpha: float = 0.75, k: int = 5) -> None:
        super().__init__(alpha)
        checks.whole("ProgressQuotient", 2, k=k)
        self.k = k
        self.recent: list[float] = []

    def observe_training(self, value: float) -> None:  # noqa: D102
        self.recent = [*self.recent, value][-self.k :]

    def progress(self, mode: Mode = "min") -> float:
        """``P_k`` of the last ``k`` training values, in thousandths."""
        best = min(self.recent) if mode == "min" else max(self.recent)
        return 1000 * _share(abs(math.fsum(self.recent) / self.k - best), best)

    def update(self, value: float, mode: Mode = "min") -> str:  # noqa: D102
        loss = self.loss(value, mode)
        if len(self.recent) < self.k:
            return ""
        progress = self.progress(mode)
        quotient = _share(loss, progress)
        if not quotient > self.alpha:
            return ""
        return (
            f"{value:.6g} is {loss:.3g} % worse than the best, {self.best:.6g}, while the last {self.k} training "
            f"values made a progress of {progress:.3g} per mille: the quotient is {quotient:.3g}, the limit is "
            f"{self.alpha:g}"
        )


def _share(gap: float, reference: float) -> float:
    """``gap / |reference|``; over 0 it is 0 or infinite."""
    return gap / abs(reference) if reference else math.copysign(math.inf, gap) if gap else 0.0
