"""Plugin: all that a plugin may have."""

from __future__ import annotations

import inspect
from typing import Any

from loopkit.events import snake_case
from loopkit.hooks import check_declaration

__all__ = ["declared", "provided", "unwrapped"]


def unwrapped(plugin: Any) -> Any:
    """The plugin in a plugin that wraps it, as `throttle` does, else itself."""
    return getattr(plugin, "__wrapped__", plugin)


def provided(plugin: Any) -> str:
    """What a plugin says that it is, or an empty string."""
    return getattr(plugin, "provides", "")


def declared(plugin: Any, label: str, declaration: Any) -> tuple[str, ...]:
    """The names of a declaration; a function of the plugin is called."""
    if isinstance(declaration, tuple) and not declaration:
        return ()
    check_declaration(f"plugin {_called(plugin)!r}: {label}", declaration)
    if callable(declaration):
        names = declaration() if inspect.ismethod(declaration) else declaration(plugin)
        check_declaration(f"plugin {_called(plugin)!r}: what {label} returns", names)
        return tuple(names)
    return tuple(declaration)


def _called(plugin: Any) -> str:
    name = getattr(plugin, "name", None)
    return name if isinstance(name, str) else snake_case(type(plugin).__name__)
