"""EpochData: the data of epochs, made or put where a saved state was."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from loopkit.base.notices import Notices
from loopkit.engine.kept.data.data_places import DataPlaces
from loopkit.engine.kept.data.loader_positions import leave, set_epoch
from loopkit.engine.kept.left_open import LeftOpen
from loopkit.engine.life.running import Running
from loopkit.engine.life.sources import named_if_endless
from loopkit.errors import PhaseError

if TYPE_CHECKING:
    from loopkit.engine.life.epoch import Epoch


class EpochData:
    """Gives epochs their data.

    Args:
        places: The data of phases, and their positions.
        left_open: The epochs that a loaded state left open.
        running: The fit and the epochs that run now.
        notices: Print what may not be meant.
    """

    def __init__(self, places: DataPlaces, left_open: LeftOpen, running: Running, notices: Notices) -> None:
        self._places = places
        self._open = left_open
        self._running = running
        self._notices = notices

    def prepare(self, epoch: Epoch) -> None:
        """Let a function make the data of an epoch that begins, and tell them which epoch it is."""
        source = epoch.source
        if source is None:
            return
        if source.made:
            epoch.take_data(*self._places.make(epoch, source))
        self._places.meet(epoch.data)
        if epoch.trains:
            set_epoch(epoch.data, self._running.progress.epochs)

    def batches(self, epoch: Epoch) -> Iterable[Any]:
        """The batches of the data that an epoch was given, from where a saved state was."""
        running = self._running
        if epoch.data is None:
            raise PhaseError(f"phase {epoch.name!r}: learner.epoch was given no data=..., so it has no batches")
        if epoch.alone and running.fit is not None and running.epochs[-1] is epoch:
            self._places.inner(epoch.key(), epoch.data)
        batches, begun, length = self._places.batches(epoch)
        epoch.begin_data(begun, length)
        self.restore_generators(epoch)
        if length is None and not epoch.trains:
            return named_if_endless(batches, epoch.name, running.progress, self._notices.say_once)
        return batches

    def restore_generators(self, epoch: Epoch) -> None:
        """Put the random generators where a loaded state says, if this epoch belongs to the run."""
        if self._open.left and not epoch.alone:
            self._open.restore_generators()

    def end(self, epoch: Epoch, complete: bool, first: bool) -> None:
        """Its steps are over.

        Args:
            epoch: The epoch.
            complete: All batches were taken.
            first: It is the first epoch over these data.
        """
        if complete:
            epoch.check_count(first)
            self._places.counts.count(epoch)
        elif epoch.saved is not None and epoch.saved["steps"] == epoch.steps:  # without another batch
            self._open.restore_generators()
            leave(epoch.data)
