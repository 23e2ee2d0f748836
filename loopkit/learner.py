"""Learner: models, optimizers, a loss function and plugins, and the loops that run phases with them."""

from __future__ import annotations

import math
import signal
import time
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, replace
from threading import get_ident
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

from loopkit import generators
from loopkit.batches import describe, move
from loopkit.discovery import checked_block, make_plugin, origin
from loopkit.dispatch import Implementation, Instrument, Registry, add_note, locate, plugin_name, shown, unwrapped
from loopkit.distributed.agreement import Agreement, compare
from loopkit.distributed.sharded import is_sharded
from loopkit.distributed.world import World
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
    StateError,
    WorldError,
)
from loopkit.events import FitBegin, FitEnd, SignalBegin
from loopkit.loader_timeout import bounded_wait
from loopkit.logs.kinds import all_loggable, loggable
from loopkit.logs.record import Packed, Place
from loopkit.order import nearest
from loopkit.phases import Phase, PredictionPhase, TrainingPhase, ValidationPhase
from loopkit.positions import keeps_place, leave
from loopkit.progress import Progress
from loopkit.reproducible import seed_everything
from loopkit.result import FitResult, Planned
from loopkit.routing import Route
from loopkit.signals import Signals
from loopkit.state import Pending, Position, apply, collect, of_rank, place
from loopkit.window import Window

if TYPE_CHECKING:
    from loopkit.explain import Explanation
    from loopkit.step import Step
    from loopkit.summary import Summary

__all__ = ["Learner"]

now = time.time
Factory = Callable[[Any], torch.optim.Optimizer]
Optimizers = torch.optim.Optimizer | Factory


class Prepared(list[Any]):
    """Batches that the plugins have set up already."""


class StopFit(Exception):
    """Leaves a fit after ``learner.stop``."""


class Interrupted(BaseException):
    """Leaves a fit between two steps, after a signal."""


