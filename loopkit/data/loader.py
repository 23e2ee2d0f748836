"""Loader: batches with a position, and loaders whose batches a function makes."""

from __future__ import annotations

import copy
import hashlib
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor

from loopkit.base.batches import describe, first_tensor, leaves
from loopkit.base.raw import raw_bytes
from loopkit.data.place import (
    PER_PROCESS,
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
    processes_of,
    whole_number,
)
from loopkit.errors import EmptyDataError


class Loader(ABC):
    """The base of all loaders, and for your own: a length, a position, a state, parts for processes and `map`.

    Each iteration over a loader is an epoch, counted from 0. One that was left early is over: the next one begins the
    next epoch at its first batch. An epoch begins when its first batch is asked for, not when ``iter`` is called.

    A class around another loader defines `batches`, and the base does the rest: the position is saved exactly,
    processes share the batches, and the source's samples can be chosen (`set_indices`). If its batches depend on
    options, `identity` names them.

    Args:
        source: The loader that it wraps, at whose position it begins, without ``steps``; or, if it wraps none, how its
            samples are cut.
        steps: Batches of an epoch, from 1; of each process, and at most: ``__len__`` may be less. By default each
            batch is made of the source's in its place. With ``steps`` it need not be.

    Raises:
        LoaderError: ``source`` is no loader of this module, or ``steps`` no count.
    """

    continues: ClassVar[bool] = False
    """With ``steps``: an epoch continues where the one before has ended, and so depends on the number of processes."""
    hands_on: ClassVar[bool] = False
    """Whether its batches come unchanged from its source: then the source's ``count_samples`` counts them, too."""

    def __new__(cls, *args: Any, **options: Any) -> Self:
        """Raise for a class that does not define `batches`."""
        if cls is Loader:
            raise LoaderError(
                "Loader is the base of loaders: write TensorLoader(inputs, targets, batch_size=32) for tensors in "
                "memory, from_function(...) for batches that a function makes, or a DataLoader of torch"
            )
        missing = sorted(cls.__abstractmethods__)
        if missing:
            raise LoaderError(
                f"{cls.__name__} does not define {', '.join(missing)}: write "
                f"def batches(self, epoch, start, indices=None), which yields the batches of an epoch"
            )
        return super().__new__(cls)

    def __init__(self, source: Loader | Shares | None = None, *, steps: int | None = None) -> None:
        if not isinstance(source, (Loader, Shares, type(None))):
            raise LoaderError(f"{type(self).__name__} was given {describe(source)}: it takes a loader of loopkit.data")
        inner = source if isinstance(source, Loader) else None
        shares = source.shares if isinstance(source, Loader) else source
        self.source: Any = inner
        """This process's part of the loader that it wraps."""
        self._counted = steps is not None
        if shares is None or self._counted:
            shares = Shares(whole_number("steps", steps, 1), 1)
        self._shares = shares
        self._rank = 0
        self._place = Place()
        if inner is None:
            self._chosen = Chosen(shares.samples)
            return
        self._chosen = inner._chosen
        self._rank = inner.rank
        if not self._counted:
            self._place = inner._place.copied()

    def __copy__(self) -> Self:
        copied = object.__new__(type(self))
        vars(copied).update(vars(self))
        copied._place = copy.copy(self._place)
        return copied

    def __len__(self) -> int:
        """Batches per epoch, of this process."""
        if self.source is None or self._counted:
            return self._shares.steps()
        return len(self.source)

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
        """Samples of this epoch that all processes have yielded; batches for `from_function`."""
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
        if not place.position or self._counted:
            return None
        seed = self._shuffles()
        if seed is False:
            return None
        if place.order is None:  # made when it is asked for, once an epoch
            place.order = ordered(shares.samples, seed, place.epoch, place.indices)
        return part_of(place.order, shares, self._rank, place.start, place.position - 1 - place.base)

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
        epoch = whole_number("epoch", epoch, 0)
        if self._place.begun or self._place.epoch != epoch:
            self._place = Place(epoch)
        self._place.choose()

    def start_over(self) -> None:
        """Let the next iteration be epoch 0, unless `set_epoch` or `load_state_dict` chose one since the last.

        A learner calls it before its first epoch over a loader that others may have used.
        """
        if not self._place.given:
            self._place = Place()

    def state_dict(self, *, next_epoch: bool = False) -> dict[str, Any]:
        """Where the loader is, and what must be the same where this is loaded. It can be written as JSON.

        ``"epoch"`` and ``"position"``: while the k-th batch of an iteration is processed the position is k, the last
        one included; once the iteration has ended, the state is position 0 of the next epoch. If that is not
        enough, ``"consumed"`` is the number of samples that all processes have used. The state is the same in each.

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
        shares = self._shares
        processes = state.get("processes", 1)
        same = processes == own.get("processes", 1)
        if not same:
            state = self._moved(state)
            processes = state.get("processes", 1)
        place = load_place(self, state, own, () if same else PER_PROCESS)
        if "consumed" in state:
            place.start = whole_number("the state's consumed", state["consumed"], 0)
            place.base = place.position
        elif processes != 1 and (not same or shares.size > 1):  # else steps are not shared
            raise LoaderError("the state has no consumed, which states of several processes have")
        elif not same:
            batch_size = whole_number("the state's batch_size", state.get("batch_size", 1), 1)
            before = Shares(shares.samples, batch_size)
            place.start = before.used(0, place.position)
            place.base = place.position
        elif place.position > len(self):
            raise LoaderError(f"the state's position is {place.position}, but an epoch has {len(self)} batches")
        if place.start > shares.samples:
            raise LoaderError(f"the state's consumed is {place.start}, but an epoch has {shares.samples}")
        self._chosen.load(state, place)
        self._place = place.choose()

    def _moved(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Convert a state that was saved with another number of processes."""
        if not self._counted:
            if self.source is None:
                return state
            moved: Mapping[str, Any] = self.source._moved(state)
            return moved
        if state.get("position") or (self.continues and state.get("epoch")):
            saved = state.get("processes", 1)
            here = self.identity().get("processes", 1)
            word = "processes" if saved > 1 else "process"
            raise LoaderError(
                f"{self!r} counts the batches of each process, and the state was saved with {saved} {word}, "
                f"{here} here, which are elsewhere after as many: resume with {saved}, or "
                f"call set_epoch to begin an epoch without the state"
            )
        return {**state, "consumed": 0}

    def shard(self, rank: int, size: int, tail: Tail = "uneven", least: int = 1) -> Self:
        """The part of one process: a loader of its batches, with its own position, from this loader's on.

        Every process has the same order of an epoch. In step i they have the parts of the batch that a loader with
        ``size * batch_size`` samples would give, one after the other by rank; ``batch_size`` counts the samples of
        one process. A state of one process fits all others, and, as long as samples, order and seed are the same, any
        number of them: see `load_state_dict`.

        Batches of `from_function` are not cut: the process takes every index ``i * size + rank``. So does
        the number of a batch from which ``map(fn, seed)`` seeds its generator: it is the one that the batch would
        have in a single process with the same ``batch_size``.

        Args:
            rank: The process, from 0.
            size: How many there are; for 1 all batches stay whole.
            tail: The treatment of a last global batch that is not full, unless ``drop_last`` leaves it out.
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
        sharded._place = Place(place.epoch, place.position, place.begun, place.position, self._consumed(place))
        sharded._place.given = place.given
        sharded._place.indices = place.indices
        return sharded

    def _share(self, rank: int, size: int, tail: Tail, least: int) -> None:
        if self.source is not None:
            self.source = self.source.shard(rank, size, tail, least)
            if not self._counted:
                self._shares = self.source.shares
        elif not self._counted:
            self._shares = self._shares.among(rank, size, tail, least)
        self._rank = rank

    def _consumed(self, place: Place) -> int:
        return self._shares.used(place.start, place.position - place.base)

    def map(self, fn: Callable[..., Any], seed: int | None = None) -> Loader:
        """A loader of the same length whose batches are ``fn(batch)``, made when they are asked for.

        It begins at this loader's position and from then on has its own: iterations over one do not move the other.
        States fit both, unless a seed is given here.

        Args:
            fn: Called with a batch, which it may change in place.
            seed: Call ``fn(batch, generator)`` with a ``torch.Generator`` on the device of the batch's first tensor,
                seeded from this seed, the epoch and the batch's index: numbers for a batch do not depend on
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


