"""Errors of configurations."""

from __future__ import annotations

from loopkit import LoopkitError

__all__ = ["ConfigError"]


class ConfigError(LoopkitError, ValueError):
    """A configuration cannot be read, run or written."""

    def __init__(self, what: str, problems: tuple[str, ...] = ()) -> None:
        super().__init__("\n  ".join((what, *problems)))
        self.problems = problems or (what,)
        """One line for each, as ``"run.toml:12: ..."``."""
