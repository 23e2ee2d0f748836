"""Lazy: names of a package that are imported on first use, by its ``__getattr__`` (PEP 562)."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any


@cache
def homes(package: str) -> dict[str, str]:
    """The names that a package's source imports under ``if TYPE_CHECKING:``, with their modules."""
    source: str | None = sys.modules[package].__loader__.get_source(package)  # type: ignore[union-attr]
    if source is None:
        raise ImportError(f"{package} reads its own source, which is not there: install loopkit with its .py files")
    blocks = {ast.unparse(node.test): node.body for node in ast.parse(source).body if isinstance(node, ast.If)}
    imports = [node for node in blocks["TYPE_CHECKING"] if isinstance(node, ast.ImportFrom)]
    return {each.name: str(node.module) for node in imports for each in node.names}


def lazily(package: str, *modules: str) -> Callable[[str], Any]:
    """Make a package's ``__getattr__``, which imports the names under ``if TYPE_CHECKING:`` on first use.

    Args:
        package: Its name.
        modules: Modules of the package that are also imported on first use.
    """
    found = homes(package)

    def get(name: str) -> Any:
        if name in modules:
            return import_module(f"{package}.{name}")
        if name not in found:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = vars(sys.modules[package])[name] = getattr(import_module(found[name]), name)
        return value

    return get
