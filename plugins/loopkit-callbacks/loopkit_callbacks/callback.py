"""LightningCallback: a callback of Lightning as a plugin."""

from __future__ import annotations

import signal
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from loopkit.author import Shown, nearest, snake_case
from loopkit.errors import PluginError
from loopkit.hooks import hookimpl
from loopkit.phases import PredictionPhase
from loopkit_callbacks.common import LIMITS, is_needed, load, made, plain
from loopkit_callbacks.trainer import Module, Now, Trainer

if TYPE_CHECKING:
    from loopkit import Epoch, Step
    from loopkit.learner import Learner
    from loopkit.phases import Phase
    from loopkit.result import FitResult

__all__ = ["REFUSED", "SUPPORTED", "LightningCallback"]

SUPPORTED = ("EarlyStopping", "LearningRateMonitor", "Timer", "DeviceStatsMonitor", "LambdaCallback")
"""The callbacks of Lightning that run here; one that is written on ``Callback`` itself runs as LambdaCallback does."""

REFUSED = {
    "ModelCheckpoint": "it writes pickles of a trainer; loopkit.plugins.Checkpoint saves and resumes the whole run",
    "OnExceptionCheckpoint": "it writes pickles of a trainer; loopkit.plugins.Checkpoint saves on signals and errors",
    "Checkpoint": "it writes pickles of a trainer; loopkit.plugins.Checkpoint saves and resumes the whole run",
    "GradientAccumulationScheduler": "it owns the loop's accumulation; give Learner(accumulate=...)",
    "StochasticWeightAveraging": "it owns the loop; loopkit.plugins.WeightAverage averages, and Schedule sets the rate",
    "WeightAveraging": "it swaps the module that the loop trains; use loopkit.plugins.WeightAverage",
    "EMAWeightAveraging": "it swaps the module that the loop trains; use loopkit.plugins.WeightAverage",
    "BaseFinetuning": "it adds parameters to the optimizer; use loopkit.plugins.Freeze",
    "BackboneFinetuning": "it adds parameters to the optimizer; use loopkit.plugins.Freeze",
    "LearningRateFinder": "it runs its own fits; use LRFinder of loopkit-insight",
    "BatchSizeFinder": "it runs its own fits, and changes the data",
    "ModelPruning": "it rewrites parameters, and their entries in checkpoints",
    "ModelSummary": "it reads a whole LightningModule; log loopkit.logs.Graph(model)",
    "RichModelSummary": "it reads a whole LightningModule; log loopkit.logs.Graph(model)",
    "ProgressBar": "it draws the loops of a trainer; use loopkit.plugins.Progress",
    "TQDMProgressBar": "it draws the loops of a trainer; use loopkit.plugins.Progress",
    "RichProgressBar": "it draws the loops of a trainer; use loopkit.plugins.Progress",
    "BasePredictionWriter": "it is part of trainer.predict; write what learner.predict_batches gives",
    "SpikeDetection": "it writes files, and ends the process by an exception; use loopkit.plugins.SkipSpikes",
    "ThroughputMonitor": "it reads a trainer's loops and its logger's files; use loopkit_insight.Profile",
}
"""Why the others do not run, and what to use instead."""

ROOTS = ("lightning.pytorch", "pytorch_lightning")
NEVER = {
    "on_sanity_check_start": "no validation is run before the training",
    "on_sanity_check_end": "no validation is run before the training",
    "on_before_zero_grad": "gradients are cleared when a window begins and after its update, without an event",
    "on_save_checkpoint": "it changes pickles of a trainer; give the callback a state_dict() and load_state_dict()",
    "on_load_checkpoint": "it reads pickles of a trainer; give the callback a state_dict() and load_state_dict()",
}
STAGES = ("train", "validation", "test", "predict")
PARTS = ("start", "epoch_start", "batch_start", "batch_end", "epoch_end", "end")
HOOKS = (
    *("setup", "teardown", "on_fit_start", "on_fit_end", "on_exception"),
    *("on_before_backward", "on_after_backward", "on_before_optimizer_step", *NEVER),
    *(f"on_{stage}_{part}" for stage in STAGES for part in PARTS),
)


@dataclass(frozen=True)
class Kind:
    """The adapter's declarations for a kind of callback."""

    provides: str = ""
    volatile: tuple[str, ...] = ()
    """The keys of its state that are measured times."""
    takes_data: bool = False
    """Whether its hooks look at batches and outputs, which the others are not given."""


