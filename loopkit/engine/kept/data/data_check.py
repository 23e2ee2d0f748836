"""data_check: a digest of the last batch of an open epoch, by which a resumed run knows its data again."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from loopkit.base import generators
from loopkit.base.batches import describe, leaves
from loopkit.base.digest import digest
from loopkit.base.notes import warn
from loopkit.data import Loader, Shares
from loopkit.engine.kept.data.data_parts import DataParts, same
from loopkit.errors import StateError

VARIABLE = "LOOPKIT_DATA"
"""The environment variable that lets other data pass, if it is ``warn``."""
STOP = "stop"
WARN = "warn"
FACTS = ("kind", "length", "batch_size", "samples", "workers", "in_order", "processes")
"""Facts of data that have to be alike for their batches to be compared."""


def passes(data: str) -> bool:
    """Whether a run resumes over data that differ, with a warning."""
    return WARN in (data, os.environ.get(VARIABLE, ""))


class Seen:
    """The last batch of an epoch, as the loader gave it, and how its tensors look when they are new."""

    def __init__(self) -> None:
        self.batch: Any = None
        self._fresh: frozenset[int | None] | None = None

    def begin(self, batch: Any) -> None:
        """Look at the first batch of an epoch, which nothing has changed yet."""
        self._fresh = _versions(batch)

    def digest(self) -> tuple[str | None, str]:
        """Return a digest of the last batch, or None and the reason."""
        if self.batch is None or self._fresh is None:
            return None, ""
        versions = _versions(self.batch)
        if None in versions or not versions <= self._fresh:
            return None, "a tensor of its batch was changed in place"
        found = digest(self.batch)
        return found, "" if found is not None else f"{describe(self.batch)} has no digest"


def _versions(batch: Any) -> frozenset[int | None]:
    """The numbers of changes in place of the tensors in a batch; None for others."""
    flat = type(batch) in (tuple, list) and all(type(part) is Tensor for part in batch)  # most batches, each epoch
    tensors = batch if flat else [leaf for leaf in leaves(batch) if isinstance(leaf, Tensor)]
    return frozenset(None if tensor.is_inference() else tensor._version for tensor in tensors)


class DataCheck:
    """Compares the batch before a position with the one that a state has a digest of.

    Args:
        expected: The digest; None if the state has none.
        repeats: Whether the data gave the same batches twice, as far as the state knows.
    """

    def __init__(self, expected: str | None, repeats: bool) -> None:
        self.expected = expected
        self.repeats = repeats
        self._found: str | None = None
        self._after_first: Any = None
        self._still = False
        """Whether a batch after the first was made without a random number; else each is changed by numbers, as by
        random transforms, and their order is that of the first."""
        self._late: tuple[str | None, Any] | None = None
        """The digest of a batch that depends on numbers which were drawn on the way, and the generators there."""

    @classmethod
    def of(cls, saved: Mapping[str, Any], facts: Mapping[str, Any], known: bool) -> DataCheck:
        """Return the check for an open epoch.

        Args:
            saved: The saved form of the epoch.
            facts: The facts of the data that it is given now; its batches are compared only if these are as before.
            known: Whether the state has a digest of this process's data.
        """
        held = saved.get("proof") or {}
        then = saved["data"]["facts"]
        alike = known and all(then.get(name) == facts.get(name) for name in FACTS)
        return cls(held.get("digest") if alike else None, held.get("repeats", True))

    @property
    def differs(self) -> bool:
        """Whether the batch is another one."""
        return None not in (self.expected, self._found) and self.expected != self._found

    def skip(self, batches: Iterator[Any], count: int) -> int:
        """Leave out so many batches, and look at the last; returns how many there were."""
        used = 0
        before: Any = None
        for batch in islice(batches, count):
            used += 1
            if self.expected is None or (self._still and used < count):
                continue
            now = generators.save()
            if used == 1:
                self._after_first = before = now
            self._still = self._still or (used > 1 and same(now, before))
            before = now
            if used == count:
                self._look(batch, now)
        return used

    def _look(self, batch: Any, now: Any) -> None:
        """Look at a batch; one that depends on random numbers which training drew in between proves nothing."""
        if same(now, self._after_first):
            self._found = digest(batch)
        else:
            self._late = digest(batch), now

    def drew_otherwise(self, at: Any) -> bool:
        """Whether data that draw on the way were made again with other numbers, since training draws there, too.

        Args:
            at: The states of the global generators at the position.
        """
        if (
            not self._still
            or self._late is None
            or None in (self._late[0], self.expected)
            or self._late[0] == self.expected
        ):
            return False
        made = self._late[1]
        before = generators.save()
        generators.restore(at)
        then = generators.save()
        generators.restore(before)
        late = [name for name in made if not same(made[name], self._after_first.get(name))]
        return any(not same(made[name], then.get(name)) for name in late)

    def read(self, parts: DataParts, make: Callable[[], Any]) -> None:
        """Look at a batch that is made once more, which leaves all generators where they are."""
        if self.expected is None:
            return
        before = [generators.save(), parts.saved()]
        try:
            found = digest(make())
        except (StopIteration, IndexError):  # the data are others, or have no batch there
            found = ""
        drew = not same([generators.save(), parts.saved()], before)
        generators.restore(before[0])
        parts.load_generators(before[1])
        if found == self.expected or not drew:
            self._found = found

    def look_again(self, batches: Iterator[Any], count: int) -> None:
        """Find out whether the data repeat, by reading the same batches a second time."""
        second = DataCheck(self.expected, self.repeats)
        second.skip(batches, count)
        self.repeats = second._found == self._found

    def problem(self, phase: str, data: Any, steps: int) -> str:
        """Describe the difference; empty if there is none."""
        if not self.differs:
            return ""
        return (
            f"the data of phase {phase!r} ({type(data).__name__}) differ from the saved ones: batch "
            f"{steps - 1} of the open epoch is another one than before"
        )

    def judge(self, problem: str, data: str) -> None:
        """Stop the run for a problem of any process, or warn.

        Raises:
            StateError: The data differ, and ``data`` is ``"stop"``.
        """
        if not problem:
            return
        if not self.repeats:
            warn(
                f"{problem}; these data yield other batches each time they are read. The run continues over other data"
            )
        elif passes(data):
            warn(f"{problem}. The run continues over other data")
        else:
            raise StateError(
                f"{problem}. Give the data as they were, with the same files, seeds and options. To continue, "
                f'give Checkpoint(..., data="warn"), or set {VARIABLE}=warn in the environment'
            )


def batch_of_loader(data: Loader, state: Mapping[str, Any]) -> Callable[[], Any] | None:
    """Return what makes the batch before the position in a state; None if that takes long or cannot be told."""
    position = int(state["position"])
    if position < 1 or getattr(data, "replay", False):
        return None
    earlier = _before(data.shares, state.get("consumed"), position)
    if earlier is None:
        return None
    consumed = {"consumed": earlier} if "consumed" in state else {}

    def make() -> Any:
        data.load_state_dict({**state, "position": position - 1, **consumed})
        try:
            return next(iter(data))
        finally:
            data.load_state_dict(state)

    return make


def batch_of_sampler(data: DataLoader[Any], sampler: Any, state: Mapping[str, Any], steps: int) -> Any:
    """Return what makes the batch before the position of a `ResumableSampler`; None if it cannot be told."""
    size = getattr(data.batch_sampler, "batch_size", 1)
    shares = sampler.shares or Shares(sampler.samples, size)
    earlier = _before(shares, state["position"], steps)
    if earlier is None:
        return None

    def make() -> Any:
        sampler.load_state_dict({**state, "position": earlier})
        try:
            indices = next(iter(data.sampler if data.batch_sampler is None else data.batch_sampler))
        finally:
            sampler.load_state_dict(state)
        if data.batch_sampler is None:
            return data.collate_fn(data.dataset[indices])
        return next(iter(_one_batch(data, indices)))

    return make


def _one_batch(data: DataLoader[Any], indices: Any) -> DataLoader[Any]:
    """Return a loader of one batch, made as the loader makes its own: by a worker, if it has any."""
    workers = 1 if data.num_workers else 0
    return DataLoader(
        data.dataset,
        batch_sampler=[indices],
        collate_fn=data.collate_fn,
        num_workers=workers,
        multiprocessing_context=data.multiprocessing_context if workers else None,
        worker_init_fn=data.worker_init_fn,
        generator=torch.Generator(),  # else it draws a seed from the global one
    )


def _before(shares: Shares, used: int | None, steps: int) -> int | None:
    """Return the samples that were used a step earlier; None where steps have not had equal sizes."""
    if used is not None and used != shares.used(0, steps):
        return None
    return shares.used(0, steps - 1)
