"""Loaders of batches with a position: tensors in memory, and batches made by a function.

They do no work per sample and start no processes. For samples that are read or decoded one by one,
``torch.utils.data.DataLoader`` is the right tool; `ResumableSampler` gives it a position, and `seeded` random numbers
that belong to the sample.

Several processes share the samples of an epoch: `Loader.shard` and `ResumableSampler.shard` give each its part.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import operator
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, get_args

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, Dataset, Sampler

from loopkit.base import devices
from loopkit.base.batches import describe, first_tensor, leaves, map_tensors, move
from loopkit.base.notes import warn
from loopkit.base.raw import raw_bytes
from loopkit.errors import EmptyDataError, LoopkitError

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "Loader",
    "LoaderError",
    "Prefetch",
    "ResumableBatchSampler",
    "ResumableSampler",
    "TensorLoader",
    "from_function",
    "same",
    "seeded",
]
__dir__ = __all__.copy

BLOCK_BYTES = 1 << 20
BLOCK_BATCHES = 1024
# Above this torch copies with several threads. That gains microseconds; where others keep the cores busy, waiting for
# a thread was measured to take 2 to 10 milliseconds a block.
BLOCK_ELEMENTS_CPU = 32_768
# Indices that are made into Python numbers at a time: all at once would take 36 bytes and more for each sample.
BLOCK_INDICES = 65_536


class LoaderError(LoopkitError, ValueError):
    """A loader cannot be made of these arguments, or a saved state is not one of this loader."""


Tail = Literal["uneven", "pad", "drop"]
"""The treatment of an epoch's last global batch if it is not full, see `Loader.shard`."""
TAILS: tuple[Tail, ...] = get_args(Tail)


@dataclass(frozen=True)
class Shares:
    """How the samples of an epoch are cut into global batches, and each of those into one part for each process.

    A global batch has ``size * batch_size`` samples, consecutive in the epoch's order; so are those of a part. All
    processes have the same number of steps.
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
        """Samples of an epoch that were used after this many steps from ``start`` on; those of all processes."""
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
        size = _whole("size", size, 1)
        rank = _whole("rank", rank, 0)
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


class _Place:
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

    def next(self) -> _Place:
        """Where the next iteration begins."""
        return _Place(self.epoch + 1) if self.begun else self

    def begin(self) -> None:
        """An iteration begins here."""
        self.begun = True
        self.given = False

    def copied(self) -> _Place:
        """The same place for a loader around this one's, which begins there."""
        place = copy.copy(self)
        place.given = self.given or self.begun or self.epoch > 0 or self.position > 0
        return place

    def choose(self) -> _Place:
        """The same place, as one that someone chose."""
        self.given = True
        return self


class _Chosen:
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

    def begin(self, place: _Place) -> None:
        """An epoch begins at this place; a resumed one has its samples."""
        if not place.position:
            place.indices = self.indices

    def save(self, place: _Place) -> dict[str, Any]:
        """The saved form: the chosen indices of this epoch, and of the next one where they differ."""
        now = place.indices if place.position else self.indices
        later = self.indices
        saved: dict[str, Any] = {} if now is None else {"indices": now.tolist()}
        return saved if later is now else {**saved, "next_indices": None if later is None else later.tolist()}

    def load(self, state: Mapping[str, Any], place: _Place) -> None:
        """Restore the return value of `save`."""
        self.set(state.get("indices"))
        place.indices = self.indices
        if "next_indices" in state:
            self.set(state["next_indices"])


def _ordered(samples: int, seed: int | None, epoch: int, indices: Tensor | None) -> Tensor | None:
    """The samples of an epoch in its order, shuffled by a seed; None if each is in its own place."""
    order = None if seed is None else _order(samples, seed, epoch)
    if indices is None:
        return order
    return indices if order is None else indices[order]