KINDS = {
    "EarlyStopping": Kind(provides="early_stopping"),
    "Timer": Kind(volatile=("time_elapsed",)),
    "LambdaCallback": Kind(takes_data=True),
}


class LightningCallback(Shown):
    """Run a callback of Lightning: its hooks are called at the events that they stand for.

    The callback gets facades in the places of its trainer and its module, which have what the supported callbacks
    need; any other attribute raises an error that names it. Its logs go to ``learner.log``, its stops to
    ``learner.stop``, its state into the learner's. Its messages and its numbers are its own.

    Args:
        callback: One of `SUPPORTED`, or your own class on Lightning's ``Callback`` itself; or the name
            of a supported one, which is then made of ``options``.
        metrics: The metrics that it calls otherwise, ``{"val_loss": "val/loss"}``; its other names are the learner's.
        log_every_n_steps: How often a callback that logs steps does so, counted in updates; 0 is never.
        reads: The states that the hooks of a LambdaCallback or of your own callback read; by default all, so that they
            run last. For a supported one this is known.
        updates: The states that these change in place.
        writes: The states that these make.
        name: The plugin's name; by default ``lightning_`` and the class in snake case.
        options: For a callback given by name.

    Where each hook comes: ``setup``, ``on_fit_start``, ``on_train_start`` at ``fit_begin``; ``on_train_epoch_start`` at
    ``epoch_begin``, not again in an epoch that is resumed; ``on_train_batch_start`` and ``_end`` at
    ``step_begin`` and ``step_end``; ``on_before_backward``, ``on_after_backward`` and ``on_before_optimizer_step`` at
    ``backward_begin``, ``backward_end`` and ``update_begin``; ``on_train_epoch_end`` at ``cycle_end``, after the
    validations of the epoch, as in Lightning, and in your own loop at ``phase_end``; ``on_train_end``, ``on_fit_end``
    and ``teardown`` at ``fit_end``, or ``on_exception`` there after an error or a signal. Validation, and phases of the
    name ``"test"``, have ``on_validation_start`` and ``on_validation_epoch_start`` at ``epoch_begin``,
    ``on_validation_epoch_end`` at ``epoch_end``, ``on_validation_end`` at ``phase_end``.

    Raises:
        PluginError: The callback is not supported, or Lightning is not installed; gives the reason and an alternative.
        UnsupportedError: During a hook: the callback uses an attribute that the facades do not have.

    Example::

        LightningCallback(EarlyStopping("val/loss", patience=3))
    """

    provides = ""
    volatile: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    updates: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()

    def __init__(
        self,
        callback: Any,
        *,
        metrics: Mapping[str, str] | None = None,
        log_every_n_steps: int = 50,
        reads: tuple[str, ...] | None = None,
        updates: tuple[str, ...] = (),
        writes: tuple[str, ...] = (),
        name: str | None = None,
        **options: Any,
    ) -> None:
        if isinstance(callback, str):
            callback = _make(callback, options)
        elif options:
            raise PluginError(
                f"LightningCallback: {next(iter(options))!r} is an option for a callback that is given by name; this "
                f"{type(callback).__name__} is made already"
            )
        if type(log_every_n_steps) is not int or log_every_n_steps < 0:
            raise PluginError(
                f"LightningCallback: log_every_n_steps is {log_every_n_steps!r}: it counts updates, 0 is never"
            )
        if not isinstance(metrics or {}, Mapping):
            raise PluginError(f"LightningCallback: metrics is {metrics!r}: write {{'val_loss': 'val/loss'}}")
        base = _base(callback)
        self.callback = callback
        self.kind, own = _kind(callback, base)
        who = type(callback).__name__
        self.name = name or f"lightning_{snake_case(who)}"
        self.provides, self.volatile = own.provides, own.volatile
        self._takes_data = own.takes_data
        if not own.takes_data and (reads is not None or updates or writes):
            raise PluginError(
                f"LightningCallback: the reads and changes of {who} are known: leave out reads, updates, writes"
            )
        self._used = {hook for hook in HOOKS if _overrides(callback, base, hook)}
        for hook in sorted(self._used & set(NEVER)) if own.takes_data else ():
            raise PluginError(f"LightningCallback: {who} has {hook}, which never comes here: {NEVER[hook]}")
        self._names = dict(metrics or {})
        for unused in self._names.keys() - {getattr(callback, "monitor", None)} if not own.takes_data else ():
            raise PluginError(f"LightningCallback: metrics has a name for {unused!r}, which {who} does not look at")
        root = next(root for root in ROOTS if base.__module__.startswith(f"{root}."))
        self._now = Now(who, root, log_every_n_steps)
        self._trainer, self._module = Trainer(self._now), Module(self._now)
        self._monitor = self._monitored() if self.kind == "EarlyStopping" else ""
        self._checks = 0
        self.reads, self.updates, self.writes = self._reads(reads), updates, writes
        self.needed = self._find_needed()
        """The hooks that it has beside the begin and the end of the fit."""

    def _reads(self, given: tuple[str, ...] | None) -> tuple[str, ...]:
        if self._takes_data:
            return ("*",) if given is None else given
        if self.kind == "EarlyStopping":
            return (f"metrics.{self._monitor}",)
        if self.kind == "LearningRateMonitor":
            momentum = ("optimizer.momentum", "optimizer.betas") if self.callback.log_momentum else ()
            decay = ("optimizer.weight_decay",) if self.callback.log_weight_decay else ()
            return ("optimizer.lr", *momentum, *decay)
        return ()

    def _monitored(self) -> str:
        """The learner's name of an EarlyStopping's metric."""
        monitor = self.callback.monitor
        metric = str(self._names.get(monitor, monitor))
        phase, slash, rest = metric.partition("/")
        if not (phase and slash and rest):
            raise PluginError(
                f"LightningCallback: EarlyStopping monitors {monitor!r}; a metric of loopkit is '<phase>/<metric>': "
                f"give it monitor='val/loss', or LightningCallback(..., metrics={{{monitor!r}: 'val/loss'}})"
            )
        return metric

    def _find_needed(self) -> set[str]:
        """Return the hooks that the callback needs; the others cost nothing."""
        stages = [stage for stage in STAGES if any(f"on_{stage}_{part}" in self._used for part in PARTS)]
        others = [stage for stage in stages if stage != "train"]

        def of(*parts: str) -> list[str]:
            return [f"on_{stage}_{part}" for stage in others for part in parts]

        batches = [f"on_{stage}_batch_{part}" for stage in stages for part in ("start", "end")]
        served = {
            "epoch_begin": ["on_train_epoch_start", *of("start", "epoch_start")],
            "step_begin": batches,
            "backward_begin": ["on_before_backward"],
            "backward_end": ["on_after_backward"],
            "update_begin": ["on_before_optimizer_step"],
            "step_end": batches[1::2],
            "epoch_end": of("epoch_end"),
            "phase_end": ["on_train_epoch_end", *of("end")],
            "cycle_end": ["on_train_epoch_end"],
        }
        return {hook for hook, named in served.items() if not self._used.isdisjoint(named)}

    # The hooks

    @hookimpl(after=("checkpoint",))  # which may load a state
    def fit_begin(self, learner: Learner) -> None:
        """Run the callback's hooks for the start of the fit."""
        now = self._now
        at = None if learner.current is None else learner.current.position
        now.asked, self._checks = False, 0
        now.epoch_ends = now.epoch_ends and at is not None and at.cycle  # else it is of a fit that failed
        self._enter(learner)
        if self._monitor:
            phase = learner.phases.get(self._monitor.partition("/")[0])
            now.after_validation = phase is None or not phase.training
        self._call("setup", stage="fit")
        self._call("on_fit_start")
        self._call("on_train_start")
        self._ask()

    @hookimpl(when=is_needed("epoch_begin"))
    def epoch_begin(self, learner: Learner, phase: Phase, epoch: Epoch) -> None:
        """Run its hooks for the start of an epoch, unless it is resumed."""
        self._enter(learner, phase)
        if not epoch.resumed:
            stage = _stage(phase)
            if stage != "train":
                self._call(f"on_{stage}_start")
            self._call(f"on_{stage}_epoch_start")
            self._ask()

    @hookimpl(when=is_needed("step_begin"))
    def step_begin(self, learner: Learner, phase: Phase, step: Step) -> None:
        """Run its hooks for the start of a step."""
        self._enter(learner, phase, step)
        self._now.updates = learner.progress.updates
        self._call(f"on_{_stage(phase)}_batch_start", step.batch if self._takes_data else None, step.index)
        self._ask()

    @hookimpl(when=is_needed("backward_begin"))
    def backward_begin(self, learner: Learner, phase: Phase, step: Step) -> None:
        """Run its hook before backward."""
        self._in_step(learner, phase, step, "on_before_backward", step.loss)

    @hookimpl(when=is_needed("backward_end"))
    def backward_end(self, learner: Learner, phase: Phase, step: Step) -> None:
        """Run its hook after backward."""
        self._in_step(learner, phase, step, "on_after_backward")

    @hookimpl(when=is_needed("update_begin"))
    def update_begin(self, learner: Learner, phase: Phase, step: Step) -> None:
        """Run its hook before an optimizer steps."""
        self._in_step(learner, phase, step, "on_before_optimizer_step", step.optimizer)

    def _in_step(self, learner: Learner, phase: Phase, step: Step, hook: str, *values: Any) -> None:
        self._enter(learner, phase, step)
        self._call(hook, *values)
        self._ask()

    @hookimpl(when=is_needed("step_end"))
    def step_end(self, learner: Learner, phase: Phase, step: Step) -> None:
        """Run its hooks for the end of a step."""
        self._enter(learner, phase, step)
        batch, outputs = (step.batch, _outputs(phase, step)) if self._takes_data else (None, None)
        self._call(f"on_{_stage(phase)}_batch_end", outputs, batch, step.index)
        self._ask()

    @hookimpl(when=is_needed("epoch_end"))
    def epoch_end(self, learner: Learner, phase: Phase) -> None:
        """Run its hooks for the end of an epoch that does not train."""
        self._enter(learner, phase)
        if not phase.training:
            self._call(f"on_{_stage(phase)}_epoch_end")
            self._ask()

    @hookimpl(when=is_needed("phase_end"))
    def phase_end(self, learner: Learner, phase: Phase) -> None:
        """Run its hooks after an epoch; for a training epoch of ``fit`` they run in ``cycle_end``."""
        now = self._now
        self._enter(learner, phase)
        monitored = not self._monitor or phase.name == self._monitor.partition("/")[0]
        if phase.training:
            now.epoch_ends = monitored or now.after_validation
        elif monitored and not (self._monitor and now.stops):
            self._checks += 1
            self._call(f"on_{_stage(phase)}_end")
        if learner.current is None or not learner.current.position.by_fit:
            self._end_train_epoch()
        self._ask()

    @hookimpl(when=is_needed("cycle_end"))
    def cycle_end(self, learner: Learner) -> None:
        """Run its hook after a training epoch and its validations."""
        self._enter(learner)
        self._end_train_epoch()
        self._ask()

    def _end_train_epoch(self) -> None:
        now = self._now
        if not now.epoch_ends:
            return
        if not self._monitor or not now.stops:
            self._checks += not now.after_validation
            self._call("on_train_epoch_end")
        now.epoch_ends = False

    @hookimpl
    def fit_end(self, learner: Learner, result: FitResult) -> None:
        """Run its hooks for the end of the fit, or for the error that ended it."""
        now, fit = self._now, learner.current
        self._enter(learner)
        if fit is not None and result.reason in ("error", "signal"):
            self._call("on_exception", fit.failure or _interrupt(fit.signal))
        else:
            self._end_train_epoch()  # a stop may have left out the validation
            self._call("on_train_end")
            self._call("on_fit_end")
            self._call("teardown", stage="fit")
        if self._monitor and not self._checks and learner.world.rank == 0 and result.reason in LIMITS:
            warnings.warn(
                f"plugin {self.name!r} monitors {self._monitor!r}, but no epoch of its phase was looked at in this fit",
                stacklevel=2,
            )
        del now.learner  # which would live as long as the callback

    # Calling

    def _enter(self, learner: Learner, phase: Phase | None = None, step: Step | None = None) -> None:
        now = self._now
        now.learner, now.phase, now.index = learner, phase, 0 if step is None else step.index

    def _call(self, hook: str, *values: Any, **named: Any) -> None:
        if hook in self._used:
            self._now.metrics = partial(self._metrics, hook)
            getattr(self.callback, hook)(self._trainer, self._module, *values, **named)

    def _metrics(self, hook: str) -> dict[str, float]:
        """The content of ``trainer.callback_metrics`` in this hook: the monitored metric, or all, or none."""
        known = self._now.learner.metrics
        if self._takes_data:
            names = {metric: name for name, metric in self._names.items()}
            return {names.get(metric, metric): value for metric, value in known.items()}
        if not self._monitor or hook not in ("on_train_epoch_end", "on_validation_end"):
            return {}
        value = known.get(self._monitor)
        if value is not None:
            return {self.callback.monitor: float(value)}
        if self.callback.strict and (hook == "on_validation_end") is self._now.after_validation:
            there = ", ".join(known) or "none"
            raise PluginError(
                f"plugin {self.name!r}: there is no metric {self._monitor!r}{nearest(self._monitor, known)}; there "
                f"are: {there}"
            )
        return {}

    def _ask(self) -> None:
        """Pass on that the callback wants the fit to end."""
        if self._now.asked:
            self._now.asked = False
            said = getattr(self.callback, "stopping_reason_message", None)
            self._now.learner.stop(said or f"{self._now.callback} set trainer.should_stop", by=self.name)

    # State

    def state_dict(self) -> dict[str, Any]:
        """The callback's own state, and whether its hooks for the end of an epoch are still to run.

        Raises:
            PluginError: The callback's state holds something that no plugin's state can hold.
        """
        state = plain(self.callback.state_dict(), self._now.callback)
        return {"callback": state, "epoch_ends": self._now.epoch_ends}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the return value of `state_dict`."""
        self._now.epoch_ends = state["epoch_ends"]
        self.callback.load_state_dict(plain(state["callback"], self._now.callback))


def _make(name: str, options: dict[str, Any]) -> Any:
    """A supported callback by name."""
    if name not in SUPPORTED:
        raise _refusal(name)
    module = load("lightning.pytorch.callbacks", "Lightning", "lightning", f"LightningCallback({name!r})")
    return made(LightningCallback, getattr(module, name), options)


def _refusal(name: str) -> PluginError:
    if name in REFUSED:
        return PluginError(f"LightningCallback: {name} cannot run here: {REFUSED[name]}")
    return PluginError(
        f"LightningCallback: {name!r} is not supported{nearest(name, SUPPORTED)}; supported are {', '.join(SUPPORTED)} "
        f"and what is written on Callback itself"
    )


def _is_lightnings(cls: type) -> bool:
    return cls.__module__.startswith(tuple(f"{root}." for root in ROOTS))


def _base(callback: Any) -> type:
    """Lightning's class ``Callback``, as the callback has it."""
    if isinstance(callback, type):
        raise PluginError(
            f"LightningCallback: {callback.__name__} is a class; give an instance: {callback.__name__}(...)"
        )
    for cls in type(callback).__mro__:
        if cls.__name__ == "Callback" and _is_lightnings(cls):
            return cls
    raise PluginError(
        f"LightningCallback: {callback!r} is no callback of Lightning; give an instance of a subclass of "
        f"lightning.pytorch.Callback, or the name of one of {', '.join(SUPPORTED)}"
    )


