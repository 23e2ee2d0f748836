"""Rounds: one epoch's batches shared out among processes of different speed, round by round."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from torch import Tensor

from loopkit.author import Shown
from loopkit.data import Loader, LoaderError
from loopkit.errors import EmptyDataError
from loopkit_local.cadence import Controller

__all__ = ["Rounds"]


class Rounds(Shown):
    """This process's batches of a loader that several processes go through together, each batch once.

    A round is a run of consecutive batches in the epoch's order: first the share of rank 0, then rank 1, and so
    on, as many as the controller sets when the round begins. All processes compute the same plan, since their
    controllers got the same numbers. The number of steps of a process in an epoch is not known: this has no length.

    A state is of the whole, not of one process: saved between two rounds it resumes with any number of processes.
    In the middle of a round each process is at another place, and must resume from its own state.

    Args:
        source: The whole data, the same in all processes. It is not moved.
        controller: Fed the same numbers in all processes.
        rank: Of this process.
        size: How many processes there are.
        accumulate: Batches per update: the controller counts updates.

    Raises:
        LoaderError: The source is the part of one process.
        EmptyDataError: There are fewer batches than processes.

    Example::

        >>> import torch
        >>> from loopkit.data import TensorLoader
        >>> from loopkit_local import Cadence, Controller, Rounds
        >>> loader = TensorLoader(torch.arange(10), batch_size=1)
        >>> parts = [Rounds(loader, Controller(Cadence(anchor=2), 2), rank, 2) for rank in (0, 1)]
        >>> [[int(batch) for batch in part] for part in parts]
        [[0, 1, 4, 5, 7, 8], [2, 3, 6, 9]]
    """

    def __init__(self, source: Loader, controller: Controller, rank: int, size: int, accumulate: int = 1) -> None:
        if source.shares.size > 1:
            raise LoaderError(f"{source!r} is a part already: give the whole loader")
        if len(source) < size:
            raise EmptyDataError(
                f"the data has {len(source)} batches for {size} processes: use smaller batches, so that each has one"
            )
        self.source = source
        self._controller = controller
        self._rank = rank
        self._size = size
        self._accumulate = accumulate
        self._epoch = source.epoch
        self._begun = False
        self._indices: Tensor | None = None
        """The samples of this epoch, if not each once."""
        self._start = 0
        """Batches of the epoch before this round."""
        self._counts: list[int] | None = None
        """Updates of each process in this round; None between two rounds."""
        self._done = 0
        """Batches of this round that this process has taken."""

    @property
    def ended(self) -> bool:
        """Whether this process has taken all its batches of a round, and not begun the next one."""
        return self._counts is not None and self._done == len(self._mine(self._counts))

    @property
    def last(self) -> bool:
        """Whether this round ends the epoch."""
        return self._counts is not None and self._end(self._counts) == len(self.source)

    @property
    def between(self) -> bool:
        """Whether no round is under way."""
        return self._counts is None or self.ended

    def __iter__(self) -> Iterator[Any]:
        if self._begun:
            self.leave()
        if self._start == 0 and self._counts is None:
            self._indices = self.source.chosen
        self._begun = True
        source, epoch = self.source, self._epoch
        samples = source.shares.batch_size
        while True:
            if self._counts is not None and self.ended:
                self._start, self._counts, self._done = self._end(self._counts), None, 0
            if self._counts is None:
                left = -(-(len(source) - self._start) // self._accumulate)
                if not left:
                    break
                self._counts = self._controller.plan(left)
            mine = self._mine(self._counts)[self._done :]
            for batch in islice(source.batches(epoch, mine.start * samples, self._indices), len(mine)):
                self._done += 1
                yield batch
        self.leave()

    def leave(self) -> None:
        """End the epoch, be it that it was not complete: the next iteration is of the next one."""
        if self._begun:
            self._epoch, self._begun = self._epoch + 1, False
            self._start, self._counts, self._done = 0, None, 0

    def state_dict(self) -> dict[str, Any]:
        """Where all are, and what must be the same where this is loaded; ``position`` counts batches of the whole."""
        between, chosen = self.between, self.source.chosen
        now = self._indices if self._start or self._counts is not None else chosen
        names = {"indices": now, "next_indices": chosen} if now is not None or chosen is not None else {}
        return {
            "epoch": self._epoch,
            "position": self._end(self._counts) if self._counts is not None and between else self._start,
            "round": None if between else {"counts": list(self._counts or ()), "rank": self._rank, "done": self._done},
            "identity": self.source.identity(),
            **{name: None if each is None else each.tolist() for name, each in names.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next epoch resume where `state_dict` was called.

        Raises:
            LoaderError: The state is of other data, or of the middle of a round of another process.
        """
        own = self.source.identity()
        if dict(state["identity"]) != own:
            raise LoaderError(f"the state is of a loader with {dict(state['identity'])}, this one has {own}")
        if not 0 <= state["position"] <= len(self.source):
            raise LoaderError(f"the state's position is {state['position']}: there are {len(self.source)} batches")
        middle = state["round"]
        if middle is not None and (len(middle["counts"]), middle["rank"]) != (self._size, self._rank):
            raise LoaderError(
                f"the state was saved by rank {middle['rank']} of {len(middle['counts'])} in the middle of a round, "
                f"where each process has its own parameters and place; this is rank {self._rank} of {self._size}. "
                f"Save at the end of a round or of an epoch, or load in each process what it saved itself"
            )
        self._epoch, self._start, self._begun = state["epoch"], state["position"], False
        self._counts, self._done = (None, 0) if middle is None else (list(middle["counts"]), middle["done"])
        for name in ("indices", "next_indices"):
            self.source.set_indices(state.get(name))
            self._indices = self.source.chosen if name == "indices" else self._indices

    def _mine(self, counts: list[int]) -> range:
        """The indices of this process's batches in the round."""
        before, own = sum(counts[: self._rank]), counts[self._rank]
        low, high = (self._start + self._accumulate * updates for updates in (before, before + own))
        return range(min(low, len(self.source)), min(high, len(self.source)))

    def _end(self, counts: list[int]) -> int:
        return min(self._start + self._accumulate * sum(counts), len(self.source))
