"""When processes average their parameters, and how many steps each makes in between: the decisions, without a clock."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from loopkit.author import checks
from loopkit.errors import PluginError

__all__ = ["Cadence", "Controller", "EverySteps", "Free", "divide"]

DEAD_ZONE = 0.10
"""Counts are left as they are while each is within this part of its target."""
SLOWEST, QUICKEST = 0.1, 0.8
"""Bounds of the weight of a new measurement of a rank's speed."""
GROWTH = 2
"""By how much the anchor grows at most per report, so that one hiccup of the network does not send it to its end."""
LOWERED = 0.5
"""The factor by which the guard lowers the anchor."""
RISES = 3


@dataclass(frozen=True)
class EverySteps:
    """Average after every so many updates; each process makes the same steps.

    With ``accumulate=a`` an update is ``a`` steps, applied, skipped or cancelled, so that all processes
    have the same counts.

    Args:
        steps: Updates between two averages, from 1.
    """

    steps: int = 1

    def __post_init__(self) -> None:
        checks.whole(type(self).__name__, steps=self.steps)


@dataclass(frozen=True)
class Cadence:
    """Average at matched times: a process that is faster makes more steps between two averages.

    Args:
        anchor: Updates of the slowest process between two averages at first; less than this only the guard makes it.
        overhead_target: The cost of an average, as a part of the time that the slowest process computes, from 0.01
            to 0.5. While it costs more, the anchor grows to where it would cost just this, at most twofold at a time;
            below half of it the anchor shrinks by 1.
        max_anchor: The anchor's upper end.
        max_batch_diff: How many updates more than the slowest a process may make between two averages; None for no
            bound, 0 for equal numbers.
        guard: The divergence ``max_r ||before_r - after|| / ||after||`` of an average above which, if the last three
            rose, the anchor is halved, and grows back by 1 with each average that does not diverge. None: no guard.
    """

    anchor: int = 10
    overhead_target: float = 0.10
    max_anchor: int = 200
    max_batch_diff: int | None = None
    guard: float | None = 0.05

    def __post_init__(self) -> None:
        checks.whole(type(self).__name__, anchor=self.anchor)
        checks.whole(type(self).__name__, self.anchor, max_anchor=self.max_anchor)
        if self.max_batch_diff is not None:
            checks.whole(type(self).__name__, 0, max_batch_diff=self.max_batch_diff)
        if not 0.01 <= self.overhead_target <= 0.5:
            raise PluginError(
                f"{type(self).__name__}: overhead_target is {self.overhead_target!r}: it is a part of the computing "
                f"time, from 0.01 to 0.5"
            )
        if self.guard is not None and not self.guard > 0:
            raise PluginError(f"{type(self).__name__}: guard is {self.guard!r}: it is above 0, or None for no guard")


@dataclass(frozen=True)
class Free(Cadence):
    """As `Cadence`, without waiting for the slowest: the average is made while the next round runs.

    A process may be one round ahead of the others, and the numbers of a round follow from the times measured two rounds
    before. It is the choice where speeds fluctuate; the parameters of the processes are never all equal but at the end
    of an epoch.
    """


