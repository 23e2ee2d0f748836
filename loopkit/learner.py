"""Learner: models, optimizers, a loss function and plugins, and the loops that run phases with them."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

from loopkit.batches import describe
from loopkit.dispatch import Implementation, Instrument, Registry, locate
from loopkit.epoch import Epoch
from loopkit.errors import (
    Cancel,
    CancelFit,
    EmptyDataError,
    ExhaustedIteratorError,
    PhaseError,
    PhaseInputError,
    PluginError,
    ReentrancyError,
)
from loopkit.events import FitBegin, FitEnd
from loopkit.order import nearest
from loopkit.phases import Phase, PredictionPhase, TrainingPhase, ValidationPhase
from loopkit.progress import Progress
from loopkit.reproducible import seed_everything
from loopkit.result import FitResult, Planned
from loopkit.routing import Route
from loopkit.window import Window

if TYPE_CHECKING:
    from loopkit.explain import Explanation
    from loopkit.step import Step

__all__ = ["Learner"]

Factory = Callable[[Any], torch.optim.Optimizer]
Optimizers = torch.optim.Optimizer | Factory


class StopFit(Exception):
    """Leaves ``learner.fitting`` after ``learner.stop``."""


class Learner:
    """Everything that is trained together, and the loops.

    Args:
        model: A module, or a mapping of named modules.
        loss_fn: ``loss_fn(outputs, targets) -> scalar``; phases of your own may do without.
        optimizer: An optimizer, a factory ``params -> Optimizer``, or a mapping of named ones. The factories of a
            mapping take the parameters of the model of the same name; a single factory takes all.
        plugins: Plugin instances, in any order.
        phases: Phases of your own; one that has the name of a standard phase (train, val, predict) replaces it.
        accumulate: Steps per update.
        accumulate_reduction: ``"mean"``: the window's gradient is ``sum(w_i g_i) / sum(w_i)``, for losses that are
            means; ``"sum"``: it is ``sum(g_i)``, for losses that are sums.
        seed: Seeds Python, NumPy and torch now, by `loopkit.seed_everything`.
        deterministic: Passed on to `loopkit.seed_everything`; needs a seed.
        standard: Add the standard plugins that the list does not hold: metrics with the loss, history, progress,
            sanity check, stop on non-finite numbers.
        order: Plugin names (or what they provide) that run in this order wherever they meet; or several such lists.
        instrument: ``fn(hook, plugin, call)`` through which every call of a plugin goes; it must return ``call()``.

    Raises:
        PluginError: A plugin is malformed, or two do not go together.
        PhaseError: An argument does not fit the others.

    Example::

        learner = Learner(model, nn.CrossEntropyLoss(), lambda params: torch.optim.SGD(params, lr=0.1))
        result = learner.fit(train, val, epochs=3)
    """

    def __init__(
        self,
        model: nn.Module | Mapping[str, nn.Module],
        loss_fn: Callable[..., Tensor] | None = None,
        optimizer: Optimizers | Mapping[str, Optimizers] | None = None,
        *,
        plugins: Iterable[Any] = (),
        phases: Iterable[Phase] = (),
        accumulate: int = 1,
        accumulate_reduction: str = "mean",
        seed: int | None = None,
        deterministic: bool = False,
        standard: bool = True,
        order: Sequence[Any] = (),
        instrument: Instrument | None = None,
    ) -> None:
        if accumulate < 1:
            raise PhaseError(f"accumulate is {accumulate}: it counts the steps of an update, from 1")
        if accumulate_reduction not in ("mean", "sum"):
            raise PhaseError(f"accumulate_reduction is {accumulate_reduction!r}: it is 'mean' or 'sum'")
        if seed is not None:
            seed_everything(seed, deterministic)
        elif deterministic:
            raise PhaseError("deterministic=True needs seed=...")
        self.model = model
        self.models: dict[str, nn.Module] = dict(model) if isinstance(model, Mapping) else {"model": model}
        for name, module in self.models.items():
            if not isinstance(module, nn.Module):
                raise PhaseError(f"model {name!r} is {module!r}: it must be an instance of torch.nn.Module")
        self.loss_fn: Callable[..., Any] = loss_fn if loss_fn is not None else _no_loss_fn
        self.accumulate = accumulate
        self.accumulate_reduction = accumulate_reduction
        self.progress = Progress()
        self.metrics: dict[str, float] = {}
        """The latest value of every metric, as ``"val/loss"``; a fit begins with none."""
        self.result: FitResult | None = None
        """The result of the fit that is running or was the last."""
        self._given_phases = list(phases)
        self.phases: dict[str, Phase] = _phases(self._given_phases)
        self.optimizer: Any = None
        self.optimizers: dict[str, torch.optim.Optimizer] = {}
        self._epochs: list[Epoch] = []
        self._stop: tuple[str, str] | None = None
        self._cancelled: CancelFit | None = None
        self._fitting = False
        self._ending = 0
        """How many ``fit_begin``, ``phase_end`` or ``fit_end`` are running: their hooks' passes are nested ones."""
        self._outside: list[Epoch] = []
        """The passes that were open when the fit began."""
        self._fit_ends: list[Implementation] = []
        self._not_begun: set[str] = set()
        self._checked: dict[int, tuple[Phase, int]] = {}
        self._routes: dict[str, Route] = {}
        self._wrappers: set[str] = set()
        """The plugins that have put a wrapper around a model."""
        self._changes = 0
        self._registry = Registry(self, order, instrument)
        if not isinstance(plugins, Iterable):
            raise PluginError(f"plugins is {plugins!r}: give a list, plugins=[...]")
        plugins = list(plugins)
        if standard:
            from loopkit.plugins import standard_set

            plugins += standard_set(plugins)
        self._registry.change(add=plugins)
        self._setup_models(self._registry.plugins)
        self._set_optimizers(optimizer)

    # Plugins

    @property
    def plugins(self) -> dict[str, Any]:
        """The plugins by name."""
        return self._registry.plugins

    def add(self, *plugins: Any) -> None:
        """Add plugins, all or none. During a fit they take part from the next step on."""
        before = set(self.plugins)
        self._change(add=plugins)
        self._join(set(self.plugins) - before)

    def remove(self, *words: str) -> None:
        """Remove plugins by name or by what they provide. During a fit their ``fit_end`` still comes at its end."""
        self._change(remove=words)

    def replace(self, word: str, plugin: Any) -> None:
        """Put a plugin in the place of the one that has this name or provides this."""
        before = self.plugins
        self._change(add=[plugin], remove=[word])
        now = self.plugins
        gone = [old for name, old in before.items() if now.get(name) is not old]
        self._join({name for name, new in now.items() if before.get(name) is not new}, gone)

    def _change(self, add: Iterable[Any] = (), remove: Iterable[str] = ()) -> None:
        for name in map(self._registry.find, remove):
            if name in self._wrappers:
                raise PluginError(f"plugin {name!r} has wrapped a model for good: build a new learner without it")
        self._registry.change(add, remove)
        self._changes += 1

    def _join(self, names: set[str], gone: Iterable[Any] = ()) -> None:
        """Set the new plugins up; if one fails, take them out again and put those back that had gone for them."""
        wrappers = {name: route.wrapper for name, route in self._routes.items()}
        try:
            self._setup_models(names)
            if self._fitting:
                self._begin_fit(names)
        except BaseException:
            failed = [self.plugins[name] for name in names & self._not_begun]
            self._fit_ends = [impl for impl in self._fit_ends if not any(impl.plugin is each for each in failed)]
            self._not_begun -= names
            self._wrappers -= names
            self._change(add=gone, remove=names)
            for name, route in list(self._routes.items()):
                if name in wrappers:
                    route.wrapper = wrappers[name]
                else:
                    self._routes.pop(name).undo()
            raise

    def explain(self, phase: str | Phase | None = None) -> Explanation:
        """The plan of a phase, or of all: event by event, which plugin runs when, and why. Print it."""
        from loopkit.explain import Explanation

        phases = list(self.phases.values()) if phase is None else [self._phase(phase)]
        return Explanation.of(self._registry, phases)

    # Running

    def fit(
        self,
        train: Any,
        val: Any = None,
        *,
        epochs: int | float | None = None,
        max_steps: int | None = None,
        max_updates: int | None = None,
        validate_every: int = 1,
        validate_every_updates: int | None = None,
        overfit_batches: int | None = None,
        phase: str | Phase | None = None,
        val_phase: str | Phase | None = None,
    ) -> FitResult:
        """Train, and validate after every epoch.

        Args:
            train: An iterable of batches, or a function that returns one for each epoch.
            val: The same for validation; None for no validation.
            epochs: Passes over ``train``; ``math.inf`` if another limit or a plugin ends the fit.
            max_steps: End the fit after this many training steps.
            max_updates: End the fit after this many updates.
            validate_every: Validate after every so many epochs.
            validate_every_updates: Instead, validate in mid-epoch after every so many updates.
            overfit_batches: Train on the first so many batches alone, the same in every epoch.
            phase: The training phase; by default the one in ``Learner(phases=...)``, else the standard one.
            val_phase: The validation phase, likewise.

        Returns:
            Why the fit ended, its counts, metrics and history.

        Raises:
            ValueError: No limit, or one that is not positive.
            ReentrancyError: Called during a fit.
            EmptyDataError: There is no batch.
        """
        limits = {"epochs": epochs, "max_steps": max_steps, "max_updates": max_updates}
        every = {"validate_every": validate_every, "validate_every_updates": validate_every_updates}
        _check_limits({**limits, **every, "overfit_batches": overfit_batches})
        if all(limit is None for limit in limits.values()):
            raise ValueError(
                "fit has no end: give epochs=, max_steps= or max_updates= (epochs=math.inf if you mean it)"
            )
        train_phase = self._role(phase, lambda p: p.training, "train", "phase")
        valid_phase = self._role(
            val_phase, lambda p: not p.training and not isinstance(p, PredictionPhase), "val", "val_phase"
        )
        for each, given in ((train_phase, train), (valid_phase, val)):
            if given is not None or each is train_phase:
                _check_data(given)
                _check_length(each, given, _length(given))
        if overfit_batches is not None:
            train = [batch for batch, _ in zip(_iterable(train), range(overfit_batches), strict=False)]
        planned = _planned(epochs, max_steps, max_updates, _length(train), self.accumulate)
        with self.fitting(planned) as result:
            start = self.progress.steps, self.progress.updates

            def limit() -> str:
                if max_steps is not None and self.progress.steps - start[0] >= max_steps:
                    return "max_steps"
                if max_updates is not None and self.progress.updates - start[1] >= max_updates:
                    return "max_updates"
                return ""

            validated = start[1]

            def after_step() -> bool:
                nonlocal validated
                if validate_every_updates and val is not None:
                    if self.progress.updates - validated >= validate_every_updates:
                        first, validated = validated == start[1], self.progress.updates
                        self._pass(valid_phase, val, first=first)
                return limit() != ""

            checks = max_steps or max_updates or validate_every_updates
            done = 0
            while epochs is None or done < epochs:
                self._pass(train_phase, train, after_step if checks else None, first=done == 0)
                done += 1
                if val is not None and not validate_every_updates and (done % validate_every == 0 or limit()):
                    self._pass(valid_phase, val, first=done <= validate_every)
                if reached := limit():
                    result.reason = reached  # type: ignore[assignment]
                    break
            else:
                result.reason = "epochs"
        return result

    def run(self, phase: str | Phase, data: Any) -> dict[str, float]:
        """One pass of a phase over data; returns its metrics, as ``"val/loss"``.

        It may be called from a hook: a phase inside another leaves counters, modes and contexts as they were.
        """
        phase = self._phase(phase)
        _check_data(data)
        self._pass(phase, data)
        return {name: value for name, value in self.metrics.items() if name.startswith(f"{phase.name}/")}

    def evaluate(self, data: Any, phase: str | Phase | None = None) -> dict[str, float]:
        """`run` the validation phase."""
        check = lambda p: not p.training and not isinstance(p, PredictionPhase)  # noqa: E731
        return self.run(self._role(phase, check, "val", "phase"), data)

    def predict(self, data: Any, phase: str | Phase | None = None) -> Any:
        """The outputs for all of ``data``, concatenated along the first dimension (in tuples and mappings too)."""
        return _concatenate(list(self.predict_batches(data, phase)))

    def predict_batches(self, data: Any, phase: str | Phase | None = None) -> Iterator[Any]:
        """The outputs batch by batch, each computed when it is asked for.

        Between batches the modules are in the mode in which the caller left them; the pass ends, with its events,
        when the iterator is exhausted or closed.
        """
        chosen = self._role(phase, lambda p: isinstance(p, PredictionPhase), "predict", "phase")
        _check_data(data)
        batches = _iterable(data)
        with self.epoch(chosen, length=_length(batches)) as epoch:
            for batch in batches:
                step = epoch.step(batch)
                if "outputs" in vars(step):
                    epoch.restore_modes()
                    yield step.outputs
                    epoch.set_modes()
            _check_count(chosen, batches, epoch.steps, epoch.length, True)

    def epoch(self, phase: str | Phase, length: int | None = None) -> Epoch:
        """One pass whose loop is yours: ``with learner.epoch("train") as epoch: ... epoch.step(batch)``.

        Args:
            phase: A phase or the name of one.
            length: The number of steps, if known: the last one then closes its accumulation window itself.
        """
        return Epoch(self, self._phase(phase), length)

    @contextmanager
    def fitting(self, planned: Planned | None = None) -> Iterator[FitResult]:
        """``fit`` without its loop: fires ``fit_begin`` and ``fit_end`` around passes that you run yourself.

        `CancelFit` and ``learner.stop`` leave the block after the pass in which they came.

        Args:
            planned: How far the fit is meant to go, for displays and schedules.

        Example::

            with learner.fitting() as result:
                for _ in range(3):
                    learner.run("train", batches)
        """
        if self._fitting:
            raise ReentrancyError("a fit is running: call run, evaluate or predict from a hook, not fit")
        result = self.result = FitResult(seed=torch.initial_seed(), planned=planned or Planned())
        self.metrics.clear()
        before = astuple(self.progress)
        started = time.monotonic()
        failure: BaseException | None = None
        self._fitting, self._stop, self._cancelled = True, None, None
        self._fit_ends, self._not_begun = [], set()
        self._outside = list(self._epochs)
        try:
            self._ending += 1
            try:
                self._begin_fit(set(self.plugins))
            finally:
                self._ending -= 1
            yield result
            if result.reason == "running":
                result.reason = "end"
        except StopFit:
            pass
        except CancelFit as cancel:
            result.reason, result.message, result.by = "cancel", cancel.reason, cancel.by
        except BaseException as error:
            result.reason = "error"
            failure = error
        if self._stop is not None and failure is None:
            result.reason, (result.message, result.by) = "stop", self._stop
        result.epochs, result.steps, result.updates, result.samples = (
            now - then for now, then in zip(astuple(self.progress), before, strict=True)
        )
        result.metrics = dict(self.metrics)
        result.seconds = time.monotonic() - started
        self._ending += 1
        try:
            self._end_fit(result, failure)
        finally:
            self._ending -= 1
            self._fitting, self._cancelled = False, None

    def stop(self, reason: str = "", by: str = "") -> None:
        """Ask for a normal end: the current step ends, then the epoch with its events, then the fit.

        Args:
            reason: For ``FitResult.message``.
            by: Who asks; plugins give their name.
        """
        if self._stop is None:
            self._stop = (reason, by)
            self._changes += 1

    @property
    def running(self) -> Epoch | None:
        """The pass that is running, the innermost one if a phase runs inside another."""
        return self._epochs[-1] if self._epochs else None

    @property
    def fitting_now(self) -> bool:
        """Whether a fit is running."""
        return self._fitting

    @property
    def stop_requested(self) -> bool:
        """Whether `stop` or `CancelFit` ended the last pass; for outer loops of your own."""
        return self._stop is not None

    # The engine's own

    def where(self, phase: Phase, step: Step | None) -> str:
        """Phase, epoch and step, for messages."""
        at = "" if step is None else f", step {step.index}"
        return f"phase {phase.name!r}, epoch {self.progress.epochs}{at}"

    def _pass(self, phase: Phase, data: Any, after_step: Callable[[], bool] | None = None, first: bool = True) -> None:
        batches = _iterable(data)
        length = _length(batches)
        _check_length(phase, batches, length)
        with self.epoch(phase, length) as epoch:
            if epoch.pending is not None:
                raise epoch.pending
            if epoch.stopped:
                return
            if epoch.run(batches, after_step):
                _check_count(phase, batches, epoch.steps, length, first)

    def _end_of_pass(self, cancel: Cancel | None) -> None:
        """Pass on what ends more than the pass that was just left."""
        if isinstance(cancel, CancelFit):
            if self._fitting or self._epochs:
                raise cancel
            self._stop = (cancel.reason, cancel.by)
        self._leave_if_stopped()

    def _leave_if_stopped(self) -> None:
        """Leave the fit's own loop after `stop`; a pass that a hook runs, whatever its event, is none of it."""
        if self._stop is not None and self._fitting and not self._ending:
            if all(epoch in self._outside for epoch in self._epochs):
                raise StopFit

    def _begin_fit(self, names: set[str]) -> None:
        registry = self._registry
        begins = {impl.entry.plugin: impl for impl in registry.ordered(FitBegin.hook)}
        ends = {impl.entry.plugin: impl for impl in registry.implementations(FitEnd.hook)}
        order = [place.entry.plugin for place in registry.fit_order() if place.entry.plugin in names]
        self._fit_ends += [ends[name] for name in order if name in ends]
        self._not_begun |= {name for name in order if name in begins}
        for name in order:
            if name in begins:
                try:
                    registry.call(begins[name], learner=self)
                except CancelFit as cancel:
                    cancel.by = cancel.by or name
                    self._cancelled = self._cancelled or cancel
                except BaseException as error:
                    locate(error, f"in fit_begin of plugin {name!r}")
                    raise
                self._not_begun.discard(name)

    def _end_fit(self, result: FitResult, failure: BaseException | None) -> None:
        """Call every ``fit_end`` whose ``fit_begin`` was completed, then raise what there is to raise."""
        errors: list[BaseException] = []
        for impl in reversed(self._fit_ends):
            if impl.entry.plugin not in self._not_begun:
                try:
                    self._registry.call(impl, learner=self, result=result)
                except Cancel:
                    pass  # the fit has ended already
                except BaseException as error:
                    locate(error, f"in fit_end of plugin {impl.entry.plugin!r}")
                    errors.append(error)
        if failure is None and len(errors) == 1:
            raise errors[0]
        if errors and (failure is None or isinstance(failure, Exception)):
            causes = errors if failure is None else [failure, *errors]
            raise BaseExceptionGroup("fit_end failed" if failure is None else "the fit failed, then fit_end", causes)
        if failure is not None:
            for late in errors:
                failure.add_note(f"loopkit: fit_end failed too: {late!r}")
            raise failure

    def _check_phase(self, phase: Phase) -> None:
        """What only shows when a phase is run: events that never come, state that nobody makes."""
        registry = self._registry
        if self._checked.get(id(phase)) != (phase, registry.version):
            known = {p.name: p for p in (*self.phases.values(), *(p for p, _ in self._checked.values()), phase)}
            registry.check_run(list(known.values()))
            self._checked[id(phase)] = (phase, registry.version)

    def _make_windows(self) -> tuple[Window, ...]:
        mean = self.accumulate_reduction == "mean"
        return tuple(Window(name, opt, self.accumulate, mean) for name, opt in self.optimizers.items())

    def _modules(self) -> Iterator[nn.Module]:
        for model in self.models.values():
            yield from model.modules()

    def _forget_metrics(self, phase: Phase) -> None:
        for name in [name for name in self.metrics if name.startswith(f"{phase.name}/")]:
            del self.metrics[name]

    def _phase(self, phase: str | Phase) -> Phase:
        if isinstance(phase, Phase):
            return phase
        if isinstance(phase, str) and phase in self.phases:
            return self.phases[phase]
        names = ", ".join(self.phases)
        hint = nearest(phase, self.phases) if isinstance(phase, str) else ""
        raise PhaseError(f"no phase is called {phase!r}{hint}; there are: {names}. Give Learner(phases=[...]) more")

    def _role(self, given: str | Phase | None, fits: Callable[[Phase], bool], standard: str, argument: str) -> Phase:
        """The phase that was asked for, else the only one of the user's that fits, else the standard one."""
        if given is not None:
            return self._phase(given)
        own = [phase for phase in self._given_phases if fits(phase)]
        if len(own) > 1:
            names = ", ".join(repr(phase.name) for phase in own)
            raise PhaseError(f"the learner has several such phases ({names}): say which with {argument}=...")
        return own[0] if own else self.phases[standard]

    def _setup_models(self, names: Iterable[str]) -> None:
        """Run the ``setup_model`` of these plugins on every module, and route calls through what wraps it."""
        for impl in self._registry.ordered("setup_model"):
            if impl.entry.plugin not in names:
                continue
            for name, module in self.models.items():
                top = self._routes[name].wrapper if name in self._routes else module
                wrapper = self._registry.call(impl, learner=self, name=name, model=top)
                if not isinstance(wrapper, nn.Module):
                    raise PluginError(
                        f"plugin {impl.entry.plugin!r}: setup_model returned {describe(wrapper)}, not a module"
                    )
                if wrapper is module or wrapper is top:
                    continue
                self._wrappers.add(impl.entry.plugin)
                if name in self._routes:
                    self._routes[name].wrapper = wrapper
                else:
                    self._routes[name] = Route(module, wrapper)

    def _set_optimizers(self, optimizer: Optimizers | Mapping[str, Optimizers] | None) -> None:
        if optimizer is None:
            return
        if isinstance(optimizer, Mapping):
            self.optimizers = {name: self._make_optimizer(name, given, True) for name, given in optimizer.items()}
            self.optimizer = self.optimizers
        else:
            self.optimizer = self._make_optimizer("optimizer", optimizer, False)
            self.optimizers = {"optimizer": self.optimizer}

    def _make_optimizer(self, name: str, given: Optimizers, named: bool) -> torch.optim.Optimizer:
        if isinstance(given, torch.optim.Optimizer):
            return given
        if not callable(given):
            raise PhaseError(f"optimizer {name!r} is {given!r}: give an optimizer, or a function params -> optimizer")
        if named and name not in self.models:
            raise PhaseError(
                f"optimizer {name!r} is a factory, but no model has that name{nearest(name, self.models)}; "
                f"the models are {', '.join(self.models)}"
            )
        models = [self.models[name]] if named else self.models.values()
        try:
            made = given([p for model in models for p in model.parameters()])
        except Exception as error:
            locate(error, f"the factory of optimizer {name!r} raised this")
            raise
        if not isinstance(made, torch.optim.Optimizer):
            raise PhaseError(f"the factory of optimizer {name!r} returned {made!r}: it must return a torch optimizer")
        return made


