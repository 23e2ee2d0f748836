"""Keep the weights of a run, without what it takes to go on."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loopkit import sharded
from loopkit.checkpoint import save_weights
from loopkit.criteria import Mode, checked_mode, direction, is_better
from loopkit.errors import PluginError
from loopkit.hooks import hookimpl
from loopkit.options import Shown

if TYPE_CHECKING:
    from loopkit import Epoch
    from loopkit.learner import Learner
    from loopkit.phases import Phase


class SaveWeights(Shown):
    """Write the weights as safetensors after each training epoch, or the best.

    The files are ``<directory>/<model>.safetensors``. A file is replaced at once, when the new one is on the disk.
    `loopkit.checkpoint.load_weights` reads it. A run that shall go on needs ``Checkpoint``: nothing else is saved here.

    Args:
        directory: It is made if it is not there.
        best: The metric, as ``"val/loss"``, whose best value's weights are kept; None: those of the last epoch.
        mode: ``"min"`` if lower values are better, ``"max"`` if higher ones are; by default as the metric says, else
            the fit is refused.
        name: The plugin's name.

    The best weights are those that were measured: the average, where ``WeightAverage`` validates with it. Epochs
    outside a fit, such as those of ``learner.evaluate``, and those that a hook begins write nothing. Of several
    processes rank 0 writes.

    Raises:
        PluginError: ``mode`` or ``best`` is no such; when a fit begins, the parameters are sharded.

    Example::

        SaveWeights("weights", best="val/accuracy")
    """

    provides = "save_weights"
    per_process = ("directory",)

    def __init__(
        self,
        directory: str | os.PathLike[str],
        best: str | None = None,
        mode: Mode | None = None,
        name: str = "save_weights",
    ) -> None:
        if best is not None and "/" not in best:
            raise PluginError(f"SaveWeights: best is {best!r}: it is '<phase>/<metric>', such as 'val/loss'")
        self.directory, self.best, self.name = Path(directory), best, name
        self.monitor, self.mode = best, checked_mode("SaveWeights", mode)
        self.value: float | None = None
        """The best value so far."""

    def _reads(self) -> tuple[str, ...]:
        return ("params", "buffers", *(() if self.best is None else (f"metrics.{self.best}",)))

    @hookimpl(after=("sync",))
    def fit_begin(self, learner: Learner) -> None:
        """Refuse what one process cannot write."""
        for name, model in learner.models.items():
            if any(map(sharded.is_sharded, model.parameters())):
                raise PluginError(
                    f"plugin {self.name!r}: the parameters of model {name!r} are sharded, of which each process holds "
                    f"a part: use Checkpoint, which gathers them"
                )

    @hookimpl
    def epoch_end(self, learner: Learner, epoch: Epoch) -> None:
        """Note whose weights are measured."""
        epoch.keep(self)["by"] = learner.models.weights.by

    @hookimpl(reads=lambda plugin: plugin._reads())
    def phase_end(self, learner: Learner, phase: Phase, epoch: Epoch) -> None:
        """Write, if it is time."""
        if learner.current is None or not learner.current.can_save:
            return
        if self.best is None:
            due = phase.training
        else:
            due = phase.name == self.best.partition("/")[0] and self._is_best(learner)
        if due and learner.world.rank == 0:
            by = epoch.keep(self).get("by")
            with learner.plugins[by].averaged(learner) if by else nullcontext():
                self.directory.mkdir(parents=True, exist_ok=True)
                for name, model in learner.models.items():
                    save_weights(model, self.directory / f"{name}.safetensors")

    def _is_best(self, learner: Learner) -> bool:
        value = learner.metrics[self.monitor or ""]
        better = is_better(value, self.value, direction(self, learner.plugins.values()))
        self.value = value if better else self.value
        return better

    def state_dict(self) -> dict[str, Any]:
        """The best value."""
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from it."""
        self.value = state["value"]
