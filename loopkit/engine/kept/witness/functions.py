"""functions: the objects that a function holds: in its closure, as defaults, and by names of its module."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from loopkit.base.generators import is_generator
from loopkit.engine.kept.witness.libraries import is_library

LONG = 1_000
"""Items of a global container up to which it is looked into."""


def held(function: types.FunctionType, counts: Callable[[Any], bool]) -> Iterator[tuple[str, Any]]:
    """Yield the objects that a function closes over, has as defaults or attributes, or looks up by name.

    Args:
        function: The function.
        counts: Whether an object of its module counts that it looks up by name.
    """
    code = function.__code__
    known = function.__globals__
    found = {name: known[name] for name in _names_in(code) if name in known and counts(known[name])}
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            found[name] = cell.cell_contents
        except ValueError:  # it is not set yet
            continue
    defaults = function.__defaults__ or ()
    names = code.co_varnames[: code.co_argcount]
    found |= dict(zip(names[len(names) - len(defaults) :], defaults, strict=True))
    found |= function.__kwdefaults__ or {}
    yield from found.items()
    yield from ((name, each) for name, each in vars(function).items() if name not in found)


def held_in_code(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the objects that a function of the user's, or one that it calls, closes over or names.

    Of a function of a library, only what it closes over and its defaults.
    """
    library = _is_of_library(function)

    def counts(value: Any) -> bool:
        if library:
            return False
        if type(value) in (list, tuple, dict):
            items = value.values() if type(value) is dict else value
            return len(value) <= LONG and any(_may_train(each) for each in items)
        if isinstance(value, types.FunctionType):
            return value.__globals__ is function.__globals__
        return _may_train(value)

    yield from held(function, counts)


def held_by_methods(kind: type, counts: Callable[[Any], bool]) -> Iterator[tuple[str, Any]]:
    """Yield the objects that the methods of a class close over or look up by name, if they count.

    Args:
        kind: The class; of one of a library nothing is yielded.
        counts: Whether an object counts.
    """
    for base in kind.__mro__:
        if is_library(base.__module__):
            continue
        for method, function in vars(base).items():
            if isinstance(function, types.FunctionType):
                yield from ((f"{method}.{name}", each) for name, each in held(function, counts) if counts(each))


def methods_of(value: Any) -> dict[str, types.FunctionType]:
    """Return the functions in the class of an object and in its bases, by name; none of a library's class."""
    found: dict[str, types.FunctionType] = {}
    for base in type(value).__mro__:
        if is_library(base.__module__):
            continue
        for name, each in vars(base).items():
            function = each.__func__ if isinstance(each, (classmethod, staticmethod)) else each
            if isinstance(function, types.FunctionType):
                found.setdefault(name, _unwrapped(function))
    return found


def _unwrapped(function: types.FunctionType) -> types.FunctionType:
    """The function in a decorator of a library, such as ``contextmanager``."""
    inner = vars(function).get("__wrapped__")
    if isinstance(inner, types.FunctionType) and _is_of_library(function):
        return _unwrapped(inner)
    return function


def _is_of_library(function: types.FunctionType) -> bool:
    return is_library(str(function.__globals__.get("__name__")))


def _may_train(value: Any) -> bool:
    return isinstance(value, (nn.Module, Tensor)) or is_generator(value)


def _names_in(code: types.CodeType) -> list[str]:
    """List the names that code looks up, with the functions that are defined in it."""
    names = list(code.co_names)
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            names += _names_in(each)
    return names
