"""Notices: lines for people that are printed once."""

from __future__ import annotations

from collections.abc import Callable

from loopkit.base.notes import say


class Notices:
    """The lines that were printed, so that none is printed again.

    Args:
        is_first: Returns whether this process is the one that prints, of several that train together.
    """

    def __init__(self, is_first: Callable[[], bool]) -> None:
        self._is_first = is_first
        self._said: set[str] = set()

    def say_once(self, text: str) -> None:
        """Print a line on standard error, unless it was printed before; in the first process only."""
        if text not in self._said and self._is_first():
            self._said.add(text)
            say(text)
