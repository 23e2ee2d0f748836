"""End a fit when a metric no longer improves."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from loopkit.base import checks, devices, sharded
from loopkit.base.options import Shown
from loopkit.base.words import nearest
from loopkit.criteria import Criterion, Mode, NumberSinceBest
from loopkit.criteria.directions import better, checked_mode, direction, is_better
from loopkit.errors import PluginError
from loopkit.hooks import hookimpl
from loopkit.plugins.buffers import extra_states, put_extra_states

if TYPE_CHECKING:
    from loopkit import Epoch
    from loopkit.learner import Learner
    from loopkit.phases import Phase
    from loopkit.result import FitResult, StopRequest

PATIENCE = 5


class EarlyStopping(Shown):
    """Stop the fit by a criterion on one metric; ``FitResult.message`` names the criterion and its values.

    The metric is looked at in the ``phase_end`` of its phase, whoever runs the epoch. An epoch that ``learner.stop``
    cut short, or that had no step, is not looked at. The fit ends as a normal result, with reason ``"stop"``.

    Args:
        monitor: The metric, as ``"<phase>/<metric>"``.
        patience: Stop after so many values without an improvement, from 1: `loopkit.criteria.NumberSinceBest`.
        mode: ``"min"`` if lower values are better, ``"max"`` if higher ones are; by default the metric's own, else
            the fit raises, unless the criterion does not ask (`loopkit.criteria.InvalidValue`, limits).
        min_delta: Only what is better by more than this is an improvement for ``patience``, at least 0.
        restore_best: When the run is over, at ``fit_end``, put back the parameters, buffers and extra states
            with which the best value was measured, bitwise. The optimizer and ``learner.metrics`` stay as they are.
            After an error, a signal or a pause everything does: the next fit resumes from the interrupted weights.
        criterion: A criterion of `loopkit.criteria` instead of ``patience`` and ``min_delta``. The plugin has its own
            copy.
        training: The training series, for a criterion that needs it (``ProgressQuotient`` of loopkit-control).
        best_device: Where the best parameters are kept, such as ``"cpu"``; by default where they are.
        name: The plugin's name.

    The best value is the best finite one, by however little; nan and infinity never are. Without a mode there is none.

    What is restored is what was measured. It is copied at ``epoch_end``, while the contexts of the epoch are entered:
    if a plugin has put averaged weights in place for the epoch, those are kept and become the parameters at the end.
    Memory: with ``restore_best``, one copy of the parameters and buffers, and a second one between ``epoch_end`` and
    ``phase_end`` of the monitored phase. Copies to another device wait for the transfer, once an epoch.

    Several processes look at rank 0's value, with rank 0's criterion and clock, so that all keep the same best weights.

    The state is kept from fit to fit, as the learner's counters are. After it has ended a fit, it starts empty in
    the next one. State that was saved when it had asked for the end, but before that came, ends the next fit at once.

    Raises:
        PluginError: An option is out of range; at ``phase_end``, the epoch did not make the metric.

    Example::

        EarlyStopping("val/loss", patience=3, restore_best=True)
        EarlyStopping("val/accuracy", criterion=Patience(3) | TimeLimit(3600))
    """

    provides = "early_stopping"
    per_process = ()  # it talks to the others
    volatile = ("seconds",)

    def __init__(
        self,
        monitor: str = "val/loss",
        patience: int = PATIENCE,
        mode: Mode | None = None,
        min_delta: float = 0.0,
        restore_best: bool = False,
        criterion: Criterion | None = None,
        *,
        training: str = "train/loss",
        best_device: str | torch.device | None = None,
        name: str = "early_stopping",
    ) -> None:
        self.name = name
        self.monitor, self.phase = _metric("monitor", monitor)
        self.training, self._training_phase = _metric("training", training)
        self.mode = checked_mode("EarlyStopping", mode)
        self.restore_best = restore_best
        own = criterion
        if criterion is None:
            criterion = _patience(patience, min_delta)
        elif not isinstance(criterion, Criterion):
            raise PluginError(
                f"EarlyStopping: criterion is {criterion!r}; give an instance of one of loopkit.criteria, such as "
                f"criterion=Patience(3)"
            )
        elif (patience, min_delta) != (PATIENCE, 0.0):
            raise PluginError(
                "EarlyStopping: criterion takes the place of patience and min_delta; leave them out, or give "
                "criterion=NumberSinceBest(patience, min_delta) | ..."
            )
        if best_device is not None and not restore_best:
            raise PluginError(f"EarlyStopping: best_device is {best_device!r} without restore_best=True")
        self.best_device = _device(best_device)
        self._own = {"patience": patience, "min_delta": min_delta, "criterion": own, "best_device": best_device}
        self.given = copy.deepcopy(criterion)
        """The criterion as it is at the start; `criterion` is the one of the fit."""
        self._start()

    def _start(self) -> None:
        self.criterion = copy.deepcopy(self.given)
        self.best: float | None = None
        """The best value so far."""
        self.best_epoch: int | None = None
        """``learner.progress.epochs`` when it was measured: the training epochs that were complete by then."""
        self.reason = ""
        """Why it asked for the end."""
        self._ended = False
        self._asked: StopRequest | None = None
        self._best: dict[str, Tensor] | None = None
        self._best_extra: dict[str, Any] = {}
        """The extra states of modules that go with them."""

    def _hear(self) -> None:
        """A stop that a plugin has put off is none."""
        if self._asked is not None and self._asked.put_off:
            self.reason = ""
            self._asked = None

    @hookimpl(before=("average",), after=("checkpoint",))  # and so, turned round, in fit_end
    def fit_begin(self, learner: Learner) -> None:
        """Start the clock; start empty if it ended a fit, and this one is another."""
        self._hear()
        fit = learner.current
        if self.reason and fit is not None and not fit.stopped:
            if self._ended or fit.resumed:  # because a limit was raised
                self._start()
            else:
                learner.stop(self.reason, by=self.name)
        self.criterion.start()

    @hookimpl(reads=lambda plugin: ("params", "buffers") if plugin.restore_best else ())
    def epoch_end(self, learner: Learner, phase: Phase, epoch: Epoch) -> None:
        """Copy what was measured, while it is in place."""
        if phase.name not in (self.phase, self._training_phase):
            return
        keep = epoch.keep(self)
        keep["cut"] = epoch.stopped or epoch.steps == 0
        if phase.name == self.phase and self.restore_best and learner.current is not None and not keep["cut"]:
            with learner.models.weights.in_training_form():
                keep["measured"] = {name: self._copy(tensor) for name, tensor in _tensors(learner).items()}
            keep["extra"] = extra_states(learner)

    def _copy(self, tensor: Tensor) -> Tensor:
        tensor = tensor.detach()
        return tensor.clone() if self.best_device is None else tensor.to(self.best_device, copy=True)

    @hookimpl(reads=lambda plugin: ("progress", *plugin.metrics()))
    def phase_end(self, learner: Learner, phase: Phase, epoch: Epoch) -> None:
        """Look at the metric, and ask for the end of the fit if the criterion is met."""
        keep = epoch.keep(self)
        if learner.current is None or keep.get("cut", False):
            return
        if phase.name == self._training_phase and self.criterion.needs_training:
            self.criterion.observe_training(learner.world.share(self._value(learner, phase, self.training)))
        if phase.name != self.phase:
            return
        measured = keep.pop("measured", None)
        extra = keep.pop("extra", {})
        plugins = learner.plugins.values()
        mode = direction(self, plugins) if self.needs_mode else self.mode or better(self.monitor, plugins)
        value = learner.world.share(self._value(learner, phase, self.monitor))
        if mode is not None and is_better(value, self.best, mode):
            self.best = value
            self.best_epoch = learner.progress.epochs
            self._best = measured
            self._best_extra = extra
        if reason := learner.world.share(self.criterion.update(value, mode or "min")):
            reason = f"{self.monitor}: {reason}"
            self._asked = learner.stop(reason, by=self.name)
            self.reason = reason

    @hookimpl(updates=lambda plugin: ("params", "buffers") if plugin.restore_best else ())
    def fit_end(self, learner: Learner, result: FitResult) -> None:
        """Put back the best parameters."""
        self.criterion.pause()
        self._hear()
        if result.by == self.name:  # also by a stop that was put off
            self.reason = result.message
        self._ended = self.reason != ""
        if result.reason in ("error", "signal", "pause"):  # the run is not over
            return
        if self._best is not None:
            if not getattr(learner.phases.get(self.phase), "training", False):
                learner.models.modes.receive()
            with learner.models.module_modes.in_training_form():
                _restore(learner, self._best, self.name)
            put_extra_states(learner, self._best_extra)

    @property
    def needs_mode(self) -> bool:
        """Whether it goes by which values of the metric are better."""
        return self.restore_best or self.criterion.needs_mode

    def metrics(self) -> tuple[str, ...]:
        """The state names of the metrics that it reads."""
        names = (self.monitor, self.training) if self.criterion.needs_training else (self.monitor,)
        return tuple(f"metrics.{name}" for name in names)

    def _value(self, learner: Learner, phase: Phase, name: str) -> float:
        if (value := learner.metrics.get(name)) is None:
            known = list(learner.metrics)
            raise PluginError(
                f"plugin {self.name!r}: the epoch of phase {phase.name!r} made no metric {name!r}"
                f"{nearest(name, known)}; there are: {', '.join(known) or 'none'}"
            )
        return float(value)

    def options(self) -> dict[str, Any]:
        """The options it was made with."""
        kept = {name: getattr(self, name) for name in ("monitor", "mode", "restore_best", "training", "name")}
        return {**kept, **self._own}

    def state_dict(self) -> dict[str, Any]:
        """The criterion's state, the best value and, with ``restore_best``, its parameters and buffers."""
        self._hear()
        return {
            "criterion": self.criterion.state_dict(),
            "best": self.best,
            "best_epoch": self.best_epoch,
            "reason": self.reason,
            "ended": self._ended,
            "parameters": None if self._best is None else dict(self._best),  # these tensors are never changed
            **({"extra": dict(self._best_extra)} if self._best_extra else {}),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the return value of `state_dict`."""
        self.criterion.load_state_dict(state["criterion"])
        self.best = state["best"]
        self.best_epoch = state["best_epoch"]
        self.reason = state["reason"]
        self._ended = state["ended"]
        self._best_extra = dict(state.get("extra", {}))  # an older state has none
        kept = state["parameters"]
        self._best = None if kept is None or not self.restore_best else {n: self._copy(t) for n, t in kept.items()}


def _tensors(learner: Learner) -> dict[str, Tensor]:
    """Parameters and buffers of all models, each once."""
    return {
        f"{model}.{name}": tensor
        for model, module in learner.models.with_extras().items()
        for named in (module.named_parameters(), module.named_buffers())
        for name, tensor in named
    }


@torch.no_grad()
def _restore(learner: Learner, kept: dict[str, Tensor], plugin: str) -> None:
    now = _tensors(learner)
    for name, tensor in kept.items():
        if name not in now or now[name].shape != tensor.shape:
            found = f"has shape {tuple(now[name].shape)}" if name in now else "is gone"
            raise PluginError(
                f"plugin {plugin!r}: {name!r} was kept with shape {tuple(tensor.shape)} and {found} now, so the best "
                f"parameters cannot be restored: the model was changed since. No parameter was restored"
            )
    for name, tensor in kept.items():
        now[name].copy_(sharded.like(tensor, now[name]))


def _metric(argument: str, value: Any) -> tuple[str, str]:
    """A metric's name and the phase in it."""
    checks.metric_name("EarlyStopping", **{argument: value})
    return value, value.partition("/")[0]


def _patience(patience: int, min_delta: float) -> NumberSinceBest:
    try:
        return NumberSinceBest(patience, min_delta)
    except PluginError:
        raise PluginError(
            f"EarlyStopping: patience is {patience!r} and min_delta is {min_delta!r}: patience is a whole number, from "
            f"1, min_delta a finite number, at least 0"
        ) from None


def _device(device: str | torch.device | None) -> torch.device | None:
    return None if device is None else devices.parse("EarlyStopping", device, option="best_device")
