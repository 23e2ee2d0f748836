"""objects: plain objects in the state of an optimizer, saved by their attributes, and made again from them.

Tensors of a class with several tensors within, such as states of 8 bits, are saved by these, if their package has
declared the class safe to load, by ``torch.serialization.add_safe_globals``.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import torch
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
TENSOR_FORM = {".tensor_class", ".tensors", ".context", ".size", ".stride"}
"""The keys of the saved form of a tensor that is made of others."""
DEEPEST = 100
SEQUENCES = (list, tuple, deque)


def taken_apart(value: Any, package: str) -> Any:
    """Return a value with the saved form of each object of a package in its place; a value without any is the same one.

    Args:
        value: The state of an optimizer.
        package: The top package of the optimizer's class; objects of other classes stay as they are.
    """
    return _mapped(value, lambda each: _form(each, package), 0)


def put_together(value: Any, package: str, move: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> Any:
    """Undo `taken_apart`, with tensors of the objects moved.

    Nothing is imported, and no code of the class runs but ``__tensor_unflatten__``.

    Raises:
        StateError: A class is unknown here, of another package, or not one whose objects `taken_apart` saves.
    """

    def moved(parts: Any) -> Any:
        return _mapped(parts, lambda part: move(part) if isinstance(part, Tensor) else part, 0)

    def made(each: Any) -> Any:
        if _is_tensor_form(each):
            return _tensor(each, moved(each[".tensors"]), package)
        if not _is_object_form(each):
            return each
        cls = _known(each[OBJECT], package, is_plain)
        value: Any = object.__new__(cls)
        vars(value).update(moved(each[ATTRIBUTES]))
        return value

    return _mapped(value, made, 0, last=True)


def problems(value: Any, package: str) -> list[str]:
    """List the classes of a saved form that are not here, in words."""
    found: dict[str, None] = {}

    def look(each: Any) -> Any:
        try:
            if _is_tensor_form(each):
                _known(each[".tensor_class"], package, is_made_of_tensors)
            elif _is_object_form(each):
                _known(each[OBJECT], package, is_plain)
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


def is_made_of_tensors(cls: type) -> bool:
    """Whether tensors of a class consist of others, and its package has declared it safe to load."""
    if not issubclass(cls, Tensor) or not hasattr(cls, "__tensor_unflatten__"):
        return False
    if cls.__module__.partition(".")[0] == "torch":  # a tensor over several processes is saved by its shares
        return False
    return cls in torch.serialization.get_safe_globals() and _named(cls.__module__, cls.__qualname__) is cls


def tensors_within(value: Tensor) -> dict[str, Tensor]:
    """Return the tensors that a tensor consists of; none, if it is one of torch's own."""
    if not is_made_of_tensors(type(value)):
        return {}
    each: Any = value
    return {name: getattr(value, name) for name in each.__tensor_flatten__()[0]}


def _form(value: Any, package: str) -> Any:
    cls = type(value)
    if cls.__module__.partition(".")[0] != package or isinstance(value, type):
        return value
    name = f"{cls.__module__}:{cls.__qualname__}"
    if is_made_of_tensors(cls):
        context = value.__tensor_flatten__()[1]
        shape = {".size": tuple(value.size()), ".stride": tuple(value.stride())}
        return {".tensor_class": name, ".tensors": tensors_within(value), ".context": context, **shape}
    if not is_plain(cls):
        return value
    return {OBJECT: name, ATTRIBUTES: dict(vars(value))}


def _is_object_form(value: Any) -> bool:
    return type(value) is dict and value.keys() == {OBJECT, ATTRIBUTES}


def _is_tensor_form(value: Any) -> bool:
    return type(value) is dict and value.keys() == TENSOR_FORM


def _tensor(form: Mapping[str, Any], tensors: Any, package: str) -> Tensor:
    """Make a tensor again from the tensors within."""
    cls: Any = _known(form[".tensor_class"], package, is_made_of_tensors)
    try:
        made = cls.__tensor_unflatten__(tensors, form[".context"], form[".size"], form[".stride"])
        fits = type(made) is cls and tensors_within(made).keys() == tensors.keys()
    except Exception as error:
        raise StateError(f"its tensor of class {form['.tensor_class']!r:.200} cannot be made again: {error}") from error
    if not fits:
        raise StateError(f"its tensor of class {form['.tensor_class']!r:.200} cannot be made again from its parts")
    return made  # type: ignore[no-any-return]


def _known(name: Any, package: str, fits: Callable[[type], bool]) -> type:
    module, _, path = name.partition(":") if isinstance(name, str) else ("", "", "")
    if module.partition(".")[0] != package:
        raise StateError(
            f"it holds an object of class {name!r:.200}, which is not of the optimizer's package {package!r}"
        )
    cls = _named(module, path)
    if not isinstance(cls, type) or not fits(cls):
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