def _no_loss_fn(*args: Any) -> Any:
    raise PhaseError("the phase uses learner.loss_fn, but the learner has none: give Learner(loss_fn=...)")


def _phases(given: list[Phase]) -> dict[str, Phase]:
    phases: dict[str, Phase] = {p.name: p for p in (TrainingPhase(), ValidationPhase(), PredictionPhase())}
    for phase in given:
        if not isinstance(phase, Phase):
            raise PhaseError(f"phases holds {phase!r}: it takes instances of loopkit.Phase")
        if [p.name for p in given].count(phase.name) > 1:
            raise PhaseError(f"two phases are called {phase.name!r}: give one Phase(name=...)")
        phases[phase.name] = phase
    return phases


def _check_limits(limits: Mapping[str, int | float | None]) -> None:
    for name, value in limits.items():
        whole = isinstance(value, int) or (name == "epochs" and value == math.inf)
        if value is not None and (isinstance(value, bool) or not whole or value < 1):
            raise ValueError(
                f"{name} is {value!r}: it counts from 1" + (", or is math.inf" if name == "epochs" else "")
            )


def _planned(
    epochs: int | float | None, max_steps: int | None, max_updates: int | None, length: int | None, accumulate: int
) -> Planned:
    finite = int(epochs) if epochs is not None and epochs != math.inf else None
    steps, updates = max_steps, max_updates
    if finite is not None and length is not None:
        steps = min(finite * length, max_steps or finite * length)
    if steps is not None and length is not None:
        full, rest = divmod(steps, length)
        updates = full * math.ceil(length / accumulate) + math.ceil(rest / accumulate)
        updates = min(updates, max_updates or updates)
    return Planned(finite, steps, updates)


