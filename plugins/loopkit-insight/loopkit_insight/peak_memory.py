"""The most memory that an epoch has taken on a device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loopkit.author import Shown, devices
from loopkit.hooks import hookimpl

if TYPE_CHECKING:
    from loopkit import Epoch
    from loopkit.learner import Learner
    from loopkit.phases import Phase

__all__ = ["PeakMemory"]

NAME = "peak_memory"


class PeakMemory(Shown):
    """Record the most bytes of each epoch, as ``"train/peak_memory"``.

    So they are in the epoch's line and in the logs. Of several devices that the models are on, and of several
    processes, it is the highest. On the CPU, and where torch does not count, there is no such metric. A resumed epoch
    counts from the resume on. The plugin resets torch's peak (``torch.accelerator.reset_peak_memory_stats``).

    Args:
        name: The plugin's name.

    Example::

        Learner(model, loss_fn, optimizer, plugins=[ToDevice(), PeakMemory()])
    """

    observes = True
    volatile = ("_open", NAME, f"*/{NAME}")

    def __init__(self, name: str = "peak_memory") -> None:
        self.name = name
        self._open: list[Epoch] = []
        """The epochs that run, each in a hook of the one before."""

    @hookimpl
    def epoch_begin(self, learner: Learner, epoch: Epoch) -> None:
        """Count anew."""
        self._note(learner)
        self._open = [each for each in self._open if each.keep(self)["depth"] < epoch.depth]
        self._open.append(epoch)
        epoch.keep(self).update(depth=epoch.depth, peak=-1.0)

    @hookimpl(writes=(f"metrics.*/{NAME}",))
    def epoch_end(self, learner: Learner, phase: Phase, epoch: Epoch) -> None:
        """Log the highest count."""
        if epoch not in self._open:  # the plugin was added in its course
            return
        self._note(learner)
        self._open.remove(epoch)
        peak = learner.world.highest(epoch.keep(self)["peak"])[0]
        if peak >= 0:
            learner.metrics[f"{phase.name}/{NAME}"] = peak

    def _note(self, learner: Learner) -> None:
        """Let the open epochs know the peak so far, and count anew."""
        used = {p.device for model in learner.models.values() for p in model.parameters()}
        peak = max(map(devices.take_peak, used), default=-1)
        for epoch in self._open:
            epoch.keep(self)["peak"] = max(epoch.keep(self)["peak"], float(peak))
