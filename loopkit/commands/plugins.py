"""``loopkit plugins``: what is installed."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from loopkit.cli import JSON, argument, command, plain, say, say_json, table

if TYPE_CHECKING:
    from loopkit.installed import EntryPoint

WIDTH = 100
"""Columns of a line where there is no terminal."""
HEADINGS = ("name", "version", "distribution", "what it does")


@command(
    "plugins",
    argument("name", metavar="NAME", nargs="?", help="import this plugin, and print what it does and its options"),
    JSON,
)
def list_plugins(options: argparse.Namespace) -> int:
    """List the plugins that are installed, and import none of them; or say what the one called NAME is.

    Each can be given to a Learner by its name, alone or with options, and is imported then:

        Learner(..., plugins=["grad_norm", {"clip_grad_norm": {"max_norm": 1.0}}])

    What does not fit into a line, of 100 columns where there is no terminal, ends with "...".

    Exit code: 0, or 1 if the metadata of a distribution are broken; 2 if no plugin is called NAME, or it may not be
    loaded.
    """
    from loopkit import discovery
    from loopkit.installed import COMMANDS, installed

    found = installed()
    rows, problems = discovery.plugins(found)
    if options.name is not None:
        factory = discovery.load_plugin(options.name)
        say("\n".join(_told(factory, discovery.find(options.name))))
        return 0
    if options.json:
        say_json(
            {
                "plugins": [
                    {
                        **{
                            key: getattr(row.entry_point, key)
                            for key in ("name", "full_name", "version", "distribution")
                        },
                        "does": discovery.first_line(row.entry_point),
                    }
                    for row in rows
                ],
                "broken": problems,
            }
        )
        return 1 if problems else 0
    cells = [HEADINGS]
    for row in rows:
        each, mark = row.entry_point, " *" if row.others else ""
        cells.append((each.name + mark, each.version, each.distribution, discovery.first_line(each)))
    for line in table([[plain(cell, 300) for cell in row] for row in cells], WIDTH):
        say(line)
    say("`loopkit plugins NAME` says what one does, and its options")
    for name in sorted({row.entry_point.name for row in rows if row.others}):
        names = [row.entry_point.full_name for row in rows if row.entry_point.name == name]
        say(f"* {plain(name)} is not one plugin: write {plain(' or '.join(names), 1000)}")
    if commands := found.of(COMMANDS):
        say("commands: " + plain(", ".join(f"{each.name} ({each.distribution})" for each in commands), 1000))
    if (allow := discovery.allowed()) is not None:
        say(f"{discovery.ALLOW} allows by name: {plain(', '.join(allow) or 'none', 1000)}")
    for problem in problems:
        say(f"broken: {plain(problem, 1000)}")
    return 1 if problems else 0


def _told(factory: Callable[..., Any], entry_point: EntryPoint) -> list[str]:
    """What a plugin is, for people."""
    from loopkit.hooks import implemented
    from loopkit.plugin import provided

    doc = inspect.getdoc(factory) or "(it has no docstring)"
    lines = [
        plain(f"{entry_point}: {entry_point.value}"),
        plain(f"{entry_point.value.rpartition(':')[2]}{_options(factory)}", 1000),
        "    " + plain(doc.partition("\n")[0]),
    ]
    if inspect.isclass(factory):
        lines += [f"provides: {provides}"] if (provides := provided(factory)) else []
        lines.append(plain(f"hooks: {' '.join(sorted(implemented(factory)))}", 1000))
    return lines


class _Written(str):
    """An annotation that is shown as it is written, without quotes."""

    __repr__ = str.__str__


def _options(factory: Callable[..., Any]) -> str:
    """What it takes, in brackets."""
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):
        return "(...)"  # one in C
    parameters = [
        each.replace(annotation=_Written(each.annotation)) if isinstance(each.annotation, str) else each
        for each in signature.parameters.values()
    ]
    return str(signature.replace(parameters=parameters, return_annotation=signature.empty))
