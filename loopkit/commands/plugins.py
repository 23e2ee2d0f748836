"""``loopkit plugins`` and ``loopkit api``: what is installed, and what can be imported."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from loopkit.cli import argument, command, plain, say, table
from loopkit.commands.configs import reporting

__all__ = ["list_plugins", "show_api"]

HEADINGS = ("name", "version", "distribution", "provides", "hooks")


@command(
    "plugins",
    argument("--declare", metavar="MODULE", help="import MODULE and print the entry points for its plugins instead"),
)
def list_plugins(options: argparse.Namespace) -> int:
    """List the plugins that are installed, and import none of them.

    Each can be given to a Learner by its name, alone or with options, and is imported then:

        Learner(..., plugins=["grad_norm", {"clip_grad_norm": {"max_norm": 1.0}}])

    With --declare, the output is for the pyproject.toml of a distribution that has plugins; MODULE is found in the
    working directory, too.

    Exit code: 0, or 1 if the metadata of a distribution are broken.
    """
    from loopkit import discovery
    from loopkit.installed import COMMANDS, installed

    if options.declare is not None:
        return reporting(lambda: _declared(discovery.declarations(options.declare)))
    found = installed()
    rows, problems = discovery.plugins(found)
    cells = [HEADINGS]
    for row in rows:
        each, about = row.entry_point, row.about
        told = ("not declared", "") if about is None else (about.provides or "-", " ".join(about.hooks))
        mark = " *" if row.others else ""
        cells.append((each.name + mark, each.version, each.distribution, *told))
    for line in table([[plain(cell, 300) for cell in row] for row in cells]):
        say(line)
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


def _declared(groups: Mapping[str, Mapping[str, str]]) -> str:
    """Entry points as they stand in a pyproject.toml."""
    lines: list[str] = []
    for group, values in groups.items():
        lines += [f'[project.entry-points."{group}"]', *(f'{name} = "{value}"' for name, value in values.items())]
    return "\n".join(lines)


@command(
    "api",
    argument("name", metavar="NAME", nargs="?", default="", help="a module, class, function or method, such as fit"),
)
def show_api(options: argparse.Namespace) -> int:
    """Print the public API: signatures and first lines of all of it, or the whole docstring of NAME.

    NAME is a path or the end of one: loopkit.plugins, ClipGradNorm, Learner.fit.

    Exit code: 0, or 2 if nothing is called NAME.
    """
    from loopkit.reference import shown

    say(shown(options.name).strip("\n"))
    return 0
