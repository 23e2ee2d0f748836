"""Python's state around a recording: the changes of a step, and how they are undone."""

from __future__ import annotations

import dis
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

LEAVES = (Tensor, type, BuiltinFunctionType, ModuleType, str, bytes, int, float, complex, bool)
TRUSTED = ("torch", "loopkit", "loopkit_whole_step", "builtins")
"""Packages whose own functions are not looked into."""
ENGINE = ("loopkit.engine", "loopkit.learner")
"""Modules whose objects are not looked into."""
OWN = {nn.Module: ("_parameters", "_buffers", "_modules"), torch.optim.Optimizer: ("state", "param_groups")}
"""Attributes that are handled elsewhere."""
DEPTH = 6


class PythonState:
    """The attributes of objects, the contents of their lists, dicts and sets, and values that their functions read from
    outside.

    Args:
        roots: The objects, by the name that messages have for them.
    """

    def __init__(self, roots: Mapping[str, Any]) -> None:
        self._seen: dict[int, Any] = {}
        self._held: list[tuple[str, Callable[[], Any], Callable[[Any], Any], Any, bool]] = []
        self._outside = False
        """Whether it looks at what functions read from outside."""
        for name, root in roots.items():
            self._look(name, root, 0)

    def _hold(self, name: str, read: Callable[[], Any], write: Callable[[Any], Any]) -> None:
        self._held.append((name, read, write, read(), self._outside))

    def _look(self, name: str, value: Any, depth: int) -> None:
        if value is None or isinstance(value, LEAVES) or id(value) in self._seen or depth > DEPTH:
            return
        if type(value).__module__.startswith(ENGINE):
            return
        self._seen[id(value)] = value
        if isinstance(value, MethodType):
            self._look(name, value.__func__, depth)
        elif isinstance(value, FunctionType):
            self._look_at_function(name, value, depth)
        elif isinstance(value, dict):
            self._hold(name, partial(dict, value), partial(_refill, value))
            for key, part in list(value.items()):
                self._look(f"{name}[{key!r}]", part, depth + 1)
        elif isinstance(value, (list, deque, set)):
            self._hold(name, partial(type(value), value), partial(_refill, value))
            for number, part in enumerate(value):
                self._look(f"{name}[{number}]", part, depth + 1)
        elif isinstance(value, tuple):
            for number, part in enumerate(value):
                self._look(f"{name}[{number}]", part, depth + 1)
        elif type(getattr(value, "__dict__", None)) is dict and not isinstance(value, Mapping):  # list[int] has a proxy
            attributes = vars(value)
            self._hold(name, partial(dict, attributes), partial(_refill, attributes))
            for key, part in list(attributes.items()):
                if not any(isinstance(value, cls) and key in own for cls, own in OWN.items()):
                    self._look(f"{name}.{key}", part, depth + 1)
            for cls in type(value).__mro__:
                if cls.__module__.partition(".")[0] not in TRUSTED:
                    for part in vars(cls).values():
                        if isinstance(part, FunctionType):
                            self._look(name, part, depth + 1)

    def _look_at_function(self, name: str, function: FunctionType, depth: int) -> None:
        """Its closure, and the globals that it names."""
        if (function.__module__ or "").partition(".")[0] in TRUSTED:
            return
        within, self._outside = self._outside, True
        for word, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            read = partial(getattr, cell, "cell_contents", ...)
            self._hold(f"{word}, which {name} uses", read, partial(setattr, cell, "cell_contents"))
            self._look(f"{word}, which {name} uses", read(), depth + 1)
        variables = function.__globals__
        named = (each.argval for each in dis.get_instructions(function) if each.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
        for word in dict.fromkeys(named):
            if word in variables and not isinstance(value := variables[word], (type, ModuleType, Tensor)):
                self._hold(f"the global {word}", partial(variables.get, word), partial(variables.__setitem__, word))
                self._look(f"the global {word}", value, depth + 1)
        self._outside = within

    def changes(self, outside: bool = False) -> Iterator[str]:
        """The names of changed values; with ``outside`` only the ones that functions read from outside."""
        for name, read, _, before, is_outside in self._held:
            if outside > is_outside:
                continue
            now = read()
            if isinstance(before, dict):
                for key in (*before, *(key for key in now if key not in before)):
                    if not _same(before.get(key, ...), now.get(key, ...)):
                        yield f"{name}.{key}"
            elif isinstance(before, set):
                if before != now:
                    yield name
            elif isinstance(before, (list, deque)):
                if len(before) != len(now) or not _alike(before, now):
                    yield name
            elif not _same(before, now):
                yield name

    def put_back(self) -> None:
        """Make everything as it was."""
        for _, read, write, before, _ in self._held:
            if isinstance(before, (dict, list, deque, set)) or not _same(before, read()):
                write(before)


def _refill(live: Any, before: Any) -> None:
    """Make a container hold what it held."""
    if isinstance(live, list):
        live[:] = before
    else:
        live.clear()
        (live.extend if isinstance(live, deque) else live.update)(before)


def _alike(before: Any, now: Any) -> bool:
    return all(_same(one, other) for one, other in zip(before, now, strict=True))


def _same(one: Any, other: Any) -> bool:
    """Whether a value is the same; tensors are the same if they are one object."""
    if one is other:
        return True
    if isinstance(one, Tensor) or isinstance(other, Tensor) or type(one) is not type(other):
        return False
    if isinstance(one, (str, bytes, int, float, complex, bool)):
        return bool(one == other) or (one != one and other != other)
    if isinstance(one, tuple):
        return len(one) == len(other) and _alike(one, other)
    return isinstance(one, MethodType) and bool(one == other)