def _check_data(data: Any) -> None:
    if isinstance(data, Dataset) and not isinstance(data, IterableDataset):
        raise PhaseInputError(
            f"data is a {type(data).__name__}, which gives samples, not batches: DataLoader(data, batch_size=32) does"
        )
    if isinstance(data, tuple) and data and all(isinstance(part, Tensor) for part in data):
        raise PhaseInputError(
            f"data is {describe(data)}, which is one batch, or whole tensors: give [batch], or "
            f"loopkit.data.TensorLoader(*tensors, batch_size=32)"
        )
    if isinstance(data, (Tensor, str, bytes, Mapping)) or not (
        callable(data) or hasattr(data, "__iter__") or hasattr(data, "__getitem__")
    ):
        hint = "; loopkit.data.TensorLoader(inputs, targets, batch_size=32) makes batches of tensors"
        raise PhaseInputError(
            f"data is {describe(data)}: it must be an iterable of batches, or a function returning one{hint}"
        )


def _iterable(data: Any) -> Iterable[Any]:
    return data if hasattr(data, "__iter__") or not callable(data) else data()  # type: ignore[no-any-return]


def _length(data: Any) -> int | None:
    try:
        return len(data)
    except TypeError:  # no __len__, or (a DataLoader over an IterableDataset) one that says so
        return None


