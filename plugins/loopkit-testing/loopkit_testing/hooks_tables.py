"""``loopkit hooks``: hooks, state names, declarations and checks, as one table each."""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import shutil
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from loopkit.author import nearest
from loopkit.commands import JSON, argument, say, say_json, standalone
from loopkit.errors import LoopkitError

WIDTH = 100
"""Columns of a line where there is no terminal."""


@dataclass(frozen=True)
class Entry:
    """A row of a table."""

    cells: dict[str, str]
    """By the headings of the columns; the first is its name, the last its description."""
    doc: str
    """The whole description."""

    @property
    def name(self) -> str:
        """The hook, state, word or check."""
        return next(iter(self.cells.values()))


def tables() -> dict[str, list[Entry]]:
    """The tables by name: ``hooks``, ``states``, ``words``, ``provides`` and ``checks``."""
    from loopkit.author import PROVIDES, STATES, hooks
    from loopkit.events import Event
    from loopkit_testing import CHECKS, overhead
    from loopkit_testing.declaration import declaration
    from loopkit_testing.processes import two_processes

    others = {hook for hook, event in Event.by_hook.items() if event.__module__ != Event.__module__}
    return {
        "hooks": [
            Entry(
                {"hook": each.name, "kind": each.kind, "takes": ", ".join(each.arguments), "when": _first(each.doc)},
                inspect.cleandoc(each.doc),
            )
            for each in hooks().values()
            if each.name not in others
        ],
        "states": [Entry({"state": name, "what it is": text}, text) for name, text in STATES.items()],
        "words": list(_words()),
        "provides": [Entry({"word": name, "meaning": text}, text) for name, text in PROVIDES.items()],
        "checks": [
            Entry({"check": check.__name__, "promise": _sentence(doc)}, doc)
            for check in (*CHECKS.values(), declaration, overhead, two_processes)
            for doc in [inspect.getdoc(check) or ""]
        ],
    }


def _words() -> Iterator[Entry]:
    """Declarations of a plugin: the options of `hookimpl`, and attributes of its class."""
    from loopkit.author import Plugin
    from loopkit.hooks import hookimpl

    said = (inspect.getdoc(hookimpl) or "").partition("Args:")[2].partition("\n\n")[0]
    options = dict(re.findall(r"(?m)^    (\w+): (.*(?:\n {8}.*)*)", said))
    words = list(_attributes(Plugin))
    words = [(words[0][0], "phase", ""), *words, ("to leave a hook out", "when", ""), ("to be replayed", "traced", "")]
    for needed, name, doc in words:
        where = "class" if name not in options else "hook" if not doc else "hook, class"
        doc = " ".join(options.get(name, doc).split())
        yield Entry({"word": name, "in": where, "needed": needed, "meaning": _sentence(doc)}, doc)


def _attributes(protocol: type) -> Iterator[tuple[str, str, str]]:
    """Under which comment an attribute or method stands in the source, its name and its docstring."""
    source = inspect.getsource(protocol)
    lines, (made,) = source.splitlines(), ast.parse(source).body
    assert isinstance(made, ast.ClassDef)
    group = ""
    for node, after in zip(made.body, [*made.body[1:], None], strict=True):
        above = lines[node.lineno - 3]
        group = above.removeprefix("    # ").lower() if above.startswith("    # ") else group
        match node, after:
            case ast.FunctionDef(name=name), _:
                yield group, name, ast.get_docstring(node) or ""
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(doc))):
                yield group, name, inspect.cleandoc(doc)


def _first(doc: str) -> str:
    """The first paragraph, on one line."""
    return " ".join(doc.split("\n\n")[0].split())


def _sentence(doc: str) -> str:
    """The first sentence, on one line, without its end."""
    return re.split(r"(?<=[^.])\.(?= |$)", _first(doc))[0]


def _plain(text: str) -> str:
    """The text with code marked as in Markdown."""
    return text.replace("``", "`")


def markdown(entries: list[Entry], link: Callable[[Entry], str] | None = None) -> str:
    """A table for a page.

    Args:
        entries: Its rows.
        link: Where the name of a row leads to.
    """
    rows = [list(entries[0].cells), ["---"] * len(entries[0].cells)]
    for entry in entries:
        name, *cells = (_plain(cell).replace("|", "\\|") for cell in entry.cells.values())
        rows.append([f"[`{name}`]({link(entry)})" if link else f"`{name}`", *cells])
    return "\n".join(f"| {' | '.join(row)} |".replace("|  |", "| |") for row in rows)


@standalone(
    "hooks",
    argument("name", metavar="NAME", nargs="?", help="a hook, state, word or check, or one of the tables"),
    JSON,
)
def show_hooks(options: argparse.Namespace) -> int:
    """Print the hooks, states, declarations and checks of plugins, or the description of NAME.

    Each table has a name: hooks, states, words, provides, checks. For example:

        loopkit hooks update_begin
        loopkit hooks states

    Exit code: 0, or 2 if NAME is unknown.
    """
    found = _named(tables(), options.name) if options.name else tables()
    if options.json:
        say_json({name: [{**each.cells, "doc": each.doc} for each in entries] for name, entries in found.items()})
    elif options.name and options.name not in found:
        for name, entries in found.items():
            for each in entries:
                say(f"{name}: {', '.join(list(each.cells.values())[:-1])}")
                say(textwrap.indent(_plain(each.doc), "    "))
    else:
        for name, entries in found.items():
            say(f"{name}\n{'=' * len(name)}")
            say("\n".join(_lines(entries)) + "\n")
    return 0


def _named(found: dict[str, list[Entry]], name: str) -> dict[str, list[Entry]]:
    """The table of this name, or the rows of it in all tables."""
    meant = {table: [each for each in rows if table == name or each.name == name] for table, rows in found.items()}
    if chosen := {name: meant[name]} if name in meant else {table: rows for table, rows in meant.items() if rows}:
        return chosen
    known = [*found, *(each.name for rows in found.values() for each in rows)]
    raise LoopkitError(
        f"there is no hook, state, word or check {name!r}{nearest(name, known)}: `loopkit hooks` lists them"
    )


def _lines(entries: list[Entry]) -> Iterator[str]:
    """Rows of name and what it is, as wide as the terminal; longer texts are cut."""
    names = max(len(each.name) for each in entries)
    width = max(shutil.get_terminal_size((WIDTH, 0)).columns - names - 2, 30)
    for each in entries:
        *_, text = each.cells.values()
        first, *rest = textwrap.wrap(_plain(text), width) or [""]
        yield f"{each.name:<{names}}  {first}".rstrip()
        yield from (" " * (names + 2) + line for line in rest)
