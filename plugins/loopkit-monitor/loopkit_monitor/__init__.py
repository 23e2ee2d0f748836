"""See loopkit runs: a live page, a report in one file, a view for the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from loopkit_monitor.plugin import Monitor, Report

__all__ = ["Monitor", "Report"]


def __getattr__(name: str) -> Any:
    """The plugins, imported when they are asked for: the server does without them, and so without torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from loopkit_monitor import plugin

    return getattr(plugin, name)
