"""IgniteHandler: a handler of Ignite as a plugin."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from loopkit.author import Shown, nearest, snake_case
from loopkit.errors import PluginError
from loopkit.hooks import hookimpl
from loopkit.progress import Progress
from loopkit_callbacks.common import LIMITS, Metrics, is_needed, load, made, plain

if TYPE_CHECKING:
    from loopkit import Epoch, Step
    from loopkit.learner import Learner
    from loopkit.phases import Phase
    from loopkit.result import FitResult
    from loopkit_callbacks.engine import Groups, PhaseEngine

__all__ = ["REFUSED", "SUPPORTED", "IgniteHandler"]

SCHEDULERS = ("LinearCyclicalScheduler", "CosineAnnealingScheduler", "PiecewiseLinear")
"""The schedulers that can be made by name."""
SUPPORTED = (
    *("EarlyStopping", "TerminateOnNan", "ProgressBar", *SCHEDULERS),
    *("ConcatScheduler", "LRScheduler", "ParamGroupScheduler"),
)
"""The handlers of Ignite that run here; a ``ParamScheduler`` of your own does too."""

LOGGER = "it writes files or to a service; use loopkit.plugins.LogTo with a backend"
REFUSED = {
    "Checkpoint": "it writes pickles; loopkit.plugins.Checkpoint saves and resumes the whole run",
    "ModelCheckpoint": "it writes pickles; loopkit.plugins.Checkpoint saves and resumes the whole run",
    "DiskSaver": "it writes pickles; loopkit.plugins.Checkpoint saves and resumes the whole run",
    "EMAHandler": "it keeps a second model, whose state it does not save; use loopkit.plugins.WeightAverage",
    "FastaiLRFinder": "it runs and resets the loop; use LRFinder of loopkit-insight",
    "ReduceLROnPlateauScheduler": "it writes a temporary pickle; use loopkit.plugins.Plateau",
    "BatchSizeScheduler": "it owns the loop's data",
    "StateParamScheduler": "it sets attributes of an engine's state, which loopkit does not read; use Schedule",
    "TimeLimit": "use loopkit.plugins.EarlyStopping(criterion=loopkit.criteria.TimeLimit(...))",
    "Timer": "it is driven by a loop's events, without a state; use FitResult.seconds or loopkit_insight",
    "BasicTimeProfiler": "it measures a loop of Ignite; use loopkit_insight.Profile",
    "HandlersTimeProfiler": "it measures a loop of Ignite; use loopkit_insight.Profile",
    "EpochOutputStore": "it keeps the outputs of a loop of Ignite; use learner.predict",
    **dict.fromkeys(
        (
            *("ClearMLLogger", "FBResearchLogger", "MLflowLogger", "NeptuneLogger", "PolyaxonLogger"),
            *("TensorboardLogger", "VisdomLogger", "WandBLogger"),
        ),
        LOGGER,
    ),
}
"""Why the others do not run, and what to use instead."""

EVENTS = {
    "STARTED": ("fit_begin", "epoch_begin"),
    "EPOCH_STARTED": ("epoch_begin",),
    "ITERATION_STARTED": ("step_begin",),
    "ITERATION_COMPLETED": ("step_end",),
    "EPOCH_COMPLETED": ("phase_end",),
    "TERMINATE": ("phase_end", "fit_end"),
    "COMPLETED": ("phase_end", "fit_end"),
}
"""The hooks at which each event may come."""


@dataclass(frozen=True)
class Kind:
    """The adapter's declarations for a kind of handler."""

    phase: str
    """The phase whose engine it is attached to, by default."""
    event: str
    """The event, by default."""
    provides: str = ""


KINDS = {
    "EarlyStopping": Kind("val", "COMPLETED", "early_stopping"),
    "TerminateOnNan": Kind("train", "ITERATION_COMPLETED", "non_finite"),
    "ProgressBar": Kind("train", "ITERATION_COMPLETED", "progress"),
    "ParamScheduler": Kind("train", "ITERATION_STARTED", "schedule"),
}


