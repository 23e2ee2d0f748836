"""torchdata_loaders: loaders of torchdata draw the order of an epoch again as they load a state."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.data import IterableDataset

from loopkit.base import generators
from loopkit.engine.kept.data.data_parts import LONG, DataParts, same
from loopkit.engine.kept.witness.walk import MAPPINGS, SEQUENCES, SETS, Found, walk

DEEP = 40
"""Attributes between a loader and a part of its stream: each step of a stream holds the one before it."""


def is_stateful_loader(data: Any) -> bool:
    """Whether it is a ``StatefulDataLoader``, whose state is one of an epoch.

    Between epochs its ``state_dict`` would begin the next one. A state of an epoch that has ended, or was left early,
    makes samplers and datasets with a state begin the next epoch where the last one was.
    """
    return any(each.__module__.startswith("torchdata.stateful_dataloader") for each in type(data).__mro__)


def is_of_nodes(data: Any) -> bool:
    """Whether it is a ``Loader`` of ``torchdata.nodes``."""
    return hasattr(data, "restart_on_stop_iteration")


def is_stream(value: Any) -> bool:
    """Whether it is a stream, which nobody but the engine tells the epoch."""
    return isinstance(value, IterableDataset) or type(value).__module__.startswith("datasets.")


def buffer_lost(data: Any) -> str:
    """Describe a stream that is shuffled in a buffer, whose samples a state leaves out; empty if there is none.

    The streams of Hugging Face ``datasets`` fill the buffer anew as they load a state: the samples in it are lost.
    """
    if not (is_stateful_loader(data) or is_of_nodes(data)):
        return ""
    if not any(map(_is_buffer, walk(data, deep=DEEP, enter=_is_short))):
        return ""
    name = type(data).__name__
    return (
        f"the stream in {name} is shuffled in a buffer, and its state leaves out the samples in it: a run that resumes "
        f"in mid-epoch would never see them. Give torch.utils.data.DataLoader in place of {name}: it reads the batches "
        f"of the epoch again, and resumes exactly"
    )


def _is_buffer(found: Found) -> bool:
    """Whether it is the buffer of a shuffle, with more than one sample."""
    value = found.value
    return "BufferShuffled" in type(value).__name__ and vars(value).get("buffer_size", 0) != 1


def _is_short(found: Found) -> bool:
    """Whether to look inside a value: not into lists of samples, nor into running workers."""
    kind = type(found.value)
    if kind in MAPPINGS or kind in SEQUENCES or kind in SETS:
        return len(found.value) <= LONG
    return found.key not in ("_iterator", "multiprocessing_context")


def has_begun(data: Any) -> bool:
    """Whether a ``Loader`` of ``torchdata.nodes`` has begun an epoch; before that, a state would begin one."""
    return vars(data).get("_it") is not None


def end_epoch(data: Any, state: Any) -> None:
    """Load the state of an epoch that is over into a ``Loader`` of ``torchdata.nodes``, so that the next one is new.

    The loader alone draws the order of the epoch in the state once more, and that of the next one from where the
    random generators are then.
    """
    before = generators.save()
    attributes = vars(data)
    restarts = data.restart_on_stop_iteration
    data.load_state_dict(state)
    attributes["restart_on_stop_iteration"] = False
    try:
        iter(data).has_next()
    finally:
        attributes["restart_on_stop_iteration"] = restarts
        generators.restore(before)


@contextmanager
def drawn_again(data: Any, parts: DataParts, workers_running: bool) -> Iterator[None]:
    """Inside, samplers without a state in a ``StatefulDataLoader`` draw the order that the epoch began with.

    The loader calls ``iter()`` of them up to three times as it loads a state, and takes the last order; as it begins an
    epoch, it calls it twice with workers, and once otherwise.

    Args:
        data: The loader.
        parts: The random generators in it.
        workers_running: Whether the epoch began with workers that ran already.
    """
    taken = 2 if data.num_workers and not workers_running else 1
    places = [(data, "sampler"), (data, "batch_sampler"), (data.batch_sampler, "sampler")]
    held = [(vars(owner), name) for owner, name in places if name in getattr(owner, "__dict__", {})]
    before = [(attributes, name, attributes[name]) for attributes, name in held]
    stands = {id(value): _Again(value, parts, taken) for _, _, value in before if _draws(value)}
    for attributes, name, value in before:
        attributes[name] = stands.get(id(value), value)
    try:
        yield
    finally:
        for attributes, name, value in before:
            attributes[name] = value
        for stand in stands.values():
            stand.ended = True


def draw_order(batches: Any) -> None:
    """Let the sampler of a ``StatefulDataLoader`` in this process draw its order, which waits for its first batch."""
    ahead = getattr(batches, "_sampler_iter", None)
    if isinstance(ahead, itertools.islice):
        vars(batches)["_sampler_iter"] = itertools.chain(list(itertools.islice(ahead, 1)), ahead)


def _draws(sampler: Any) -> bool:
    """Whether a sampler has no state of its own, and torchdata goes over it again."""
    if sampler is None or type(sampler).__module__.startswith(("torchdata.", "torch.utils.data.dataloader")):
        return False
    return not (callable(getattr(sampler, "state_dict", None)) and callable(getattr(sampler, "load_state_dict", None)))


class _Again:
    """Stands in for a sampler, and draws the same order in each iteration from a given one on, until it has ended."""

    def __init__(self, sampler: Any, parts: DataParts, taken: int) -> None:
        self.sampler = sampler
        self.ended = False
        self._parts = parts
        self._taken = taken
        self._calls = 0
        self._before: Any = None
        """Where the generators were in the iteration that counts, if ``iter()`` drew."""

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        if self.ended:
            return self._over()
        self._calls += 1
        if self._before is not None:
            everywhere, own = self._before
            generators.restore(everywhere)
            self._parts.load_generators(own)
        before = generators.save(), self._parts.saved()
        indices = self._over()
        if self._calls == self._taken and not same([generators.save(), self._parts.saved()], list(before)):
            self._before = before
        return indices

    def _over(self) -> Iterator[Any]:
        indices: Iterator[Any] = iter(self.sampler)
        return indices
