"""How long an epoch is: cut short, counted off a stream, or steps without any data."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler

from loopkit.author import describe
from loopkit.data import Loader, LoaderError, ResumableSampler
from loopkit.errors import EmptyDataError


def limit(loader: Any, steps: int) -> Any:
    """The first batches of each epoch of a loader, with a length.

    The next epoch begins anew: of a loader that shuffles it has other samples. A run resumes exactly in mid-epoch.

    Args:
        loader: A loader of `loopkit.data`, whose parts several processes take; or any iterable of batches.
        steps: Batches of an epoch, from 1; of each process. A shorter epoch stays as it is. Another number of processes
            can resume between two epochs, not in the middle of one.

    Raises:
        LoaderError: ``steps`` is no count, or the loader is shuffled by a generator whose place cannot be saved.

    Example::

        >>> from loopkit.data import TensorLoader
        >>> few = limit(TensorLoader(torch.arange(6), batch_size=2), steps=2)
        >>> len(few), [batch.tolist() for batch in few]
        (2, [[0, 1], [2, 3]])
    """
    return _Limited(loader, steps) if isinstance(loader, Loader) else _Counted(loader, steps, endless=False)


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

    def __len__(self) -> int:
        return min(self._steps, len(self.source))

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

    def __init__(self, data: Any, steps: int, endless: bool) -> None:
        if isinstance(data, DataLoader) and _sampler(data) is None and isinstance(data.sampler, RandomSampler):
            raise LoaderError(
                f"{describe(data)} is shuffled by a generator whose place cannot be saved: give it "
                f"sampler=ResumableSampler(dataset)"
            )
        self._data, self._steps, self._endless = data, _count(steps), endless
        self._batches: Iterator[Any] | None = None
        self.position = 0
        """Batches of this epoch that were yielded."""
        self.taken = 0
        """Batches that were taken since the data was begun."""
        self._loaded = False

    def __len__(self) -> int:
        return self._steps if self._endless or not hasattr(self._data, "__len__") else min(self._steps, len(self._data))

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


def _sampler(data: Any) -> ResumableSampler | None:
    sampler = data.sampler if isinstance(data, DataLoader) else None
    return sampler if isinstance(sampler, ResumableSampler) else None


def _keeps_place(data: Any) -> bool:
    named = all(callable(getattr(data, name, None)) for name in ("state_dict", "load_state_dict"))
    return named or _sampler(data) is not None


def _count(steps: Any) -> int:
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise LoaderError(f"steps is {steps!r}: it is a whole number, from 1")
    return steps