class Loader(ABC):
    """The base of all loaders, and of your own: a length, a position, a state, parts for processes and `map`.

    Each iteration over a loader is an epoch, counted from 0. One that was left early is over: the next one begins the
    next epoch at its first batch. An epoch begins when its first batch is asked for, not when ``iter`` is called.

    One of your own around another loader has `batches`, and the base does the rest: the position is saved exactly,
    processes share the batches, and the source's samples can be chosen (`set_indices`). If its batches depend on
    options, `identity` names them.

    Args:
        source: The loader that it wraps, at whose position it begins, without ``steps``; or, if it wraps none, how its
            samples are cut.
        steps: Batches of an epoch, from 1; of each process, and at most: ``__len__`` may say fewer. By default each
            batch is made of the source's in its place. With ``steps`` it need not be.

    Raises:
        LoaderError: ``source`` is no loader of this module, or ``steps`` no count.
    """

    continues: ClassVar[bool] = False
    """With ``steps``: an epoch continues where the one before has ended, and so depends on the number of processes."""

    def __init__(self, source: Loader | Shares | None = None, *, steps: int | None = None) -> None:
        if not isinstance(source, (Loader, Shares, type(None))):
            raise LoaderError(f"{type(self).__name__} was given {describe(source)}: it takes a loader of loopkit.data")
        inner = source if isinstance(source, Loader) else None
        shares = source.shares if isinstance(source, Loader) else source
        self.source: Any = inner
        """This process's part of the loader that it wraps."""
        self._counted = steps is not None
        self._shares = Shares(_whole("steps", steps, 1), 1) if shares is None or self._counted else shares
        self._chosen: _Chosen = _Chosen(self._shares.samples) if inner is None else inner._chosen
        self._rank: int = 0 if inner is None else inner.rank
        self._place: _Place = _Place() if inner is None or self._counted else inner._place.copied()

    def __len__(self) -> int:
        """Batches per epoch; those of this process."""
        return self._shares.steps() if self.source is None or self._counted else len(self.source)

    @abstractmethod
    def batches(self, epoch: int, start: int, indices: Tensor | None = None) -> Iterator[Any]:
        """The batches of an epoch that this process has yet to yield; it moves no position.

        Args:
            epoch: From 0. The same epoch has the same batches whenever it is asked for.
            start: Samples of the epoch that all processes have used; with ``steps``, batches of this process.
            indices: The samples of the epoch, if not each once; hand them on to the source.
        """

    def identity(self) -> dict[str, Any]:
        """The options that decide the batches, as JSON, compared when a state is loaded; by default the source's."""
        return {} if self.source is None else dict(self.source.identity())

    @property
    def epoch(self) -> int:
        """The epoch that the last batch came from; after its end, the next one."""
        return self._place.epoch

    @property
    def position(self) -> int:
        """Batches of this epoch that were yielded."""
        return self._place.position

    @property
    def consumed(self) -> int:
        """Samples of this epoch that were yielded, those of all processes; batches for `from_function`."""
        return self._consumed(self._place)

    @property
    def shares(self) -> Shares:
        """How the samples of an epoch are cut into steps, and shared by processes."""
        return self._shares

    @property
    def rank(self) -> int:
        """The process whose part it is, from 0."""
        return self._rank

    def __iter__(self) -> Iterator[Any]:
        place = self._place = self._place.next()
        place.begin()
        self._chosen.begin(place)
        for batch in self.batches(place.epoch, self._consumed(place), place.indices):
            place.position += 1
            yield batch
        place.epoch += 1
        place.position = 0
        place.begun = False
        place.base = place.start = 0
        place.order = None

    @property
    def indices(self) -> Tensor | None:
        """The indices of the samples in the batch that was yielded last, on the CPU; None where there are none."""
        place = self._place
        shares = self._shares
        if not place.position or self._counted or (seed := self._shuffles()) is False:
            return None
        if place.order is None:  # made when it is asked for, once an epoch
            place.order = _ordered(shares.samples, seed, place.epoch, place.indices)
        return _part(place.order, shares, self._rank, place.start, place.position - 1 - place.base)

    def _shuffles(self) -> int | Literal[False] | None:
        """The seed by which samples are shuffled, None if they are not; False if the batches have none."""
        return False if self.source is None else self.source._shuffles()

    @property
    def chosen(self) -> Tensor | None:
        """The indices that `set_indices` chose for the next epoch; None if each sample comes once."""
        return self._chosen.indices

    def set_indices(self, indices: Tensor | Sequence[int] | None) -> None:
        """Take these samples in the next epochs, in the place of each once: hard examples often, later ones not yet.

        An epoch that has begun keeps its samples. ``shuffle`` shuffles them. Saved with the position. A loader's parts,
        and the loaders around it, take them, too; every process gives the same.

        Args:
            indices: As many as there are samples, from 0, each as often as it is to come; None: each once again.

        Raises:
            LoaderError: They are none, too many or too few, no sample has one of them, or the loader has no samples
                by index.
        """
        if indices is not None and self._shuffles() is False:
            raise LoaderError(f"{self!r} has no samples by index: set_indices needs a TensorLoader, or one around it")
        self._chosen.set(indices)

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration be this epoch, from its first batch.

        If a state of the same epoch was just loaded, its position is kept, so that a loop that sets the epoch at the
        begin of every iteration resumes where it was.

        Args:
            epoch: From 0.
        """
        epoch = _whole("epoch", epoch, 0)
        if self._place.begun or self._place.epoch != epoch:
            self._place = _Place(epoch)
        self._place.choose()

    def start_over(self) -> None:
        """Let the next iteration be epoch 0, unless `set_epoch` or `load_state_dict` chose one since the last.

        A learner calls it before its first epoch over a loader that others may have used.
        """
        if not self._place.given:
            self._place = _Place()

    def state_dict(self, *, next_epoch: bool = False) -> dict[str, Any]:
        """Where the loader is, and what must be the same where this is loaded. It can be written as JSON.

        ``"epoch"`` and ``"position"``: while the k-th batch of an iteration is processed the position is k, the last
        one included; once the iteration has ended, the state is position 0 of the next epoch. Where that does not
        tell it, ``"consumed"`` is the number of samples that all processes have used. The state is the same in each.

        Args:
            next_epoch: The iteration is over, be it that it was left early: where the next one will begin.
        """
        place = self._place.next() if next_epoch else self._place
        state = {"epoch": place.epoch, "position": place.position, **self.identity(), **self._chosen.save(place)}
        consumed = self._consumed(place)
        shares = self._shares
        if shares.size > 1 or place.position > shares.steps() or consumed != shares.used(0, place.position):
            state["consumed"] = consumed
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration resume where `state_dict` was called; batches before that are not made again.

        The next iteration over a loader that was saved while it processed its last batch has no batch. A state of
        another number of processes lets the iteration resume after the samples that those have used, whatever the
        batch size.

        Raises:
            LoaderError: The state is of a loader with other samples, order or seed; for the same number of processes,
                with another batch size or tail.
        """
        own = self.identity()
        same = state.get("processes", 1) == own.get("processes", 1)
        state = state if same else self._moved(state)
        place = _load_place(self, state, own, () if same else PER_PROCESS)
        if "consumed" in state:
            place.start = _whole("the state's consumed", state["consumed"], 0)
            place.base = place.position
        elif state.get("processes", 1) != 1 and (not same or self._shares.size > 1):  # else steps are not shared
            raise LoaderError("there is no consumed in the state, which those of several processes have")
        elif not same:
            before = Shares(self._shares.samples, _whole("the state's batch_size", state.get("batch_size", 1), 1))
            place.start = before.used(0, place.position)
            place.base = place.position
        elif place.position > len(self):
            raise LoaderError(f"the state's position is {place.position}, but an epoch has {len(self)} batches")
        if place.start > self._shares.samples:
            raise LoaderError(f"the state's consumed is {place.start}, but an epoch has {self._shares.samples}")
        self._chosen.load(state, place)
        self._place = place.choose()

    def _moved(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Convert a state that was saved with another number of processes."""
        if not self._counted:
            return state if self.source is None else self.source._moved(state)
        if state.get("position") or (self.continues and state.get("epoch")):
            saved, here = (each.get("processes", 1) for each in (state, self.identity()))
            raise LoaderError(
                f"{self!r} counts the batches of each process, and the state was saved with {saved} process"
                f"{'es' if saved > 1 else ''}, {here} here, which are elsewhere after as many: go on with {saved}, or "
                f"call set_epoch to begin an epoch without the state"
            )
        return {**state, "consumed": 0}

    def shard(self, rank: int, size: int, tail: Tail = "uneven", least: int = 1) -> Self:
        """The part of one process: a loader of its batches, with a position of its own, from this loader's on.

        Every process has the same order of an epoch. In step i they have the parts of the batch that a loader with
        ``size * batch_size`` samples would give, one after the other by rank; ``batch_size`` counts the samples of
        one process. A state of one process fits all others, and, as long as samples, order and seed are the same, any
        number of them: see `load_state_dict`.

        Batches of `from_function` are not cut: the process takes those with the index ``i * size + rank``. So does
        the number of a batch from which ``map(fn, seed)`` seeds its generator: it is the one that the batch would
        have in a single process with the same ``batch_size``.

        Args:
            rank: The process, from 0.
            size: How many there are; for 1 nothing is cut.
            tail: What becomes of a last global batch that is not full, unless ``drop_last`` leaves it out.
                ``"uneven"``: it is cut into parts that differ by at most one sample. ``"pad"``: samples from the
                epoch's begin fill it up. ``"drop"``: it is left out. Batches of a function, which cannot be cut, are
                filled up for ``"uneven"`` too; so is the rest of an epoch that resumes among more processes than it
                has samples left.
            least: An uneven tail with fewer samples for each process is added to the batch before it.

        Raises:
            LoaderError: Rank, size or tail are impossible, or the loader is a part itself.
            EmptyDataError: There are too few samples.

        Example::

            >>> loader = TensorLoader(torch.arange(11), batch_size=3)
            >>> for rank in range(2):
            ...     print([batch.tolist() for batch in loader.shard(rank, 2)])
            [[0, 1, 2], [6, 7, 8]]
            [[3, 4, 5], [9, 10]]
        """
        place = self._place
        sharded = copy.copy(self)
        sharded._share(rank, size, tail, least)
        sharded._place = _Place(place.epoch, place.position, place.begun, place.position, self._consumed(place))
        sharded._place.given = place.given
        sharded._place.indices = place.indices
        return sharded

    def _share(self, rank: int, size: int, tail: Tail, least: int) -> None:
        if self.source is not None:
            self.source = self.source.shard(rank, size, tail, least)
            self._shares = self._shares if self._counted else self.source.shares
        elif not self._counted:
            self._shares = self._shares.among(rank, size, tail, least)
        self._rank = rank

    def _consumed(self, place: _Place) -> int:
        return self._shares.used(place.start, place.position - place.base)

    def map(self, fn: Callable[..., Any], seed: int | None = None) -> Loader:
        """A loader of the same length whose batches are ``fn(batch)``, made when they are asked for.

        It begins at this loader's position and from then on has its own: iterations over one do not move the other.
        States fit both, unless a seed is given here.

        Args:
            fn: Called with a batch, which it may change in place.
            seed: Call ``fn(batch, generator)`` with a ``torch.Generator`` on the device of the batch's first tensor,
                seeded from this seed, the epoch and the batch's index: what is drawn for a batch does not depend on
                how the loader came to it. Of several maps with equal seeds each draws its own numbers. The generator
                is seeded again for the next batch, so ``fn`` must not keep it.

        Example::

            >>> loader = TensorLoader(torch.zeros(4, 2), batch_size=2)
            >>> doubled = loader.map(lambda x: 2 * x)
            >>> noisy = loader.map(lambda x, generator: x + torch.randn(x.shape, generator=generator), seed=0)
            >>> len(noisy), torch.equal(next(iter(noisy)), next(iter(noisy)))
            (2, False)
        """
        return _MappedLoader(self, fn, seed)


class TensorLoader(Loader):
    """Batches of tensors that are in memory, of a CPU or of a device.

    Blocks of whole batches are gathered at once and cut into batches, so that a small batch costs a few microseconds.
    A block holds at most 1 MiB, 1,024 batches and, on a CPU, 32,768 elements of a tensor, but always one batch.
    Batches are contiguous and share no memory with the tensors or with each other, but a batch that is kept may keep
    its block in memory: ``clone()`` what you keep or save.

    Args:
        tensors: Tensors or NumPy arrays of the same length, ``(samples, ...)``, or one mapping of names to such. One
            gives batches that are tensors ``(batch_size, ...)``, several give tuples, a mapping gives dicts. Tensors
            that are on ``device`` already are used as they are, not copied; so are arrays that can be written to.
        batch_size: Samples per batch, from 1; the last batch holds what is left.
        shuffle: Take the samples in a new order in every epoch. The order depends on the seed and the epoch, not on
            the device or on torch's global generator, which is not used. It takes 8 bytes per sample.
        seed: For ``shuffle``.
        drop_last: Leave out a last batch that is not full.
        device: Move the tensors there, once.

    Raises:
        LoaderError: There is no tensor, something that is no tensor, an array whose dtype no tensor has, lengths or
            devices that differ, a tensor that requires grad, or ``batch_size < 1``.
        EmptyDataError: There is no batch.

    Example::

        >>> inputs, targets = torch.arange(10.0).reshape(5, 2), torch.arange(5)
        >>> loader = TensorLoader(inputs, targets, batch_size=2, shuffle=True, seed=1)
        >>> len(loader), [targets.shape[0] for _, targets in loader]
        (3, [2, 2, 1])
        >>> for batch in TensorLoader({"inputs": inputs, "targets": targets}, batch_size=5):
        ...     print(batch["targets"])
        tensor([0, 1, 2, 3, 4])

        >>> batches = iter(loader)
        >>> first, state = next(batches), loader.state_dict()
        >>> state["epoch"], state["position"]
        (1, 1)
        >>> again = TensorLoader(inputs, targets, batch_size=2, shuffle=True, seed=1)
        >>> again.load_state_dict(state)
        >>> all(torch.equal(one[1], other[1]) for one, other in zip(batches, again, strict=True))
        True
    """

    def __init__(
        self,
        *tensors: Tensor | NDArray[Any] | Mapping[str, Tensor | NDArray[Any]],
        batch_size: int,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        device: torch.device | str | int | None = None,
    ) -> None:
        named = _named(tensors)
        self.batch_size = _whole("batch_size", batch_size, 1)
        self.shuffle = bool(shuffle)
        self.seed = _whole("seed", seed)
        self.drop_last = bool(drop_last)
        self.samples = _check_tensors(named, device)
        self._tensors = [tensor if device is None else tensor.to(device) for tensor in named.values()]
        self._keys = list(named) if isinstance(tensors[0], Mapping) else None
        count = self.samples // self.batch_size if drop_last else -(-self.samples // self.batch_size)
        if not count:
            raise EmptyDataError(
                f"there is no batch: the tensors hold {self.samples} samples and batch_size is {self.batch_size}"
                + (" with drop_last=True" if self.samples else "")
            )
        super().__init__(Shares(self.samples, self.batch_size, tail="drop" if drop_last else "uneven"))
        batch_bytes = [tensor.nbytes // self.samples * self.batch_size for tensor in self._tensors]
        limits = [BLOCK_BATCHES, BLOCK_BYTES // max(1, sum(batch_bytes))]
        limits += [
            BLOCK_ELEMENTS_CPU // max(1, tensor.numel() // self.samples * self.batch_size)
            for tensor in self._tensors
            if tensor.device.type == "cpu"
        ]
        self._block = max(1, min(limits)) * self.batch_size
        # Where a matrix begins may decide which kernel multiplies it, and so the last bits of the product: batches
        # that would not begin like a tensor of their own are copied out of their block.
        alignments = [64 if tensor.device.type == "cpu" else 256 for tensor in self._tensors]
        shared = self._block > self.batch_size
        self._copied = [shared and size % align != 0 for size, align in zip(batch_bytes, alignments, strict=True)]

    def __repr__(self) -> str:
        held = dict(zip(self._keys, self._tensors, strict=True)) if self._keys else tuple(self._tensors)
        return (
            f"TensorLoader({describe(held)}, batch_size={self.batch_size}, shuffle={self.shuffle}, seed={self.seed}, "
            f"drop_last={self.drop_last})"
        ) + (f".shard({self._rank}, {self._shares.size}, {self._shares.tail!r})" if self._shares.size > 1 else "")

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that it takes batches from."""
        return tuple(self._tensors)

    def identity(self) -> dict[str, Any]:  # noqa: D102
        return {
            "samples": self.samples,
            "batch_size": self.batch_size,
            "drop_last": self.drop_last,
            "shuffle": self.shuffle,
            "seed": self.seed,
            **_processes(self._shares),
        }

    def _shuffles(self) -> int | None:
        return self.seed if self.shuffle else None

    def batches(self, epoch: int, start: int, indices: Tensor | None = None) -> Iterator[Any]:  # noqa: D102
        order = _ordered(self.samples, self._shuffles(), epoch, indices)
        for chosen, low, high, size in self._blocks(order, start):
            columns = self._gather(chosen, low, high, size)
            if self._keys is not None:
                for row in zip(*columns, strict=True):
                    yield dict(zip(self._keys, row, strict=True))
            elif len(columns) > 1:
                yield from zip(*columns, strict=True)
            else:
                yield from columns[0]

    def _blocks(self, order: Tensor | None, start: int) -> Iterator[tuple[Tensor | None, int, int, int]]:
        """The blocks of an epoch from sample ``start`` on: an order, the first and last of it, and a batch's size."""
        shares = self._shares
        device = self._tensors[0].device
        if shares.size == 1:
            stop = start + (self.samples - start) // self.batch_size * self.batch_size
            stop = stop if self.drop_last else self.samples
            order = None if order is None else order.to(device)
            for low in range(start, stop, self._block):
                yield order, low, min(low + self._block, stop), self.batch_size
        elif steps := shares.steps(start):
            first, end = shares.part(self._rank, start, steps - 1)
            last = torch.arange(first, end, device="cpu") % self.samples
            begins = start + self._rank * self.batch_size + shares.whole * torch.arange(steps - 1, device="cpu")
            own = (begins[:, None] + torch.arange(self.batch_size, device="cpu")).flatten()
            if len(last) <= self.batch_size:  # else it has one or two more, and stands alone
                own = torch.cat([own, last])
                last = last[:0]
            for places, size in ((own, self.batch_size), (last, len(last))):
                chosen = (places if order is None else order[places]).to(device)
                for low in range(0, len(chosen), self._block):
                    yield chosen, low, min(low + max(self._block, size), len(chosen)), size

    def _gather(self, order: Tensor | None, low: int, high: int, size: int) -> list[Iterator[Tensor]]:
        """For each tensor the batches of a block, that is of the samples from ``low`` to ``high`` in this order."""
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):  # a block may serve steps inside and outside of inference mode
                return self._gather(order, low, high, size)
        columns: list[Iterator[Tensor]] = []
        for tensor, copied in zip(self._tensors, self._copied, strict=True):
            if order is None:
                block = tensor[low:high].clone(memory_format=torch.contiguous_format)
            else:
                block = tensor.index_select(0, order[low:high])
            if high - low <= size:
                columns.append(iter((block,)))
            else:
                # unsafe: each part counts its in-place changes by itself, else autograd would take a change of one
                # batch for a change of the others
                batches: tuple[Tensor, ...] = block.unsafe_split(size)
                columns.append(map(torch.clone, batches) if copied else iter(batches))
        return columns


