"""The entry points of a distribution, compared with its plugins."""

from __future__ import annotations

from loopkit.author import load_plugin, plugins
from loopkit_testing.case import Case


def declaration(case: Case) -> list[str]:
    """The entry point of the plugin is installed and leads to it."""
    plugin, name = case.plugins()[0], case.name or ""
    rows = [row for row in plugins()[0] if row.entry_point.is_called(name)]
    if not rows:
        return [
            f'no plugin called {name!r} is installed: add {name} = "package.module:{type(plugin).__name__}" to the '
            f"entry points of group loopkit.plugins, and install the distribution again"
        ]
    made = load_plugin(name)
    if isinstance(made, type) and not isinstance(plugin, made):
        return [f"{rows[0].entry_point} is {made.__qualname__}, and the factory makes a {type(plugin).__name__}"]
    return []