class _MappedLoader(Loader):
    def __init__(self, source: Loader, fn: Callable[..., Any], seed: int | None) -> None:
        super().__init__(source)
        self._fn = checked_function(fn)
        self._seed = None if seed is None else whole_number("seed", seed)
        self._seeds: list[int] = list(source.identity().get("map_seeds", ()))
        if self._seed is not None:
            self._seeds.append(self._seed)

    def identity(self) -> dict[str, Any]:
        found = super().identity()
        if self._seeds:
            found["map_seeds"] = list(self._seeds)
        return found

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
            yield fn(batch, generator.manual_seed(mix(seed, epoch, index, len(self._seeds))))


def _device(batch: Any) -> torch.device:
    """The device of the first tensor in a batch; the CPU without one."""
    first = first_tensor(batch)
    return torch.device("cpu") if first is None else first.device


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
        count = whole_number("n", n)
        if count < 1:
            raise EmptyDataError(f"there is no batch: n is {n}; it counts the batches of an epoch, from 1")
        super().__init__(Shares(count, batch_size=1))
        self._fn = checked_function(fn)
        self._seed = None if seed is None else whole_number("seed", seed)

    def identity(self) -> dict[str, Any]:
        return {"batches": self._shares.samples, "seed": self._seed, **processes_of(self._shares)}

    def __repr__(self) -> str:
        return f"from_function({self._shares.samples}, {_name(self._fn)})"

    def batches(self, epoch: int, start: int, indices: Tensor | None = None) -> Iterator[Any]:
        fn = self._fn
        seed = self._seed
        shares = self._shares
        stop = start + shares.steps(start) * shares.size
        numbers = range(start + self._rank, stop, shares.size)
        wrapped: Iterable[int] = numbers
        if shares.size > 1:
            wrapped = (number % shares.samples for number in numbers)
        if seed is None:
            yield from map(fn, wrapped)
            return
        generator = torch.Generator("cpu")
        for index in wrapped:
            yield fn(index, generator.manual_seed(mix(seed, epoch, index)))

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
    count = whole_number("batches", batches, 1)
    if isinstance(loader, (list, tuple)) and count < len(loader) and _has_repeated(loader):
        raise LoaderError(
            f"the {len(loader)} batches are given several times, and same would take the first {count}: give the "
            f"{type(loader).__name__} itself as the data, which are the same in every epoch"
        )
    source = loader.map(lambda batch: batch) if isinstance(loader, Loader) else loader
    return _SameLoader(list(itertools.islice(source, count)))


def _has_repeated(batches: Sequence[Any]) -> bool:
    """Whether one batch is in several places."""
    return len({id(each) for each in batches}) < len(batches)


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