class Learner:
    """Everything that is trained together, and the loops.

    Args:
        model: A module, or a mapping of named modules.
        loss_fn: ``loss_fn(outputs, targets) -> scalar``; phases of your own may do without.
        optimizer: An optimizer, a factory ``params -> Optimizer``, or a mapping of named ones. The factories of a
            mapping take the parameters of the model of the same name; a single factory takes all.
        plugins: Plugins, in any order; also names of installed ones (`loopkit plugins`) and mappings of a name to its
            options: ``["grad_norm", {"clip_grad_norm": {"max_norm": 1.0}}]``. See `loopkit.load_plugin`.
        phases: Phases of your own; one that has the name of a standard phase (train, val, predict) replaces it.
        accumulate: Steps per update.
        accumulate_reduction: ``"mean"``: the window's gradient is ``sum(w_i g_i) / sum(w_i)``, for losses that are
            means; ``"sum"``: it is ``sum(g_i)``, for losses that are sums.
        seed: Seeds Python, NumPy and torch now, by `loopkit.seed_everything`.
        deterministic: Passed on to `loopkit.seed_everything`; needs a seed.
        standard: Add the standard plugins that the list does not hold: metrics with the loss, history, progress,
            sanity check, stop on non-finite numbers.
        block: Names of plugins that this learner never takes: one that is given is refused, before it is imported if it
            is given by name, and a standard one is left out.
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
        plugins: Iterable[Any] | Mapping[str, Any] = (),
        phases: Iterable[Phase] = (),
        accumulate: int = 1,
        accumulate_reduction: str = "mean",
        seed: int | None = None,
        deterministic: bool = False,
        standard: bool = True,
        block: Iterable[str] = (),
        order: Sequence[Any] = (),
        instrument: Instrument | None = None,
    ) -> None:
        if isinstance(accumulate, bool) or not isinstance(accumulate, int) or accumulate < 1:
            raise PhaseError(f"accumulate is {accumulate!r}: it counts the steps of an update, from 1")
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
        if isinstance(loss_fn, type):
            made = loss_fn.__name__
            raise PhaseError(f"loss_fn is the class {made}, not a function: give an instance, loss_fn={made}()")
        if loss_fn is not None and not callable(loss_fn):
            raise PhaseError(
                f"loss_fn is {loss_fn!r:.80}, which cannot be called: give a function of outputs and targets, such as "
                f"torch.nn.CrossEntropyLoss()"
            )
        if not isinstance(phases, Iterable) or isinstance(phases, str):
            raise PhaseError(f"phases is {phases!r:.80}: give a list, phases=[...]")
        self.loss_fn: Callable[..., Any] = loss_fn if loss_fn is not None else _no_loss_fn
        self.accumulate = accumulate
        self.accumulate_reduction = accumulate_reduction
        self.progress = Progress()
        self.metrics: dict[str, float] = {}
        """The latest value of every metric, as ``"val/loss"``; a fit begins with none."""
        self.result: FitResult | None = None
        """The result of the fit that is running or was the last."""
        self.position: Position | None = None
        """Where the fit is that is running."""
        self.signal: signal.Signals | None = None
        """The signal that was caught, during ``signal_begin``."""
        self.failure: BaseException | None = None
        """What the fit failed with, during ``fit_end``."""
        self.config: str | None = None
        """The configuration that it was made from, as TOML; None for a learner by hand."""
        self.world = World()
        """The processes that train together; this one alone, unless a plugin joins others."""
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
        self._loaders: dict[str, Any] = {}
        """What the last pass of each phase iterated over."""
        self._earlier: dict[str, list[weakref.ref[Any]]] = {}
        self._alternating: set[str] = set()
        """The phases that have several loaders in turn."""
        self._fits = 0
        self._pending: Pending | None = None
        self._resumed: Position | None = None
        """The position of the fit that a loaded state goes on with."""
        self._signals: Signals | None = None
        self._asked = Agreement()
        """What this process asks the others for."""
        self._due: Agreement | None = None
        """What is to be acted upon at the next edge."""
        self._started = 0.0
        self._loader_timeout: float | None = None
        self._checked: dict[int, tuple[Phase, int]] = {}
        self._routes: dict[str, Route] = {}
        self._wrappers: set[str] = set()
        """The plugins that have put a wrapper around a model."""
        self._changes = 0
        self._beginning = False
        self._place: Epoch | None = None
        """The pass that is running, or has just ended if its ``phase_end`` is."""
        self._logged_at: Place | None = None
        """Where what is logged now is, if that was looked up since it has changed last."""
        self._thread = 0
        """The one that runs the passes, and changes that."""
        self._registry = Registry(self, order, instrument)
        if not isinstance(plugins, Iterable) or isinstance(plugins, str):
            raise PluginError(f"plugins is {plugins!r}: give a list, plugins=[...]")
        if isinstance(plugins, Mapping):
            plugins = [{name: options} for name, options in plugins.items()]
        self.block = checked_block(block)
        """Names of plugins that are refused."""
        plugins = self._made(plugins)
        self._standard: list[Any] = []
        """The plugins that the user did not list."""
        if standard:
            from loopkit.plugins import standard_set

            self._standard = [plugin for plugin in standard_set(plugins) if plugin.name not in self.block]
            plugins += self._standard
        self._registry.change(add=plugins)
        self._setup_models(self._registry.plugins)
        self._set_optimizers(optimizer)

    @property
    def rank(self) -> int:
        """Which of the processes that train together this is; 0 for one alone."""
        return self.world.rank

    @property
    def world_size(self) -> int:
        """How many processes train together."""
        return self.world.size

    # Plugins

    @property
    def plugins(self) -> dict[str, Any]:
        """The plugins by name."""
        return self._registry.plugins

    def plugin_versions(self) -> dict[str, dict[str, str]]:
        """The ``"distribution"`` and ``"version"`` that each plugin's class comes from, by the plugin's name.

        Those whose distribution is not known, such as a class of the script itself, are left out.
        """
        found = {name: origin(type(unwrapped(plugin)).__module__) for name, plugin in self.plugins.items()}
        return {name: {"distribution": each[0], "version": each[1]} for name, each in found.items() if each}

    def add(self, *plugins: Any) -> None:
        """Add plugins, all or none; names and mappings too. During a fit they take part from the next step on."""
        before = set(self.plugins)
        self._change(add=self._made(plugins))
        self._join(set(self.plugins) - before)

    def remove(self, *words: str) -> None:
        """Remove plugins by name or by what they provide. During a fit their ``fit_end`` still comes at its end."""
        self._change(remove=words)

    def replace(self, word: str, plugin: Any) -> None:
        """Put a plugin in the place of the one that has this name or provides this."""
        before = self.plugins
        self._change(add=self._made([plugin]), remove=[word])
        now = self.plugins
        gone = [old for name, old in before.items() if now.get(name) is not old]
        self._join({name for name, new in now.items() if before.get(name) is not new}, gone)

    def _made(self, given: Iterable[Any]) -> list[Any]:
        """The plugins, where some are given by name."""
        plugins = [make_plugin(each, self.block) for each in given]
        for plugin in plugins:
            if self.block and (name := plugin_name(plugin)) in self.block:
                raise PluginError(f"plugin {name!r} is blocked by block={list(self.block)}: take it out of one of them")
        return plugins

    def _change(self, add: Iterable[Any] = (), remove: Iterable[str] = ()) -> None:
        for name in map(self._registry.find, remove):
            if name in self._wrappers or not getattr(self.plugins[name], "removable", True):
                raise PluginError(f"plugin {name!r} has changed a model for good: build a new learner without it")
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
            self._registry.change(gone, names)
            self._changes += 1
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

    def summary(self, batch: Any = None, phase: str | Phase | None = None, depth: int | None = None) -> Summary:
        """The modules as a tree, with their parameters and sizes and what they return, and the data. Print it.

        With a batch, one step of a phase that does not train is run on it, without plugins but ``move_batch``, and not
        compiled. Modes, buffers, gradients and random generators are afterwards as they were.

        Args:
            batch: What a loader yields; None for the modules alone, without shapes.
            phase: How the models are run; the standard prediction by default: ``learner.model(inputs)``.
            depth: Leave out modules with more than so many others around them; 0 is the models alone.

        Raises:
            PhaseError: The phase trains, or a model has parameters whose shape only a first forward will tell.

        Example::

            print(learner.summary(next(iter(train))))
        """
        from loopkit.summary import summarize

        return summarize(self, batch, None if phase is None else self._phase(phase), depth)

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
        on_signal: str | None = "raise",
        loader_timeout: float | None = 300.0,
    ) -> FitResult:
        """Train, and validate after every epoch; go on with the fit of a state that was loaded.

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
            on_signal: As in `fitting`.
            loader_timeout: Seconds that the workers of a ``DataLoader`` may take for a batch, unless the loader has a
                timeout of its own; None for no limit.

        Returns:
            Why the fit ended, its counts, metrics and history.

        Raises:
            ValueError: No limit, or one that is not positive.
            StateError: The state that was loaded does not fit the data or the phases.
            SystemExit: SIGTERM came; its code is 143.
            KeyboardInterrupt: SIGINT came.
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
            batches = self._set_up(train_phase, _iterable(train))
            train = Prepared(batch for batch, _ in zip(batches, range(overfit_batches), strict=False))
        ready = {valid_phase: self._set_up(valid_phase, val), train_phase: self._set_up(train_phase, train)}
        planned = _planned(epochs, max_steps, max_updates, _length(ready[train_phase]), self.accumulate)
        self._loader_timeout = loader_timeout
        with self.fitting(planned, on_signal=on_signal) as result:
            assert self.position is not None
            at = self.position
            at.by_fit = True
            for each, given in ready.items():
                if hasattr(given, "__iter__"):
                    self._loaders[each.name] = given  # may be saved before its first pass
                if each.name not in self._open_before:
                    place(self._pending, each.name, given)

            def limit() -> str:
                if max_steps is not None and self.progress.steps - at.start.steps >= max_steps:
                    return "max_steps"
                if max_updates is not None and self.progress.updates - at.start.updates >= max_updates:
                    return "max_updates"
                return ""

            def after_step() -> bool:
                if validate_every_updates and val is not None:
                    first = at.validated == at.start.updates
                    if self.progress.updates - at.validated >= validate_every_updates:
                        at.validating, at.validated = True, self.progress.updates
                    if at.validating:
                        self._pass(valid_phase, val, first=first, ended=validated)
                return limit() != ""

            def trained() -> None:
                at.epochs += 1
                due = at.epochs % validate_every == 0 or limit() != ""
                at.validate = due and val is not None and not validate_every_updates

            def validated() -> None:
                at.validate = at.validating = False

            checks = max_steps or max_updates or validate_every_updates
            while True:
                self._answer_signal()
                if at.validate and val is not None:
                    self._pass(valid_phase, val, first=at.epochs <= validate_every, ended=validated)
                elif not self._open_before and (
                    reached := limit() or ("epochs" if epochs is not None and at.epochs >= epochs else "")
                ):
                    result.reason = reached  # type: ignore[assignment]
                    break
                else:
                    first = at.epochs == 0
                    self._pass(train_phase, train, after_step if checks else None, first=first, ended=trained)
        return result

    def run(self, phase: str | Phase, data: Any) -> dict[str, float]:
        """One pass of a phase over data; returns its metrics, as ``"val/loss"``.

        It may be called from a hook: a phase inside another leaves counters, modes and contexts as they were. In a loop
        of your own that goes on with a saved state, the run of a phase that was over by then is passed over.
        """
        phase = self._phase(phase)
        _check_data(data)
        done = self._fitting and not self._ending and not self.open_passes and self.resuming not in ("", phase.name)
        if not done:
            self._pass(phase, data)
        return {name: value for name, value in self.metrics.items() if name.startswith(f"{phase.name}/")}

    def evaluate(self, data: Any, phase: str | Phase | None = None) -> dict[str, float]:
        """`run` the validation phase."""
        check = lambda p: not p.training and not isinstance(p, PredictionPhase)  # noqa: E731
        return self.run(self._role(phase, check, "val", "phase"), data)

    def predict(self, data: Any, phase: str | Phase | None = None, *, device: str | torch.device | None = "cpu") -> Any:
        """The outputs for all of ``data``, concatenated along the first dimension (in tuples and mappings too).

        Where several processes share the data, each gets the outputs of all, in the order of the data, on the CPU.

        Args:
            data: Batches, as for `fit`.
            phase: The phase that predicts; the standard one by default.
            device: Where the outputs go, each batch as soon as it is made; None: they stay where the model made them.
        """
        chosen = self._predicting(phase)
        given = _iterable(data)
        part = self._set_up(chosen, given)
        place = None if device is None else torch.device(device)
        made = self.predict_batches(part, chosen)
        outputs = list(made) if place is None else [move(each, place) for each in made]  # host sync: wanted there
        if self.world.size > 1 and part is not given:
            from loopkit.distributed.shards import gather

            outputs = gather(self.world, given, part, outputs)
        return _concatenate(outputs)

    def predict_batches(self, data: Any, phase: str | Phase | None = None) -> Iterator[Any]:
        """The outputs batch by batch, each computed when it is asked for.

        Between batches the modules are in the mode in which the caller left them; the pass ends, with its events,
        when the iterator is exhausted or closed.
        """
        chosen = self._predicting(phase)
        _check_data(data)
        batches = self._set_up(chosen, _iterable(data))
        with self.epoch(chosen, length=_length(batches)) as epoch:
            for batch in batches:
                step = epoch.step(batch)
                if "outputs" in vars(step):
                    epoch.restore_modes()
                    yield step.outputs
                    epoch.set_modes()
            _check_count(chosen, batches, epoch.steps, epoch.length, True)

    def _predicting(self, phase: str | Phase | None) -> Phase:
        return self._role(phase, lambda p: isinstance(p, PredictionPhase), "predict", "phase")

    def epoch(self, phase: str | Phase, length: int | None = None, data: Any = None) -> Epoch:
        """One pass whose loop is yours: ``with learner.epoch("train") as epoch: ... epoch.step(batch)``.

        Args:
            phase: A phase or the name of one.
            length: The number of steps, if known: the last one then closes its accumulation window itself.
            data: What ``epoch.batches()`` goes over, from where a saved state was; needed if the pass is to be saved.
        """
        phase = self._phase(phase)
        data = self._set_up(phase, data)
        epoch = Epoch(self, phase, _length(data) if length is None else length)
        epoch.data = data
        return epoch

    def fitting(self, planned: Planned | None = None, *, on_signal: str | None = "raise") -> Fitting:
        """``fit`` without its loop: fires ``fit_begin`` and ``fit_end`` around passes that you run yourself.

        `CancelFit` and ``learner.stop`` leave the block after the pass in which they came; SIGINT and SIGTERM, after
        the step in which they came. A second SIGINT ends at once.

        Args:
            planned: How far the fit is meant to go, for displays and schedules.
            on_signal: What comes after ``fit_end`` if a signal ended the fit: ``"raise"``: ``KeyboardInterrupt`` after
                SIGINT, ``SystemExit(143)`` after SIGTERM; ``"return"``: neither. None: signals are not caught.

        Returns:
            A context manager; ``with`` gives the `FitResult`.

        Example::

            with learner.fitting() as result:
                for _ in range(3):
                    learner.run("train", batches)
        """
        if on_signal not in ("raise", "return", None):
            raise ValueError(f"on_signal is {on_signal!r}: it is 'raise', 'return' or None")
        return Fitting(self, planned, on_signal)

    def state_dict(self) -> dict[str, Any]:
        """Everything that decides how training goes on from here, bit for bit.

        That is: the models' own weights (never averaged ones) and buffers, optimizers, open accumulation windows,
        counters, metrics, where the fit and its loaders are, the random generators of Python, NumPy and torch, and
        every plugin's state under its name. It holds None, booleans, numbers, strings, lists, tuples, dicts and
        tensors, which are those in use: copy what you keep.

        Of several processes, all must call it; each gets what differs from one to another, too, and any number of
        processes can load it.

        Raises:
            StateError: A step is under way (`at_edge`), or the data has no position that could be saved.
        """
        if not self.at_edge:
            raise StateError(
                "state_dict in the middle of a step, or of a pass that a hook runs: there is no way to go on from "
                "there. Call it at step_end or phase_end, when learner.at_edge says so"
            )
        windows = [window for epoch in self.open_passes for window in epoch.windows if window.count]
        if self.world.size > 1 and any(not is_sharded(p) for window in windows for p in window.params):
            raise StateError(
                "state_dict of several processes inside an accumulation window, which holds gradients of this process "
                "alone: call it after the window's update"
            )
        if self._alternating:
            raise StateError(
                f"phase {min(self._alternating)!r} runs over several loaders in turn, and one position is kept for a "
                f"phase: give each loader a phase of its own, TrainingPhase(name=...)"
            )
        state = collect(self)
        if self.world.size > 1:
            state["ranks"] = self.world.gather(of_rank(state, self))
        return state

    def load_state_dict(self, state: Mapping[str, Any], *, allow: Collection[str] = (), replay: bool = True) -> None:
        """Go on from what `state_dict` returned: the next ``fit`` is the one that was saved, where it was.

        Everything is checked before anything is changed. A loop of your own goes on with the pass that was open, at the
        step where it was (``epoch.steps``), if its data is given to `run`.

        Args:
            state: It is not kept or changed.
            allow: Plugins that may be missing, in the state (they begin anew) or here.
            replay: Let data that has no position of its own be passed over up to where it was, with the generators of
                that time; otherwise it is refused.

        Raises:
            StateError: The state does not fit; says what differs.
            ReentrancyError: A pass is running.
        """
        apply(self, state, allow=allow, replay=replay)

    @property
    def at_edge(self) -> bool:
        """Whether the state can be saved now: no step is under way, nor a pass that a hook has begun."""
        passes = self.open_passes
        if self._ending:  # in fit_begin, phase_end or fit_end
            return self._ending == 1 and all(epoch.between for epoch in passes)
        return all(epoch.between for epoch in passes[:-1]) and all(epoch.at_edge for epoch in passes[-1:])

    def stop(self, reason: str = "", by: str = "") -> None:
        """Ask for a normal end: the current step ends, then the epoch with its events, then the fit.

        Args:
            reason: For ``FitResult.message``.
            by: Who asks; plugins give their name.
        """
        if self.world.size > 1:
            self._asked.stop = self._asked.stop or (reason, by)
        elif self._stop is None:
            self._stop = (reason, by)
            self._changes += 1

    def request_save(self) -> None:
        """Ask that the state is saved between two steps, as SIGUSR1 does: ``signal_begin`` fires there."""
        if self.world.size > 1:
            self._asked.save = True
        elif self._fitting:
            self._due = Agreement()
            self._due.save = True
            self._changes += 1

    def log(self, name: str, value: Any) -> None:
        """Log a value: hand it to every plugin that listens (``log_value``), such as ``LogTo``, which writes it.

        From any phase or plugin, in a pass or between two. It waits for no device: a tensor on one is copied there, and
        read when the log is written. If no plugin listens it does nothing, and outside of a fit nothing is written.

        Args:
            name: Any text; ``"train/loss"`` by custom.
            value: A number, a tensor of one (of a graph it keeps nothing), or a kind of `loopkit.logs`, such as
                ``Image(pixels)``.

        Raises:
            LogError: It cannot be logged; says what to log instead.

        Example::

            learner.log("train/temperature", model.log_temperature.exp())
        """
        if (packed := self._registry.packed) is None:
            return
        if value.__class__ is not float or name.__class__ is not str or not name:
            value = loggable(name, value)
        packed.append((name, value, self._logged_at or self._look(), now()))

    def log_values(self, values: Mapping[str, Any]) -> None:
        """Log several values, as `log` does one: what is the same for all of them is looked up once.

        Args:
            values: By name; each as for `log`.

        Raises:
            LogError: One cannot be logged; then none is.

        Example::

            learner.log_values({"train/margin": margin, "train/entropy": entropy})
        """
        if (packed := self._registry.packed) is None:
            return
        plain = values.__class__ is dict and {*map(type, values.values())} == {float}
        if plain and {*map(type, values)} == {str} and "" not in values:
            values = dict(values)
        elif not (values := all_loggable(values)):
            return
        packed.append((None, values, self._logged_at or self._look(), now()))

    def _look(self) -> Place:
        """Where what is logged now is."""
        here, progress = self._place, self.progress
        name, steps = "", progress.steps
        if here is not None:
            name, steps = here.name, steps + here.around
            if here.trains and (step := here.current) is not None and not step.ended:
                steps += 1
        made = name, progress.epochs, steps, progress.updates
        if get_ident() == self._thread:  # in another one, it may have changed by now
            self._logged_at = made
        return made

    def pack_log(self, plugin: Any, packed: list[Packed] | None) -> None:
        """Let what is logged be appended to a list, which is the cheapest way to keep it.

        Args:
            plugin: One of the plugins; its ``log_value`` is not called any more.
            packed: The list, which the plugin has to empty in time, of what each call has logged (`Packed`); None: the
                plugin is called again.
        """
        self._registry.pack(plugin, packed)

    def agree(self, *numbers: float) -> list[float]:
        """Let every process act, at this edge, on what any of them asks for: stops, cancels, saves and signals.

        For plugins that sync processes; all call it at the same step. One collective.

        Args:
            numbers: Sent along.

        Returns:
            The highest of each number over the processes.
        """
        signals = self._signals
        if signals is not None and signals.caught is not None:
            self._asked.save = True
            self._asked.ending = self._asked.ending or signals.ending
            signals.caught = None
        updates = float(self.progress.updates)
        agreed, (most, least, *highest) = self._asked.reach(self.world, updates, -updates, *numbers)
        if self.world.in_step and most != -least:
            raise WorldError(
                f"the processes have made from {-least:.0f} to {most:.0f} updates, rank {self.rank} {updates:.0f}: a "
                f"step was cancelled, or an update skipped, in some of them alone, and their parameters have parted. "
                f"Decide by what all of them know, such as learner.world.highest(value)"
            )
        if agreed.wanted:
            self._stop = self._stop or agreed.stop
            self._due = agreed if self._due is None else self._due.joined(agreed)
            self._changes += 1
        return highest

    @property
    def asks(self) -> bool:
        """Whether this process asks for something that the processes have not agreed on yet."""
        return self.signal_waits or self._asked.wanted

    @property
    def resuming(self) -> str:
        """The phase whose pass was open in a state that was loaded, until it goes on; else an empty string."""
        return self._open_before[0] if self._open_before else ""

    @property
    def running(self) -> Epoch | None:
        """The pass that is running, the innermost one if a phase runs inside another."""
        return self._epochs[-1] if self._epochs else None

    @property
    def fitting_now(self) -> bool:
        """Whether a fit is running."""
        return self._fitting

    @property
    def beginning(self) -> bool:
        """Whether the ``fit_begin`` of a fit is running."""
        return self._beginning

    @property
    def stop_requested(self) -> bool:
        """Whether `stop` or `CancelFit` ended the last pass; for outer loops of your own."""
        return self._stop is not None

    # The engine's own

    def count_update(self) -> None:
        """The parameters were updated."""
        self.progress.updates += 1
        self._logged_at = None

    def _move_to(self, place: Epoch | None) -> None:
        self._place, self._thread = place, get_ident()
        self._logged_at = None

    def where(self, phase: Phase, step: Step | None) -> str:
        """Phase, epoch and step, for messages."""
        at = "" if step is None else f", step {step.index}"
        return f"phase {phase.name!r}, epoch {self.progress.epochs}{at}"

    def _pass(
        self,
        phase: Phase,
        data: Any,
        after_step: Callable[[], bool] | None = None,
        first: bool = True,
        ended: Callable[[], None] | None = None,
    ) -> None:
        given, data = data, _iterable(data)
        made = data is not given
        data = self._set_up(phase, data)
        length = _length(data)
        _check_length(phase, data, length)
        epoch = Epoch(self, phase, length)
        epoch.data, epoch.made, epoch.ended = data, made, ended
        with epoch, bounded_wait(data, self._loader_timeout, lambda: epoch.steps):
            batches = epoch.batches()
            if epoch.pending is not None:
                raise epoch.pending
            if epoch.resumed:  # what comes after the step at which the state was saved, which may be the end
                act = after_step if self._open_before or not epoch.stopped else None
                if (act is not None and epoch.call_between(act)) or epoch.stopped:
                    self._restore_generators()
                    leave(data)
                    return
            elif epoch.stopped:
                return
            if epoch.run(batches, after_step):
                _check_count(phase, data, epoch.steps, epoch.length, first)

    def _set_up(self, phase: Phase, data: Any) -> Any:
        """What the plugins put in the place of the data of a pass; a function that makes data is left as it is."""
        if hasattr(data, "__iter__") and not isinstance(data, Prepared):
            for impl in self._registry.plan(phase).setup_data:
                data = self._registry.call(impl, learner=self, phase=phase, data=data)
                if not hasattr(data, "__iter__"):
                    raise PluginError(
                        f"plugin {impl.entry.plugin!r}: setup_data returned {describe(data)}, not an iterable of "
                        f"batches"
                    )
        return data

    @property
    def open_passes(self) -> list[Epoch]:
        """The passes that are running, the outermost first, without those that were running when the fit began."""
        return [epoch for epoch in self._epochs if epoch not in self._outside]

    def _remember(self, phase: str, data: Any) -> None:
        """Note what the passes of a phase iterate over; with several loaders there is no saying which comes next."""
        before = self._loaders.get(phase)
        self._loaders[phase] = data
        if before is not None and before is not data and keeps_place(before):
            self._earlier.setdefault(phase, []).append(weakref.ref(before))
        if any(ref() is data for ref in self._earlier.get(phase, ())):
            self._alternating.add(phase)

    def _take_pass(self, phase: Phase) -> dict[str, Any] | None:
        """What a loaded state holds of the pass that begins now, if that was open."""
        pending = self._pending
        if pending is None:
            return None
        if not pending.passes:
            self._restore_generators()
        elif pending.passes[0]["phase"] == phase.name:
            return pending.passes.pop(0)
        elif phase.training:
            raise StateError(
                f"the state that was loaded was saved in a pass of phase {pending.passes[0]['phase']!r}, and this is a "
                f"pass of {phase.name!r}: run the same phases in the same order as when it was saved"
            )
        return None

    @property
    def _open_before(self) -> list[str]:
        """The phases whose pass was open in a loaded state and has not begun again yet."""
        return [] if self._pending is None else [saved["phase"] for saved in self._pending.passes]

    def _restore_generators(self) -> None:
        """Put the random generators where they were, when what was open is open again."""
        pending = self._pending
        if pending is not None and not pending.passes and pending.generators is not None:
            generators.restore(pending.generators)
            pending.generators = None

    def _restore_position(self, position: Position) -> None:
        self._fits = position.number - (not self._fitting)
        if self._fitting:
            self.position, self._stop = position, self._stop or position.stop
        else:
            self._resumed = position

    def _seconds(self) -> float:
        assert self.position is not None
        return self.position.seconds + time.monotonic() - self._started

    def _notice_signal(self) -> None:
        self._changes += 1

    @property
    def signal_waits(self) -> bool:
        """Whether a signal was caught, or a save agreed on, that nobody has acted upon yet."""
        return self._due is not None or (self._signals is not None and self._signals.caught is not None)

    def _answer_signal(self) -> None:
        """Between two steps, or two passes: let plugins save, and end the fit or the pass if that is asked for."""
        signals = self._signals
        if not self.signal_waits or not self.at_edge:
            return
        if self.world.size > 1 and any(epoch.window_open for epoch in self.open_passes):
            return  # a window holds gradients of this process alone, which cannot be saved
        due, self._due = self._due or Agreement(), None
        self.signal = due.ending
        if signals is not None and signals.caught is not None and self.world.size == 1:
            due.save, due.ending = True, signals.ending
            self.signal, signals.caught = signals.caught, None
        if self._fitting and (due.save or due.ending is not None):
            for impl in self._registry.ordered(SignalBegin.hook):
                self._registry.call(impl, learner=self)
            if due.ending is not None and signals is not None:
                self.signal = signals.ending = due.ending
                raise Interrupted
        if due.cancel is not None:
            raise due.cancel

    def _meet(self, epoch: Epoch) -> None:
        """At the begin of a pass of several processes: it must be the same in all, and is cancelled in all or none."""
        compare(self.world, epoch)
        self._asked.cancel, epoch.pending = epoch.pending, None
        self.agree()
        if self._due is not None:
            epoch.pending, self._due.cancel = self._due.cancel, None

    def _end_of_pass(self, epoch: Epoch, cancel: Cancel | None) -> None:
        """Pass on what ends more than the pass that was just left."""
        if self.world.size > 1:
            self._asked.cancel = epoch._stronger(cancel, self._asked.cancel)
            self.agree()
            if self._due is not None:
                cancel, self._due.cancel = self._due.cancel, None
            if epoch.outer is not None:
                self._asked, due = epoch.outer
                self._due = self._due if due is None else due.joined(self._due)
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

    def _agree_to_begin(self) -> None:
        """What one process asked for in ``fit_begin`` holds for all."""
        if self.world.size > 1:
            self._asked.cancel = self._cancelled
            self.agree()
            if self._due is not None and isinstance(self._due.cancel, CancelFit):
                self._cancelled, self._due.cancel = self._due.cancel, None

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
                    if error is not failure:
                        errors.append(error)
        if failure is None and len(errors) == 1:
            raise errors[0]
        if errors and (failure is None or isinstance(failure, Exception)):
            causes = errors if failure is None else [failure, *errors]
            raise BaseExceptionGroup("fit_end failed" if failure is None else "the fit failed, then fit_end", causes)
        if failure is not None:
            for late in errors:
                add_note(failure, f"loopkit: fit_end failed too: {shown(late)}")
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


