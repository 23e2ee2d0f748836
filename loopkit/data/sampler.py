"""ResumableSampler: gives a ``DataLoader`` a position; seeded: random numbers that belong to a sample."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, Dataset, Sampler

from loopkit.base.batches import describe
from loopkit.base.words import takes
from loopkit.data.place import (
    Chosen,
    LoaderError,
    Place,
    Shares,
    Tail,
    checked_function,
    load_place,
    mix,
    ordered,
    part_of,
    whole_number,
)
from loopkit.errors import EmptyDataError

# Indices that are made into Python numbers at a time: all at once would take 36 bytes and more for each sample.
BLOCK_INDICES = 65_536


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

    A ``DataLoader`` with workers reads ahead, so the sampler cannot know how much was used: pass it when you save
    its state, as `loopkit.Learner` does.

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

    @takes()
    def __init__(self, samples: int | Sized, *, shuffle: bool = True, seed: int = 0) -> None:
        self.samples = whole_number("samples", len(samples) if isinstance(samples, Sized) else samples)
        if self.samples < 1:
            raise EmptyDataError(f"there is no sample: samples is {describe(samples)}")
        self.shuffle = bool(shuffle)
        self.seed = whole_number("seed", seed)
        self._place = Place()
        self._chosen = Chosen(self.samples)
        self._start = 0
        self._shares: Shares | None = None
        self._rank = 0

    def __copy__(self) -> Self:
        copied = object.__new__(type(self))
        vars(copied).update(vars(self))
        copied._place = copy.copy(self._place)
        return copied

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
        """Samples of that epoch that its iteration left out because they were used before the state was saved."""
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
                yield SampleIndex(index, mix(self.seed, epoch, index))

    def _begin(self) -> Place:
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
        return part_of(place.order, shares, self._rank, self._start, step)

    def _order(self, place: Place) -> Tensor | None:
        return ordered(self.samples, self.seed if self.shuffle else None, place.epoch, place.indices)

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
            yield [SampleIndex(index, mix(self.seed, epoch, index)) for index in indices]

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
            tail: The treatment of a last global batch that is not full, see `Loader.shard`.
            batch_size: Samples per batch of one process.
            least: Samples of each process in an uneven tail, see `Loader.shard`.

        Raises:
            LoaderError: Rank, size, tail or batch size are impossible, or the sampler is a part itself.
            EmptyDataError: There are too few samples.

        Example::

            >>> dataset = list("abcdefgh")
            >>> for rank in range(2):
            ...     batches = ResumableSampler(dataset, shuffle=False).shard(rank, 2, batch_size=2)
            ...     print(list(torch.utils.data.DataLoader(dataset, batch_sampler=batches)))
            [['a', 'b'], ['e', 'f']]
            [['c', 'd'], ['g', 'h']]
        """
        whole = self._shares or Shares(self.samples, whole_number("batch_size", batch_size, 1))
        place = self._place
        sharded = copy.copy(self)
        sharded._shares = whole.among(rank, size, tail, least)
        sharded._rank = rank
        sharded._place = Place(place.epoch, place.position, place.begun)
        sharded._place.given = place.given
        sharded._place.indices = place.indices
        return ResumableBatchSampler(sharded)

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration be this epoch, from its first sample.

        If a state of the same epoch was just loaded, its position is kept.

        Args:
            epoch: From 0.
        """
        epoch = whole_number("epoch", epoch, 0)
        if self._place.begun or self._place.epoch != epoch:
            self._place = Place(epoch)
            self._start = 0
        self._place.choose()

    def start_over(self) -> None:
        """Let the next iteration be epoch 0, unless `set_epoch` or `load_state_dict` chose one; see `Loader`."""
        if not self._place.given:
            self._place = Place()
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
        position = min(whole_number("position", position, 0), self.samples)  # the last batch may not be full
        state = {"epoch": place.epoch, "position": position, **self._identity()}
        return {**state, **self._chosen.save(place if position else Place())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration give the rest of the epoch: the samples that had not been used.

        Raises:
            LoaderError: The state is of a sampler with another number of samples, order or seed.
        """
        place = load_place(self, state, self._identity())
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
            raise LoaderError("the sampler is not a part: use sampler.shard(rank, size, batch_size=...)")
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

    The generator is seeded from the sampler's seed, the epoch and the index. Numbers for a sample depend
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
    return _SeededDataset(dataset, checked_function(fn))


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
        generator = torch.Generator("cpu").manual_seed(mix(index.seed, self._depth))
        return self._fn(self._dataset[index], generator)
