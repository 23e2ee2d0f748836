"""Learner: models, optimizers, a loss function and plugins, and the calls that people make."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal
from weakref import WeakMethod

import torch
from torch import Tensor, nn

from loopkit.base import devices
from loopkit.base.generators import seed_everything
from loopkit.base.notes import warn
from loopkit.base.words import is_count, takes
from loopkit.base.world import World
from loopkit.engine.compile.phase_table import PhaseTable
from loopkit.engine.kept.modes import Modes
from loopkit.engine.kept.optimizers import is_optimizer
from loopkit.engine.kept.resume import EpochStart
from loopkit.engine.life.engine import Engine
from loopkit.engine.life.epoch import Epoch
from loopkit.engine.life.fit import Fit
from loopkit.engine.life.forwards import Outputs
from loopkit.engine.life.limits import Limits, Terms
from loopkit.engine.life.models import Models
from loopkit.engine.life.sources import Source, check_given
from loopkit.engine.life.user_loop import Rounds
from loopkit.engine.life.validations import validations_of
from loopkit.errors import ArgumentError, PhaseError, PluginError, StateError
from loopkit.events import SignalBegin
from loopkit.every import Every
from loopkit.phases import Phase
from loopkit.plugin import plugin_name, provided, unwrapped
from loopkit.progress import Progress
from loopkit.result import FitResult, Planned, StopRequest

if TYPE_CHECKING:
    from loopkit.engine.compile.explain import Explanation
    from loopkit.engine.compile.registry import Registry
    from loopkit.engine.life.models import Optimizers


now = time.time


@dataclass
class Options:
    """The options of a learner that it does not hold elsewhere."""

    standard: list[Any]
    """The standard plugins that it added to the list itself; also the ones removed since."""
    order: list[list[str]]
    """The orders of plugins that it was given, a list of names for each."""
    config: str | None = None
    """The configuration that it was made from, as TOML; None for a learner by hand."""


ELSEWHERE = {
    "metrics": "give plugins=[Metrics(...)]",
    "callbacks": "give plugins=[...]",
    "epochs": "give learner.fit(train, epochs=...)",
    "device": "give plugins=[ToDevice(...)]",
    "criterion": "give loss_fn=...",
    "loss": "give loss_fn=...",
    "lr": "give optimizer=lambda params: torch.optim.AdamW(params, lr=...)",
}
"""Arguments that people bring from other libraries, and what to write."""

LIMITS = {
    "updates": "give max_updates=...",
    "steps": "give max_steps=...",
    "max_epochs": "give epochs=...",
    "n_epochs": "give epochs=...",
    "num_epochs": "give epochs=...",
    "max_time": "give minutes=...",
    "validation_data": "give fit(train, val)",
    "val_data": "give fit(train, val)",
    "callbacks": "give Learner(plugins=[...])",
    "batch_size": "give it to the loader",
}
"""Arguments of ``fit`` that people bring from other libraries, and what to write."""


class Learner:
    """Models, optimizers, a loss and plugins, and the loops that train them.

    Args:
        model: A module, or a mapping of named modules.
        loss_fn: ``loss_fn(outputs, targets) -> scalar``; your own phases may do without. One with
            ``reduction="sum"``, and the result of `loopkit.losses.summed`, is a sum over the samples: then so is the
            gradient of an accumulation window, and the loss in the metrics is the sum divided by the samples.
        optimizer: An optimizer, a factory ``params -> Optimizer``, or a mapping of named ones. The factories of a
            mapping take the parameters of the model of the same name; a single factory takes all.
        plugins: Plugins, in any order; also names of installed ones (`loopkit plugins`) and mappings of a name to its
            options: ``["grad_norm", {"clip_grad_norm": {"max_norm": 1.0}}]``. See `loopkit.load_plugin`.
        phases: Your own phases; one that has the name of a standard phase (train, val, predict) replaces it.
        accumulate: Steps per update.
        seed: Seeds Python, NumPy and torch now, by `loopkit.seed_everything`. For algorithms that are deterministic
            call ``seed_everything(seed, deterministic=True)`` yourself, before the model is made.
        standard: Add the standard plugins that the list does not hold: metrics with the loss, history, progress,
            sanity check, stop on non-finite numbers. ``learner.remove("progress")`` takes one out again.
        order: Plugin names (or what they provide) that run in this order wherever they meet; or several such lists.
        optimizer_modes: Call ``train()`` and ``eval()`` of optimizers whose class has both, such as schedule-free ones,
            around training and validation, unless a plugin owns the weights with an average. False leaves it to you.

    Raises:
        PluginError: A plugin is malformed, or two do not go together.
        PhaseError: An argument does not fit the others.

    Example::

        learner = Learner(model, nn.CrossEntropyLoss(), lambda params: torch.optim.SGD(params, lr=0.1))
        result = learner.fit(train, val, epochs=3)
    """

    _standard_set: ClassVar[Callable[[Iterable[Any]], list[Any]]]

    @takes(**ELSEWHERE)
    def __init__(
        self,
        model: nn.Module | Mapping[str, nn.Module],
        loss_fn: Callable[..., Tensor] | None = None,
        optimizer: Optimizers | Mapping[str, Optimizers] | None = None,
        *,
        plugins: Iterable[Any] | Mapping[str, Any] = (),
        phases: Iterable[Phase] = (),
        accumulate: int = 1,
        seed: int | None = None,
        standard: bool = True,
        order: Sequence[Any] = (),
        optimizer_modes: bool = True,
    ) -> None:
        if seed is not None:
            seed_everything(seed)
        models = Models(model)
        _check_loss_fn(loss_fn)
        self.loss_fn: Callable[..., Any] = loss_fn if loss_fn is not None else no_loss_fn
        self._engine = Engine(self, models, PhaseTable(phases), order)
        self.accumulate = accumulate
        self._logbook = self._engine.logbook
        self.model = models.as_given(model)
        plugins = _listed(plugins)
        added = Learner._standard_set(plugins) if standard else []
        self._engine.registry.change(add=[*plugins, *added])
        self.options = Options(added, [list(chain) for chain in self._engine.registry.chains])
        """Its options, beside its parts."""
        self._engine.holders.find_extras()
        models.set_up(self._engine.registry, self._engine.registry.plugins)
        owner = WeakMethod(self._engine.registry.owner_of_weights)  # plugins may keep the models, not the learner
        models.modes = Modes({}, optimizer_modes, lambda: found() if (found := owner()) is not None else "")
        self._set_optimizers(optimizer)

    # What it is

    def __repr__(self) -> str:
        """Such as ``Learner(Sequential, 547 parameters, Adam lr 0.001, 9 plugins, 8 epochs done)``."""
        plugins = len(self.plugins)
        epochs = self.progress.epochs
        counts = f"{plugins} plugin{'s' * (plugins != 1)}", f"{epochs} epoch{'s' * (epochs != 1)} done"
        return f"Learner({', '.join([*self.models.described(), *counts])})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raise for ``copy.copy``, ``copy.deepcopy`` and ``pickle``, which would tear the parts of a learner apart.

        Raises:
            StateError: Always.
        """
        raise StateError(
            f"{self!r} cannot be copied or pickled, since its plugins, optimizers and hooks refer to each other: call "
            f"the function that made it once more, and load its state there, other.load_state_dict(learner."
            f"state_dict()). To use it in another process, make it there; a copy of its weights is "
            f"copy.deepcopy(learner.model)"
        )

    @property
    def models(self) -> Models:
        """The modules by name; a single one is ``"model"``. Its ``weights`` list their replacements."""
        return self._engine.models

    @property
    def optimizer(self) -> Any:
        """The optimizer, or the mapping of named ones; None without."""
        return self._engine.models.optimizer

    @property
    def optimizers(self) -> dict[str, torch.optim.Optimizer]:
        """The optimizers by name; a single one is ``"optimizer"``."""
        return self._engine.models.optimizers

    @property
    def phases(self) -> PhaseTable:
        """The phases by name."""
        return self._engine.phases

    @property
    def accumulate(self) -> int:
        """Steps per update."""
        return self._engine.flags.accumulate

    @accumulate.setter
    def accumulate(self, steps: int) -> None:
        if not is_count(steps):
            raise PhaseError(f"accumulate is {steps!r}: it counts the steps of an update, from 1")
        self._engine.flags.set_accumulate(steps)

    @property
    def progress(self) -> Progress:
        """Counters of the training phases, over all fits."""
        return self._engine.progress

    @property
    def metrics(self) -> dict[str, float]:
        """The latest value of every metric, as ``"val/loss"``; a fit begins with none."""
        return self._engine.metrics

    @property
    def world(self) -> World:
        """The processes that train together; only this one, unless a plugin joins others."""
        return self._engine.requests.world

    @world.setter
    def world(self, world: World) -> None:
        self._engine.requests.join(world)

    @property
    def current(self) -> Fit | None:
        """The fit that is running."""
        return self._engine.fit

    @property
    def result(self) -> FitResult | None:
        """The result of the fit that is running or was the last."""
        return self._engine.running.result

    def set_optimizer(self, optimizer: Optimizers | Mapping[str, Optimizers]) -> None:
        """Continue with another optimizer: between fits, such as for a second stage of a training.

        Its state begins anew. A ``Schedule`` multiplies the rates of the new one.

        Args:
            optimizer: As for `Learner`. A factory takes the parameters of the models as they are now.

        Raises:
            PhaseError: A fit or an epoch is running.
        """
        if self.current is not None or self._engine.running.epochs:
            raise PhaseError("learner.set_optimizer() in a fit, whose windows go by the old one: call it after the fit")
        self._set_optimizers(optimizer)

    def _set_optimizers(self, optimizer: Optimizers | Mapping[str, Optimizers] | None) -> None:
        self._engine.models.set_optimizers(optimizer)
        self._engine.models.set_up_optimizers(self._engine.registry, self.plugins)
        self._engine.holders.check_saved()

    # Plugins

    @property
    def plugins(self) -> dict[str, Any]:
        """The plugins by name."""
        return self._engine.registry.plugins

    @property
    def history(self) -> Any:
        """The plugin that keeps the metrics of each epoch, by default a `History`: ``learner.history.plot()``.

        Raises:
            PluginError: No plugin provides ``"history"``.
        """
        for plugin in self.plugins.values():
            if provided(plugin) == "history":
                return plugin
        raise PluginError("learner.history: no plugin keeps a history; add one: plugins=[History()]")

    def add(self, *plugins: Any) -> None:
        """Add plugins, all or none; names and mappings too. During a fit they take part from the next step on."""
        before = set(self.plugins)
        self._change(add=[_made(each) for each in plugins])
        self._join(set(self.plugins) - before)

    def remove(self, *words: str) -> None:
        """Remove plugins by name or by their ``provides``. During a fit their ``fit_end`` still comes at its end.

        A plugin with ``leave`` undoes its changes: a schedule puts back the optimizer's own rates, `Freeze` thaws.
        """
        self._change(remove=words)

    def replace(self, word: str, plugin: Any) -> None:
        """Put a plugin in the place of the one that has this name or provides this."""
        before = self.plugins
        self._change(add=[_made(plugin)], remove=[word])
        now = self.plugins
        gone = [old for name, old in before.items() if now.get(name) is not old]
        self._join({name for name, new in now.items() if before.get(name) is not new}, gone)

    def _change(self, add: Iterable[Any] = (), remove: Iterable[str] = ()) -> None:
        engine = self._engine
        for name in map(engine.registry.find, remove):
            if engine.models.has_wrapper_of(name) or not getattr(self.plugins[name], "removable", True):
                raise PluginError(
                    f"plugin {name!r} has changed a model or an optimizer for good: build a new learner without it"
                )
        before = self.plugins
        engine.registry.change(add, remove)
        engine.holders.find_extras()
        engine.requests.change()
        now = self.plugins
        for name, plugin in before.items():
            if now.get(name) is not plugin and hasattr(plugin, "leave"):
                plugin.leave(self)

    def _join(self, names: set[str], gone: Iterable[Any] = ()) -> None:
        """Set the new plugins up; if one fails, take them out again and put those back that had gone for them."""
        engine = self._engine
        wrappers = engine.models.wrappers()
        optimizers = engine.models.optimizers
        fit = self.current
        try:
            engine.models.set_up(engine.registry, names)
            engine.models.set_up_optimizers(engine.registry, names)
            self._check_optimizers(optimizers)
            if fit is not None:
                engine.registry.owners.begin({name: self.plugins[name] for name in names})
                fit.begin_plugins(names)
        except BaseException as error:
            if fit is not None:
                fit.brackets.forget({name: self.plugins[name] for name in names}, fit.result, error)
            self._undo(names, error)
            engine.registry.change(gone, names)
            engine.requests.change()
            engine.models.put_back(wrappers, names)
            engine.models.put_optimizers(optimizers)
            engine.models.set_up(engine.registry, {plugin_name(each) for each in gone if hasattr(each, "leave")})
            raise

    def _check_optimizers(self, before: Mapping[str, torch.optim.Optimizer]) -> None:
        """Look at the optimizers that a plugin, which joins, has put in the place of others."""
        engine = self._engine
        if engine.models.optimizers is before:
            return
        if engine.running.fit is not None or engine.running.epochs:
            raise PhaseError("a plugin replaces an optimizer in a fit, whose windows go by the old one: add it before")
        engine.holders.check_saved()

    def _undo(self, names: Iterable[str], error: BaseException) -> None:
        """Let plugins that could not join leave again, as far as they came."""
        for name in names:
            try:
                if hasattr(self.plugins[name], "leave"):
                    self.plugins[name].leave(self)
            except Exception as other:
                error.add_note(f"loopkit: leave of plugin {name!r} raised {type(other).__name__}: {other}")

    def explain(self, phase: str | Phase | None = None, *, full: bool = False) -> Explanation:
        """The plan; print it. Of a phase: hook by hook, which plugin runs when, and why.

        Args:
            phase: The phase; None: all of them, on one screen, with only the changes of gradients and weights.
            full: All of them, hook by hook.
        """
        from loopkit.engine.compile.explain import Explanation

        phases = list(self.phases.values()) if phase is None else [self.phases.find(phase)]
        modes = self.models.modes.explained()
        unproved = self._engine.places.unproved.values()
        return Explanation.of(self._engine.registry, phases, full or phase is not None, modes, unproved)

    # Running

    @takes(**LIMITS)
    def fit(
        self,
        train: Any,
        val: Any = None,
        *,
        epochs: int | float | None = None,
        max_steps: int | None = None,
        max_updates: int | None = None,
        minutes: float | None = None,
        validate: Every | Mapping[str, Every] | None = None,
        on_interrupt: str | None = "raise",
        loader_timeout: float | None = 300.0,
    ) -> FitResult:
        """Train, and validate after every epoch; resume the fit of a loaded state.

        However the fit ends normally, the last weights are validated once.

        Args:
            train: An iterable of batches, or a function that returns one for each epoch. A mapping of a phase's name
                to it, ``{"gan": loader}``, chooses the training phase; by default it is the one in
                ``Learner(phases=...)``, else the standard one.
            val: The same for validation; None for no validation. A mapping may hold several, such as
                ``{"val": a, "ood": b}``: they are run in this order, and their metrics are ``"val/loss"`` and
                ``"ood/loss"``. For a name of which the learner has no phase it makes a `ValidationPhase`.
            epochs: Epochs over ``train``; ``math.inf`` if another limit or a plugin ends the fit.
            max_steps: End the fit after this many training steps.
            max_updates: End the fit after this many updates.
            minutes: End the fit after the step in which so many minutes are over; fractions are fine. They are counted
                as ``FitResult.seconds`` is, over all processes that a fit has had. Not reproducible.
            validate: When to validate: ``every(epochs=2)``, ``every(updates=100)``, ``every(minutes=10)`` (not
                reproducible), with ``first=True`` also before the first update; see `loopkit.every`. A mapping by the
                names of phases gives each its own. By default ``every(epochs=1)``.
            on_interrupt: As in `rounds`.
            loader_timeout: Seconds that the workers of a ``DataLoader`` may take for a batch, unless the loader has
                its own timeout; None for no limit.

        Returns:
            Why the fit ended, its counts, metrics and history.

        Raises:
            ArgumentError: No limit, or one that is not positive; or ``validate`` does not fit ``val``.
            PhaseError: A name is of no phase that fits.
            StateError: The state that was loaded does not fit the data or the phases.
            SystemExit: SIGTERM came (code 143), or ``learner.pause`` was called (75).
            KeyboardInterrupt: SIGINT came.
            ReentrancyError: Called during a fit.
            EmptyDataError: There is no batch.

        Example::

            learner.fit(train, {"val": a, "ood": b}, epochs=3, validate={"ood": every(epochs=3)})
        """
        if val is not None:
            check_given(train, val)
        limits = Limits(epochs, max_steps, max_updates, minutes)
        if epochs is None and not limits.between_steps:
            raise ArgumentError(
                "fit has no end: give epochs=, max_steps= or max_updates= (epochs=math.inf if you mean it), or minutes="
            )
        source = Source(self._engine.registry, *self._engine.phases.training(train))
        validations = validations_of(self._engine.registry, self.phases, val, validate)
        planned = limits.planned(source.length, self._engine.flags.accumulate, len(self._engine.models.optimizers))
        fit = self._engine.fit_loop(Terms(limits, planned, on_interrupt, loader_timeout), source, validations)
        fit.complete()
        return fit.result

    @takes(rounds="give epochs=...", number="give epochs=...")
    def rounds(
        self,
        epochs: int | float | None = None,
        *,
        planned: Planned | None = None,
        on_interrupt: str | None = "raise",
        state: Mapping[str, Any] | None = None,
    ) -> Rounds:
        """A fit whose loop is yours: fires ``fit_begin`` and ``fit_end`` around the epochs that you run in each round.

        Resumes a fit that was saved, where it was. Rounds that were over are skipped. The round that was under way is
        run again with the random generators, metrics and counters that it had: epochs that were over are skipped, and
        your own code between them is run. `Rounds.once` keeps what that code makes of the weights.
        `CancelFit` ends it after the epoch in which it came. After ``learner.stop`` the round ends without another
        training epoch. SIGINT, SIGTERM and ``learner.pause`` end it after the step in which they came; a second SIGINT
        ends at once.

        Args:
            epochs: Rounds; None: until you leave the loop, or something ends the fit.
            planned: How far the fit is meant to go, for displays and schedules; by default so many epochs.
            on_interrupt: The action after ``fit_end`` if a signal or a pause ended the fit: ``"raise"``:
                ``KeyboardInterrupt`` after SIGINT, ``SystemExit`` after SIGTERM (143) and after a pause (75);
                ``"return"``: no exception. None: signals are not caught.
            state: Other objects that your loop's code changes, by name: random generators that it draws from, and
                objects with ``state_dict`` and ``load_state_dict``, such as an environment. They are saved with the
                round. The global generators, and generators in phases, models or the loss, are saved anyway.

        Raises:
            PhaseError: Something in ``state`` is neither.
            StateError: The saved round cannot be run again; names what differs.

        Returns:
            An iterable: it gives the number of each round, from 0. As a context manager around the loop
            (``with learner.rounds(epochs=3) as rounds: for _ in rounds: ...``) ``fit_end`` also gets an error
            that your own code raises between two epochs; ``rounds.result`` is the `FitResult`.

        Example::

            for _ in learner.rounds(epochs=3):
                learner.run("train", batches)
                learner.run("val", others)
        """
        limits = Limits(epochs)
        terms = Terms(limits, planned or limits.planned(None, 1), on_interrupt)
        return Rounds(self._engine.user_loop(terms, {} if state is None else state))

    @takes(loader="give run(phase, data)")
    def run(self, phase: str | Phase, data: Any) -> dict[str, float]:
        """One epoch of a phase over data; returns its metrics, as ``"val/loss"``.

        It may be called from a hook: a phase inside another leaves counters, modes and contexts as they were. In
        `rounds` that resume a saved state, an epoch that was over by then is skipped, and its metrics are returned.
        """
        phase = self.phases.find(phase)
        fit = self.current
        with self._engine.epochs.next(phase, Source(self._engine.registry, phase, data)) as epoch:
            epoch.run_all(None if fit is None else fit.timeout, True)
        return {name: value for name, value in self.metrics.items() if name.startswith(f"{phase.name}/")}

    @takes(loader="give evaluate(data)", val="give evaluate(data)", name="give phase=...")
    def evaluate(self, data: Any, phase: str | Phase | None = None, *, weights: str | None = None) -> dict[str, float]:
        """Run the validation phase once over data, without gradients; returns its metrics, as ``"val/loss"``.

        Args:
            data: An iterable of batches, or a function that returns one, as for `fit`.
            phase: The phase, or its name; the validation phase by default.
            weights: The plugin, by its name or what it provides, whose weights stand in the place of the models' own
                meanwhile, such as ``"weight_average"``; by default the weights that this phase runs with.

        Raises:
            PluginError: No plugin has such weights.
            EmptyDataError: There is no batch.

        Example::

            accuracy = learner.evaluate(test)["val/accuracy"]
        """
        chosen = self.phases.of("val", phase)
        with nullcontext() if weights is None else self._weights_of(weights):
            return self.run(chosen, data)

    def _weights_of(self, word: str) -> Any:
        name = self._engine.registry.find(word)
        plugin = unwrapped(self.plugins[name])
        if not hasattr(plugin, "averaged"):
            raise PluginError(f"plugin {name!r} has no weights to evaluate with; WeightAverage has")
        return plugin.averaged(self)

    def inference(self, phase: str | Phase | None = None) -> AbstractContextManager[None]:
        """Inside, forwards are as in a validation: in eval mode, without gradients, with its autocast and its weights.

        For samples of text or images in a hook, such as ``phase_end``. Afterwards modes, weights, autocast and
        gradients are as they were. Random numbers that you draw inside come from the run's generators; within
        ``with learner.aside():`` these do not move.

        Args:
            phase: The phase, or its name; the validation phase by default.

        Example::

            with learner.aside(), learner.inference():
                outputs = learner.model(prompts)
        """
        return self._engine.forwards.inference(self.phases.of("val", phase))

    def aside(self) -> AbstractContextManager[None]:
        """Inside, forwards are a plugin's own, and the run does not see them, such as a probe's or a teacher's.

        Mode, weights, autocast and gradients are as outside of it; `inference` changes them.
        Afterwards random generators, buffers, modes and the casts of autocast are as they were. DDP takes no part in
        the forward. Gradients are not put back: use ``torch.autograd.grad``, which does not touch the parameters'
        gradients. It copies the buffers and the states of the generators.

        Example::

            with learner.aside():
                loss = learner.loss_fn(learner.model(inputs), targets)
                grads = torch.autograd.grad(loss, list(learner.model.parameters()))
        """
        return self._engine.forwards.aside()

    @takes(loader="give predict(data)", batch_size="give it to the loader")
    def predict(
        self,
        data: Any,
        phase: str | Phase | None = None,
        *,
        device: str | torch.device | None = "cpu",
        everywhere: bool = True,
    ) -> Any:
        """The outputs for all of ``data``, concatenated along the first dimension (in tuples and mappings too).

        Where several processes share the data, each gets the outputs of all, in the order of the data, on the CPU.

        Args:
            data: Batches, as for `fit`; or one batch of inputs, a tensor. Or a mapping of names to such data: then the
                outputs are a mapping, too.
            phase: The phase that predicts; the standard one by default.
            device: Where the outputs go, each batch as soon as it is made; None: they stay where the model made them.
            everywhere: False: where several processes share the data, only rank 0 gets the outputs, the others None.
        """
        place = None if device is None else devices.parse("predict", device, error=ArgumentError)
        return self._engine.forwards.predict(self.phases.of("predict", phase), data, place, everywhere)

    @takes(loader="give predict_batches(data)", batch_size="give it to the loader")
    def predict_batches(self, data: Any, phase: str | Phase | None = None, *, indices: bool = False) -> Outputs:
        """The outputs batch by batch, each computed when it is asked for.

        Between batches the modules are in the mode in which the caller left them; the epoch ends, with its events,
        when the iterator is exhausted or closed.

        Args:
            data: As for `fit`.
            phase: The phase that predicts; the standard one by default.
            indices: Yield ``(indices, outputs)``, with the numbers of the batch's samples in the data, as `Step` has
                them; of data that do not know them it raises.

        Returns:
            A generator. ``yield from`` it gives how many batches came, with outputs or without; None if a plugin ended
            the epoch before.
        """
        return self._engine.forwards.predict_batches(self.phases.of("predict", phase), data, indices)

    def epoch(self, phase: str | Phase, length: int | None = None, data: Any = None) -> Epoch:
        """One epoch whose loop is yours: ``with learner.epoch("train") as epoch: ... epoch.step(batch)``.

        Args:
            phase: A phase or the name of one.
            length: The number of steps, if known: the last one then closes its accumulation window itself.
            data: The data of ``epoch.batches()``, from where a saved state was; needed if the epoch is to be saved.
        """
        phase = self.phases.find(phase)
        source = None if data is None else Source(self._engine.registry, phase, data)
        return self._engine.epochs.next(phase, source, length)

    def state_dict(self, at: EpochStart | None = None, *, positions: bool = True, whole: bool = True) -> dict[str, Any]:
        """Everything that decides how training continues from here, bit for bit.

        That is: the models' own weights (never averaged ones) and buffers, optimizers, open accumulation windows,
        counters, metrics, where the fit and its loaders are, the random generators of Python, NumPy and torch, and
        every plugin's state under its name. It holds None, booleans, numbers, strings, lists, tuples, dicts and
        tensors, which are those in use: copy what you keep.

        Args:
            positions: Without, it leaves out open epochs and their data, and can be made in mid-step.
            at: The result of ``epoch.mark()`` when an epoch that does not train began: the state as of then, after a
                step of it has failed.
            whole: Gather sharded tensors in each process. Without, each process has its part of them, a ``DTensor``.

        Of several processes, all must call it; each gets what differs from one to another, too, and any number of
        processes can load it.

        Raises:
            StateError: A step is under way, or an epoch that a hook runs, or the data has no position to be saved.
        """
        return self._engine.saving.saved(at, positions, whole)

    def load_state_dict(
        self,
        state: Mapping[str, Any],
        *,
        allow: Collection[str] = (),
        replay: bool = True,
        own: bool = False,
        data: Literal["stop", "warn"] = "stop",
    ) -> None:
        """Restore the return value of `state_dict`: the next ``fit`` is the one that was saved, where it was.

        Everything is checked before anything is changed. Your own loop resumes the epoch that was open, at
        the step where it was (``epoch.steps``), if its data is given to `run`.

        Args:
            state: It is not kept or changed.
            allow: Plugins that may be missing, in the state (they start again) or here.
            replay: Let data without a position be skipped up to where it was, with the generators of
                that time; otherwise it raises.
            own: Its tensors may be taken over instead of copied.
            data: ``"warn"``: resume an open epoch also if its data differ from the saved ones.

        Raises:
            StateError: The state does not fit; the message lists the differences.
            ReentrancyError: An epoch is running.
        """
        self._engine.loading.load(state, self.world, allow=allow, replay=replay, own=own, data=data)
        self._logbook.move_to(self._logbook.epoch)

    def forget(self) -> None:
        """Forget where a fit was interrupted, or a loaded state was: the next fit is a new one."""
        self._engine.resume.forget()

    # Requests

    def stop(self, reason: str = "", by: str = "") -> StopRequest:
        """Ask for the end of the run: the current step ends, then the epoch with its events, then the fit.

        Asked for in an epoch that does not train, it takes effect at that epoch's end. The last weights are validated,
        unless that was done since the last update.

        Args:
            reason: For ``FitResult.message``.
            by: Who asks; plugins give their name.

        Returns:
            The request. Between two steps it is answered; a plugin may put it off (`loopkit.plugin.Plugin.hold_stop`),
            which ``put_off`` then returns. So any thread, and a handler of a signal, may call this.

        Raises:
            PhaseError: No fit or epoch is running.
        """
        self._check_running("stop")
        return self._engine.requests.stop(reason, by)

    def pause(self, reason: str = "", by: str = "") -> None:
        """Ask that this process ends where it is, as SIGTERM does, and the run resumes when it is started again.

        It takes effect between two steps, where the state can be saved, without ``epoch_end``. With
        ``on_interrupt="raise"`` the fit raises ``SystemExit(75)``; if no plugin saves the run, there is one warning.

        Raises:
            PhaseError: No fit is running.
        """
        self._check_running("pause")
        self._engine.requests.pause(reason, by)
        fit = self.current
        if fit is not None and fit.raises and not self._engine.registry.ordered(SignalBegin.hook):
            warn(
                "learner.pause ends this process, and no plugin saves the run, so what was trained is lost: add "
                "Checkpoint(directory), or give fit(on_interrupt='return') to continue in this process"
            )

    def _check_running(self, what: str) -> None:
        engine = self._engine
        if engine.running.fit is None and (what == "pause" or not (engine.running.epochs or engine.running.hooks)):
            raise PhaseError(
                f"learner.{what}() with no fit running: call it from a plugin, a phase or "
                f"another thread during the fit, or leave out the fit"
            )

    # Logs

    def log(self, name: str | Mapping[str, Any], value: Any = None) -> None:
        """Log a value: hand it to every plugin that listens (``log_value``), such as ``LogTo``, which writes it.

        From any phase or plugin, in an epoch or not. It waits for no device: a tensor on one is copied there, and
        read when the log is written. It has no effect without a listening plugin, or outside of a fit.

        Args:
            name: Any text; ``"train/loss"`` by custom. Or a mapping of names to values, which costs less than a call
                for each; if one cannot be logged, none is.
            value: A number, a tensor of one (without its graph), or a kind of `loopkit.logs`, such as
                ``Image(pixels)``.

        Raises:
            LogError: It cannot be logged; the message shows an alternative.

        Example::

            learner.log("train/temperature", model.log_temperature.exp())
            learner.log({"train/margin": margin, "train/entropy": entropy})
        """
        book = self._logbook
        if (packed := book.packed) is None:
            return
        place = book.place or book.look()
        if type(value) is float and type(name) is str and name:
            packed.append((name, value, place, now()))
        elif value is not None or isinstance(name, str):
            packed.append((name, book.loggable(name, value), place, now()))  # type: ignore[arg-type]  # it checks both
        elif several := book.all_loggable(name):
            packed.append((None, several, place, now()))