def _kind(callback: Any, base: type) -> tuple[str, Kind]:
    """Which supported callback it is, and what is known of it."""
    cls = type(callback)
    lightnings = next(each for each in cls.__mro__ if _is_lightnings(each))
    if lightnings is base:
        return "LambdaCallback", KINDS["LambdaCallback"]
    if lightnings.__name__ not in SUPPORTED:
        raise _refusal(lightnings.__name__)
    if cls is not lightnings:
        raise PluginError(
            f"LightningCallback: {cls.__name__} changes {lightnings.__name__}, and what it reads is not known: write "
            f"it on Callback itself"
        )
    return cls.__name__, KINDS.get(cls.__name__, Kind())


def _overrides(callback: Any, base: type, hook: str) -> bool:
    return hook in vars(callback) or getattr(type(callback), hook) is not getattr(base, hook)


def _stage(phase: Phase) -> str:
    """Lightning's word for a phase."""
    if phase.training:
        return "train"
    if isinstance(phase, PredictionPhase):
        return "predict"
    return "test" if phase.name == "test" else "validation"


def _outputs(phase: Phase, step: Step) -> Any:
    """Lightning's outputs of a step: its loss in training, else the model's outputs."""
    if not phase.training:
        return getattr(step, "outputs", None)
    loss = getattr(step, "loss", None)
    return {} if loss is None else {"loss": loss.detach()}


def _interrupt(number: signal.Signals | None) -> BaseException:
    """The exception that Lightning's ``on_exception`` gets for a signal."""
    if number is None or number == signal.SIGINT:
        return KeyboardInterrupt()
    return SystemExit(128 + number)
