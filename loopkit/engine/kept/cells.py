"""Cells: values with containers and tensors within, as of now, to put them back."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from itertools import chain, repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from loopkit.base import sharded
from loopkit.engine.kept.optimizers import same_bits
from loopkit.engine.kept.witness.looks import changes_of

MISSING = object()
"""Stands for an entry that a container has not."""
PLAIN = (type(None), bool, int, float, complex, str, bytes, set, frozenset)
Change = Callable[[bool], bool]
"""Returns whether something has changed; if its argument is true, puts it back."""


def of_tensors(tensors: Iterable[Tensor]) -> Change:
    """Keep the values of tensors; only plain numbers in memory are kept."""
    kept = [(tensor, _copied(tensor)) for tensor in tensors if _can_be_kept(tensor)]

    def has_changed(undo: bool) -> bool:
        changed = [(tensor, value) for tensor, value in kept if not same_bits(sharded.part(tensor), value)]
        for tensor, value in changed if undo else ():
            _write(tensor, value)
        return bool(changed)

    return has_changed


def by_version(tensors: Iterable[Tensor]) -> Change:
    """Note the versions of tensors, whose values cannot be put back."""
    kept = [(tensor, changes_of(tensor)) for tensor in tensors]
    return lambda undo: any(changes_of(tensor) != before for tensor, before in kept)


def of_value(look: Callable[[], Any], tensors: Callable[[Iterable[Tensor]], Change] = of_tensors) -> Change:
    """Keep a value: mappings, lists and tuples at any depth, tensors, and plain values.

    Args:
        look: Returns the value; called anew after a change.
        tensors: Keeps tensors.
    """
    before = _noted(look(), tensors)

    def has_changed(undo: bool) -> bool:
        if not _is_other(look(), before):
            return False
        if undo:
            _put_back(look(), before)
        return True

    return has_changed


def is_same(one: Any, other: Any) -> bool:
    """Whether two saved forms have equal values; objects that cannot be compared count as equal."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return same_bits(sharded.part(one), sharded.part(other))
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(is_same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(is_same, one, other))
    return not isinstance(one, PLAIN) or one == other or one != one


class _Noted(NamedTuple):
    """A tensor and its values."""

    tensor: Tensor
    change: Change


def _noted(value: Any, tensors: Callable[[Iterable[Tensor]], Change]) -> Any:
    """A copy of containers, with each tensor noted; parameters and other objects are themselves."""
    if isinstance(value, Tensor) and not isinstance(value, torch.nn.Parameter):
        return _Noted(value, tensors([value]))
    if isinstance(value, dict):
        return {key: _noted(each, tensors) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_noted(each, tensors) for each in value)
    return copy.copy(value) if type(value) is set else value


def _is_other(now: Any, before: Any) -> bool:
    """Whether a value differs from what was noted."""
    if isinstance(before, _Noted):
        return (now is not before.tensor and not is_same(now, before.tensor)) or before.change(False)
    if isinstance(before, dict):
        if not isinstance(now, dict) or now.keys() != before.keys():
            return True
        return any(_is_other(now[key], each) for key, each in before.items())
    if type(before) in (list, tuple):
        return type(now) is not type(before) or len(now) != len(before) or any(map(_is_other, now, before))
    return now is not before and not is_same(now, before)


def _put_back(now: Any, before: Any) -> Any:
    """Return the value that was noted, in the containers that are there now if they fit."""
    if isinstance(before, _Noted):
        before.change(True)
        return before.tensor
    if isinstance(before, dict):
        found = now if isinstance(now, dict) else {}
        for key in [key for key in found if key not in before]:
            del found[key]
        for key, each in before.items():
            found[key] = _put_back(found.get(key), each)
        return found
    if type(before) in (list, tuple):
        there = now if isinstance(now, (list, tuple)) else ()
        items = [_put_back(*pair) for pair in zip(chain(there, repeat(None)), before, strict=False)]
        if type(before) is list and type(now) is list:
            now[:] = items
            return now
        return type(before)(items)
    return before


def _can_be_kept(tensor: Tensor) -> bool:
    if is_lazy(tensor) or tensor.is_meta or tensor.is_quantized:
        return False
    part = sharded.part(tensor)
    return part.layout is torch.strided and type(part) in (Tensor, torch.nn.Parameter, torch.nn.Buffer)


def _copied(tensor: Tensor) -> Tensor:
    """A copy in main memory, where there is more of it than on a device."""
    return sharded.part(tensor).detach().to("cpu", copy=True)


@torch.no_grad()
def _write(tensor: Tensor, value: Tensor) -> None:
    part = sharded.part(tensor)
    if part.shape == value.shape:
        part.copy_(value)
    else:
        part.set_(value.to(part.device))  # type: ignore[call-overload]
