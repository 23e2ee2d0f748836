"""Shards: the part of the data that each process takes, and outputs put back in order.

An epoch's order is the same in every process. Each global batch, of ``batch_size`` samples for every process, is cut
into consecutive parts, one for each rank, so that together the processes take the batches of a single one. Which
samples of the epoch are used is a number that does not depend on how many processes there are: positions fit any
number of them.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping, Sequence, Sized
from typing import TYPE_CHECKING, Any, NamedTuple, cast
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from loopkit.base.batches import count_samples, describe
from loopkit.base.facts import fact
from loopkit.data import Loader, ResumableBatchSampler, ResumableSampler, Shares, Tail
from loopkit.errors import WorldError

if TYPE_CHECKING:
    from loopkit.base.world import World


LEAST = 2
"""Samples of a process in a training step: batch norm cannot do with one."""
_made: WeakKeyDictionary[Any, tuple[tuple[Any, ...], Any, str]] = WeakKeyDictionary()
"""The parts made of data: the arguments, the part, and the line about it."""


def shard(
    data: Any, rank: int, size: int, tail: str = "uneven", *, seed: int = 0, epoch: int = 0, training: bool = True
) -> tuple[Any, str]:
    """The part of one process, and one line about it; it does not depend on the rank.

    The same object gives the same part every time, so that its position is kept from epoch to epoch. A part gives
    itself. So does all data if ``size`` is 1.

    - A loader of `loopkit.data` gives ``loader.shard(rank, size, tail)``.
    - A ``DataLoader``, or torchdata's ``StatefulDataLoader``, in which a `loopkit.data.ResumableSampler` or torch's
      ``SequentialSampler`` or ``RandomSampler`` (without replacement, of all samples) decides about the order gives a
      loader that is the same but for its batch sampler: the part of a `ResumableSampler`. ``drop_last`` leaves out a
      last global batch that is not full. Where the order was random, it is the order of `ResumableSampler` with the
      seed of the sampler's generator; without a generator, of ``seed``. It must be the same in every process.
    - One with a ``DistributedSampler`` of this rank and size is left as it is for training: see `set_epoch`. It repeats
      samples to fill up. So a `ResumableSampler` without shuffle takes its place where they are counted or predicted.

    Args:
        data: The data of an epoch.
        rank: The process, from 0.
        size: How many there are.
        tail: The treatment of a last global batch that is not full, see `loopkit.data.Loader.shard`. A
            ``DistributedSampler`` has its own way.
        seed: For a ``RandomSampler`` without a generator.
        epoch: The epoch from which the order in the place of a ``RandomSampler``'s counts, when the part is made: with
            a new loader for every epoch all would have the order of the first without it.
        training: Whether the epoch trains.

    Raises:
        WorldError: The data cannot be shared out, or is the part of another process.
        EmptyDataError: There are too few samples.

    Example::

        >>> from loopkit.data import TensorLoader
        >>> loader = TensorLoader(torch.arange(6), batch_size=2)
        >>> part, line = shard(loader, 1, 2)
        >>> print(line)
        TensorLoader: 2 steps of 2 x 2 samples, the last one of 2
        >>> [batch.tolist() for batch in part], shard(loader, 1, 2)[0] is part
        ([[2, 3], [5]], True)
    """
    if size == 1:
        return data, ""
    given = (rank, size, tail, seed, training)
    made = _made.get(data) if isinstance(data, (Loader, DataLoader)) else None
    if made is None or made[0] != given:
        part, line = _shard(data, rank, size, cast(Tail, tail), seed, epoch, training)
        if part is data:
            return data, line
        made = _made[data] = given, part, line
    return made[1], made[2]


def set_epoch(data: Any, epoch: int) -> bool:
    """Set the epoch of a ``DataLoader``'s ``DistributedSampler``; loopkit's own samplers count by themselves.

    Call it before every epoch that trains, or each has the order of the first. If the sampler's epochs do not begin
    with 0, give it a ``set_epoch`` that adds the first.

    Args:
        data: The data of the coming epoch.
        epoch: From 0.

    Returns:
        Whether the loader has one.
    """
    sampler = _order_of(data)[0] if isinstance(data, DataLoader) else None
    if isinstance(sampler, DistributedSampler):
        sampler.set_epoch(epoch)
    return isinstance(sampler, DistributedSampler)


def facts_of(data: Any) -> dict[str, str]:
    """The facts of data to be sharded that all processes must share; empty for a shard or other data."""
    if isinstance(data, Loader) and data.shares.size == 1:
        place = {"epoch", "position", "consumed"}
        return {key: fact(value) for key, value in data.state_dict().items() if key not in place}
    if not isinstance(data, DataLoader) or isinstance(data.dataset, IterableDataset):
        return {}
    sampler, batch_size, drop_last = _order_of(data)
    if isinstance(sampler, DistributedSampler) or getattr(sampler, "shares", None) is not None:
        return {}
    generator = getattr(sampler, "generator", None)
    seed = getattr(sampler, "seed", None) if generator is None else generator.initial_seed()
    facts = {
        "batches": len(data),
        "batch_size": batch_size,
        "drop_last": drop_last,
        "order": _name(sampler),
        "seed": seed,
    }
    return {key: fact(value) for key, value in facts.items()}


class Parts(NamedTuple):
    """The samples that a process takes in the steps of an epoch."""

    each: int
    """In every step but the last."""
    last: int
    even: bool
    """Whether the parts of the last step are equal in all processes."""


def parts_of(data: Any) -> Parts | None:
    """The samples that a process takes in the steps of an epoch from its first step; None if that is not known."""
    if isinstance(data, Loader) and "samples" in data.state_dict():
        return _own_parts(data.shares, data.rank)
    if not isinstance(data, DataLoader) or isinstance(data.dataset, IterableDataset):
        return None
    sampler, batch_size, drop_last = _order_of(data)
    if isinstance(sampler, ResumableSampler):
        return _own_parts(sampler.shares, sampler.rank)
    if _is_distributed(sampler) and data.batch_sampler is not None:
        left = 0 if drop_last else len(sampler) % batch_size
        return Parts(batch_size, left or batch_size, True)
    return None


def _own_parts(shares: Shares | None, rank: int) -> Parts | None:
    """The parts of one process; None if the samples are not shared out, or there are none."""
    if shares is None or shares.size == 1:
        return None
    steps = shares.steps()
    if not steps:
        return None
    ends = [shares.part(each, 0, steps - 1) for each in range(shares.size)]
    lasts = [high - low for low, high in ends]
    return Parts(shares.batch_size, lasts[rank], len(set(lasts)) == 1)


def restore_order(parts: Sequence[Sequence[Any]], samples: int) -> list[Any]:
    """The outputs of an epoch in its order: the dataset's, if it was not shuffled.

    Args:
        parts: For each rank, its outputs step by step: tensors ``(samples, ...)``, or tuples, lists and mappings of
            such.
        samples: Samples of the epoch; the rest filled up the last step, and is cut off. With
            ``tail="drop"`` there are fewer.

    Returns:
        Batches, to be concatenated along the first dimension.

    Raises:
        WorldError: The ranks have different numbers of steps, or outputs that cannot be put in order.

    Example::

        >>> ranks = [[torch.tensor([0, 1]), torch.tensor([4])], [torch.tensor([2, 3]), torch.tensor([0])]]
        >>> torch.cat(restore_order(ranks, samples=5)).tolist()
        [0, 1, 2, 3, 4]
    """
    if len({len(part) for part in parts}) > 1:
        raise WorldError(
            f"the processes have outputs of {', '.join(str(len(part)) for part in parts)} steps, by rank: they must "
            f"all have the same number"
        )
    ordered: list[Any] = []
    left = samples
    for step in zip(*parts, strict=True):
        for batch in step:
            count = count_samples(batch)
            if count > left:
                batch = _mapped(_first_rows(left), [batch])
            if left:
                ordered.append(batch)
            left -= min(count, left)
    return ordered


def gather(world: World, data: Any, outputs: Sequence[Any], everywhere: bool = True) -> list[Any]:
    """The outputs of all processes for data that was shared out, in its order and on the CPU, in each of them.

    Args:
        world: The processes.
        data: The shared data.
        outputs: Its results for its batches.
        everywhere: False: only in rank 0; none elsewhere.
    """
    samples = len(cast(Sized, data.dataset)) if isinstance(data, DataLoader) else getattr(data, "samples", sys.maxsize)
    own = [_mapped(_on_host, [batch]) for batch in outputs]
    parts = world.gather(own) if everywhere else world.collect(own)
    return restore_order(parts, samples) if parts else []


def _on_host(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0].cpu()


def _shard(data: Any, rank: int, size: int, tail: Tail, seed: int, epoch: int, training: bool) -> tuple[Any, str]:
    least = LEAST if training else 1
    if isinstance(data, Loader):
        return _shard_loader(data, rank, size, tail, least)
    if not isinstance(data, DataLoader):
        raise _refused(
            data, "of batches that are there already, or come one after the other, each process would need all"
        )
    if isinstance(data.dataset, IterableDataset):
        raise _refused(data, f"its dataset {_name(data.dataset)} gives samples one after the other, not by index")
    sampler, batch_size, drop_last = _order_of(data)
    if isinstance(sampler, DistributedSampler):
        _checked(data, sampler.rank, sampler.num_replicas, rank, size)
        if training:
            return data, f"{_name(data)}: left as it is, with its {_name(sampler)}"
    elif isinstance(sampler, ResumableSampler) and sampler.shares is not None:
        return _checked(data, sampler.rank, sampler.shares.size, rank, size), ""
    whole, what = _whole_sampler(data, sampler, seed, epoch)
    if drop_last:
        tail = "drop"
    elif data.batch_sampler is None and tail == "uneven":
        tail = "pad"  # a batch that is one sample cannot get another
    batches = whole.shard(rank, size, tail, batch_size=batch_size, least=least)
    assert batches.sampler.shares is not None
    return _with_batches(data, batches), f"{_name(data)}: {_steps(batches.sampler.shares, 'samples')}{what}"


def _shard_loader(data: Loader, rank: int, size: int, tail: Tail, least: int) -> tuple[Any, str]:
    if data.shares.size > 1:
        return _checked(data, data.rank, data.shares.size, rank, size), ""
    own = data.shard(rank, size, tail, least)
    if own.shares.size != size:  # its epochs have a number of steps, which each process takes
        return own, f"{_name(data)}: {len(own)} steps in each of {size} processes"
    return own, f"{_name(data)}: {_steps(own.shares, 'batches' if 'batches' in own.state_dict() else 'samples')}"


def _whole_sampler(data: DataLoader[Any], sampler: Any, seed: int, epoch: int) -> tuple[ResumableSampler, str]:
    """A sampler of all samples in the order of the loader's sampler, and a note on the change."""
    if isinstance(sampler, ResumableSampler):
        return sampler, ""
    if isinstance(sampler, DistributedSampler):
        if not _is_distributed(sampler) and not _of_torchdata(sampler, "StatefulDistributedSampler"):
            raise _refused(data, f"{_name(sampler)} decides which samples come, in its own way")
        whole = ResumableSampler(len(cast(Sized, sampler.dataset)), shuffle=False)
        what = f"; ResumableSampler without shuffle in the place of {_name(sampler)}, which repeats samples to fill up"
        return whole, what
    if type(sampler) is SequentialSampler:
        whole = ResumableSampler(len(sampler), shuffle=False)
        return whole, "; ResumableSampler without shuffle in the place of SequentialSampler"
    if not _is_random(sampler):
        unknown = data.batch_sampler if sampler is None else sampler
        raise _refused(data, f"{_name(unknown)} decides which samples come, in its own way")
    generator = data.generator if _of_torchdata(sampler, "RandomSampler") else sampler.generator
    if generator is not None:
        seed = generator.initial_seed()
    whole = ResumableSampler(len(sampler), seed=seed)
    whole.set_epoch(epoch)
    return whole, f"; ResumableSampler with seed {seed} in the place of RandomSampler"