def from_function(n: int, fn: Callable[..., Any], seed: int | None = None) -> Loader:
    """A loader of n batches that a function makes, each when it is asked for: synthetic data, simulations, slices.

    Args:
        n: Batches per epoch, from 1.
        fn: ``fn(index) -> batch``, the index from 0.
        seed: Call ``fn(index, generator)`` with a ``torch.Generator`` (of the CPU) seeded from this seed, the epoch
            and the index. The generator is seeded again for the next batch, so ``fn`` must not keep it.

    Raises:
        LoaderError: ``n`` is no whole number, or ``fn`` cannot be called.
        EmptyDataError: ``n < 1``.

    Example::

        >>> from_function(3, lambda index: torch.full((2,), index)).state_dict()
        {'epoch': 0, 'position': 0, 'batches': 3, 'seed': None}
        >>> loader = from_function(100, lambda index, generator: torch.randn(8, 2, generator=generator), seed=0)
        >>> first, second = list(loader), list(loader)
        >>> len(first), torch.equal(first[0], second[0])
        (100, False)
    """
    return _FunctionLoader(n, fn, seed)


class _FunctionLoader(Loader):
    def __init__(self, n: int, fn: Callable[..., Any], seed: int | None) -> None:
        count = _whole("n", n)
        if count < 1:
            raise EmptyDataError(f"there is no batch: n is {n}; it counts the batches of an epoch, from 1")
        super().__init__(Shares(count, batch_size=1))
        self._fn = _callable(fn)
        self._seed = None if seed is None else _whole("seed", seed)

    def identity(self) -> dict[str, Any]:
        return {"batches": self._shares.samples, "seed": self._seed, **_processes(self._shares)}

    def __repr__(self) -> str:
        return f"from_function({self._shares.samples}, {_name(self._fn)})"

    def batches(self, epoch: int, start: int, indices: Tensor | None = None) -> Iterator[Any]:
        fn = self._fn
        seed = self._seed
        shares = self._shares
        numbers = range(start, start + shares.steps(start) * shares.size)[self._rank :: shares.size]
        wrapped = (number % shares.samples for number in numbers) if shares.size > 1 else numbers
        if seed is None:
            yield from map(fn, wrapped)
            return
        generator = torch.Generator("cpu")
        for index in wrapped:
            yield fn(index, generator.manual_seed(_mix(seed, epoch, index)))

    def _share(self, rank: int, size: int, tail: Tail, least: int) -> None:
        super()._share(rank, size, "pad" if tail == "uneven" else tail, least)


