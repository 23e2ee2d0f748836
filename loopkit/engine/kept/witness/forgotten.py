"""forgotten: attributes of an object that its ``state_dict`` leaves out, although they move in training.

A state has a form of its own, so this is no proof: an attribute counts as held if anything in the state has a similar
name, or an equal value.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from loopkit.engine.kept.witness.looks import Look, Scope, look_at
from loopkit.engine.kept.witness.walk import MAPPINGS, SEQUENCES, SETS

DEEP = 6
MOST = 10_000
"""Values of a state that are compared; a larger one counts as holding everything."""
OWN = Scope(deep=1)
"""Only attributes of the object itself are compared with its state, and items of its containers."""
NUMBERS = (bool, int, float)


class Contents:
    """The names and values in a state."""

    def __init__(self, state: Any) -> None:
        self._names: set[str] = set()
        self._values: list[Any] = []
        self.whole = True
        """Whether all of the state was read."""
        for name, value in _inside(state, 0):
            if len(self._values) == MOST:
                self.whole = False
                break
            self._names.add(_plain_name(name))
            self._values.append(value)

    def hold(self, path: str, look: Look) -> bool:
        """Whether the state holds an attribute, as far as can be told."""
        if not self.whole or look.kind not in HELD:
            return True
        name = _plain_name(path.partition(".")[0].partition("[")[0].partition("{")[0])
        return any(_alike(name, each) for each in self._names) or any(HELD[look.kind](look, v) for v in self._values)


def _inside(value: Any, depth: int) -> Iterator[tuple[str, Any]]:
    """Yield the values in a state, each with the name that it has there."""
    kind = type(value)
    if depth == DEEP:
        return
    if isinstance(value, Mapping):
        for key, each in list(value.items()):
            yield str(key), each
            yield from _inside(each, depth + 1)
    elif kind in SEQUENCES or kind in SETS:
        for each in list(value):
            yield "", each
            yield from _inside(each, depth + 1)


def _plain_name(name: str) -> str:
    return name.replace("_", "").lower()


def _alike(one: str, other: str) -> bool:
    """Whether two names may be of one thing, such as ``_best`` and ``best_value``."""
    short, long = sorted((one, other), key=len)
    return short == long or (len(short) > 2 and short in long)


def _equal(look: Look, value: Any) -> bool:
    if isinstance(value, Tensor):
        value = value.item() if value.numel() == 1 and value.device.type == "cpu" else None
    if isinstance(look.state, NUMBERS) and isinstance(value, NUMBERS):
        return look.state == value or (math.isnan(look.state) and math.isnan(value))
    return type(value) is type(look.state) and bool(value == look.state)


def _same_items(look: Look, value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == look.length
    kind = type(value)
    return (kind in MAPPINGS or kind in SEQUENCES or kind in SETS) and len(value) == look.length


def _same_shape(look: Look, value: Any) -> bool:
    tensor = look.state[0]()
    return tensor is None or (isinstance(value, Tensor) and value.shape == tensor.shape)


def _is_array(look: Look, value: Any) -> bool:
    found = look_at(value)
    return found is not None and found.kind in ("array", "tensor", "values")


def _is_state(look: Look, value: Any) -> bool:
    """Whether a value may be the state of a generator."""
    return isinstance(value, (Tensor, tuple, list, bytes)) or (isinstance(value, Mapping) and "state" in value)


def _is_of_learner(look: Look, value: Any) -> bool:
    return isinstance(value, Mapping) and "models" in value


HELD = {
    "value": _equal,
    "values": _same_items,
    "tensor": _same_shape,
    "array": _is_array,
    "generator": _is_state,
    "learner": _is_of_learner,
}
"""By the kind of a look: whether a value of a state may be what it shows."""
