"""RandomGenerators: the global random generators of Python, NumPy and torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from loopkit.base import generators
from loopkit.engine.kept.part import Part


class RandomGenerators(Part):
    """The global random generators. `Resume` saves them, not `saved`: they may be of an epoch's begin."""

    name = "generators"
    what = "the random generators"

    def load(self, saved: Mapping[str, Any]) -> Callable[[], None]:
        """Put them where they were; return the undo."""
        before = generators.save()
        try:
            generators.restore(saved)
        except BaseException:
            generators.restore(before)
            raise
        return lambda: generators.restore(before)

    def apart(self, saved: Any) -> Any:
        """Return all: each process draws from its own."""
        return saved

    def share(self, whole: Any, saved: list[Any], rank: int, size: int) -> Any:
        """Return this process's own; a new process keeps its own ones."""
        return saved[rank] if rank < len(saved) else generators.save()
