"""The kinds of the values in a saved state, checked before any of it is used."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

Kind = tuple[str, Callable[[Any], bool]]
"""Its name, and a function that returns whether a value is one."""


def is_number(value: Any) -> bool:
    """Whether it is an integer, a float, a scalar of NumPy or a tensor of one element; not a boolean."""
    if isinstance(value, Tensor):
        return value.numel() == 1
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def is_plain(value: Any) -> bool:
    """Whether it is a mapping of names to None, booleans, numbers of 64 bits, strings, and lists of such."""
    if not _is_named(value):
        return False
    for entry in value.values():
        parts = entry if type(entry) is list else [entry]
        if not all(map(_is_simple, parts)):
            return False
    return True


def _is_simple(value: Any) -> bool:
    if type(value) is int:
        return value.bit_length() <= 64
    return value is None or type(value) in (bool, float, str)


def _is_named(value: Any) -> bool:
    return isinstance(value, Mapping) and all(type(key) is str for key in value)


def _are_mappings(value: Any) -> bool:
    return _is_named(value) and all(isinstance(part, Mapping) for part in value.values())


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


ANY: Kind = ("anything", lambda v: True)
COUNT: Kind = ("a count", _is_count)
COUNTS: Kind = ("a list of counts", lambda v: type(v) is list and all(map(_is_count, v)))
FLAG: Kind = ("true or false", lambda v: type(v) is bool)
LIST: Kind = ("a list", lambda v: type(v) is list)
MAPPING: Kind = ("a mapping", lambda v: isinstance(v, Mapping))
NAMED: Kind = ("mappings by name", _are_mappings)
NUMBER: Kind = ("a finite number", lambda v: is_number(v) and math.isfinite(v))
NUMBERS: Kind = ("numbers by name", lambda v: _is_named(v) and all(map(is_number, v.values())))
SIZE: Kind = ("a count above 0", lambda v: _is_count(v) and v > 0)
TEXT: Kind = ("a string", lambda v: type(v) is str)


def wrong(where: str, value: Any, kinds: Mapping[str, Kind], *, more: bool = True) -> list[str]:
    """List the values that are missing, not of their kind, or without a kind, in the mapping ``value`` at ``where``.

    >>> wrong("progress", {"steps": -1}, {"steps": COUNT, "epochs": COUNT})
    ['progress.steps is -1, not a count', 'progress.epochs is missing']
    """
    if not isinstance(value, Mapping):
        return [f"{where or 'the state'} is {shown(value)}, not a mapping"]
    path = f"{where}." if where else ""
    problems = []
    for key, (what, right) in kinds.items():
        if key not in value:
            problems.append(f"{path}{key} is missing")
        elif not right(value[key]):
            problems.append(f"{path}{key} is {shown(value[key])}, not {what}")
    if not more:
        unknown = [key for key in value if key not in kinds]
        problems += [f"{path}{key!s:.40} is unknown" for key in unknown]
    return problems


def shown(value: Any) -> str:
    """A value in a message: short, whatever it is."""
    if type(value) is int and value.bit_length() > 64:
        return f"an integer of {value.bit_length()} bits"
    if value is None or isinstance(value, (bool, int, float, str)):
        return f"{value!r:.60}"
    return f"a {type(value).__name__}"
