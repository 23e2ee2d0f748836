"""Agreement: what one process asks for takes effect in all of them at the same edge."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

from loopkit.errors import Cancel, CancelEpoch, CancelFit, WorldError

if TYPE_CHECKING:
    from loopkit.distributed.world import World
    from loopkit.epoch import Epoch

__all__ = ["Agreement", "compare"]

CANCELS: dict[str, type[Cancel]] = {cancel.__name__: cancel for cancel in (CancelEpoch, CancelFit)}


class Agreement:
    """What this process asks for, and what all have agreed on."""

    def __init__(self) -> None:
        self.stop: tuple[str, str] | None = None
        """The reason for an end of the fit, and who asks for it."""
        self.cancel: Cancel | None = None
        """What ends the pass, or the fit, at once."""
        self.save = False
        """Whether the state should be saved."""
        self.ending: signal.Signals | None = None
        """The signal that asks for the end."""

    @property
    def wanted(self) -> bool:
        """Whether anything is asked for."""
        return self.save or any(each is not None for each in (self.stop, self.cancel, self.ending))

    def joined(self, later: Agreement | None) -> Agreement:
        """This one, and what a later one adds."""
        if later is not None:
            self.stop, self.ending = self.stop or later.stop, self.ending or later.ending
            if self.cancel is None or isinstance(later.cancel, CancelFit):
                self.cancel = later.cancel or self.cancel
            self.save = self.save or later.save
        return self

    def reach(self, world: World, *numbers: float) -> tuple[Agreement, list[float]]:
        """What any process asks for, equal in all of them; from then on none of them asks for it any more.

        One collective, and two more if anything is asked for. The lowest rank's reasons count.

        Args:
            world: The processes; each must call this at the same edge.
            numbers: Sent along.

        Returns:
            What is agreed on, and the highest of each number.
        """
        wanted, *highest = world.highest(float(self.wanted), *numbers)
        agreed = Agreement()
        if wanted:
            cancel = self.cancel and (type(self.cancel).__name__, self.cancel.reason, self.cancel.by)
            said = world.gather((self.stop, cancel, self.save, self.ending and int(self.ending)))
            stops, cancels, saves, endings = zip(*said, strict=True)
            agreed.stop = _first(stops)
            agreed.save = any(saves)
            ending = _first(endings)
            agreed.ending = None if ending is None else signal.Signals(ending)
            found = [each for each in cancels if each is not None]
            if found:
                name, reason, by = next((each for each in found if each[0] == CancelFit.__name__), found[0])
                agreed.cancel = CANCELS[name](reason)
                agreed.cancel.by = by
            self.stop = self.cancel = self.ending = None
            self.save = False
        return agreed, highest


def compare(world: World, epoch: Epoch) -> None:
    """Refuse a pass that is not the same in all processes.

    Raises:
        WorldError: Says what each of them would do.
    """
    said = world.gather((epoch.phase.name, epoch.length, epoch.steps))
    if any(each != said[0] for each in said):
        each = "; ".join(f"rank {rank}: {_pass(*what)}" for rank, what in enumerate(said))
        raise WorldError(
            f"the processes begin different passes ({each}): give all of them the same phases in the same order, and "
            f"data with the same number of batches; loopkit's own loaders are shared out so"
        )


def _pass(phase: str, length: int | None, steps: int) -> str:
    many = "batches of a number that is not known" if length is None else f"{length} batches"
    return f"phase {phase!r} over {many}" + (f" from step {steps} on" if steps else "")


def _first(values: tuple[Any, ...]) -> Any:
    return next((value for value in values if value is not None), None)
