"""iterators: the place of an iterator that an object holds, told without a step of it."""

from __future__ import annotations

import gc
import itertools
import operator
import types
from typing import Any

from loopkit.base.generators import comparable_state, is_generator

LOADER = "torch.utils.data.dataloader"
"""The module of the iterators of a ``DataLoader``."""
_EXAMPLES: tuple[Any, ...] = (
    *(iter([]), iter(()), iter(range(0)), iter(range(2**70)), iter(""), iter(b""), iter(set()), reversed([])),
    *(iter({}), iter({}.values()), iter({}.items())),
)
OVER_ITEMS = tuple(type(each) for each in _EXAMPLES)
"""Kinds that know how many items are left."""
OVER_ITERATORS = (
    *(enumerate, filter, map, reversed, zip),
    *(itertools.accumulate, itertools.chain, itertools.compress, itertools.cycle, itertools.dropwhile),
    *(itertools.filterfalse, itertools.groupby, itertools.islice, itertools.pairwise, itertools.starmap),
    *(itertools.takewhile, itertools.zip_longest),
)
"""Kinds that step through other iterators."""
DEEP = 6
"""Iterators inside one another that are followed."""


def is_iterator(value: Any) -> bool:
    """Whether a value is an iterator of Python's, or of a ``DataLoader``."""
    kind = type(value)
    return kind in OVER_ITEMS or kind in OVER_ITERATORS or kind is types.GeneratorType or _is_of_loader(value)


def place_of(iterator: Any, deep: int = DEEP) -> Any:
    """The place of an iterator, in a form that can be compared."""
    kind = type(iterator)
    if _is_of_loader(iterator):
        return vars(iterator)["_num_yielded"]
    if kind in OVER_ITEMS:
        return operator.length_hint(iterator)
    last = None if kind is not types.GeneratorType else getattr(iterator.gi_frame, "f_lasti", "ended")
    held = gc.get_referents(iterator) if deep else []
    return last, tuple(_place_in(each, kind, deep) for each in held)


def _place_in(value: Any, kind: type, deep: int) -> Any:
    """The share of a value in the place of an iterator that holds it."""
    if is_iterator(value):
        return place_of(value, deep - 1)
    if kind in (zip, map) and type(value) is tuple:
        return tuple(_place_in(each, kind, deep) for each in value)
    if kind is itertools.cycle and type(value) is list:
        return len(value)
    if kind is types.GeneratorType and is_generator(value):
        return comparable_state(value)
    return value if kind is types.GeneratorType and type(value) in (bool, int, float) else None


def _is_of_loader(value: Any) -> bool:
    kind = type(value)
    return kind.__module__ == LOADER and hasattr(kind, "__next__") and "_num_yielded" in vars(value)