def same(loader: Any, batches: int = 1) -> Loader:
    """A loader of the first batches of another one, the same in every epoch.

    To see whether a model can learn a few batches by heart, which shows most mistakes in a loss or a model.

    The batches are taken now, so seed before where the order is random (`loopkit.seed_everything`, or the loader's own
    seed). Resuming with other batches than the saved ones raises.

    Args:
        loader: Any iterable of batches. The position of a loader of this module stays where it is.
        batches: How many to take, from 1; all, if there are fewer.

    Raises:
        LoaderError: ``batches`` is no count; or ``loader`` is a list with a batch in several places, such as
            ``[batch] * 20``, of which it would leave some out.
        EmptyDataError: There is no batch.

    Example::

        >>> few = same(TensorLoader(torch.arange(6), batch_size=2), batches=2)
        >>> len(few), [batch.tolist() for batch in few] * 2
        (2, [[0, 1], [2, 3], [0, 1], [2, 3]])
    """
    count = _whole("batches", batches, 1)
    if isinstance(loader, (list, tuple)) and count < len(loader) and len({id(each) for each in loader}) < len(loader):
        raise LoaderError(
            f"the {len(loader)} batches are given several times, and same would take the first {count}: give the "
            f"{type(loader).__name__} itself as the data, which are the same in every epoch"
        )
    source = loader.map(lambda batch: batch) if isinstance(loader, Loader) else loader
    return _SameLoader(list(itertools.islice(source, count)))


