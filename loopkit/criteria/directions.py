"""Directions: whether lower or higher values of a metric are better."""

from __future__ import annotations

import math
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any, Literal

from loopkit.errors import PluginError

Mode = Literal["min", "max"]


def is_better(value: float, than: float | None, mode: Mode = "min", by: float = 0.0) -> bool:
    """Whether a value is better by more than ``by``; a finite one always is than None, any other never is.

    >>> is_better(0.0, 0.5), is_better(0.5, 0.5), is_better(0.0, None), is_better(float("nan"), None)
    (True, False, True, False)
    """
    if not math.isfinite(value):
        return False
    return than is None or (than - value > by if mode == "min" else value - than > by)


def better(metric: str, plugins: Iterable[Any]) -> Mode | None:
    """Which way a metric such as ``"val/f1"`` is better; None if no plugin defines it.

    The plugin that makes it defines ``higher_is_better(metric)``; a metric called loss is better where it is lower.
    """
    makers = [each for each in plugins if callable(getattr(each, "higher_is_better", None))]
    for higher in (each.higher_is_better(metric) for each in makers):
        if higher is not None:
            return "max" if higher else "min"
    return "min" if f"/{metric}".endswith(("/loss", "_loss")) else None


def declared(metric: str, plugins: Iterable[Any]) -> Mode | None:
    """Which way a metric is better, as a plugin declares: by the ``mode`` with which it monitors it, or by making it.

    A name is no declaration: a loss is better where it is lower only if a plugin monitors it, or makes it as a metric.
    """
    known = list(plugins)
    for plugin in known:
        if getattr(plugin, "monitor", None) == metric and getattr(plugin, "mode", None) in ("min", "max"):
            return plugin.mode  # type: ignore[no-any-return]
    monitored = any(getattr(plugin, "monitor", None) == metric for plugin in known)
    made = any(_makes(plugin, metric) for plugin in known)
    return better(metric, known) if monitored or made else None


def _makes(plugin: Any, metric: str) -> bool:
    """Whether a plugin makes a metric, and knows which way it is better."""
    if not callable(getattr(plugin, "higher_is_better", None)):
        return False
    if plugin.higher_is_better(metric) is not None:
        return True
    names = plugin.names() if callable(getattr(plugin, "names", None)) else ()
    return any(fnmatchcase(f"metrics.{metric}", pattern) for pattern in names)


def direction(plugin: Any, plugins: Iterable[Any]) -> Mode:
    """The ``mode`` of a plugin that goes by a metric, or, without one, which way its ``monitor`` is better.

    Raises:
        PluginError: The direction is unknown.
    """
    mode: Mode | None = plugin.mode or better(plugin.monitor, plugins)
    if mode is None:
        raise PluginError(
            f"plugin {plugin.name!r}: it is unknown whether {plugin.monitor!r} is better where it is lower or higher: "
            f'give mode="min" or mode="max"'
        )
    return mode


def checked_mode(owner: str, mode: Any) -> Mode | None:
    """A ``mode`` that was given.

    Raises:
        PluginError: It is none.
    """
    if mode not in ("min", "max", None):
        raise PluginError(f"{owner}: mode is {mode!r}: it is 'min' (lower is better) or 'max'")
    return mode  # type: ignore[no-any-return]