def _check_length(phase: Phase, data: Any, length: int | None) -> None:
    if length == 0:
        raise EmptyDataError(f"the data of phase {phase.name!r} holds no batch: len() is 0 ({type(data).__name__})")


def _check_count(phase: Phase, data: Any, steps: int, length: int | None, first: bool) -> None:
    if steps == 0:
        if hasattr(data, "__next__") and not first:
            raise ExhaustedIteratorError(
                f"the data of phase {phase.name!r} is a {type(data).__name__} that an earlier epoch used up: "
                f"pass something that can be iterated again, or a function that returns a new iterator"
            )
        raise EmptyDataError(f"the data of phase {phase.name!r} gave no batch ({type(data).__name__})")
    if length is not None and steps != length:
        warnings.warn(
            f"len() of the data of phase {phase.name!r} is {length}, but it gave {steps} batches; {steps} counts",
            stacklevel=2,
        )


def _concatenate(outputs: list[Any]) -> Any:
    """Join outputs of batches: tensors along the first dimension, tuples and mappings part by part."""
    if not outputs:
        raise EmptyDataError("predict: the phase set no step.outputs")
    first = outputs[0]
    if isinstance(first, Tensor):
        return torch.cat(outputs) if first.ndim else torch.stack(outputs)
    if isinstance(first, Mapping):
        return {key: _concatenate([output[key] for output in outputs]) for key in first}
    if isinstance(first, (tuple, list)):
        joined = [_concatenate(list(part)) for part in zip(*outputs, strict=True)]
        return type(first)(*joined) if hasattr(first, "_fields") else type(first)(joined)
    raise PhaseError(f"predict cannot concatenate outputs of type {type(first).__name__}: use predict_batches")
