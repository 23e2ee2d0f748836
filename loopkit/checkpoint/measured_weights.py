"""The weights that the monitored metric was measured with, where they are not the models' own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from loopkit.hooks import implemented
from loopkit.plugin import hook_states, unwrapped

if TYPE_CHECKING:
    from loopkit.learner import Learner
    from loopkit.phases import Phase


class MeasuredWeights:
    """The weights that a metric was measured with, saved beside the model.

    Args:
        monitor: The metric, or None.
    """

    def __init__(self, monitor: str | None) -> None:
        self._phase = None if monitor is None else monitor.partition("/")[0]
        self.by = ""
        """The plugin whose weights stood in the place of the models' own when the metric was measured last."""
        self._is_new = False
        """The phase has run, and the metric's value was not looked at yet."""

    def concerns(self, phase: Phase) -> bool:
        """Whether the metric is of this phase."""
        return phase.name == self._phase

    def take(self, learner: Learner, phase: Phase) -> None:
        """Keep what stands in the weights' place now."""
        if _may_stand_in(learner):
            learner.models.take_measured(phase.name)
            self.by = learner.models.weights.by

    def settle(self, learner: Learner, phase: Phase) -> None:
        """Note that the phase has run; drop what was kept, if all processes have it as the models' own weights."""
        self._is_new = True
        measured = learner.models.measured
        if measured.holds(phase.name):
            differs = learner.world.highest(float(measured.differs(phase.name)))[0]
            if not differs:
                measured.drop(phase.name)

    def take_news(self) -> bool:
        """Return whether the phase has run since the last call."""
        new = self._is_new
        self._is_new = False
        return new

    def drop(self, learner: Learner) -> None:
        """Drop what was kept."""
        if self._phase is not None:
            learner.models.measured.drop(self._phase)


def _may_stand_in(learner: Learner) -> bool:
    """Whether other values than the models' own may be in their parameters now, in an epoch that does not train."""
    if learner.models.weights.by:
        return True
    if any(map(_switches, learner.optimizers.values())):
        return True
    return any(_puts_params(unwrapped(plugin)) for plugin in learner.plugins.values())


def _switches(optimizer: Any) -> bool:
    """Whether an optimizer has one form for training and one for evaluation."""
    return callable(getattr(optimizer, "eval", None)) and callable(getattr(optimizer, "train", None))


def _puts_params(plugin: Any) -> bool:
    """Whether a plugin changes parameters for the time of an epoch, by its declarations."""
    if "epoch_context" not in implemented(plugin):
        return False
    return bool(hook_states(plugin, "epoch_context", "updates", "writes") & {"params", "weights"})
