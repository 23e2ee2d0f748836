"""worker_draws: whether the workers of a ``DataLoader`` draw random numbers, which no state can hold."""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Iterable, Iterator
from multiprocessing import sharedctypes
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.utils.data import DataLoader, get_worker_info

from loopkit.base import generators
from loopkit.data import Prefetch
from loopkit.engine.kept.data.data_parts import DataParts, same
from loopkit.engine.kept.data.worker_end import end_with
from loopkit.engine.kept.witness.walk import has_attributes, walk

_flags: WeakKeyDictionary[DataLoader[Any], Any] = WeakKeyDictionary()
"""By loader, in memory that its workers share: 1 once one of them has drawn."""
_ahead: WeakKeyDictionary[DataLoader[Any], bool] = WeakKeyDictionary()
"""By loader with workers: whether its sampler draws from the global generators as it goes."""
DRAWN, COUNTED = 1, 2
"""What a flag says of a worker: it drew, or a number in its data set moved."""
_before: list[Any] = []
"""In a worker: its generators, and their states as it started."""


def has_workers(data: Any) -> bool:
    """Whether other processes make the batches."""
    return isinstance(data, DataLoader) and data.num_workers > 0


def drew(data: Any) -> bool:
    """Whether a worker of the data has drawn random numbers since the data was first `watched`."""
    return bool(_flag(data) & DRAWN)


def _flag(data: Any) -> int:
    flag = _flags.get(data) if has_workers(data) else None
    return 0 if flag is None else int(flag.value)


def watched(data: Any) -> Iterable[Any]:
    """Return the data, or a stand-in for it whose workers note whether they draw."""
    return _Watched(data) if has_workers(data) else data


def lost_when_it_begins(data: Any) -> str:
    """Name the generators that a fit over this data moves where no checkpoint can find them; empty if there is none."""
    name = type(data).__name__
    if isinstance(data, Prefetch):
        found = DataParts(data.source, states=False)
        why = "in a thread that works ahead of the batch in use"
        cure = "Give map(fn, seed=...) a function that takes a generator"
    elif has_workers(data) and (data.persistent_workers or hasattr(data, "load_state_dict")):
        found = DataParts([], SimpleNamespace(dataset=data.dataset, collate_fn=data.collate_fn), states=False)
        why = "in its workers"
        cure = "Draw by loopkit.data.seeded" + (", or leave persistent_workers out" if data.persistent_workers else "")
    else:
        return ""
    if not found.generators:
        return ""
    listed = ", ".join(path.removeprefix("function.") for path in found.generators)
    return f"{name} moves {listed} {why}, and no checkpoint holds how far: a run that is resumed draws others. {cure}"


def lost(data: Any, running: bool) -> str:
    """Name the draws of workers that a checkpoint of now lacks; empty if there is none.

    Args:
        data: The data of an epoch.
        running: The epoch is under way, and a replay of it would not make the draws again.
    """
    name = type(data).__name__
    if running and has_workers(data) and _ahead.get(data, False):
        return (
            f"the sampler of {name} draws from the global random generator for each batch, ahead of the batch in use: "
            f"a run that resumes in mid-epoch gets other samples. Give the sampler its own generator, or draw "
            f"when its iteration begins"
        )
    if _flag(data) & COUNTED and data.persistent_workers:
        return (
            f"a number in the data set of {name} moves in its workers, which live on from epoch to epoch "
            f"(persistent_workers=True), and no checkpoint holds it: a resumed run starts without it. Leave "
            f"persistent_workers out, or let set_epoch(epoch) set it"
        )
    if not drew(data):
        return ""
    if data.persistent_workers:
        why = "live on from epoch to epoch (persistent_workers=True)"
        cure = "leave persistent_workers out"
    elif running and hasattr(data, "load_state_dict"):
        why = "have generators that its state leaves out"
        cure = "save between epochs"
    else:
        return ""
    return (
        f"the workers of {name} draw random numbers and {why}, so no checkpoint holds where they are: a run that is "
        f"resumed draws others. Draw by loopkit.data.seeded, or {cure}"
    )


class _Watched:
    """A ``DataLoader`` whose workers, as they start, are told to note whether they draw."""

    def __init__(self, data: DataLoader[Any]) -> None:
        self._data = data

    def __iter__(self) -> Iterator[Any]:
        data = self._data
        if data.persistent_workers and getattr(data, "_iterator", None) is not None:
            return iter(data)  # they run already
        if data not in _flags:
            _flags[data] = sharedctypes.RawValue("b", 0)
        flag = _flags[data]
        attributes = vars(data)
        before = data.collate_fn, data.worker_init_fn
        attributes["collate_fn"] = _Collate(data.collate_fn, flag)
        attributes["worker_init_fn"] = _Init(data.worker_init_fn)
        try:
            batches = iter(data)
        finally:
            attributes["collate_fn"], attributes["worker_init_fn"] = before
        end_with(batches)
        if data in _ahead or hasattr(data, "load_state_dict"):
            return batches
        return itertools.chain(self._first(batches), batches)

    def _first(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the first batch, and note whether the sampler, which is ahead by then, draws as it is asked for."""
        before = generators.save()
        for batch in batches:
            _ahead[self._data] = not same(generators.save(), before)
            yield batch
            return


class _Init:
    """Starts a worker, and keeps the states of the generators as they are then."""

    def __init__(self, init: Any) -> None:
        self._init = init

    def __call__(self, worker: int) -> None:
        if self._init is not None:
            self._init(worker)
        info = get_worker_info()
        own = DataParts([], None if info is None else SimpleNamespace(dataset=info.dataset), states=False)
        _before[:] = [own, _states(own), None if info is None else _numbers(info.dataset)]


class _Collate:
    """Makes a batch of samples in a worker, and notes whether that, or one before it, drew."""

    def __init__(self, collate: Any, flag: Any) -> None:
        self._collate = collate
        self._flag = flag

    def __call__(self, samples: Any) -> Any:
        batch = self._collate(samples)
        if not _before:
            return batch
        own, states, numbers = _before
        if not self._flag.value & DRAWN and not same(_states(own), states):
            self._flag.value |= DRAWN
        info = get_worker_info()
        if numbers is not None and info is not None:  # of the first batch only
            _before[2] = None
            if _numbers(info.dataset) != numbers:
                self._flag.value |= COUNTED
        return batch


def _numbers(dataset: Any) -> dict[str, Any]:
    """The public numbers in a data set, by path."""
    volatile = getattr(type(dataset), "volatile", ())
    found = walk(dataset, deep=2, enter=lambda each: has_attributes(each.value))
    return {
        each.path: each.value
        for each in found
        if type(each.value) in (int, float) and "_" not in (each.path[:1], each.key[:1]) and each.key not in volatile
    }


def _states(own: DataParts) -> list[Any]:
    """The states of the generators of a worker: the global ones of the CPU, and its copy of the data set."""
    numpy = sys.modules.get("numpy")
    shared = None if numpy is None else generators.state_of(numpy.random.mtrand._rand)
    return [torch.get_rng_state(), random.getstate(), shared, own.saved()["generators"]]
