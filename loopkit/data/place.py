"""Where a loader is in its data, which share of them a process takes, and in which order."""

from __future__ import annotations

import copy
import hashlib
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.utils.data import Sampler

from loopkit.base.batches import describe
from loopkit.errors import EmptyDataError, LoopkitError


class LoaderError(LoopkitError, ValueError):
    """A loader cannot be made of these arguments, or a saved state is not one of this loader."""


Tail = Literal["uneven", "pad", "drop"]
"""The treatment of an epoch's last global batch if it is not full, see `Loader.shard`."""


TAILS: tuple[Tail, ...] = get_args(Tail)


PLACE = ("epoch", "position", "consumed", "indices", "next_indices")
"""The keys of a state that hold the place, and so differ from state to state."""


PER_PROCESS = ("processes", "batch_size", "drop_last", "tail")
"""The keys in which a state of another number of processes may differ from a loader."""


@dataclass(frozen=True)
class Shares:
    """How the samples of an epoch are cut into global batches, and each of those into one part for each process.

    A global batch has ``size * batch_size`` samples, consecutive in the epoch's order; the samples of a part as well.
    All processes have the same number of steps.
    """

    samples: int
    """Samples of an epoch."""
    batch_size: int
    """Samples per step of one process."""
    size: int = 1
    """Processes."""
    tail: Tail = "uneven"
    least: int = 1
    """Samples that each process has at least in an uneven tail; a shorter one is added to the batch before it."""

    @property
    def whole(self) -> int:
        """Samples of a full global batch."""
        return self.batch_size * self.size

    def steps(self, start: int = 0) -> int:
        """Steps that are left of an epoch of which ``start`` samples were used."""
        full, left = divmod(self.samples - start, self.whole)
        least = self.size * min(self.batch_size, self.least) if self.size > 1 else 1
        if not left or self.tail == "drop" or (self.tail == "uneven" and full and left < least):
            return full
        return full + 1

    def used(self, start: int, steps: int) -> int:
        """Samples of an epoch that were used after this many steps from ``start`` on, in all processes."""
        if self.tail != "drop" and steps >= self.steps(start):
            return self.samples
        return min(start + steps * self.whole, self.samples)

    def part(self, rank: int, start: int, step: int) -> tuple[int, int]:
        """The part of a process in a step from ``start`` on: its first place in the epoch's order, and the next part's.

        Places beyond the last sample are those from the epoch's begin on.
        """
        first = start + step * self.whole
        if self.tail != "uneven" or step < self.steps(start) - 1:
            return first + rank * self.batch_size, first + (rank + 1) * self.batch_size
        share, more = divmod(max(self.samples - first, self.size), self.size)
        low = first + rank * share + min(rank, more)
        return low, low + share + (rank < more)

    def short(self, start: int) -> int:
        """Samples that are left after ``start`` if they are too few for the processes, and so filled up; else 0."""
        left = self.samples - start
        return left if self.tail == "uneven" and 0 < left < self.size else 0

    def among(self, rank: int, size: int, tail: Tail, least: int = 1) -> Shares:
        """The same samples and batch size, shared out among more processes.

        Raises:
            LoaderError: They are shared out already, or rank, size or tail are impossible.
            EmptyDataError: There are too few samples.
        """
        size = whole_number("size", size, 1)
        rank = whole_number("rank", rank, 0)
        if rank >= size:
            raise LoaderError(f"rank is {rank}: there are {size} processes, so it must be below {size}")
        if tail not in TAILS:
            raise LoaderError(f"tail is {tail!r}: it must be one of {', '.join(map(repr, TAILS))}")
        if self.size > 1:
            raise LoaderError(f"it is one of {self.size} parts already: shard the whole one")
        if size == 1:
            return self
        shares = Shares(self.samples, self.batch_size, size, "drop" if self.tail == "drop" else tail, least)
        if not shares.steps() or shares.short(0):
            needed = shares.whole if shares.tail == "drop" else size
            raise EmptyDataError(
                f"an epoch of {self.samples} is too short for {size} processes: it needs {needed} at least"
                + ("" if self.tail == "drop" else ", or tail='pad'")
            )
        return shares


class Place:
    """Where an iterator is. Each moves its own, so that one that was left behind moves no later one."""

    __slots__ = ("base", "begun", "epoch", "given", "indices", "order", "position", "start")

    def __init__(self, epoch: int = 0, position: int = 0, begun: bool = False, base: int = 0, start: int = 0) -> None:
        self.epoch = epoch
        self.position = position
        self.begun = begun
        self.given = False
        """Whether someone chose it, and no iteration has begun there yet."""
        self.base = base
        """Steps up to which others may have taken other global batches, and ..."""
        self.start = start
        """... the samples that were used by then."""
        self.indices: Tensor | None = None
        """The samples of the epoch, where not each comes once."""
        self.order: Tensor | None = None
        """The samples of the epoch in its order, once that is made."""

    def next(self) -> Place:
        """Where the next iteration begins."""
        return Place(self.epoch + 1) if self.begun else self

    def begin(self) -> None:
        """An iteration begins here."""
        self.begun = True
        self.given = False

    def copied(self) -> Place:
        """The same place for a loader around this one's, which begins there."""
        place = copy.copy(self)
        place.given = self.given or self.begun or self.epoch > 0 or self.position > 0
        return place

    def choose(self) -> Place:
        """The same place, as one that someone chose."""
        self.given = True
        return self


