"""Cells: entries of mappings and tensors as of now, to put them back."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from loopkit.base import sharded
from loopkit.engine.kept.optimizers import same_bits
from loopkit.engine.kept.witness.looks import changes_of

MISSING = object()
"""Stands for an entry that a mapping has not."""
PLAIN = (type(None), bool, int, float, complex, str, bytes)
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


def of_mapping(mapping: MutableMapping[Any, Any], tensors: Callable[[Iterable[Tensor]], Change] = of_tensors) -> Change:
    """Keep the entries of a mapping: plain values, lists, the entries of mappings within, and tensors.

    Args:
        mapping: The mapping.
        tensors: Keeps tensors.
    """
    kept = dict(mapping)
    values = tensors(value for value in kept.values() if isinstance(value, Tensor))
    within = [of_mapping(value, tensors) for value in kept.values() if type(value) is dict]
    lists = {key: copy.copy(value) for key, value in kept.items() if type(value) is list}

    def has_changed(undo: bool) -> bool:
        changed = values(undo)
        for each in within:
            changed |= each(undo)
        others = [key for key in kept if _is_other(mapping.get(key, MISSING), kept[key], lists.get(key))]
        if undo:
            mapping.update({key: lists.get(key, kept[key]) for key in others})
        return changed or bool(others)

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


def _is_other(now: Any, before: Any, items: list[Any] | None) -> bool:
    """Whether an entry has another value than before; of a list, these items."""
    if now is MISSING:
        return True
    if items is not None:
        return not is_same(now, items)
    if isinstance(before, (Tensor, dict)):
        return now is not before and not is_same(now, before)
    return not is_same(now, before)


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
