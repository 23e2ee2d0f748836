"""How long an epoch is: cut short, counted off a stream, or steps without any data."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterator, Mapping, Sized
from fractions import Fraction
from types import WrapperDescriptorType
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler

from loopkit.author import Shares, describe, hands_on, is_count, length_of, wrapped
from loopkit.data import Loader, LoaderError, ResumableSampler
from loopkit.errors import EmptyDataError, ExhaustedIteratorError
from loopkit_data.elements import Batched


def limit(loader: Any, steps: float) -> Any:
    """The first batches of each epoch of a loader, with a length.

    The next epoch begins anew: of a loader that shuffles it has other samples. A run resumes exactly in mid-epoch.

    Args:
        loader: A loader of `loopkit.data`, whose parts several processes take; or any iterable of batches.
        steps: Batches of an epoch, from 1; of each process. Or the part of an epoch, between 0 and 1, rounded down: 0.1
            is a tenth of the batches. A shorter epoch stays as it is. Another number of processes can resume between
            two epochs, not in the middle of one.

    Raises:
        LoaderError: ``steps`` is no count and no part, it is a part of data without a length or less than a batch, or
            the loader is shuffled by a generator whose place cannot be saved, or cannot be iterated.
        ExhaustedIteratorError: A second epoch begins over an iterator that can be used once.

    Example::

        >>> from loopkit.data import TensorLoader
        >>> few = limit(TensorLoader(torch.arange(6), batch_size=2), steps=2)
        >>> len(few), [batch.tolist() for batch in few]
        (2, [[0, 1], [2, 3]])
    """
    if isinstance(steps, float) and not 0 < steps < 1:
        raise LoaderError(
            f"limit: steps is {steps!r}: it is a whole number, from 1, or a part of an epoch between 0 and 1"
        )
    part = Fraction(str(steps)) if isinstance(steps, float) else None
    count = _count(steps) if part is None else _part_of(loader, part)
    if isinstance(loader, Loader):
        return _Limited(loader, count, part)
    return _Counted(loader, count, endless=False)


def per_epoch(stream: Any, steps: int) -> Any:
    """Epochs of so many batches over a stream that continues in the next epoch, and begins again when it ends.

    Schedules over a whole fit know its length. A run resumes exactly in mid-epoch: a loader of `loopkit.data`, one
    with a ``ResumableSampler``, and data with ``state_dict`` are put where they were; of anything else the batches
    before are made again, so they have to be the same.

    Args:
        stream: A loader of `loopkit.data`, whose parts several processes take; or any iterable of batches.
        steps: Batches of an epoch, from 1; of each process. A run resumes only in the same number of processes.

    Raises:
        LoaderError: ``steps`` is no count, or the stream is shuffled by a generator whose place cannot be saved.
        EmptyDataError: The stream has no batch.

    Example::

        >>> from loopkit.data import TensorLoader
        >>> epochs = per_epoch(TensorLoader(torch.arange(6), batch_size=2), steps=2)
        >>> [[batch.tolist() for batch in epochs] for _ in range(2)]
        [[[0, 1], [2, 3]], [[4, 5], [0, 1]]]
    """
    return _PerEpoch(stream, steps) if isinstance(stream, Loader) else _Counted(stream, steps, endless=True)


def steps(n: int) -> Loader:
    """Epochs of n steps without data, for phases with ``batchless = True``: there ``step.batch`` is None.

    For full-batch training, where a phase has its data, and for reinforcement learning. Each process makes all n steps.
    A step counts as one sample, unless the phase sets ``step.weight``.

    >>> list(steps(2))
    [None, None]
    """
    return _Steps(n)


episodes = steps
"""`steps`, for phases whose step is an episode."""


def in_steps(
    loader: Any, *, samples: int | None = None, tokens: int | None = None, block: int | None = None, processes: int = 1
) -> int:
    """How many training steps so many samples or tokens are: the fewest that have at least as many.

    Lengths of a fit, of an epoch or of a warmup can then be given in samples or tokens, and a schedule knows them:
    ``learner.fit(train, max_steps=in_steps(train, tokens=10**9))``. Nothing is read.

    Args:
        loader: A loader of `loopkit.data`, or a ``DataLoader`` over samples by index.
        samples: The samples, over all epochs and processes.
        tokens: The tokens, likewise.
        block: Tokens of a sample, for ``tokens``; `Tokens` knows its own.
        processes: How many processes share the loader, if it is not a part of one process already.

    Raises:
        LoaderError: Neither or both are given, one is no count, or the loader does not know its samples.

    Example::

        >>> from loopkit.data import TensorLoader
        >>> train = TensorLoader(torch.arange(10), batch_size=4)  # steps of 4, 4 and 2 samples
        >>> in_steps(train, samples=10), in_steps(train, samples=11), in_steps(train, tokens=60, block=5)
        (3, 4, 4)
    """
    if (samples is None) == (tokens is None):
        raise LoaderError("in_steps: give samples= or tokens=, one of them")
    if tokens is not None:
        block = getattr(loader, "block", None) if block is None else block
        if block is None:
            raise LoaderError(f"in_steps: how many tokens a sample of {describe(loader)} has is unknown: give block=")
        samples = math.ceil(_count(tokens, "tokens") / _count(block, "block"))
    limits: list[_Limited] = []
    source = loader.source if isinstance(loader, _PerEpoch) else loader
    while isinstance(source, _Limited):
        limits.append(source)
        source = source.source
    shares = _shares_of(source, _count(processes, "processes"))
    length = shares.steps()
    for each in reversed(limits):
        length = each.cut(length)
    whole = shares.used(0, length)
    if not whole:
        raise LoaderError(f"in_steps: an epoch of {describe(loader)} has no batch")
    epochs, left = divmod(_count(samples, "samples"), whole)
    return int(epochs) * length + min(math.ceil(left / shares.whole), length)


def _shares_of(loader: Any, processes: int) -> Shares:
    """How the samples of an epoch are cut into the steps of all processes."""
    if isinstance(loader, Loader) and not _counts_steps(loader) and _knows_samples(loader):
        shares = loader.shares
    elif isinstance(loader, DataLoader) and isinstance(loader.batch_size, int) and isinstance(loader.sampler, Sized):
        shares = Shares(len(loader.sampler), loader.batch_size, 1, "drop" if loader.drop_last else "uneven")
    else:
        raise LoaderError(
            f"in_steps: {describe(loader)} does not know how many samples an epoch has: give a number of steps"
        )
    return shares if processes == 1 else shares.among(0, processes, shares.tail)


def _knows_samples(loader: Loader) -> bool:
    """Whether a loader counts samples, and not batches."""
    return "samples" in loader.state_dict() or hasattr(loader, "samples")


def _counts_steps(loader: Any) -> bool:
    """Whether the epochs of a loader, or of the one that it changes, are cut off by steps."""
    return any(isinstance(each, _Epochs) for each in wrapped(loader))


class _Steps(Loader):
    """Steps that processes do not share: each has its own environment."""

    def __init__(self, n: int) -> None:
        super().__init__(steps=n)

    def __repr__(self) -> str:
        return f"steps({len(self)})"

    def identity(self) -> dict[str, Any]:
        return {"batches": len(self), "seed": None}

    def batches(self, epoch: int, start: int, indices: Tensor | None = None) -> Iterator[Any]:
        return itertools.repeat(None, len(self) - start)


class _Epochs(Loader):
    """Epochs made of another loader's: each process takes ``steps`` batches of its part of that."""

    word = ""
    hands_on = True

    def __init__(self, source: Loader, steps: int) -> None:
        super().__init__(source, steps=_count(steps))
        self._steps = steps

    def __repr__(self) -> str:
        return f"{self.word}({self.source!r}, {self._steps})"

    def identity(self) -> dict[str, Any]:
        return {**super().identity(), self.word: self._steps}

    def _from(self, epoch: int, start: int, indices: Tensor | None) -> Iterator[Any]:
        """The source's batches of an epoch, after so many."""
        batches: Iterator[Any] = self.source.batches(epoch, self.source.shares.used(0, start), indices)
        return batches