class _SameLoader(_FunctionLoader):
    def __init__(self, batches: list[Any]) -> None:
        super().__init__(len(batches), batches.__getitem__, None)
        digest = hashlib.blake2b(digest_size=8, usedforsecurity=False)
        for part in _contents(batches):
            digest.update(part)
        self._content = digest.hexdigest()

    def __repr__(self) -> str:
        return f"same({self._shares.samples} batches)"

    def identity(self) -> dict[str, Any]:
        return {**super().identity(), "content": self._content}


def _name(fn: Callable[..., Any]) -> str:
    return str(getattr(fn, "__qualname__", type(fn).__name__))


def _contents(value: Any) -> Iterator[bytes]:
    """The bytes of all tensors, texts and numbers in a batch."""
    for leaf in leaves(value):
        if isinstance(leaf, Tensor):
            yield raw_bytes(leaf)  # host sync: once
        elif isinstance(leaf, (str, bytes, int, float)):
            yield repr(leaf).encode()


class _MappedLoader(Loader):
    def __init__(self, source: Loader, fn: Callable[..., Any], seed: int | None) -> None:
        super().__init__(source)
        self._fn = _callable(fn)
        self._seed = None if seed is None else _whole("seed", seed)
        self._seeds: list[int] = list(source.identity().get("map_seeds", ()))
        if self._seed is not None:
            self._seeds.append(self._seed)

    def identity(self) -> dict[str, Any]:
        return {**super().identity(), **({"map_seeds": list(self._seeds)} if self._seeds else {})}

    def __repr__(self) -> str:
        return f"{self.source!r}.map({_name(self._fn)})"

    def batches(self, epoch: int, start: int, indices: Tensor | None = None) -> Iterator[Any]:
        fn = self._fn
        seed = self._seed
        batches = self.source.batches(epoch, start, indices)
        if seed is None:
            yield from map(fn, batches)
            return
        generator = torch.Generator("cpu")
        first = start // self._shares.batch_size + self._rank
        for index, batch in zip(itertools.count(first, self._shares.size), batches):
            device = _device(batch)
            if device != generator.device:
                generator = torch.Generator(device)
            yield fn(batch, generator.manual_seed(_mix(seed, epoch, index, len(self._seeds))))


def _part(order: Tensor | None, shares: Shares, rank: int, start: int, step: int) -> Tensor:
    """The samples of a process in a step from ``start`` on."""
    low, high = shares.part(rank, start, step)
    if shares.size == 1:
        high = min(high, shares.samples)
    places = torch.arange(low, high, device="cpu") % shares.samples
    return places if order is None else order[places]


class Prefetch(Loader):
    """A loader of the same batches on a device, each of which is copied while the one before it is used.

    A thread makes the next batch and pins it, and a side stream copies it. Where both take less time than a step, no
    step waits for data. On the CPU, MPS and XPU only the thread works ahead.

    The state is the loader's own: it tells of the batches that were yielded, not of those that were made ahead.

    Args:
        loader: A loader of this module. If its first batch of an epoch draws from torch's global generator, which the
            loop draws from too, all are made in the main thread, when they are asked for. ``map(fn, seed)`` and
            `from_function` have generators of their own.
        device: As for `loopkit.plugins.ToDevice`, which then has nothing to move.
        resident: Keep the tensors of a `TensorLoader` on the device if they take at most half of the memory that is
            free there when the first epoch begins. Where that fails, batches are copied one by one.

    Raises:
        LoaderError: ``loader`` is none of this module. For a ``DataLoader``, ``pin_memory=True`` and workers do it.

    Example::

        >>> loader = Prefetch(TensorLoader(torch.arange(4), batch_size=2), "cpu")
        >>> [batch.tolist() for batch in loader]
        [[0, 1], [2, 3]]
    """

    def __init__(self, loader: Loader, device: torch.device | str = "auto", *, resident: bool = True) -> None:
        if not isinstance(loader, Loader):
            raise LoaderError(
                f"Prefetch was given {describe(loader)}: it takes a loader of loopkit.data, such as TensorLoader. A "
                f"DataLoader works ahead by itself: DataLoader(..., num_workers=2, pin_memory=True)"
            )
        super().__init__(loader)
        self.device = devices.local_device() if device == "auto" else devices.indexed(torch.device(device))
        self.resident = bool(resident)
        self._kept: Loader | None = None
        """The loader with its tensors on the device."""
        self._tried = False
        self._said = False

    def __repr__(self) -> str:
        return f"Prefetch({self.source!r}, {str(self.device)!r})"

    def _share(self, rank: int, size: int, tail: Tail, least: int) -> None:
        super()._share(rank, size, tail, least)
        self._kept = None
        self._tried = False

    def batches(self, epoch: int, start: int, indices: Tensor | None = None) -> Iterator[Any]:  # noqa: D102
        if self.resident and not self._tried:
            self._kept = self._on_device()
            self._tried = True
        if self._kept is not None:
            steps = 0
            try:
                for steps, batch in enumerate(self._kept.batches(epoch, start, indices), 1):  # noqa: B007
                    yield batch
                return
            except torch.OutOfMemoryError:
                self._kept, start = None, self._shares.used(start, steps)
        batches = self.source.batches(epoch, start, indices)
        before = torch.default_generator.get_state()
        first = list(itertools.islice(batches, 1))
        batches = itertools.chain(first, batches)
        if torch.equal(torch.default_generator.get_state(), before):
            yield from _ahead(batches, self.device)
            return
        if not self._said:
            self._said = True
            warn(
                "Prefetch: the loader draws from torch's global generator, which the loop draws from too, so its "
                "batches are not made ahead. Give map(fn, seed=...) a function that takes a generator"
            )
        for batch in batches:
            yield move(batch, self.device)

    def _on_device(self) -> Loader | None:
        source = self.source
        if type(source) is not TensorLoader or not devices.reads_late(self.device):
            return None
        kept = copy.copy(source)
        try:
            if not devices.fits(sum(tensor.nbytes for tensor in source.tensors), self.device):
                return None
            kept._tensors = [tensor.to(self.device) for tensor in source.tensors]
        except torch.OutOfMemoryError:
            return None
        return kept


