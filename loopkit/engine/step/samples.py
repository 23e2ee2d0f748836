"""Samples: how many samples a batch has, as its phase or its loader counts them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from loopkit.base.batches import count_samples, describe, hands_on, odd_lengths, wrapped
from loopkit.base.notes import locate
from loopkit.engine.kept.data.data_check import Seen
from loopkit.errors import PhaseInputError
from loopkit.phases import Phase
from loopkit.plugin import unwrapped


class Samples:
    """Counts the samples of batches in one epoch.

    Args:
        phase: Counts by its own method, if it has one; else the data do, if they have a function ``count_samples``.
        say: Prints the note about a batch whose lengths disagree.
    """

    def __init__(self, phase: Phase, say: Callable[[str], None]) -> None:
        self._phase = phase
        self._say = say
        self._looked = False
        self.seen = Seen()
        """The last batch, as the loader gave it."""
        self._own: Callable[[Any], int] | None = None
        """The function of the phase or of the data that counts."""
        self._where = ""
        """Where that function is."""
        self.tensor_class: type[Tensor] | None = Tensor
        """A batch whose first part has exactly this class counts by its length; None: `count` counts every batch."""
        self.count: Callable[[Any], int] = count_samples
        """Counts the samples of any batch."""
        if type(phase).samples is not Phase.samples:
            self._count_by(phase, "samples")
        self.takes_empty = False
        """Whether the phase or a plugin takes batches without any."""
        self.failure: BaseException | None = None
        """The error of that function; `Loop.run` raises it as it is, since the loader did not raise it."""

    def how_to_count(self) -> tuple[type[Tensor] | None, Callable[[Any], int]]:
        """Return the class of a first part whose length counts, and the function that counts any other batch."""
        return self.tensor_class, self.count

    def read_options(self, plugins: Iterable[Any], data: Any) -> None:
        """See whether the phase or a plugin takes batches without samples, and whether the data count their own."""
        counting = [each for each in wrapped(data, hands_on) if _counts(each)]
        if self.tensor_class is not None and counting:
            self._count_by(counting[0], "count_samples")
        takers = (self._phase, *map(unwrapped, plugins))
        self.takes_empty = any(getattr(each, "takes_empty", False) for each in takers)

    def look_at_first_batch(self, batch: Any) -> None:
        """Look at the first batch of the epoch; print one note if it begins with lengths that disagree."""
        if self._looked:
            return
        self._looked = True
        self.seen.begin(batch)
        if _is_even_pair(batch):
            return
        if self.tensor_class is None or (odd := odd_lengths(batch)) is None:
            return
        name = type(self._phase).__name__
        self._say(
            f"phase {self._phase.name!r}: a batch is {describe(batch)}, whose parts begin with {odd[0]} and {odd[1]}, "
            f"and counts as {count_samples(batch)} samples in metrics and windows; if that is not so, give {name} a "
            f"method samples(self, batch), or the loader a function, loader.count_samples = lambda batch: ..."
        )

    def _count_by(self, owner: Any, name: str) -> None:
        """Let a function of the phase or of the data count all batches."""
        self._own = getattr(owner, name)
        self._where = f"{type(owner).__name__}.{name}"
        self.count = self._counted
        self.tensor_class = None

    def _counted(self, batch: Any) -> int:
        assert self._own is not None
        try:
            samples = self._own(batch)
            if type(samples) is not int or samples < 0:
                raise PhaseInputError(
                    f"{self._where} returned {describe(samples)} {str(samples)[:40]} for {describe(batch)}: it returns "
                    f"the number of samples, an int from 0"
                )
        except Exception as error:
            self.failure = error
            locate(error, f"in {self._where.rpartition('.')[2]} of phase {self._phase.name!r}, as a batch came")
            raise
        return samples


def _counts(data: Any) -> bool:
    """Whether data have a function ``count_samples``, and do not answer any name, as proxies and mocks do."""
    return getattr(data, "count_samples", None) is not None and getattr(data, "count_samples of any", None) is None


def _is_even_pair(batch: Any) -> bool:
    """Whether a batch is two tensors of one length, as most are: this is asked in each epoch."""
    if batch.__class__ not in (tuple, list) or len(batch) != 2:
        return False
    one, other = batch
    if one.__class__ is not Tensor or other.__class__ is not Tensor:
        return False
    return bool(one.ndim and other.ndim) and one.shape[0] == other.shape[0]