class IgniteHandler(Shown):
    """Run a handler of Ignite, attached to an engine that fires its events.

    The engine of the training phase is a trainer: ``STARTED`` and ``COMPLETED`` come once a fit. The engine of any
    other phase is an evaluator, each of whose epochs is a run of one epoch of Ignite. ``engine.state`` has ``epoch``,
    ``iteration``, ``max_epochs``, ``epoch_length``, ``metrics`` (of the phase, without its name:
    ``metrics["loss"]``) and, at ``ITERATION_COMPLETED``, ``output``: the loss of a training step, detached, else the
    pair of outputs and targets. ``engine.terminate()`` is ``learner.stop``. Any other attribute is an error that names
    it.

    Args:
        handler: One of `SUPPORTED`, or the name of one that is then made of ``options``; the adapter gives it the
            ``trainer`` or the ``optimizer``. The trainer of an ``EarlyStopping`` that is made already is replaced.
        event: When it is called: an event of Ignite, filtered ones included, or its name (``"epoch_completed"``). By
            default ``COMPLETED`` for EarlyStopping, ``ITERATION_STARTED`` for schedulers, else ``ITERATION_COMPLETED``.
        phase: The phase of the engine; by default ``"val"`` for EarlyStopping and ``"train"`` for the others.
        optimizer: The optimizers that a scheduler is for, a pattern of their names.
        attach: For ProgressBar, the other arguments of its ``attach``, such as ``{"metric_names": "all"}``.
        name: The plugin's name; by default ``ignite_`` and the class in snake case.
        options: For a handler given by name.

    A scheduler owns its hyperparameter of its optimizers, as ``Schedule`` does: two of them for the same raise.
    ``TerminateOnNan`` reads the loss in each step and so waits for the device. ``ProgressBar`` takes the place of the
    standard display, and is drawn by the first process only.

    Raises:
        PluginError: The handler is not supported, or Ignite is not installed; gives the reason and an alternative.
        UnsupportedError: The handler uses an attribute that the engine does not have.

    Example::

        IgniteHandler("EarlyStopping", patience=3, score_function=lambda engine: -engine.state.metrics["loss"])
        IgniteHandler("PiecewiseLinear", param_name="lr", milestones_values=[(0, 0.1), (100, 0.01)])
    """

    provides = ""
    owns: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    syncs: tuple[str, ...] = ()

    def __init__(
        self,
        handler: Any,
        event: Any = None,
        *,
        phase: str | None = None,
        optimizer: str = "*",
        attach: Mapping[str, Any] | None = None,
        name: str | None = None,
        **options: Any,
    ) -> None:
        who = handler if isinstance(handler, str) else type(handler).__name__
        if isinstance(handler, str) and handler not in SUPPORTED:
            raise _refusal(handler)
        if options and not isinstance(handler, str):
            raise PluginError(
                f"IgniteHandler: {next(iter(options))!r} is an option for a handler that is given by name; this {who} "
                f"is made already"
            )
        load("ignite", "Ignite (pytorch-ignite)", "ignite", f"IgniteHandler of {who}")
        from loopkit_callbacks.engine import Groups, PhaseEngine

        self._engine: PhaseEngine = PhaseEngine(who)
        self._groups: Groups = Groups(optimizer)
        if isinstance(handler, str):
            handler = self._make(handler, options)
        self.handler = handler
        self.kind = _kind(handler)
        own = KINDS[self.kind]
        self.phase = own.phase if phase is None else phase
        self.name = name or f"ignite_{snake_case(who)}"
        self.provides = own.provides
        self._optimizer = optimizer
        if not isinstance(self.phase, str):
            raise PluginError(f"IgniteHandler: phase is {phase!r}: it is the name of a phase, such as 'val'")
        if not isinstance(attach or {}, Mapping):
            raise PluginError(f"IgniteHandler: attach is {attach!r}: write {{'metric_names': 'all'}}")
        self._fired = False
        """An event has come in this fit."""
        if attach and self.kind != "ProgressBar":
            raise PluginError(f"IgniteHandler: attach= is only for ProgressBar; {who} is called at its event")
        self._set_up(_event(own.event if event is None else event), dict(attach or {}))

    def _make(self, name: str, options: dict[str, Any]) -> Any:
        """A supported handler by name."""
        import ignite.handlers

        given: dict[str, Any] = {}
        if name == "EarlyStopping":
            given["trainer"] = self._engine
        elif name in SCHEDULERS:
            given["optimizer"] = self._groups
        elif name not in KINDS:
            raise PluginError(
                f"IgniteHandler: {name} is made of other objects, and cannot be made by name: give an instance"
            )
        return made(IgniteHandler, getattr(ignite.handlers, name), options, **given)

    def _set_up(self, event: Any, attach: dict[str, Any]) -> None:
        """Attach the handler, and declare its reads and changes."""
        engine, handler = self._engine, self.handler
        if self.kind == "ProgressBar":
            handler.pbar_cls = type("Bar", (handler.pbar_cls,), {"monitor_interval": 0})  # no thread to watch bars
            handler.attach(engine, event_name=event, **attach)
            if attach.get("metric_names"):
                self.reads += ("metrics",)
        else:
            engine.add_event_handler(event, handler)
        if self.kind == "EarlyStopping":
            handler.trainer = engine
            self.reads += ("metrics",)
        elif self.kind == "ParamScheduler":
            keys = sorted({key for key, _ in _sets(handler)})
            self.owns = self.writes = tuple(f"optimizer.{key}.{self._optimizer}" for key in keys)
        self._outputs = self.kind == "TerminateOnNan" or "output_transform" in attach
        if self._outputs:
            self.reads += ("loss", "outputs", "targets")
            self.syncs = ("step_end",)
        unheard = [each.name for each in engine.attached if each.name not in EVENTS]
        if unheard:
            raise PluginError(
                f"IgniteHandler: {unheard[0]} never comes here; the events that come are {', '.join(EVENTS)}"
            )

    @property
    def needed(self) -> set[str]:
        """The hooks at which events may come that the handler is attached to."""
        return {hook for event in self._engine.attached for hook in EVENTS[event.name]}

    def changed_at(self, hook: str) -> tuple[str, ...]:
        """The states that it changes in a hook that it always has."""
        return self.writes if hook in self.needed else ()

    # The hooks

    @hookimpl(writes=lambda plugin: plugin.changed_at("fit_begin"), after=("checkpoint",))  # which may load a state
    def fit_begin(self, learner: Learner) -> None:
        """Fire ``STARTED``, if the engine is a trainer."""
        self._engine.should_terminate = self._fired = False
        if self.phase not in learner.phases and (hint := nearest(self.phase, learner.phases)):
            raise PluginError(f"plugin {self.name!r}: no phase is called {self.phase!r}{hint}")
        self._enter(learner, None)
        if self.kind == "ParamScheduler":
            self._check_groups(learner)
        if self._is_trainer(learner):
            self._fire(learner, "STARTED")

    @hookimpl(when=is_needed("epoch_begin"))
    def epoch_begin(self, learner: Learner, phase: Phase, epoch: Epoch) -> None:
        """Fire ``EPOCH_STARTED``, unless the epoch is resumed."""
        if self._enter(learner, phase, epoch) and not epoch.resumed:
            if not phase.training:
                self._fire(learner, "STARTED")
            self._fire(learner, "EPOCH_STARTED")

    @hookimpl(when=is_needed("step_begin"))
    def step_begin(self, learner: Learner, phase: Phase, step: Step) -> None:
        """Fire ``ITERATION_STARTED``."""
        if self._enter(learner, phase, step.epoch, begun=True):
            self._fire(learner, "ITERATION_STARTED")

    @hookimpl(when=is_needed("step_end"))
    def step_end(self, learner: Learner, phase: Phase, step: Step) -> None:
        """Fire ``ITERATION_COMPLETED``."""
        if self._enter(learner, phase, step.epoch):
            if self._outputs:
                self._engine.state.output = _output(phase, step)
            try:
                self._fire(learner, "ITERATION_COMPLETED")
            finally:
                self._engine.state.output = None

    @hookimpl(when=is_needed("phase_end"))
    def phase_end(self, learner: Learner, phase: Phase) -> None:
        """Fire ``EPOCH_COMPLETED``, and ``COMPLETED`` if the engine is an evaluator."""
        if self._enter(learner, phase):
            if not (phase.training and self._engine.should_terminate):  # as in Ignite, which leaves its loop at once
                self._fire(learner, "EPOCH_COMPLETED")
            if not phase.training:
                self._fire(learner, "COMPLETED")

    @hookimpl(writes=lambda plugin: plugin.changed_at("fit_end"))
    def fit_end(self, learner: Learner, result: FitResult) -> None:
        """Fire ``COMPLETED``, if the engine is a trainer."""
        if self._enter(learner, None) and self._is_trainer(learner) and result.reason != "error":
            if self._engine.should_terminate:
                self._fire(learner, "TERMINATE", ask=False)
            self._fire(learner, "COMPLETED", ask=False)
        if not self._fired and learner.world.rank == 0 and result.reason in LIMITS:
            warnings.warn(
                f"plugin {self.name!r} is for the phase {self.phase!r}, and no epoch of it was run in this fit; known "
                f"are: {', '.join(learner.phases)}",
                stacklevel=2,
            )
        if self.kind == "ProgressBar" and self.handler.pbar is not None:  # of an epoch that was cut short
            self.handler.pbar.close()
            self.handler.pbar = None
        self._groups.learner = None  # which would live as long as the handler

    # Calling

    def _is_trainer(self, learner: Learner) -> bool:
        phase = learner.phases.get(self.phase)
        return self.phase == "train" if phase is None else phase.training

    def _enter(self, learner: Learner, phase: Phase | None, running: Epoch | None = None, begun: bool = False) -> bool:
        """Put the engine's state where the learner is; whether the hook is one of the engine's phase."""
        if phase is not None and phase.name != self.phase:
            return False
        state, fit, done = self._engine.state, learner.current, learner.progress
        self._groups.learner = learner
        if phase is not None and not phase.training:
            state.epoch = state.max_epochs = 1
            state.iteration = running.steps if running is not None else state.iteration
        else:
            start = Progress() if fit is None else fit.position.start
            inside = running is not None and phase is not None
            state.epoch = done.epochs - start.epochs + inside
            state.iteration = done.steps - start.steps + begun
            state.max_epochs = None if fit is None else fit.result.planned.epochs
        if running is not None and phase is not None:
            state.epoch_length = running.length
        if "metrics" in self.reads:
            prefix = f"{self.phase}/"
            metrics = learner.metrics.items()
            own = {key.removeprefix(prefix): value for key, value in metrics if key.startswith(prefix)}
            state.metrics = Metrics(self._engine.who, own)
        return not (self.kind == "ProgressBar" and learner.world.rank > 0)

    def _fire(self, learner: Learner, event: str, ask: bool = True) -> None:
        engine = self._engine
        asked, self._fired = engine.should_terminate, True
        engine.fire_event(_event(event))
        if ask and engine.should_terminate and not asked:
            learner.stop(self._reason(), by=self.name)

    def _reason(self) -> str:
        if self.kind == "EarlyStopping":
            return f"EarlyStopping: no score better than {self.handler.best_score} in {self.handler.counter} calls"
        if self.kind == "TerminateOnNan":
            return "TerminateOnNan: the loss is not finite"
        return f"{self._engine.who} called engine.terminate()"

    def _check_groups(self, learner: Learner) -> None:
        """Raise for a scheduler of an optimizer that is not the learner's."""
        chosen = {name: each for name, each in learner.optimizers.items() if fnmatchcase(name, self._optimizer)}
        known = [id(group) for optimizer in chosen.values() for group in optimizer.param_groups]
        groups = self.handler.optimizer_param_groups
        if not groups or any(id(group) not in known for group in groups):
            names = ", ".join(map(repr, learner.optimizers)) or "none"
            raise PluginError(
                f"plugin {self.name!r}: the scheduler is not for an optimizer of the learner that is called "
                f"{self._optimizer!r}; there are: {names}. Make it of the optimizer that the learner is given, or by "
                f"name: IgniteHandler('PiecewiseLinear', ...)"
            )
        for key, group in ((key, group) for key, its_groups in _sets(self.handler) for group in its_groups):
            if key not in group:
                there = [each for each in group if each not in ("params", "param_names")]
                raise PluginError(
                    f"plugin {self.name!r}: the optimizer has no {key!r}{nearest(key, there)}; there are: "
                    f"{', '.join(there)}"
                )

    # State

    def state_dict(self) -> dict[str, Any]:
        """The handler's own state; a TerminateOnNan and a ProgressBar have none.

        Raises:
            PluginError: It holds something that no plugin's state can hold.
        """
        own = self.handler.state_dict() if hasattr(self.handler, "state_dict") else {}
        return {"handler": plain(own, self._engine.who)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the return value of `state_dict`."""
        if hasattr(self.handler, "load_state_dict"):
            self.handler.load_state_dict(plain(state["handler"], self._engine.who))


def _event(given: Any) -> Any:
    """An event of Ignite, from its name or as it is."""
    from ignite.engine import Events
    from ignite.engine.events import CallableEventWithFilter, EventsList

    if isinstance(given, str):
        if given.upper() not in EVENTS:
            raise PluginError(
                f"IgniteHandler: there is no event {given!r}{nearest(given, map(str.lower, EVENTS))}; events are "
                f"{', '.join(EVENTS).lower()}"
            )
        return Events[given.upper()]
    if not isinstance(given, (CallableEventWithFilter, EventsList)):
        raise PluginError(f"IgniteHandler: event is {given!r}: give one of ignite.engine.Events, or its name")
    return given


def _refusal(name: str) -> PluginError:
    if name in REFUSED:
        return PluginError(f"IgniteHandler: {name} cannot run here: {REFUSED[name]}")
    return PluginError(
        f"IgniteHandler: {name!r} is not supported{nearest(name, SUPPORTED)}; supported are {', '.join(SUPPORTED)}. "
        f"loopkit.plugins.call_on makes a plugin of a function"
    )


def _kind(handler: Any) -> str:
    """Which supported handler it is."""
    import ignite.handlers as known

    cls = type(handler)
    if isinstance(handler, type):
        raise PluginError(f"IgniteHandler: {handler.__name__} is a class; give an instance: {handler.__name__}(...)")
    for each in cls.__mro__:
        if each.__name__ in REFUSED and each.__module__.startswith("ignite."):
            raise _refusal(each.__name__)
    if isinstance(handler, (known.ParamScheduler, known.ParamGroupScheduler)):
        return "ParamScheduler"
    if cls in (known.EarlyStopping, known.TerminateOnNan, known.ProgressBar):
        return cls.__name__
    raise _refusal(cls.__name__)


def _sets(scheduler: Any) -> Iterator[tuple[str, Sequence[dict[str, Any]]]]:
    """The hyperparameters that a scheduler sets, each with the parameter groups in which it does."""
    if parts := getattr(scheduler, "schedulers", ()):
        for part in parts:
            yield from _sets(part)
    else:
        yield scheduler.param_name, scheduler.optimizer_param_groups


def _output(phase: Phase, step: Step) -> Any:
    """The output of a step, as the trainers and evaluators that Ignite makes have it; an empty tuple is none."""
    if phase.training:
        loss = getattr(step, "loss", None)
        return () if loss is None else loss.detach()
    pair = (getattr(step, "outputs", None), getattr(step, "targets", None))
    return tuple(part for part in pair if part is not None)
