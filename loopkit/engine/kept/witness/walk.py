"""walk: the objects that an object of the user's holds, found without running any code of the user's."""

from __future__ import annotations

import functools
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from loopkit.base.generators import is_generator

MAPPINGS = (dict, OrderedDict, defaultdict, Counter)
SEQUENCES = (list, tuple, deque)
SETS = (set, frozenset)
PLAIN = (type(None), bool, int, float, complex, str, bytes)
HeldBy = Callable[[types.FunctionType], Iterable[tuple[str, Any]]]
CLOSED = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, torch.Tensor)
"""Kinds whose insides are not looked at: they are values, or code."""


class Found(NamedTuple):
    """A value on the way through an object."""

    path: str
    """Such as ``sampler.generator`` or ``transforms[0].rng``; empty for the object itself."""
    owner: Any
    """The object or container that holds it; None for the object itself."""
    key: Any
    """The name of the attribute, the key or the index under which the owner holds it."""
    value: Any


def walk(
    root: Any,
    *,
    deep: int = 4,
    most: int = 10_000,
    enter: Callable[[Found], bool] = lambda found: True,
    held_by: HeldBy | None = None,
) -> Iterator[Found]:
    """Yield an object and everything that it holds, breadth first, each object once.

    It reads ``vars()``, ``__slots__``, built-in containers by their exact type, and the parts of bound methods and of
    ``functools.partial``: never a property, ``__getattr__``, ``__len__`` or ``__iter__`` of a class of the user's.

    Args:
        root: The object.
        deep: How many attributes or items lie between the root and the last values.
        most: How many values it yields at most.
        enter: Whether to look inside a value; it is asked for values that can hold others.
        held_by: Yields the names and the objects that a function holds; without it, functions are not looked into.
    """
    level = [Found("", None, None, root)]
    seen: set[int] = set()
    count = 0
    for depth in range(deep + 1):
        below: list[Found] = []
        for found in level:
            value = found.value
            if not isinstance(value, PLAIN):
                if id(value) in seen:
                    continue
                seen.add(id(value))
            yield found
            count += 1
            if count == most:
                return
            if depth == deep or len(below) >= most:
                continue
            if held_by is not None and isinstance(value, types.FunctionType):
                if enter(found):
                    below += _attributes(found, held_by(value))
            elif can_hold(value) and enter(found):
                below += islice(inside(found), most - len(below))
        level = below


def can_hold(value: Any) -> bool:
    """Whether a value can hold others that `walk` finds."""
    if isinstance(value, (*PLAIN, *CLOSED)) or is_generator(value):
        return False
    kind = type(value)
    return kind in MAPPINGS or kind in SEQUENCES or kind in SETS or kind in HOLDERS or has_attributes(value)


def has_attributes(value: Any) -> bool:
    """Whether an object has attributes of its own, asked without ``__getattr__``."""
    if _members(type(value)):
        return True
    try:
        return type(object.__getattribute__(value, "__dict__")) is dict
    except AttributeError:
        return False


def inside(found: Found) -> Iterator[Found]:
    """Yield what a value holds: attributes by name, items by key or index."""
    value = found.value
    path = found.path
    kind = type(value)
    if kind in MAPPINGS:
        for key, each in value.items():
            if isinstance(key, PLAIN):
                yield Found(f"{path}[{key!r}]", value, key, each)
    elif kind in SEQUENCES:
        for index, each in enumerate(value):
            yield Found(f"{path}[{index}]", value, index, each)
    elif kind in SETS:
        for each in value:
            yield Found(f"{path}{{}}", value, None, each)
    else:
        yield from _attributes(found, _named(value))


def _attributes(found: Found, named: Iterable[tuple[str, Any]]) -> Iterator[Found]:
    """Yield objects that an object holds under names."""
    prefix = f"{found.path}." if found.path else ""
    for name, each in named:
        yield Found(f"{prefix}{name}", found.value, name, each)


def _named(value: Any) -> list[tuple[str, Any]]:
    """The attributes of an object, or the parts of a callable."""
    kind = type(value)
    if kind in HOLDERS:
        return [(name, getattr(value, name)) for name in HOLDERS[kind]]
    try:
        attributes = object.__getattribute__(value, "__dict__")
    except AttributeError:
        attributes = {}
    return [*attributes.items(), *slots(value).items()]


def slots(value: Any) -> dict[str, Any]:
    """Return the filled ``__slots__`` of an object, read without its code."""
    found: dict[str, Any] = {}
    for name, member in _members(type(value)):
        try:
            found[name] = member.__get__(value)
        except AttributeError:  # an empty one
            continue
    return found


def _members(kind: type) -> tuple[tuple[str, Any], ...]:
    """The slots of a class by name."""
    known = _MEMBERS.get(kind)
    if known is None:
        bases = [vars(base) for base in kind.__mro__ if "__slots__" in vars(base)]
        members = [each for base in bases for each in base.items() if type(each[1]) is types.MemberDescriptorType]
        known = _MEMBERS[kind] = tuple(members)
    return known


_MEMBERS: WeakKeyDictionary[type, tuple[tuple[str, Any], ...]] = WeakKeyDictionary()
"""The slots of classes that were looked at."""

HOLDERS: dict[type, tuple[str, ...]] = {
    functools.partial: ("func", "args", "keywords"),
    types.MethodType: ("__self__",),
}
"""Built-in callables that hold objects, and under which names."""