def _ahead(batches: Iterator[Any], device: torch.device) -> Iterator[Any]:
    """The batches on a device: while one is used, a stream copies the next one, and a thread makes two more."""
    lane = devices.Lane(device) if devices.reads_late(device) else None

    def take() -> Any:
        batch = next(batches, _END)
        return batch if lane is None or batch is _END else map_tensors(batch, devices.pinned)

    def send(batch: Any) -> tuple[Any, Any]:
        if lane is None:
            return move(batch, device), None
        with lane.stream:
            return move(batch, device), lane.mark()

    with ThreadPoolExecutor(1, "loopkit-prefetch") as thread:
        coming = deque([thread.submit(take), thread.submit(take)])
        sent: tuple[Any, Any] | None = None
        while True:
            following = None
            if sent is None or (coming[0].done() and coming[0].exception() is None):  # else what is there comes first
                batch = coming.popleft().result()
                if batch is _END and sent is None:
                    return
                coming.append(thread.submit(take))
                following = None if batch is _END else send(batch)
            if sent is not None:
                if lane is not None:
                    lane.receive(sent[1], [leaf for leaf in leaves(sent[0]) if isinstance(leaf, Tensor)])
                yield sent[0]
            sent = following


_END = object()


class SampleIndex(int):
    """The index of a sample, from 0, with the seed of the numbers that are drawn for it in this epoch."""

    seed: int

    def __new__(cls, index: int, seed: int) -> SampleIndex:
        """An index with its seed."""
        self = super().__new__(cls, index)
        self.seed = seed
        return self

    def __reduce__(self) -> tuple[type[SampleIndex], tuple[int, int]]:
        return SampleIndex, (int(self), self.seed)