class Controller:
    """How many updates each process makes until the next average, from how long it took before.

    It has no clock and sends no message: processes that report the same numbers get the same counts.

    Args:
        cadence: The bounds.
        size: How many processes there are.

    Example::

        >>> controller = Controller(Cadence(anchor=10), 2)
        >>> controller.counts
        [10, 10]
        >>> controller.report(wall_ms=[100.0, 300.0], counts=[10, 10], sync_ms=5.0)
        [30, 10]
        >>> controller.plan(100), controller.plan(30)
        ([30, 10], [23, 7])
    """

    def __init__(self, cadence: Cadence, size: int) -> None:
        self.cadence = cadence
        self.anchor = cadence.anchor
        """Updates of the slowest process between two averages."""
        self.ceiling = cadence.max_anchor
        """The largest anchor that the guard allows."""
        self.counts = [cadence.anchor] * size
        """Updates of each process in a full round."""
        self.ms: list[float | None] = [None] * size
        """Milliseconds per update of each process, smoothed; None before its first."""
        self.overhead = 0.0
        """The cost of the last average, as a share of the slowest process's computing time."""
        self.divergences: list[float] = []
        """The last three, since the guard acted last."""
        self.lowered = 0
        """How often the guard has lowered the anchor."""

    def report(
        self, wall_ms: Sequence[float], counts: Sequence[float], sync_ms: float, divergence: float | None = None
    ) -> list[int]:
        """Take in the times of a round; returns the counts of the next full one.

        Args:
            wall_ms: Milliseconds that each process took for its steps, without waiting for others.
            counts: Updates that each really made; with accumulation, a part of one counts as that part.
            sync_ms: Milliseconds that an average held training up, without waiting for the slowest.
            divergence: Of an average, ``max_r ||before_r - after|| / ||after||``; None if it was not measured.

        Raises:
            PluginError: There is not one number for each process, or one is negative or not finite.
        """
        size = len(self.counts)
        if len(wall_ms) != size or len(counts) != size:
            raise PluginError(f"report: {len(wall_ms)} times and {len(counts)} counts for {size} processes")
        if not all(math.isfinite(number) and number >= 0 for number in (*wall_ms, *counts, sync_ms)):
            raise PluginError(
                f"report: wall_ms {list(wall_ms)}, counts {list(counts)}, sync_ms {sync_ms}: all must be finite, from 0"
            )
        first = all(each is None for each in self.ms)
        for rank, (took, count) in enumerate(zip(wall_ms, counts, strict=True)):
            if count:
                self.ms[rank] = _smoothed(self.ms[rank], max(took / count, 1e-6))
        before = self.anchor
        self._set_anchor(sync_ms, max(wall_ms))
        if divergence is not None and self.cadence.guard is not None:
            self._guard(divergence, self.cadence.guard, before)
        low = min(self.cadence.anchor, self.ceiling)
        self.anchor = min(max(self.anchor, low), self.ceiling)
        targets = self._targets()
        far = any(abs(target - count) > DEAD_ZONE * count for target, count in zip(targets, self.counts, strict=True))
        if first or far or self._too_far_apart():
            self.counts = targets
        return list(self.counts)

    def plan(self, left: int) -> list[int]:
        """The counts of the next round, if the epoch has so many updates left for all processes together.

        The last two rounds of an epoch are about equal, so that it ends for all at the same time. Their sum is never
        more than what is left; each process has one at least, if there are enough.
        """
        full = sum(self.counts)
        if left > 2 * full:
            return list(self.counts)
        return divide(left if left <= full else -(-left // 2), self.counts)

    def state_dict(self) -> dict[str, Any]:
        """The state that decides the next counts."""
        return {
            "anchor": self.anchor,
            "ceiling": self.ceiling,
            "counts": list(self.counts),
            "ms": list(self.ms),
            "overhead": self.overhead,
            "divergences": list(self.divergences),
            "lowered": self.lowered,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the return value of `state_dict`; of another number of processes, only the anchor is taken over."""
        self.anchor, self.ceiling, self.lowered = state["anchor"], state["ceiling"], state["lowered"]
        self.overhead, self.divergences = state["overhead"], list(state["divergences"])
        same = len(state["counts"]) == len(self.counts)
        self.counts = list(state["counts"]) if same else [self.anchor] * len(self.counts)
        self.ms = list(state["ms"]) if same else [None] * len(self.ms)

    def _set_anchor(self, sync_ms: float, compute_ms: float) -> None:
        if not compute_ms or not sync_ms:
            return
        self.overhead = sync_ms / compute_ms
        target = self.cadence.overhead_target
        if self.overhead > target:
            self.anchor = math.ceil(min(self.anchor * self.overhead / target, GROWTH * self.anchor))
        elif self.overhead < target / 2:
            self.anchor -= 1  # not below the first anchor: see report

    def _guard(self, divergence: float, limit: float, anchor: int) -> None:
        last = self.divergences = [*self.divergences, divergence][-RISES:]
        broken = not math.isfinite(divergence)
        if broken or (divergence > limit and len(last) == RISES and all(a < b for a, b in pairwise(last))):
            self.anchor = self.ceiling = max(1, math.ceil(LOWERED * anchor))
            self.divergences = []
            self.lowered += 1
        elif divergence <= limit:
            self.ceiling = min(self.ceiling + 1, self.cadence.max_anchor)

    def _targets(self) -> list[int]:
        slowest = max((each for each in self.ms if each is not None), default=1.0)
        targets = [self.anchor if ms is None else max(1, round(self.anchor * slowest / ms)) for ms in self.ms]
        if self.cadence.max_batch_diff is not None:
            most = min(targets) + self.cadence.max_batch_diff
            targets = [min(target, most) for target in targets]
        return targets

    def _too_far_apart(self) -> bool:
        bound = self.cadence.max_batch_diff
        return bound is not None and max(self.counts) - min(self.counts) > bound


def divide(total: int, weights: Sequence[int]) -> list[int]:
    """Whole numbers in proportion to positive weights that add up to ``total``; each from 1, if there are enough.

    The rounding goes to the largest remainders, and where these are equal to the lower rank.

    Example::

        >>> divide(10, [3, 1]), divide(1, [1, 1]), divide(3, [100, 1, 1])
        ([8, 2], [1, 0], [1, 1, 1])
    """
    least = 1 if total >= len(weights) else 0
    whole = sum(weights)
    parts = [total * weight // whole for weight in weights]
    by_remainder = sorted(range(len(weights)), key=lambda rank: (-(total * weights[rank] % whole), rank))
    for rank in by_remainder[: total - sum(parts)]:
        parts[rank] += 1
    for rank, part in enumerate(parts):
        if part < least:
            parts[max(range(len(parts)), key=parts.__getitem__)] -= least - part
            parts[rank] = least
    return parts


def _smoothed(old: float | None, new: float) -> float:
    """A measurement counts more if it differs more: jitter is ignored, a change is not."""
    if old is None:
        return new
    weight = min(max(abs(new - old) / old, SLOWEST), QUICKEST)
    return weight * new + (1 - weight) * old
