"""Which checkpoints of a run stay: the newest, the best, and the one that the run resumed from."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loopkit.base.notes import warn
from loopkit.base.words import nearest
from loopkit.checkpoint import storage
from loopkit.checkpoint.bundle import monitored, number
from loopkit.checkpoint.manifest import Listing, Manifest
from loopkit.criteria import Mode
from loopkit.errors import CheckpointError, PluginError

if TYPE_CHECKING:
    from loopkit.learner import Learner


class Retention:
    """The checkpoints of a directory by age and by a metric.

    Args:
        keep: How many of the newest stay.
        keep_best: How many of the best stay.
        monitor: The metric that ranks them, or None.
    """

    def __init__(self, keep: int, keep_best: int, monitor: str | None) -> None:
        self.keep = keep
        self.keep_best = keep_best
        self.monitor = monitor
        self.mode: Mode = "min"
        """Whether lower values are better."""
        self.source: Path | None = None
        """The checkpoint that ``resume`` named."""
        self.damaged: set[Path] = set()
        """Checkpoints that were found damaged: they neither count nor are they removed."""
        self._remover = storage.Remover()

    def value(self, learner: Learner, plugin: str) -> float:
        """Return the last value of the metric.

        Raises:
            PluginError: There is no such metric.
        """
        assert self.monitor is not None
        value = learner.metrics.get(self.monitor)
        if value is None:
            known = list(learner.metrics)
            raise PluginError(
                f"plugin {plugin!r}: there is no metric {self.monitor!r}{nearest(self.monitor, known)}; there are: "
                f"{', '.join(known) or 'none'}"
            )
        return float(value)

    def noted(self, value: float | None) -> dict[str, float | str] | None:
        """Return the entry of a manifest for a value of the metric."""
        if self.monitor is None or value is None:
            return None
        return {"metric": self.monitor, "mode": self.mode, "value": number(value)}

    def is_best(self, directory: Path, value: float | None) -> bool:
        """Whether a value of the metric is among the best."""
        if value is None or math.isnan(value):
            return False
        ranked = self._ranked(self._found(directory))
        return len(ranked) < self.keep_best or self._key(value) < ranked[self.keep_best - 1][0]

    def rotate(self, directory: Path) -> None:
        """Remove the checkpoints that do not stay, in a thread."""
        surplus = self._surplus(self._found(directory))
        _try(lambda: self._remover.remove(surplus))

    def close(self) -> None:
        """Wait until everything is removed."""
        _try(self._remover.close)

    def _surplus(self, found: Listing) -> list[Path]:
        best = [manifest.path for _, manifest in self._ranked(found)[: self.keep_best]]
        source = [] if self.source is None else [self.source]
        return storage.keep(found, self.keep, {*best, *source})

    def _found(self, directory: Path) -> Listing:
        """List the checkpoints that are there, without the damaged ones."""
        found = storage.listing(directory)
        return Listing([manifest for manifest in found if manifest.path not in self.damaged], found.problems)

    def _ranked(self, found: Listing) -> list[tuple[float, Manifest]]:
        """Return the checkpoints with a value of the metric, best first, the older first among equals."""
        ranked = []
        for manifest in reversed(found):
            value = monitored(manifest)
            if value is not None and value[0] == self.monitor and not math.isnan(value[2]):
                ranked.append((self._key(value[2]), manifest))
        return sorted(ranked, key=lambda item: item[0])

    def _key(self, value: float) -> float:
        return value if self.mode == "min" else -value


def _try(act: Callable[[], Any]) -> None:
    """Warn of an old checkpoint that cannot be removed: the run continues, and the next save tries again."""
    try:
        act()
    except CheckpointError as error:
        warn(str(error))
