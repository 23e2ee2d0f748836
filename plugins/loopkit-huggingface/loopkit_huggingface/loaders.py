"""Loaders of batches from datasets, with positions that can be saved at any step."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

from torch import Tensor
from torch.utils.data import BatchSampler

from loopkit.author import Shares, Shown, describe
from loopkit.data import Loader, LoaderError, ResumableSampler
from loopkit.errors import EmptyDataError, StateError

__all__ = ["DatasetLoader", "StreamLoader"]

Collate = Callable[[list[Any]], Any]
"""Makes a batch of samples, such as ``DataCollatorWithPadding(tokenizer)``."""


class DatasetLoader(Loader):
    """Batches of a dataset with samples by index, such as ``datasets.Dataset``, made in this process.

    Order, position, state, ``map`` and ``shard`` are as in `loopkit.data.TensorLoader`: with the same samples, seed
    and batch size the same samples come in the same order, and a run resumes in mid-epoch with the batch that is next.
    A dataset made by `loopkit.data.seeded` draws the same numbers for a sample wherever the epoch was resumed.

    A collator that draws random numbers draws them from torch's generator, which a checkpoint has, too.

    Args:
        dataset: Anything with a length and samples by index.
        batch_size: Samples per batch, from 1; the last batch holds what is left.
        shuffle: Take the samples in a new order in every epoch, which depends only on the seed and the epoch.
        collate: Makes a batch of a list of samples; ``transformers.default_data_collator`` by default, which stacks
            what has the same shape in all samples.
        seed: For ``shuffle``.
        drop_last: Leave out a last batch that is not full.

    Raises:
        LoaderError: The dataset has no samples by index, ``batch_size < 1``, or the collator has random numbers of its
            own, which no checkpoint has.
        EmptyDataError: There is no batch.

    Example::

        >>> from datasets import Dataset
        >>> words = Dataset.from_dict({"input_ids": [[1, 2], [3, 4], [5, 6]]})
        >>> loader = DatasetLoader(words, batch_size=2)
        >>> [batch["input_ids"].tolist() for batch in loader]
        [[[1, 2], [3, 4]], [[5, 6]]]
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        *,
        shuffle: bool = False,
        collate: Collate | None = None,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
            raise LoaderError(
                f"dataset is {describe(dataset)}: DatasetLoader needs a length and samples by index; StreamLoader "
                f"takes datasets whose samples come one after the other"
            )
        self.dataset = dataset
        self.batch_size = _batch_size(batch_size)
        self.shuffle = shuffle
        self.collate = _collate(collate)
        self.seed = seed
        self.drop_last = drop_last
        self.samples = len(dataset)
        if self.samples < (self.batch_size if drop_last else 1):
            raise EmptyDataError(
                f"there is no batch: the dataset holds {self.samples} samples and batch_size is {self.batch_size}"
                + (" with drop_last=True" if self.samples else "")
            )
        ResumableSampler(self.samples, shuffle=shuffle, seed=seed)  # refuses a seed that is none
        super().__init__(Shares(self.samples, self.batch_size, tail="drop" if drop_last else "uneven"))

    def __repr__(self) -> str:
        return (
            f"DatasetLoader({type(self.dataset).__name__} of {self.samples} samples, batch_size={self.batch_size}, "
            f"shuffle={self.shuffle}, seed={self.seed}, drop_last={self.drop_last})"
        ) + (f".shard({self.rank}, {self.shares.size}, {self.shares.tail!r})" if self.shares.size > 1 else "")

    def identity(self) -> dict[str, Any]:  # noqa: D102
        identity = {
            "samples": self.samples,
            "batch_size": self.batch_size,
            "drop_last": self.drop_last,
            "shuffle": self.shuffle,
            "seed": self.seed,
        }
        shared = {"processes": self.shares.size, "tail": self.shares.tail} if self.shares.size > 1 else {}
        return {**identity, **shared}

    def batches(self, epoch: int, start: int, indices: Tensor | None = None) -> Iterator[Any]:  # noqa: D102
        shares, collate = self.shares, self.collate
        sampler = ResumableSampler(self.samples, shuffle=self.shuffle, seed=self.seed)
        sampler.set_indices(indices)
        sampler.load_state_dict({**sampler.state_dict(), "epoch": epoch, "position": start})
        batches = (
            BatchSampler(sampler, self.batch_size, self.drop_last)
            if shares.size == 1
            else sampler.shard(self.rank, shares.size, shares.tail, batch_size=self.batch_size, least=shares.least)
        )
        together = getattr(self.dataset, "__getitems__", None)
        for numbers in batches:
            samples = together(numbers) if together else [self.dataset[number] for number in numbers]
            try:
                batch = collate(samples)
            except (TypeError, ValueError) as error:
                _name_texts(error, samples)
                raise
            yield _labelled(batch)


