"""The public API as text: the names in ``__all__`` of all public modules, with signatures and docstrings."""

from __future__ import annotations

import inspect
import pkgutil
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from types import ModuleType
from typing import Any

import loopkit
from loopkit.author import nearest
from loopkit.errors import LoopkitError


@dataclass(frozen=True)
class Item:
    """A module, or something that one makes public."""

    path: str
    """Where to import it from: the shortest of the paths that list it."""
    signature: str
    """The arguments of a class or function, the type of another value; empty for a module or property."""
    doc: str
    """The whole docstring."""
    depth: int
    """0 for a module, 1 for what it lists, 2 for the methods and properties of a class."""
    inherited: bool = False
    """Whether the method or property comes from another class of loopkit."""

    def __str__(self) -> str:
        name = self.path if self.depth == 0 else self.path.split(".")[-1]
        return f"{'    ' * self.depth}{'.' if self.depth == 2 else ''}{name}{self.signature}"

    @property
    def first_line(self) -> str:
        """The first line of the docstring."""
        return self.doc.partition("\n")[0]


def public_modules() -> dict[str, ModuleType]:
    """The modules and packages with an ``__all__``: loopkit itself, and its direct submodules."""
    below = [f"loopkit.{found.name}" for found in pkgutil.iter_modules(loopkit.__path__) if found.name != "__main__"]
    modules = {name: import_module(name) for name in ("loopkit", *sorted(below))}
    return {name: module for name, module in modules.items() if hasattr(module, "__all__")}


def public_members(cls: type) -> list[str]:
    """The methods and properties of a class that are public, inherited ones of loopkit's classes too."""
    kinds = (staticmethod, classmethod, property, cached_property)
    return [
        name for name, (member, _) in _members(cls).items() if isinstance(member, kinds) or inspect.isfunction(member)
    ]


def items() -> list[Item]:
    """The whole public API, module by module, each followed by its names."""
    found: list[Item] = []
    seen: set[int] = set()
    for name, module in public_modules().items():
        found.append(Item(name, "", inspect.getdoc(module) or "", 0))
        for attribute in module.__all__:
            value = getattr(module, attribute)
            if inspect.isclass(value) or inspect.isroutine(value):
                if id(value) in seen:
                    continue
                seen.add(id(value))
            found += _described(f"{name}.{attribute}", value)
    return found


def shown(name: str = "") -> str:
    """The API for people: first lines of all of it, or the docstrings of one module, class or function.

    Args:
        name: Its path, or the end of it: ``"loopkit.plugins"``, ``"ClipGradNorm"``, ``"Learner.fit"``.

    Raises:
        LoopkitError: There is no public name like this.
    """
    found = chosen(name)
    whole = found[:1] if name else []
    return "\n".join([*_lines(whole, whole=True), *_lines(found[len(whole) :], whole=False)])


def chosen(name: str = "") -> list[Item]:
    """Return the items that `shown` prints: all, or the named one and its members.

    Raises:
        LoopkitError: There is no public name like this.
    """
    every = items()
    if not name:
        return [item for item in every if not item.inherited]
    ends = _ending(every, name, str) or _ending(every, name, str.lower)
    if not ends:
        words = [".".join(item.path.split(".")[-parts:]) for item in every for parts in (1, 2, 3)]
        raise LoopkitError(f"no public name is {name!r}{nearest(name, words)}: `loopkit api` lists all of them")
    meant = min(ends, key=lambda item: (item.inherited, item.depth, item.path.count("."), item.path))
    at = every.index(meant)
    after = next((i for i in range(at + 1, len(every)) if every[i].depth <= meant.depth), len(every))
    return [meant, *(item for item in every[at + 1 : after] if meant.depth or not item.inherited)]


def _ending(every: list[Item], name: str, spelt: Callable[[str], str]) -> list[Item]:
    name = spelt(name)
    return [item for item in every if f".{spelt(item.path)}".endswith(f".{name}")]


def _described(path: str, value: Any) -> Iterator[Item]:
    if not (inspect.isclass(value) or inspect.isroutine(value)):
        yield Item(path, f": {type(value).__name__}", "", 1)
        return
    yield Item(path, _signature(value), inspect.getdoc(value) or "", 1)
    for name, (member, inherited) in _members(value).items() if inspect.isclass(value) else ():
        if isinstance(member, (staticmethod, classmethod)) or inspect.isfunction(member):
            bound = getattr(value, name)
            yield Item(
                f"{path}.{name}", _signature(bound, method=inspect.isfunction(member)), _doc(bound), 2, inherited
            )
        elif isinstance(member, (property, cached_property)):
            yield Item(f"{path}.{name}", "", _doc(member), 2, inherited)


def _members(cls: type) -> dict[str, tuple[Any, bool]]:
    """Return the public members of a class and its bases in loopkit, and whether each is inherited; its own first."""
    found: dict[str, tuple[Any, bool]] = {}
    for each in cls.__mro__:
        if each is cls or each.__module__.partition(".")[0] == "loopkit":
            for name, member in vars(each).items():
                if not name.startswith("_"):
                    found.setdefault(name, (member, each is not cls))
    return found


def _signature(value: Any, method: bool = False) -> str:
    """The arguments as they are written, without ``self``."""
    if inspect.isclass(value) and issubclass(value, BaseException) and "__init__" not in vars(value):
        return ""
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return "(...)"
    if method:
        signature = signature.replace(parameters=list(signature.parameters.values())[1:])
    if inspect.isclass(value):
        signature = signature.replace(return_annotation=signature.empty)
    return re.sub(r" at 0x[0-9a-f]+", "", str(signature))


def _doc(value: Any) -> str:
    return inspect.getdoc(value) or ""


def _lines(found: list[Item], whole: bool) -> Iterator[str]:
    for item in found:
        if item.depth == 0 and not whole:
            yield ""
        yield str(item)
        indent = "    " * (item.depth + 1)
        for line in item.doc.splitlines() if whole else [item.first_line] if item.doc else []:
            yield (indent + line).rstrip()
