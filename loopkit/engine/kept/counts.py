"""Counts and LastMetrics: the counters of a run, and the last values of its metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from typing import Any

from loopkit.base.kinds import COUNT, NUMBERS, wrong
from loopkit.engine.kept.part import Part
from loopkit.progress import Progress

COUNTERS = {counter.name: COUNT for counter in fields(Progress)}
"""The counters and their kinds."""


class Counts(Part):
    """The counters of a run: steps, updates, samples, epochs.

    Args:
        progress: The learner's.
    """

    name = "progress"
    what = "the counters"

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def saved(self, whole: bool = True) -> dict[str, int]:
        """Return them by name."""
        return asdict(self._progress)

    def malformed(self, saved: Any) -> list[str]:
        """List what is no counter."""
        return wrong(self.name, saved, COUNTERS, more=False)

    def load(self, saved: Mapping[str, Any]) -> Callable[[], None]:
        """Count on from these; return the undo."""
        before = asdict(self._progress)
        self._set(saved)
        return lambda: self._set(before)

    def _set(self, counts: Mapping[str, Any]) -> None:
        for name, value in counts.items():
            setattr(self._progress, name, value)


class LastMetrics(Part):
    """The last value of each metric.

    Args:
        metrics: The learner's, by name.
    """

    name = "metrics"
    what = "the metrics"
    kind = NUMBERS

    def __init__(self, metrics: dict[str, float]) -> None:
        self._metrics = metrics

    def saved(self, whole: bool = True) -> dict[str, float]:
        """Return them by name."""
        return dict(self._metrics)

    def load(self, saved: Mapping[str, Any]) -> Callable[[], None]:
        """Take these in the place of the learner's; return the undo."""
        before = dict(self._metrics)
        self._set(saved)
        return lambda: self._set(before)

    def _set(self, metrics: Mapping[str, Any]) -> None:
        self._metrics.clear()
        self._metrics.update(metrics)
