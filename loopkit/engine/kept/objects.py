"""objects: plain objects in the state of an optimizer, saved by their attributes, and made again from them."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from loopkit.errors import StateError

OBJECT = ".object"
"""The key of an object's class in its saved form, beside `ATTRIBUTES`."""
ATTRIBUTES = ".attributes"
OWN_FORMS = (
    "__slots__",
    "__reduce__",
    "__reduce_ex__",
    "__setstate__",
    "__getstate__",
    "__getnewargs__",
    "__getnewargs_ex__",
)
"""Methods of classes whose objects are more than their attributes."""
DEEPEST = 100
SEQUENCES = (list, tuple, deque)


def taken_apart(value: Any, package: str) -> Any:
    """Return a value with the saved form of each object of a package in its place; what holds none is the same one.

    Args:
        value: The state of an optimizer.
        package: The top package of the optimizer's class; objects of other classes stay as they are.
    """
    return _mapped(value, lambda each: _form(each, package), 0)


def put_together(value: Any, package: str, move: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> Any:
    """Undo `taken_apart`, with tensors of the objects moved.

    Nothing is imported, and no code of the class runs.

    Raises:
        StateError: A class is unknown here, of another package, or not one whose objects `taken_apart` saves.
    """

    def made(each: Any) -> Any:
        if type(each) is not dict or each.keys() != {OBJECT, ATTRIBUTES}:
            return each
        cls = _known(each[OBJECT], package)
        value: Any = object.__new__(cls)
        vars(value).update(_mapped(each[ATTRIBUTES], lambda part: move(part) if isinstance(part, Tensor) else part, 0))
        return value

    return _mapped(value, made, 0, last=True)


def problems(value: Any, package: str) -> list[str]:
    """List the classes of a saved form that are not here, in words."""
    found: dict[str, None] = {}

    def look(each: Any) -> Any:
        if type(each) is dict and each.keys() == {OBJECT, ATTRIBUTES}:
            try:
                _known(each[OBJECT], package)
            except StateError as error:
                found[str(error)] = None
        return each

    _mapped(value, look, 0)
    return list(found)


def is_plain(cls: type) -> bool:
    """Whether the objects of a class are no more than their attributes."""
    own = {name for base in cls.__mro__[:-1] for name in vars(base)}
    made: Any = cls.__new__
    if made is not object.__new__ or not own.isdisjoint(OWN_FORMS):
        return False
    return _named(cls.__module__, cls.__qualname__) is cls


def _form(value: Any, package: str) -> Any:
    cls = type(value)
    if cls.__module__.partition(".")[0] != package or isinstance(value, type) or not is_plain(cls):
        return value
    return {OBJECT: f"{cls.__module__}:{cls.__qualname__}", ATTRIBUTES: dict(vars(value))}


def _known(name: Any, package: str) -> type:
    module, _, path = name.partition(":") if isinstance(name, str) else ("", "", "")
    if module.partition(".")[0] != package:
        raise StateError(
            f"it holds an object of class {name!r:.200}, which is not of the optimizer's package {package!r}"
        )
    cls = _named(module, path)
    if not isinstance(cls, type) or not is_plain(cls):
        raise StateError(
            f"it holds an object of class {name!r:.200}, which is not here, or has a form of its own: use the version "
            f"of {package!r} that saved it"
        )
    return cls


def _named(module: str, path: str) -> Any:
    """Return what is called so in a module that is imported already; None without it."""
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, "__dict__", {}).get(part)
    return found


def _mapped(value: Any, change: Callable[[Any], Any], depth: int, last: bool = False) -> Any:
    """Return a nested value with each part changed: before what it holds, or, with ``last``, after that."""
    if depth > DEEPEST:
        return value  # which the saver refuses, by its path
    changed = _inside(value if last else change(value), lambda part: _mapped(part, change, depth + 1, last))
    return change(changed) if last else changed


def _inside(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a container with its parts changed; the same one if none is."""
    if isinstance(value, Mapping):
        parts = {key: change(part) for key, part in value.items()}
        return value if all(parts[key] is part for key, part in value.items()) else parts
    if type(value) not in SEQUENCES:
        return value
    items = [change(part) for part in value]
    if all(one is other for one, other in zip(items, value, strict=True)):
        return value
    return deque(items, value.maxlen) if isinstance(value, deque) else type(value)(items)
