"""What a distribution says of a plugin, compared with the plugin."""

from __future__ import annotations

from loopkit.discovery import about_value, load_plugin, parse_about, plugins
from loopkit.testing.case import Case


def declaration(case: Case) -> list[str]:
    """The entry points of the plugin are installed, lead to it, and declare what it provides and its hooks."""
    plugin, name = case.plugins()[0], case.name or ""
    rows = [row for row in plugins()[0] if row.entry_point.is_called(name)]
    if not rows:
        return [
            f'no plugin called {name!r} is installed: add {name} = "package.module:{type(plugin).__name__}" to the '
            f"entry points of group loopkit.plugins, and install the distribution again"
        ]
    broken = []
    made = load_plugin(name)
    if isinstance(made, type) and not isinstance(plugin, made):
        broken.append(f"{rows[0].entry_point} is {made.__qualname__}, and the factory makes a {type(plugin).__name__}")
    expected, about = about_value(type(plugin)), rows[0].about
    if about is None:
        broken.append(
            f'nothing declares what {rows[0].entry_point} is: add {name} = "{expected}" to the entry points of group '
            f"loopkit.plugins.about"
        )
    elif about != parse_about(expected):
        broken.append(
            f"{rows[0].entry_point} is declared with {about.hooks}, provides {about.provides!r}; the class has other "
            f'ones: write {name} = "{expected}" and install the distribution again'
        )
    return broken
