"""Write the API pages: one for each public name, with its docstring and an example, and one for each public module.

`docs/api.md` lists the names by use, `docs/examples/` has the examples that are not in docstrings. Sphinx calls `write`
before it reads the pages.
"""

from __future__ import annotations

import fnmatch
import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from loopkit_testing.reference import public_members, public_modules

DOCS = Path(__file__).parent
INDEX = DOCS / "api.md"
PAGES = DOCS / "api"
GROUP = re.compile(r"<!-- api -->\n```text\n(.*?)```\n", re.DOTALL)
GIVEN = "`model`, `loss_fn` and `optimizer` are any; `train` and `val` are loaders; `learner` is a `Learner` of them."


def distributions() -> list[str]:
    """The packages of all distributions, also of those that are not installed."""
    return [found.name.replace("-", "_") for found in sorted((DOCS.parent / "plugins").glob("loopkit-*"))]


def modules() -> dict[str, Any]:
    """The public modules: those of loopkit, and the packages of the distributions that are installed."""
    installed = {name: import_module(name) for name in distributions() if find_spec(name) is not None}
    return {**public_modules(), **installed}


def names() -> dict[str, Any]:
    """Every public name by its path; a name that two modules list has the first path."""
    found: dict[str, Any] = {}
    seen: set[int] = set()
    for path, module in modules().items():
        for name in module.__all__:
            value = getattr(module, name)
            if inspect.ismodule(value):
                continue
            callable_ = inspect.isclass(value) or inspect.isroutine(value)
            if not (callable_ and id(value) in seen):
                found[f"{path}.{name}"] = value
            seen.add(id(value))
    return found


def groups() -> dict[str, list[str]]:
    """The names that the index lists, by heading; ``loopkit.author.*`` stands for all of a module."""
    parts = re.split(r"(?m)^## (.+)$", INDEX.read_text())[1:]
    texts = zip(parts[::2], parts[1::2], strict=True)
    return {head: listed("".join(GROUP.findall(text))) for head, text in texts}


def listed(text: str) -> list[str]:
    """The names of a list in the index."""
    every = list(names())
    return [name for word in text.split() for name in ([word] if word[-1] != "*" else fnmatch.filter(every, word))]


def examples() -> dict[str, str]:
    """The examples of `docs/examples/`, by name; a heading there lists the names that share one."""
    found: dict[str, str] = {}
    for page in sorted((DOCS / "examples").glob("*.md")):
        parts = re.split(r"(?m)^## (.+)$", page.read_text())[1:]
        for head, text in zip(parts[::2], parts[1::2], strict=True):
            for name in head.split(", "):
                assert name not in found, f"{page.name}: {name} has two examples"
                text = re.sub(r"<!-- output.*? -->\n", "It prints:\n\n", text)
                found[name] = re.sub(r"<!-- no-run.*? -->\n", "", text).strip()
    return found


def first_line(value: Any) -> str:
    """The first line of the docstring of a class or function, as Markdown."""
    doc = inspect.getdoc(value) or "" if inspect.isclass(value) or inspect.isroutine(value) else ""
    return doc.partition("\n")[0].replace("``", "`").replace("|", r"\|")


def table(paths: list[str], folder: str) -> str:
    """Names with links to their pages, and first lines; names of distributions that are not installed have no link."""
    values = names()
    rows = (
        f"| [`{path}`]({folder}{path}.md) | {first_line(values[path])} |" if path in values else f"| `{path}` | |"
        for path in paths
    )
    return "\n".join(["| | |", "|---|---|", *rows, ""])


def index(text: str) -> str:
    """The index page with a table in the place of each list of names."""
    return GROUP.sub(lambda match: table(listed(match[1]), "api/"), text)


def page(path: str, value: Any, use: str, example: str) -> str:
    """The page of a name."""
    module, _, _ = path.rpartition(".")
    lines = [f"# {path}", "", f"[API reference](../api.md) / {use} / [`{module}`]({module}.md)", ""]
    lines += ["```{eval-rst}", *directive(path, value), "```", ""]
    if example:
        lines += ["## Example", "", example, "", GIVEN if re.search(r"\b(?:model|learner|train)\b", example) else ""]
    return "\n".join(lines)


def directive(path: str, value: Any) -> Iterator[str]:
    """The directive that writes a name's signature, docstring and members."""
    if inspect.isclass(value):
        yield f".. autoclass:: {path}"
        members = public_members(value)
        if members:
            yield f"   :members: {', '.join(members)}"
    elif inspect.isroutine(value):
        yield f".. autofunction:: {path}"
    else:
        shown = [f"``{each}``" for each in value] if isinstance(value, dict | tuple) else [f"``{value}``"]
        yield from (f".. py:data:: {path}", "", f"   {', '.join(shown)}")


def module_page(path: str) -> str:
    """The page of a module: its docstring, and the names that it lists."""
    own = [name for name in names() if name.rpartition(".")[0] == path]
    return (
        f"# {path}\n\n[API reference](../api.md)\n\n"
        f"```{{eval-rst}}\n.. automodule:: {path}\n   :no-members:\n```\n\n{table(own, '')}"
    )


def pages() -> dict[str, str]:
    """The text of every page, by the name of its file."""
    uses = {name: head for head, group in groups().items() for name in group}
    shown = examples()
    made = {f"{path}.md": page(path, value, uses[path], shown.get(path, "")) for path, value in names().items()}
    return made | {f"{path}.md": module_page(path) for path in modules()}


def write() -> None:
    """Write the pages that changed, and remove those of names that are gone."""
    PAGES.mkdir(exist_ok=True)
    made = {name: f"---\norphan: true\n---\n{text}" for name, text in pages().items()}
    for old in PAGES.glob("*.md"):
        if old.name not in made:
            old.unlink()
    for name, text in made.items():
        file = PAGES / name
        if not file.exists() or file.read_text() != text:
            file.write_text(text)