def _with_batches(data: DataLoader[Any], batches: ResumableBatchSampler) -> DataLoader[Any]:
    """A copy of a loader with this process's batches."""
    part = copy.copy(data)
    state: dict[str, Any] = {"sampler": batches.sampler, "batch_size": None, "drop_last": False, "_iterator": None}
    if data.batch_sampler is not None:
        state["batch_sampler"] = batches
    if hasattr(data, "next_iter_state"):  # of a StatefulDataLoader
        state["next_iter_state"] = None
    vars(part).update(state)  # a DataLoader's attributes cannot be assigned
    return part


def _order_of(data: DataLoader[Any]) -> tuple[Any, int, bool]:
    """The sampler that decides about the order, None if it is not known; samples per batch; whether the tail goes."""
    if (batches := data.batch_sampler) is None:
        return data.sampler, 1, False
    known = type(batches) in (BatchSampler, ResumableBatchSampler) or _of_torchdata(batches, "BatchSampler")
    if not known or not isinstance(batches, BatchSampler):
        return None, 1, False
    return batches.sampler, batches.batch_size, batches.drop_last


def _is_distributed(sampler: Any) -> bool:
    """Whether it takes samples as ``DistributedSampler`` does; a subclass may count epochs in another way."""
    return all(getattr(type(sampler), name, None) is vars(DistributedSampler)[name] for name in ("__iter__", "__len__"))