class StreamLoader(Shown):
    """Batches of a dataset whose samples come one after the other, such as ``datasets.IterableDataset``.

    There is one stream of batches, epoch after epoch, and it has no length. An epoch continues where the
    previous one ended, in this process and after a restart: give each phase its own loader.

    A position is a number of samples. A run resumes with the next sample, exactly: the samples of the epoch that were
    used are read again and passed over, or, with ``replay=False``, the dataset's own state leads there at once.

    Args:
        dataset: An iterable that gives the same samples each time within an epoch. If it has ``set_epoch``, that
            is called before each, which is what makes ``IterableDataset.shuffle`` give another order in each.
        batch_size: Samples per batch, from 1; the last batch of an epoch holds what is left.
        collate: As for `DatasetLoader`.
        drop_last: Leave out a last batch that is not full.
        replay: Find a position by reading the samples before it again. False: by ``dataset.load_state_dict``, for long
            streams without ``shuffle``: datasets does not save what waits in the buffer of a shuffle.

    Raises:
        LoaderError: The dataset can be passed over only once; ``batch_size < 1``; with ``replay=False`` the dataset has
            no state, or one that is not exact.
        StateError: When an epoch begins: the epoch ended before the position.

    Several processes need different samples. ``datasets.distributed.split_dataset_by_node(dataset, rank, world_size)``
    gives each its own; a plugin such as ``DDP(shard=False)`` then leaves the loader as it is.

    Example::

        >>> from datasets import IterableDataset
        >>> words = IterableDataset.from_generator(lambda: ({"input_ids": [n, n]} for n in range(3)))
        >>> loader = StreamLoader(words, batch_size=2)
        >>> [batch["input_ids"].tolist() for batch in loader]
        [[[0, 0], [1, 1]], [[2, 2]]]
    """

    def __init__(
        self,
        dataset: Iterable[Any],
        batch_size: int,
        *,
        collate: Collate | None = None,
        drop_last: bool = False,
        replay: bool = True,
    ) -> None:
        if not hasattr(dataset, "__iter__") or hasattr(dataset, "__next__"):
            raise LoaderError(
                f"dataset is {describe(dataset)}: StreamLoader passes over it in every epoch, so it takes an iterable "
                f"such as datasets.IterableDataset.from_generator(function), no iterator"
            )
        self.dataset: Any = dataset
        self.batch_size = _batch_size(batch_size)
        self.collate = _collate(collate)
        self.drop_last = drop_last
        self.replay = replay
        self.epoch = 0
        """The epoch of the batch that comes next."""
        self.taken = 0
        """Samples of this epoch that were used."""
        self._stream: Iterator[Any] | None = None
        self._state: dict[str, Any] | None = None
        """Where the dataset was when a state was saved, until the stream is opened there."""
        if not replay:
            if not callable(getattr(dataset, "load_state_dict", None)):
                raise LoaderError(f"dataset is {describe(dataset)}, which has no state: leave out replay=False")
            if _has_buffer(getattr(dataset, "_ex_iterable", None)):
                raise LoaderError(
                    "the dataset is shuffled, and its state does not hold what waits in the buffer: samples would be "
                    "lost at every restart. Leave out replay=False, or shuffle before it is a stream"
                )

    def __iter__(self) -> Iterator[Any]:
        if self._stream is None:
            self._stream = self._open()
        stream = self._stream
        while samples := list(islice(stream, self.batch_size)):
            if self.drop_last and len(samples) < self.batch_size:
                break
            self.taken += len(samples)
            yield _labelled(self.collate(samples))
        self.epoch, self.taken, self._stream = self.epoch + 1, 0, None

    def _open(self) -> Iterator[Any]:
        """The samples of the epoch that come next."""
        if callable(set_epoch := getattr(self.dataset, "set_epoch", None)):
            set_epoch(self.epoch)
        if self._state is not None:
            self.dataset.load_state_dict(self._state)
            self._state = None
            return iter(self.dataset)
        stream: Iterator[Any] = iter(self.dataset)
        found = sum(1 for _ in islice(stream, self.taken))
        if found < self.taken:
            raise StateError(
                f"epoch {self.epoch + 1} of the dataset ended after {found} samples, but {self.taken} were used "
                f"before: it is not the same dataset"
            )
        return stream

    def state_dict(self) -> dict[str, Any]:
        """Where the stream is: ``epoch``, ``taken`` and, with ``replay=False``, the ``dataset``'s state."""
        state = self._state
        if state is None and self.taken and not self.replay:
            state = self.dataset.state_dict()
        return {"epoch": self.epoch, "taken": self.taken, "dataset": state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next epoch resume where `state_dict` was called."""
        self.epoch, self.taken, self._stream = state["epoch"], state["taken"], None
        self._state = None if self.replay else state["dataset"]


def _name_texts(error: Exception, samples: list[Any]) -> None:
    """Note which columns no collator can make tensors of; the Trainer of transformers would have left them out."""
    first = samples[0]
    texts = [name for name, value in first.items() if isinstance(value, str)] if isinstance(first, Mapping) else []
    if texts:
        error.add_note(f"there is text in {texts}: leave it out, dataset.remove_columns({texts})")


def _batch_size(value: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise LoaderError(f"batch_size is {value!r}: it is a number of samples, from 1")
    return value


def _collate(given: Collate | None) -> Collate:
    if given is None:
        from transformers import default_data_collator

        return default_data_collator  # type: ignore[no-any-return]
    if not callable(given):
        raise LoaderError(f"collate is {describe(given)}: it is a function of a list of samples")
    if (seed := getattr(given, "seed", None)) is not None:
        raise LoaderError(
            f"collate is {type(given).__name__} with seed={seed!r}, and so with its own generator, which no "
            f"checkpoint has: leave out its seed; it then draws from torch's, which Learner(seed=...) seeds"
        )
    return given


def _labelled(batch: Any) -> Any:
    """The batch, with a warning if it has labels of which none counts."""
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if isinstance(labels, Tensor) and labels.device.type == "cpu" and labels.numel() and labels.eq(-100).all():
        warnings.warn(
            "all labels of a batch are -100, so it counts as 0. If that is not meant, look for the code that masks the "
            "labels; dataset.filter(lambda row: any(label != -100 for label in row['labels'])) leaves such samples out",
            stacklevel=3,
        )
    return batch


def _has_buffer(iterable: Any) -> bool:
    """Whether a shuffle's buffer is among what a ``datasets.IterableDataset`` is made of."""
    if iterable is None:
        return False
    inner = [getattr(iterable, "ex_iterable", None), *getattr(iterable, "ex_iterables", ())]
    return "BufferShuffled" in type(iterable).__name__ or any(map(_has_buffer, inner))
