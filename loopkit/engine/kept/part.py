"""Part: one thing that a state holds of a learner, with its check and its way back."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from loopkit.base.kinds import MAPPING, Kind


class Part:
    """One of the things that a state holds of a learner: its saved form, its check and its way back.

    `loopkit.engine.kept.parts.Parts` lists them. This one holds nothing.
    """

    name = ""
    """Where a state holds it."""
    version = 1
    """The form of `saved`; `problems` and `load` know all forms up to this one."""
    what = ""
    """A description, for an undo that fails."""
    kind: Kind = MAPPING
    """The kind of its saved form."""
    in_use = True
    """Whether its saved form holds tensors in use: it is copied if others stand in the place of the models' weights."""
    optional = False
    """Whether a state may lack it: there was nothing to save, or an earlier loopkit saved none."""

    def saved(self, whole: bool = True) -> Any:
        """Return its saved form, of values that a state can hold; None if there is nothing to save.

        Args:
            whole: Tensors that are spread over processes are collected. Else each process saves its shards.
        """
        return None

    def malformed(self, saved: Any) -> list[str]:
        """List what in a saved form, which is of its kind, no learner could have saved."""
        return []

    def problems(self, saved: Any, allow: Collection[str] = ()) -> list[str]:
        """Compare a saved form with the one here, and return the differences in words.

        Args:
            saved: The form, which is well-formed.
            allow: Plugins whose part may be missing, here or there.
        """
        return []

    def prepare(self, saved: Mapping[str, Any]) -> None:
        """Get ready for a saved form, before any part is loaded."""

    def load(self, saved: Mapping[str, Any]) -> Callable[[], None]:
        """Put a saved form back, which is empty if the state has none; return the undo."""
        return lambda: None

    def apart(self, saved: Any) -> Any:
        """Return what of its saved form differs from process to process; None if nothing does."""
        return None

    def share(self, whole: Any, saved: list[Any], rank: int, size: int) -> Any:
        """Return the saved form for process `rank` of `size`.

        Args:
            whole: The form of the process that wrote the state.
            saved: The return value of `apart` on each process that saved.
            rank: This process.
            size: How many there are now.
        """
        return saved[min(rank, len(saved) - 1)]