class Chosen:
    """The samples that the next epochs take; one for a loader, its parts and its maps."""

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self.indices: Tensor | None = None

    def set(self, indices: Any) -> None:
        """Take over what `Loader.set_indices` was given."""
        samples = self.samples
        if indices is None:
            self.indices = None
            return
        chosen = torch.as_tensor(indices, device="cpu")
        if chosen.dtype.is_floating_point or chosen.dtype in (torch.bool, torch.complex64) or chosen.ndim != 1:
            raise LoaderError(f"indices is {describe(chosen)}: give the numbers of samples, one after the other")
        if len(chosen) != samples:
            raise LoaderError(
                f"there are {len(chosen)} indices, but an epoch has {samples} samples, and keeps its length, which "
                f"schedules and updates rely on: give {samples}, and a sample as often as it is to come"
            )
        if int(chosen.min()) < 0 or int(chosen.max()) >= samples:
            low = int(chosen.min())
            high = int(chosen.max())
            raise LoaderError(f"indices go from {low} to {high}, of samples 0 to {samples - 1}")
        self.indices = chosen.long().clone()

    def begin(self, place: Place) -> None:
        """An epoch begins at this place; a resumed one has its samples."""
        if not place.position:
            place.indices = self.indices

    def save(self, place: Place) -> dict[str, Any]:
        """The saved form: the chosen indices of this epoch, and of the next one where they differ."""
        now = place.indices if place.position else self.indices
        later = self.indices
        saved: dict[str, Any] = {} if now is None else {"indices": now.tolist()}
        return saved if later is now else {**saved, "next_indices": None if later is None else later.tolist()}

    def load(self, state: Mapping[str, Any], place: Place) -> None:
        """Restore the return value of `save`."""
        self.set(state.get("indices"))
        place.indices = self.indices
        if "next_indices" in state:
            self.set(state["next_indices"])


def ordered(samples: int, seed: int | None, epoch: int, indices: Tensor | None) -> Tensor | None:
    """The samples of an epoch in its order, shuffled by a seed; None if each is in its own place."""
    order = None if seed is None else order_of(samples, seed, epoch)
    if indices is None:
        return order
    return indices if order is None else indices[order]


def order_of(samples: int, seed: int, epoch: int) -> Tensor:
    """The order of the samples in an epoch, on the CPU."""
    generator = torch.Generator("cpu").manual_seed(mix(seed, epoch))
    return torch.randperm(samples, generator=generator, device="cpu")


def part_of(order: Tensor | None, shares: Shares, rank: int, start: int, step: int) -> Tensor:
    """The samples of a process in a step from ``start`` on."""
    low, high = shares.part(rank, start, step)
    if shares.size == 1:
        high = min(high, shares.samples)
    places = torch.arange(low, high, device="cpu") % shares.samples
    return places if order is None else order[places]


def processes_of(shares: Shares) -> dict[str, Any]:
    """The other processes, in the identity of a sharded loader; empty for one process."""
    return {"processes": shares.size, "tail": shares.tail} if shares.size > 1 else {}


def load_place(target: Any, state: Mapping[str, Any], own: Mapping[str, Any], free: tuple[str, ...] = ()) -> Place:
    """The place in a state, which must be one of a loader or sampler with this identity, but for what is free."""
    other = {name: value for name, value in state.items() if name not in PLACE}
    differences = [
        f"{_entry(name, other)} in the state, {_entry(name, own)} here"
        for name in {**other, **own}
        if name not in free and _entry(name, other) != _entry(name, own)
    ]
    differences += [f"no {name} in the state" for name in ("epoch", "position") if name not in state]
    if differences:
        what = type(target).__name__
        raise LoaderError(
            f"the state is not one of this {what}: {'; '.join(differences)}. Make the "
            f"{'sampler' if isinstance(target, Sampler) else 'loader'} as it was when the state was saved, or call "
            f"set_epoch to begin an epoch without the state"
        )
    epoch = whole_number("the state's epoch", state["epoch"], 0)
    return Place(epoch, whole_number("the position", state["position"], 0))


def _entry(name: str, values: Mapping[str, Any]) -> str:
    return f"{name} {values[name]!r}" if name in values else f"no {name}"


def mix(*numbers: int) -> int:
    """A seed in which every bit depends on every number, so that neighbouring seeds, epochs and batches differ."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8, usedforsecurity=False).digest()
    return int.from_bytes(digest, "little") >> 1


def whole_number(name: str, value: Any, least: int | None = None) -> int:
    """Return a value as an integer, or raise, naming the argument."""
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool) or (least is not None and number < least):
        raise LoaderError(
            f"{name} is {value!r}: it must be a whole number" + ("" if least is None else f", from {least}")
        )
    return number


def checked_function(fn: Any) -> Callable[..., Any]:
    """Return a function, or raise if it is none."""
    if not callable(fn):
        raise LoaderError(f"fn is {describe(fn)}: it must be a function that returns a batch")
    return fn  # type: ignore[no-any-return]