class _Limited(_Epochs):
    word = "limit"

    def __init__(self, source: Loader, steps: int, part: Fraction | None) -> None:
        super().__init__(source, steps)
        self._part = part
        """The part of an epoch, of which each process takes its own."""

    def __len__(self) -> int:
        return self.cut(len(self.source))

    def cut(self, length: int) -> int:
        """How many of so many batches it takes."""
        most = self._steps if self._part is None else max(math.floor(self._part * length), 1)
        return min(most, length)

    def batches(self, epoch: int, start: int, indices: Tensor | None = None) -> Iterator[Any]:
        return itertools.islice(self._from(epoch, start, indices), len(self) - start)


class _PerEpoch(_Epochs):
    word = "per_epoch"
    continues = True

    def batches(self, epoch: int, start: int, indices: Tensor | None = None) -> Iterator[Any]:
        length = len(self.source)
        first, place = divmod(epoch * self._steps + start, length)
        parts = (self._from(each, place if each == first else 0, indices) for each in itertools.count(first))
        return itertools.islice(itertools.chain.from_iterable(parts), self._steps - start)


class _Counted:
    """So many batches of any iterable, with a state."""

    hands_on = True

    def __init__(self, data: Any, steps: int, endless: bool) -> None:
        if isinstance(data, DataLoader) and _sampler(data) is None and isinstance(data.sampler, RandomSampler):
            raise LoaderError(
                f"{describe(data)} is shuffled by a generator whose place cannot be saved: give it "
                f"sampler=ResumableSampler(dataset)"
            )
        if not hasattr(data, "__iter__") and not hasattr(data, "__getitem__"):
            hint = "; call the function, or train on a function around it: lambda: limit(f(), 10)" * callable(data)
            raise LoaderError(f"{describe(data)} cannot be iterated: give an iterable of batches{hint}")
        self._data, self._steps, self._endless = data, _count(steps), endless
        self._batches: Iterator[Any] | None = None
        self.position = 0
        """Batches of this epoch that were yielded."""
        self.taken = 0
        """Batches that were taken since the data was begun."""
        self._loaded = False
        self._begun = False
        """Whether an iterator of the data was made, of which there may be only one."""

    @property
    def source(self) -> Any:
        """The data whose batches they are."""
        return self._data

    def __len__(self) -> int:
        if self._endless or (length := length_of(self._data)) is None:
            return self._steps
        return min(self._steps, length)

    def __repr__(self) -> str:
        return f"{'per_epoch' if self._endless else 'limit'}({describe(self._data)}, {self._steps})"

    def __iter__(self) -> Iterator[Any]:
        if not self._loaded:
            self._begin()
        self._loaded = False
        while self.position < self._steps:
            try:
                batch = self._next()
            except StopIteration:
                break
            self.position += 1
            yield batch
        self._begin()

    def _begin(self) -> None:
        """The next epoch."""
        self.position = 0
        if not self._endless:
            if self._batches is None and self.taken and _keeps_place(self._data):
                next(iter(self._data), None)  # leaves the epoch that was loaded, at its end here
            self._batches, self.taken = None, 0

    def _next(self) -> Any:
        if self._batches is None:
            self._batches = iter(self._data)
            if self._begun and (once := _used_once(self._data)) is not None:
                continues = "" if self._endless else "; per_epoch(stream, steps) continues in the next epoch"
                raise ExhaustedIteratorError(
                    f"{self!r} begins again, and a {type(once).__name__} can be used once: give something that can be "
                    f"iterated again, or a function that returns a new one{continues}"
                )
            self._begun = True
            if not _keeps_place(self._data):
                for _ in range(self.taken):
                    next(self._batches)
        batch = next(self._batches, self)
        if batch is self:
            if not self._endless:
                raise StopIteration
            if not self.taken:
                raise EmptyDataError(f"there is no batch: {describe(self._data)} is empty, or was used up before")
            self._batches, self.taken = None, 0
            return self._next()
        self.taken += 1
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Where it is."""
        state: dict[str, Any] = {"position": self.position, "taken": self.taken}
        if (sampler := _sampler(self._data)) is not None:
            state["data"] = sampler.state_dict(self.taken * self._data.batch_size, next_epoch=self._batches is None)
        elif _keeps_place(self._data):
            state["data"] = copy.deepcopy(self._data.state_dict())
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from there."""
        self.position, self.taken, self._batches = state["position"], state["taken"], None
        self._loaded = self.position > 0
        if "data" in state:
            (_sampler(self._data) or self._data).load_state_dict(state["data"])