def _is_random(sampler: Any) -> bool:
    """Whether it gives all samples once, in an order that it draws."""
    known = type(sampler) is RandomSampler or _of_torchdata(sampler, "RandomSampler")
    return known and not sampler.replacement and len(sampler) == len(sampler.data_source)


def _of_torchdata(value: Any, name: str) -> bool:
    return type(value).__module__.startswith("torchdata.") and type(value).__name__ == name


def _steps(shares: Shares, unit: str) -> str:
    steps = shares.steps()
    left = shares.samples % shares.whole
    text = f"{steps} {'step' if steps == 1 else 'steps'} of {shares.size} x {shares.batch_size} {unit}"
    if not left:
        return text
    if shares.tail == "drop":
        return f"{text}, {left} left out"
    if shares.tail == "pad":
        return f"{text}, the last one filled up with {shares.whole - left} from the epoch's begin"
    return f"{text}, the last one of {shares.samples - (steps - 1) * shares.whole}"


def _checked(data: Any, own_rank: int, own_size: int, rank: int, size: int) -> Any:
    """Data that is a part already, if it is the one of this process."""
    if (own_rank, own_size) != (rank, size):
        raise WorldError(
            f"{_name(data)} is the part of rank {own_rank} of {own_size}, and this is rank {rank} of {size}: give the "
            f"whole data, or the part of each process in that process"
        )
    return data