class ResumableSampler(Sampler[SampleIndex]):
    """A sampler for ``DataLoader`` that can resume in mid-epoch; with other batch sizes or numbers of workers too.

    Each iteration is an epoch, counted from 0, and begins when its first index is asked for. One that was left early is
    over: the next one begins the next epoch. The order depends only on the seed and the epoch.

    A ``DataLoader`` with workers reads ahead, so the sampler cannot know how much was used: who saves its state says
    so. `loopkit.Learner` does.

    Args:
        samples: The dataset, or its number of samples.
        shuffle: Give the samples in a new order in every epoch. It takes 8 bytes per sample.
        seed: For ``shuffle`` and `seeded`.

    Raises:
        LoaderError: ``samples`` is no number of samples and has none.
        EmptyDataError: There is no sample.

    Example::

        >>> dataset = list("abcdef")
        >>> loader = torch.utils.data.DataLoader(dataset, batch_size=2, sampler=ResumableSampler(dataset, seed=1))
        >>> batches = list(loader)
        >>> state = loader.sampler.state_dict(position=4)  # two batches were used
        >>> again = torch.utils.data.DataLoader(dataset, batch_size=1, sampler=ResumableSampler(dataset, seed=1))
        >>> again.sampler.load_state_dict(state)
        >>> list(again) == [[letter] for letter in batches[2]]
        True
    """

    def __init__(self, samples: int | Sized, *, shuffle: bool = True, seed: int = 0) -> None:
        self.samples = _whole("samples", len(samples) if isinstance(samples, Sized) else samples)
        if self.samples < 1:
            raise EmptyDataError(f"there is no sample: samples is {describe(samples)}")
        self.shuffle = bool(shuffle)
        self.seed = _whole("seed", seed)
        self._place = _Place()
        self._chosen = _Chosen(self.samples)
        self._start = 0
        self._shares: Shares | None = None
        self._rank = 0

    def __len__(self) -> int:
        if (shares := self._shares) is None:
            return self.samples
        first, end = shares.part(self._rank, 0, shares.steps() - 1)
        return (shares.steps() - 1) * shares.batch_size + end - first

    def __repr__(self) -> str:
        shares = self._shares
        return f"ResumableSampler({self.samples}, shuffle={self.shuffle}, seed={self.seed})" + (
            "" if shares is None else f".shard({self._rank}, {shares.size}, {shares.tail!r}, {shares.batch_size})"
        )

    @property
    def shares(self) -> Shares | None:
        """How processes share the samples; None if they do not."""
        return self._shares

    @property
    def rank(self) -> int:
        """The process whose part it is, from 0."""
        return self._rank

    @property
    def epoch(self) -> int:
        """The epoch of the last iteration that has begun, or the one that was loaded or set since."""
        return self._place.epoch

    @property
    def start(self) -> int:
        """Samples of that epoch that its iteration left out because a state said that they were used before."""
        return self._start

    def __iter__(self) -> Iterator[SampleIndex]:
        if self._shares is not None:
            yield from itertools.chain.from_iterable(self._parts(self._shares))
            return
        place = self._begin()
        epoch = place.epoch
        start = place.position
        order = self._order(place)
        for low in range(start, self.samples, BLOCK_INDICES):
            high = min(low + BLOCK_INDICES, self.samples)
            for index in range(low, high) if order is None else order[low:high].tolist():
                place.position += 1
                yield SampleIndex(index, _mix(self.seed, epoch, index))

    def _begin(self) -> _Place:
        """Where the iteration that begins now is."""
        place = self._place.next()
        if place is not self._place:
            self._start = 0
        self._place = place
        place.begin()
        self._chosen.begin(place)
        return place

    def set_indices(self, indices: Tensor | Sequence[int] | None) -> None:
        """Take these samples in the next epochs, in the place of each once; see `Loader.set_indices`."""
        self._chosen.set(indices)

    def indices(self, step: int, batch_size: int) -> Tensor:
        """The indices of the samples in a batch of the last epoch that has begun.

        Args:
            step: The batch's place since the iteration began.
            batch_size: Samples per batch.
        """
        shares = self._shares or Shares(self.samples, batch_size)
        place = self._place
        if place.order is None:
            place.order = self._order(place)
        return _part(place.order, shares, self._rank, self._start, step)

    def _order(self, place: _Place) -> Tensor | None:
        return _ordered(self.samples, self.seed if self.shuffle else None, place.epoch, place.indices)

    def _parts(self, shares: Shares) -> Iterator[list[SampleIndex]]:
        """The samples of this process, step by step."""
        place = self._begin()
        epoch = place.epoch
        start = place.position
        order = self._order(place)
        for step in range(shares.steps(start)):
            low, high = shares.part(self._rank, start, step)
            place.position = shares.used(start, step + 1)
            if high > self.samples or order is None:
                places = [index % self.samples for index in range(low, high)]
                indices = places if order is None else order[places].tolist()
            else:
                indices = order[low:high].tolist()
            yield [SampleIndex(index, _mix(self.seed, epoch, index)) for index in indices]

    def shard(
        self, rank: int, size: int, tail: Tail = "uneven", *, batch_size: int, least: int = 1
    ) -> ResumableBatchSampler:
        """The part of one process: its batches, for ``DataLoader(dataset, batch_sampler=...)``.

        It is the part that `Loader.shard` describes. Its sampler, `ResumableBatchSampler.sampler`, has a position of
        its own, from this one's on: states count the samples of all processes, so they fit any number of them, and
        the whole sampler.

        Args:
            rank: The process, from 0.
            size: How many there are.
            tail: What becomes of a last global batch that is not full, see `Loader.shard`.
            batch_size: Samples per batch of one process.
            least: Samples of each process in an uneven tail, see `Loader.shard`.

        Raises:
            LoaderError: Rank, size, tail or batch size are impossible, or the sampler is that of a part itself.
            EmptyDataError: There are too few samples.

        Example::

            >>> dataset = list("abcdefgh")
            >>> for rank in range(2):
            ...     batches = ResumableSampler(dataset, shuffle=False).shard(rank, 2, batch_size=2)
            ...     print(list(torch.utils.data.DataLoader(dataset, batch_sampler=batches)))
            [['a', 'b'], ['e', 'f']]
            [['c', 'd'], ['g', 'h']]
        """
        whole = self._shares or Shares(self.samples, _whole("batch_size", batch_size, 1))
        place = self._place
        sharded = copy.copy(self)
        sharded._shares = whole.among(rank, size, tail, least)
        sharded._rank = rank
        sharded._place = _Place(place.epoch, place.position, place.begun)
        sharded._place.given = place.given
        sharded._place.indices = place.indices
        return ResumableBatchSampler(sharded)

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration be this epoch, from its first sample.

        If a state of the same epoch was just loaded, its position is kept.

        Args:
            epoch: From 0.
        """
        epoch = _whole("epoch", epoch, 0)
        if self._place.begun or self._place.epoch != epoch:
            self._place = _Place(epoch)
            self._start = 0
        self._place.choose()

    def start_over(self) -> None:
        """Let the next iteration be epoch 0, unless `set_epoch` or `load_state_dict` chose one; see `Loader`."""
        if not self._place.given:
            self._place = _Place()
            self._start = 0

    def state_dict(self, position: int | None = None, *, next_epoch: bool = False) -> dict[str, Any]:
        """The state for `load_state_dict`. It can be written as JSON.

        Args:
            position: Samples of this epoch that were used. The default is how many were read, which is more where
                workers read ahead.
            next_epoch: The iteration is over, be it that it was left early: where the next one will begin.
        """
        place = self._place.next() if next_epoch else self._place
        if position is None or next_epoch:
            position = place.position
        position = min(_whole("position", position, 0), self.samples)  # the last batch may not be full
        state = {"epoch": place.epoch, "position": position, **self._identity()}
        return {**state, **self._chosen.save(place if position else _Place())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration give the rest of the epoch: the samples that had not been used.

        Raises:
            LoaderError: The state is of a sampler with another number of samples, order or seed.
        """
        place = _load_place(self, state, self._identity())
        if place.position > self.samples:
            raise LoaderError(f"the state's position is {place.position}, but an epoch has {self.samples} samples")
        self._chosen.load(state, place)
        self._place = place.choose()
        self._start = place.position

    def _identity(self) -> dict[str, Any]:
        return {"samples": self.samples, "shuffle": self.shuffle, "seed": self.seed}