def _used_once(data: Any) -> Any:
    """Return the iterator that data are, or wrap, if it surely cannot begin again; None where there is none."""
    inner = wrapped(data, lambda each: hands_on(each) or isinstance(each, Batched))
    return inner[-1] if not _keeps_place(data) and _cannot_restart(inner[-1]) else None


def _cannot_restart(data: Any) -> bool:
    """Whether it is a generator or an iterator of C; one in Python may begin anew in its ``__iter__``."""
    return hasattr(type(data), "__next__") and isinstance(type(data).__iter__, WrapperDescriptorType)


def _sampler(data: Any) -> ResumableSampler | None:
    sampler = data.sampler if isinstance(data, DataLoader) else None
    return sampler if isinstance(sampler, ResumableSampler) else None


def _keeps_place(data: Any) -> bool:
    named = all(callable(getattr(data, name, None)) for name in ("state_dict", "load_state_dict"))
    return named or _sampler(data) is not None


def _part_of(loader: Any, part: Fraction) -> int:
    """How many batches are so large a part of an epoch, rounded down."""
    length = length_of(loader)
    if length is None:
        raise LoaderError(
            f"limit takes {float(part)} of {describe(loader)}, which has no len(): give a number of batches"
        )
    if not (count := math.floor(part * length)):
        raise LoaderError(
            f"limit takes {float(part)} of {length} batches, which is less than one: give limit(loader, 1)"
        )
    return count


def _count(number: Any, name: str = "steps") -> int:
    if not is_count(number):
        raise LoaderError(f"{name} is {number!r}: it is a whole number, from 1")
    count: int = number
    return count