def standard_by(make: Callable[[Iterable[Any]], list[Any]]) -> None:
    """Let ``standard=True`` add the plugins that this makes for the given ones; `loopkit` itself calls it."""
    Learner._standard_set = staticmethod(make)


def registry_of(learner: Learner) -> Registry:
    """The plugins of a learner, their order, and the plans of its phases."""
    return learner._engine.registry


def _listed(plugins: Any) -> list[Any]:
    """The plugins of a list, or of a mapping of names to options."""
    if not isinstance(plugins, Iterable) or isinstance(plugins, str):
        raise PluginError(f"plugins is {plugins!r}: give a list, plugins=[...]")
    if isinstance(plugins, Mapping):
        plugins = [{name: options} for name, options in plugins.items()]
    return [_made(each) for each in plugins]


def _made(given: Any) -> Any:
    """A plugin, made by its name if that was given."""
    if not isinstance(given, (str, dict)):
        return given
    from loopkit.found.discovery import make_plugin

    return make_plugin(given)


def _check_loss_fn(loss_fn: Any) -> None:
    if is_optimizer(loss_fn):
        raise PhaseError(
            f"loss_fn is an optimizer ({type(loss_fn).__name__}): the order is Learner(model, loss_fn, optimizer)"
        )
    if isinstance(loss_fn, type):
        made = loss_fn.__name__
        raise PhaseError(f"loss_fn is the class {made}, not a function: give an instance, loss_fn={made}()")
    if loss_fn is not None and not callable(loss_fn):
        raise PhaseError(
            f"loss_fn is {loss_fn!r:.80}, which cannot be called: give a function of outputs and targets, such as "
            f"torch.nn.CrossEntropyLoss()"
        )


def no_loss_fn(*args: Any) -> Any:
    """Stands in the place of a loss function that was not given.

    Raises:
        PhaseError: Always.
    """
    raise PhaseError(
        "the phase uses learner.loss_fn, but the learner has none: give Learner(loss_fn=...), or [loss] in a file"
    )