class ResumableBatchSampler(BatchSampler):
    """The batches of one process, made by `ResumableSampler.shard`; ``sampler`` has the position and the state."""

    sampler: ResumableSampler

    def __init__(self, sampler: ResumableSampler) -> None:
        if sampler.shares is None:
            raise LoaderError("the sampler is not that of a part: use sampler.shard(rank, size, batch_size=...)")
        super().__init__(sampler, sampler.shares.batch_size, sampler.shares.tail == "drop")
        self._shares = sampler.shares

    def __len__(self) -> int:
        return self._shares.steps()

    def __repr__(self) -> str:
        return repr(self.sampler)

    def __iter__(self) -> Iterator[list[int]]:
        yield from self.sampler._parts(self._shares)  # type: ignore[misc]

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration be this epoch, see `ResumableSampler.set_epoch`."""
        self.sampler.set_epoch(epoch)

    def start_over(self) -> None:
        """Let the next iteration be epoch 0, see `ResumableSampler.start_over`."""
        self.sampler.start_over()


def seeded(dataset: Any, fn: Callable[[Any, torch.Generator], Any]) -> Dataset[Any]:
    """A dataset whose samples are ``fn(dataset[index], generator)``, for a ``DataLoader`` with a `ResumableSampler`.

    The generator is seeded from the sampler's seed, the epoch and the index. What is drawn for a sample depends
    neither on the samples before it, nor on the number of workers, nor on where a run was resumed.

    Args:
        dataset: A map-style dataset: samples by index. It may be a seeded one: each draws its own numbers.
        fn: Called in the workers with a sample and a ``torch.Generator`` of the CPU.

    Raises:
        LoaderError: ``fn`` cannot be called, or ``dataset`` has no samples by index.

    Example::

        >>> noisy = seeded(torch.zeros(4), lambda x, generator: x + torch.rand((), generator=generator))
        >>> batch = next(iter(torch.utils.data.DataLoader(noisy, batch_size=4, sampler=ResumableSampler(noisy))))
        >>> batch.unique().shape
        torch.Size([4])
    """
    if not hasattr(dataset, "__getitem__"):
        raise LoaderError(f"dataset is {describe(dataset)}: seeded needs one that gives samples by index")
    return _SeededDataset(dataset, _callable(fn))


class _SeededDataset(Dataset[Any]):
    def __init__(self, dataset: Any, fn: Callable[[Any, torch.Generator], Any]) -> None:
        self._dataset = dataset
        self._fn = fn
        self._depth: int = dataset._depth + 1 if isinstance(dataset, _SeededDataset) else 0

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        if not isinstance(index, SampleIndex):
            raise LoaderError(
                f"index {index!r} is {describe(index)}, which has no seed: a dataset made by seeded needs "
                f"DataLoader(..., sampler=ResumableSampler(dataset)), and must be the outermost one (around Subset)"
            )
        generator = torch.Generator("cpu").manual_seed(_mix(index.seed, self._depth))
        return self._fn(self._dataset[index], generator)


PLACE = ("epoch", "position", "consumed", "indices", "next_indices")
"""The keys of a state that hold the place, and so differ from state to state."""
PER_PROCESS = ("processes", "batch_size", "drop_last", "tail")
"""The keys in which a state of another number of processes may differ from a loader."""


def _processes(shares: Shares) -> dict[str, Any]:
    """The other processes, in the identity of a sharded loader; empty for one process."""
    return {"processes": shares.size, "tail": shares.tail} if shares.size > 1 else {}


def _order(samples: int, seed: int, epoch: int) -> Tensor:
    """The order of the samples in an epoch, on the CPU."""
    generator = torch.Generator("cpu").manual_seed(_mix(seed, epoch))
    return torch.randperm(samples, generator=generator, device="cpu")


def _load_place(target: Any, state: Mapping[str, Any], own: Mapping[str, Any], free: tuple[str, ...] = ()) -> _Place:
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
    return _Place(_whole("the state's epoch", state["epoch"], 0), _whole("the position", state["position"], 0))


def _mix(*numbers: int) -> int:
    """A seed in which every bit depends on every number, so that neighbouring seeds, epochs and batches differ."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8, usedforsecurity=False).digest()
    return int.from_bytes(digest, "little") >> 1


def _device(batch: Any) -> torch.device:
    """The device of the first tensor in a batch; the CPU without one."""
    first = first_tensor(batch)
    return torch.device("cpu") if first is None else first.device


def _entry(name: str, values: Mapping[str, Any]) -> str:
    return f"{name} {values[name]!r}" if name in values else f"no {name}"


def _whole(name: str, value: Any, least: int | None = None) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool) or (least is not None and number < least):
        raise LoaderError(
            f"{name} is {value!r}: it must be a whole number" + ("" if least is None else f", from {least}")
        )
    return number


def _callable(fn: Any) -> Callable[..., Any]:
    if not callable(fn):
        raise LoaderError(f"fn is {describe(fn)}: it must be a function that returns a batch")
    return fn  # type: ignore[no-any-return]


def _named(given: tuple[Any, ...]) -> dict[str, Any]:
    """The tensors by name, or by their number."""
    if given and isinstance(given[0], Mapping):
        if len(given) > 1:
            raise LoaderError("give TensorLoader one mapping of tensors alone, or tensors")
        named = dict(given[0])
    else:
        named = {str(number): tensor for number, tensor in enumerate(given)}
    if not named:
        raise LoaderError("TensorLoader was given no tensor")
    return {name: _tensor(name, value) for name, value in named.items()}


def _tensor(name: str, value: Any) -> Any:
    """A NumPy array as a tensor, which shares its memory where it can be written to; anything else as it is."""
    if type(value).__module__ != "numpy":
        return value
    try:
        return torch.from_numpy(value if value.flags.writeable and min(value.strides, default=0) >= 0 else value.copy())
    except TypeError:
        raise LoaderError(
            f"array {name!r} is of dtype {value.dtype}, which tensors do not have: give numbers, such as "
            f"array.astype('float32'), or class indices"
        ) from None


def _check_tensors(named: Mapping[str, Any], device: Any) -> int:
    """Raise what is wrong with the tensors; return their length."""
    for name, tensor in named.items():
        if not isinstance(tensor, Tensor):
            if isinstance(tensor, (tuple, list)) and any(isinstance(part, Tensor) for part in tensor):
                fix = "give the tensors themselves, TensorLoader(*tensors, batch_size=...)"
            else:
                fix = "torch.as_tensor(...) makes one of numbers"
            raise LoaderError(f"tensor {name!r} is {describe(tensor)}, not a tensor: {fix}")
        if not tensor.ndim:
            raise LoaderError(f"tensor {name!r} has no dimension: the first dimension must be the samples")
        if tensor.layout != torch.strided or tensor.is_nested:
            raise LoaderError(f"tensor {name!r} has layout {tensor.layout}: only dense tensors can be cut into batches")
        if tensor.requires_grad:
            raise LoaderError(f"tensor {name!r} requires grad, which batches cannot pass on: give tensor.detach()")
    lengths = {name: tensor.shape[0] for name, tensor in named.items()}
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{name!r} has {length}" for name, length in lengths.items())
        raise LoaderError(f"the tensors have different numbers of samples (their first dimension): {listed}")
    devices = {name: tensor.device for name, tensor in named.items()}
    if device is None and len(set(devices.values())) > 1:
        listed = ", ".join(f"{name!r} is on {place}" for name, place in devices.items())
        raise LoaderError(f"the tensors are on different devices: {listed}. Give device=... to move them to one")
    return int(next(iter(lengths.values())))