def _refused(data: Any, why: str) -> WorldError:
    return WorldError(
        f"{_name(data)} cannot be shared out among the processes: {why}. Use a loader of loopkit.data or a DataLoader "
        f"over samples by index; or shard it yourself by learner.world.rank and learner.world.size, and give "
        f"DDP(shard=False)"
    )


def _name(value: Any) -> str:
    return type(value).__name__.removeprefix("_")


def _first_rows(count: int) -> Callable[[Sequence[Tensor]], Tensor]:
    return lambda rows: rows[0][:count]


def _mapped(fn: Callable[[Sequence[Tensor]], Tensor], batches: Sequence[Any]) -> Any:
    """A batch like these, with ``fn`` of the tensors that stand in the same place of each."""
    first = batches[0]
    if isinstance(first, Tensor) and first.ndim:
        return fn(batches)
    if isinstance(first, Mapping):
        return {key: _mapped(fn, [batch[key] for batch in batches]) for key in first}
    if isinstance(first, (tuple, list)):
        made = [_mapped(fn, inner) for inner in zip(*batches, strict=True)]
        return type(first)(*made) if hasattr(first, "_fields") else type(first)(made)
    raise WorldError(
        f"outputs are {describe(first)}: only tensors, and tuples, lists and mappings of them, have an order"
    )