class Fitting:
    """A fit, from ``fit_begin`` to ``fit_end``; made by ``learner.fitting`` and used as a context manager."""

    def __init__(self, learner: Learner, planned: Planned | None, on_signal: str | None) -> None:
        self.learner = learner
        self._planned = planned or Planned()
        self._raises = on_signal == "raise"
        self._signals = Signals(learner._notice_signal, lambda: not learner.at_edge) if on_signal else None

    def __enter__(self) -> FitResult:
        learner = self.learner
        if learner._fitting:
            raise ReentrancyError("a fit is running: call run, evaluate or predict from a hook, not fit")
        result = learner.result = FitResult(seed=torch.initial_seed(), planned=self._planned)
        if learner._resumed is None:
            learner.metrics.clear()
        learner._fits += 1
        learner.position, learner._resumed = (
            learner._resumed or Position(replace(learner.progress), learner._fits),
            None,
        )
        learner._started = time.monotonic()
        for memory in (learner._loaders, learner._earlier, learner._alternating):
            memory.clear()
        learner._fitting, learner._stop, learner._cancelled = True, learner.position.stop, None
        learner._fit_ends, learner._not_begun = [], set()
        learner._outside = list(learner._epochs)
        learner._signals = self._signals
        learner._asked, learner._due = Agreement(), None
        if self._signals is not None:
            self._signals.__enter__()
        learner._ending += 1
        learner._beginning = True
        try:
            learner._begin_fit(set(learner.plugins))
            learner._agree_to_begin()
        except BaseException as error:
            learner._ending -= 1
            learner._beginning = False
            self._end(error)
            raise
        learner._ending -= 1
        learner._beginning = False
        return result

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self._end(error)
        return True

    def _end(self, error: BaseException | None) -> None:
        """Fire ``fit_end``, then raise what there is to raise."""
        learner, result = self.learner, self.learner.result
        assert result is not None
        assert learner.position is not None
        failure = learner.failure = None
        if isinstance(error, CancelFit):
            result.reason, result.message, result.by = "cancel", error.reason, error.by
        elif isinstance(error, Interrupted):
            assert learner.signal is not None
            result.reason, result.message = "signal", learner.signal.name
        elif error is not None and not isinstance(error, StopFit):
            result.reason, failure = "error", error
            learner.failure = error
        elif result.reason == "running":
            result.reason = "end"
        if learner._stop is not None and result.reason not in ("signal", "error"):
            result.reason, (result.message, result.by) = "stop", learner._stop
        result.epochs, result.steps, result.updates, result.samples = (
            now - then for now, then in zip(astuple(learner.progress), astuple(learner.position.start), strict=True)
        )
        result.metrics = dict(learner.metrics)
        result.seconds = learner._seconds()
        learner._ending += 1
        try:
            learner._end_fit(result, failure)
        finally:
            learner._ending -= 1
            learner._fitting, learner._cancelled, learner.position = False, None, None
            learner.failure = None
            learner._loader_timeout = None
            if self._signals is not None:
                self._signals.__exit__(None, None, None)
        ending = None if self._signals is None else self._signals.ending
        if ending is not None and self._raises:
            raise KeyboardInterrupt if ending == signal.SIGINT else SystemExit(128 + ending)


def _no_loss_fn(*args: Any) -> Any:
    raise PhaseError(
        "the phase uses learner.loss_fn, but the learner has none: give Learner(loss_fn=...), or [loss] in a file"
    )


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
