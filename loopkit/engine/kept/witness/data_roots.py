"""data_roots: the parts of a phase's data that the witness looks at: loaders, samplers, data sets, functions."""

from __future__ import annotations

import types
from collections.abc import Collection, Iterator
from typing import Any

from torch.utils.data import DataLoader

from loopkit.base.generators import is_generator
from loopkit.data import ResumableSampler
from loopkit.engine.kept.data.data_parts import DEEP, LONG, has_own_state, is_told_epochs, named_by
from loopkit.engine.kept.witness.looks import Scope, is_learner_of
from loopkit.engine.kept.witness.root import Root
from loopkit.engine.kept.witness.walk import MAPPINGS, PLAIN, SEQUENCES, SETS, Found, can_hold

CURE = (
    "Give its class state_dict and load_state_dict, or let set_epoch(epoch) set it; for a cache, volatile = ({0}). A "
    "generator or an object with a state there is saved by itself"
)
CURE_OF_A_LIST = "Shuffle it in a function that returns the data of an epoch: fit(make_data, ...)"
OF_A_LOADER = (
    "_iterator",
    "_IterableDataset_len_called",
    "_initial_iter_for_state_dict",
    "multiprocessing_context",
    "next_iter_state",
    "timeout",
)
"""Attributes of a ``DataLoader`` that belong to one iteration, or that the engine sets."""
OF_A_SAMPLER = ("_start",)
"""Attributes of a `ResumableSampler` that its place determines."""
SAVED = ("loopkit.", "torchdata.")
"""Packages whose objects have a state, or none that moves; their attributes are looked at."""
SHUT = ("datasets", "fsspec", "h5py", "lmdb", "pandas", "pyarrow", "zarr")
"""Packages whose objects are tables and files."""
ORDER = Scope(deep=0, lazy=True)
"""Of a list, which holds batches, only the order counts."""
SCOPE = Scope(deep=DEEP, long=LONG, held_by=named_by, lazy=True)


def is_looked_at(data: Any) -> bool:
    """Whether data is looked at: no tuple, which holds batches only, no list of one batch, and no data with a state."""
    if type(data) is list:
        return len(data) != 1 or isinstance(data[0], PLAIN)
    return type(data) is not tuple and not has_own_state(data)


def name_of_data(phase: str) -> str:
    """The name of the data's root."""
    return f"the data of phase {phase!r}"


def root_of_data(phase: str, data: Any, owned: Collection[int], models: Any) -> Root:
    """Return the root of a phase's data.

    Args:
        phase: The name of the phase.
        data: The data, or the function that makes it.
        owned: The ids of objects that are saved, or looked at otherwise.
        models: The learner's models.
    """
    if type(data) is list:
        return Root(name_of_data(phase), data, CURE_OF_A_LIST, _Saved(owned, models), scope=ORDER)
    return Root(name_of_data(phase), data, CURE, _Saved(owned, models), scope=SCOPE)


class _Saved:
    """Whether a value that data holds is saved, or does not count.

    Args:
        owned: The ids of objects that are saved, or looked at otherwise.
        models: The learner's models.
    """

    def __init__(self, owned: Collection[int], models: Any) -> None:
        self._owned = owned
        self._models = models

    def __call__(self, found: Found) -> bool:
        value = found.value
        if isinstance(value, PLAIN):
            return self._is_of_a_package(found)
        if id(value) in self._owned or is_generator(value) or has_own_state(value):
            return True
        if type(value).__module__.partition(".")[0] in SHUT or is_learner_of(value, self._models):
            return True
        return self._is_of_a_package(found)

    def _is_of_a_package(self, found: Found) -> bool:
        """Whether a package answers for an attribute of its own object."""
        owner = found.owner
        if type(owner).__module__.startswith(SAVED) and not _holds_objects(found.value):
            return True
        if isinstance(owner, DataLoader) and found.key in OF_A_LOADER:
            return True
        if isinstance(owner, ResumableSampler) and found.key in OF_A_SAMPLER:
            return True
        return is_told_epochs(owner) and found.key in names_in_method(type(owner), "set_epoch")


def _holds_objects(value: Any) -> bool:
    kind = type(value)
    if kind in SEQUENCES or kind in SETS:
        return any(can_hold(each) for each in value)
    if kind in MAPPINGS:
        return any(can_hold(each) for each in value.values())
    return can_hold(value) or isinstance(value, types.FunctionType)


def names_in_method(kind: type, method: str) -> frozenset[str]:
    """Return the names in the code of a method of a class, and in the methods that it names."""
    names: set[str] = set()
    ahead = [method]
    while ahead:
        for function in _functions(kind, ahead.pop()):
            new = set(function.__code__.co_names) - names
            names |= new
            ahead += new
    return frozenset(names)


def _functions(kind: type, name: str) -> Iterator[types.FunctionType]:
    for base in kind.__mro__:
        found = vars(base).get(name)
        if isinstance(found, types.FunctionType):
            yield found
