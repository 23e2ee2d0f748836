"""Criteria that are asked every so many updates, not at the end of an epoch."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from loopkit import hookimpl
from loopkit.author import Shown, better, checked_mode, checks, is_sum
from loopkit.criteria import Criterion, Mode
from loopkit.errors import PluginError
from loopkit.metrics import Mean

if TYPE_CHECKING:
    from loopkit import FitResult, Learner, Phase, Step


class StopOn(Shown):
    """End a fit by a criterion on the training loss, every so many updates.

    It is asked with the mean over their steps. A run that diverges, or has reached its goal, ends in the middle of an
    epoch. `loopkit.plugins.EarlyStopping` asks a criterion about a metric whenever its phase ends, so that with
    ``fit(validate=every(updates=100))`` it counts updates as well.

    Args:
        criterion: One of `loopkit.criteria`, such as ``Divergence(0.5, relative=True)``. The plugin has a copy.
        every: Updates between two questions, from 1. At each the host waits for the device.
        attribute: The step's number that is averaged, weighted by ``step.weight``.
        mode: ``"min"`` or ``"max"``; by default ``"min"`` for a loss, and asked for otherwise.
        name: The plugin's name.

    Of several processes the mean is over all; they have to train in step, as with ``DDP``. Saved and resumed
    exactly, also between two questions. After it has ended a fit, it starts empty in the next one.

    Raises:
        PluginError: An option is out of range; processes that do not train in step.

    Example::

        StopOn(Divergence(0.5, relative=True) | InvalidValue(), every=50)
    """

    provides = "stop_on"
    per_process = ()
    syncs = ("step_end",)
    volatile = ("seconds",)

    def __init__(
        self,
        criterion: Criterion,
        every: int = 100,
        *,
        attribute: str = "loss",
        mode: Mode | None = None,
        name: str = "stop_on",
    ) -> None:
        if not isinstance(criterion, Criterion):
            raise PluginError(
                f"StopOn: criterion is {criterion!r}: give one of loopkit.criteria, such as Divergence(5.0)"
            )
        if criterion.needs_training:
            raise PluginError(f"StopOn: {criterion!r} compares two series: give it to EarlyStopping")
        checks.whole("StopOn", every=every)
        given = checked_mode("StopOn", mode) or better(attribute, ())
        if given is None:
            raise PluginError(f'StopOn: give mode="min" if {attribute!r} is better where it is lower, else mode="max"')
        self.mode: Mode = given
        self.name, self.attribute, self.every, self._criterion = name, attribute, every, criterion
        self._start()

    def _start(self) -> None:
        self.criterion = copy.deepcopy(self._criterion)
        self._mean = Mean(self.attribute)
        self._asked = 0
        """The updates of the run when it was asked last."""

    @hookimpl(after=("checkpoint",))
    def fit_begin(self, learner: Learner) -> None:
        """Start the clock."""
        if learner.world.size > 1 and not learner.world.in_step:
            raise PluginError(f"plugin {self.name!r}: the processes do not train in step: use EarlyStopping")
        self._mean.sums = is_sum(learner.loss_fn)
        self.criterion.start()

    @hookimpl(reads=lambda plugin: ("progress", "loss", "step"))
    def step_end(self, learner: Learner, phase: Phase, step: Step) -> None:
        """Add the step, and ask."""
        if not phase.training or learner.current is None:
            return
        if (value := getattr(step, self.attribute, None)) is not None:
            self._mean.add(value, step.weight)
        if (updates := learner.progress.updates) // self.every == self._asked // self.every:
            return
        self._asked = updates
        self._mean.merge(learner.world.gather(self._mean.state_dict()))
        mean = None if self._mean.is_empty else float(self._mean.compute())  # host sync: it decides whether to go on
        self._mean.reset()
        if mean is not None and (reason := learner.world.share(self.criterion.update(mean, self.mode))):
            learner.stop(f"{self.attribute} after update {updates:,}: {reason}", by=self.name)

    @hookimpl
    def fit_end(self, result: FitResult) -> None:
        """Stop the clock."""
        self.criterion.pause()
        if result.by == self.name and result.reason == "stop":
            asked = self._asked
            self._start()
            self._asked = asked

    def state_dict(self) -> dict[str, Any]:
        """The state of the criterion, and the mean so far."""
        return {"criterion": self.criterion.state_dict(), "mean": self._mean.state_dict(), "asked": self._asked}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the return value of `state_dict`."""
        self.criterion.load_state_dict(state["criterion"])
        self._mean.load_state_dict(state["mean"])
        self._asked = state["asked"]
