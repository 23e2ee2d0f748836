"""``loopkit plugins``: the installed plugins."""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Callable
from itertools import groupby
from textwrap import fill, shorten
from typing import TYPE_CHECKING, Any

from loopkit.commands.cli import JSON, argument, columns, command, plain, say, say_json

if TYPE_CHECKING:
    from loopkit.found.discovery import Plugin
    from loopkit.found.installed import EntryPoint

WIDTH = 100
"""Columns of a line where there is no terminal."""
CLAUSE = re.compile(r"[:;.](?= [a-zA-Z])")
"""Where a first line can end."""


@command(
    "plugins",
    argument("name", metavar="NAME", nargs="?", help="import this plugin, and print what it does and its options"),
    JSON,
)
def list_plugins(options: argparse.Namespace) -> int:
    """List the installed plugins, without importing them; or describe the one called NAME.

    Each can be given to a Learner by its name, with or without options, and is imported then:

        Learner(..., plugins=["grad_norm", {"clip_grad_norm": {"max_norm": 1.0}}])

    A line ends where a thought of the docstring's first line does, so that it fits; NAME has all of it.

    Exit code: 0, or 1 if the metadata of a distribution are broken; 2 if no plugin is called NAME, or it may not be
    loaded.
    """
    from loopkit.found import discovery
    from loopkit.found.installed import COMMANDS, installed

    if options.name is not None:
        factory = discovery.load_plugin(options.name)
        say("\n".join(_told(factory, discovery.find(options.name))))
        return 0
    found = installed()
    rows, problems = discovery.plugins(found)
    rows = sorted(rows, key=_origin)
    if options.json:
        say_json({"plugins": [_as_json(row) for row in rows], "broken": problems})
        return 1 if problems else 0
    _say_rows(rows)
    say("`loopkit plugins NAME` describes one, with its options")
    _say_ambiguous(rows)
    if commands := found.of(COMMANDS):
        text = plain(", ".join(f"{each.name} ({each.distribution})" for each in commands), 1000)
        say(fill(f"commands: {text}", columns(WIDTH) or WIDTH, subsequent_indent="  "))
    if (allow := discovery.allowed()) is not None:
        say(f"{discovery.ALLOW} allows by name: {plain(', '.join(allow) or 'none', 1000)}")
    for problem in problems:
        say(f"broken: {plain(problem, 1000)}")
    return 1 if problems else 0


def _as_json(row: Any) -> dict[str, Any]:
    from loopkit.found import discovery

    point = row.entry_point
    about = {key: getattr(point, key) for key in ("name", "full_name", "version", "distribution")}
    return {**about, "does": discovery.first_line(point).replace("`", "")}


def _say_rows(rows: list[Any]) -> None:
    """Print a line for each plugin, below its distribution."""
    from loopkit.found import discovery

    widest = max((len(plain(row.entry_point.name)) + 2 for row in rows), default=0)
    longest = (columns(WIDTH) or WIDTH) - widest - 4
    for (distribution, version), group in groupby(rows, key=_origin):
        say(plain(f"{distribution} {version}"))
        for row in group:
            name = plain(row.entry_point.name) + " *" * bool(row.others)
            say(f"  {name:<{widest}}  {_brief(plain(discovery.first_line(row.entry_point), 300), longest)}".rstrip())


def _say_ambiguous(rows: list[Any]) -> None:
    for name in sorted({row.entry_point.name for row in rows if row.others}):
        names = [row.entry_point.full_name for row in rows if row.entry_point.name == name]
        say(f"* {plain(name)} is not one plugin: write {plain(' or '.join(names), 1000)}")


def _origin(row: Plugin) -> tuple[str, str]:
    return row.entry_point.distribution, row.entry_point.version


def _brief(text: str, longest: int) -> str:
    """The text without its markup, up to the end of the last clause, or of the last word, that fits."""
    text = text.replace("`", "")
    if len(text) <= longest:
        return text
    ends = [match.start() for match in CLAUSE.finditer(text) if longest // 3 < match.start() <= longest]
    return text[: ends[-1]] + "." if ends else shorten(text, max(longest, 10), placeholder=" ...")


def _told(factory: Callable[..., Any], entry_point: EntryPoint) -> list[str]:
    """Describe a plugin for people."""
    from loopkit.hooks import implemented
    from loopkit.plugin import provided

    doc = inspect.getdoc(factory) or "(it has no docstring)"
    lines = [
        plain(f"{entry_point}: {entry_point.value}"),
        plain(f"{entry_point.value.rpartition(':')[2]}{_options(factory)}", 1000),
        "    " + plain(doc.partition("\n")[0].replace("`", "")),
    ]
    if inspect.isclass(factory):
        lines += [f"provides: {provides}"] if (provides := provided(factory)) else []
        lines.append(plain(f"hooks: {' '.join(sorted(implemented(factory)))}", 1000))
    return lines


class _Written(str):
    """An annotation that is shown as it is written, without quotes."""

    __repr__ = str.__str__


def _options(factory: Callable[..., Any]) -> str:
    """Its options, in brackets."""
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):
        return "(...)"  # one in C
    parameters = [
        each.replace(annotation=_Written(each.annotation)) if isinstance(each.annotation, str) else each
        for each in signature.parameters.values()
    ]
    return str(signature.replace(parameters=parameters, return_annotation=signature.empty))
