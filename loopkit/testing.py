"""What plugin authors test with: a tiny problem, a log of events, and a check of the whole plugin contract.

A test of a plugin of your own::

    from loopkit.testing import check_plugin

    def test_my_plugin_keeps_the_contract():
        check_plugin(lambda: MyPlugin(0.5))

or one test per promise::

    @pytest.mark.parametrize("check", CHECKS)
    def test_my_plugin_keeps(check):
        check_plugin(lambda: MyPlugin(0.5), checks=[check])
"""

from __future__ import annotations

import copy
import gc
import logging
import random
import signal
import sys
import threading
import time
import weakref
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, fields
from fnmatch import fnmatchcase
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from loopkit.batches import parts
from loopkit.dispatch import Instrument, declared, plugin_name, provided
from loopkit.errors import CancelEpoch, CancelFit, CancelStep, LoopkitError, PluginError, StepStateError
from loopkit.events import (
    BackwardBegin,
    BackwardEnd,
    Event,
    StepCancelled,
    UpdateBegin,
    UpdateEnd,
    UpdateSkipped,
)
from loopkit.hooks import STATES, Hook, hookimpl, hooks
from loopkit.learner import Learner
from loopkit.order import EVERYTHING, Entry, nearest
from loopkit.phases import Phase, PredictionPhase
from loopkit.step import Step

__all__ = ["CHECKS", "Case", "ContractError", "EventLog", "Problem", "check_plugin", "tiny_problem"]


class ContractError(LoopkitError, AssertionError):
    """A plugin breaks promises; ``broken`` holds one message for each."""

    def __init__(self, plugin: str, broken: Sequence[str]) -> None:
        self.broken = tuple(broken)
        count = "a promise" if len(broken) == 1 else f"{len(broken)} promises"
        listed = "".join(f"\n  {number}. {message}" for number, message in enumerate(broken, 1))
        super().__init__(f"plugin {plugin!r} breaks {count}:{listed}")


# Problems


@dataclass
class Problem:
    """What is needed to build a learner and to fit it."""

    model: nn.Module | Mapping[str, nn.Module]
    loss_fn: Callable[..., Tensor] | None
    optimizer: Any
    """A factory, or a mapping of them: what ``Learner`` takes."""
    train: list[Any]
    val: list[Any] | None = None

    def learner(self, **options: Any) -> Learner:
        """``Learner(model, loss_fn, optimizer, **options)``."""
        return Learner(self.model, self.loss_fn, self.optimizer, **options)


def tiny_problem(seed: int = 0, samples: int = 20, batch_size: int = 6) -> Problem:
    """A classification of random points that is fitted in milliseconds.

    Inputs are float32 of shape ``(batch, 4)``, targets int64 classes 0 to 2 of shape ``(batch,)``. The model has
    parameters, buffers (batch norm) and dropout, the optimizer is SGD with momentum. The same seed gives the same
    problem; torch's generator is left as it was.

    Args:
        seed: For the data and the first weights.
        samples: For training, and half as many for validation.
        batch_size: In samples; with the defaults there are 4 batches, of 6, 6, 6 and 2 samples.

    Example::

        problem = tiny_problem()
        problem.learner(standard=False).fit(problem.train, problem.val, epochs=2)
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 3))
        train, val = (
            list(zip(torch.split(x, batch_size), torch.split(y, batch_size), strict=True))
            for count in (samples, (samples + 1) // 2)
            for x, y in [(torch.randn(count, 4), torch.randint(3, (count,)))]
        )

    def optimizer(params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.1, momentum=0.9)

    return Problem(model, nn.functional.cross_entropy, optimizer, train, val)


def _adversarial_problem(train: list[Any]) -> Problem:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        models = {"critic": nn.Linear(4, 1), "generator": nn.Linear(4, 4)}

    def optimizer(params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.01)

    return Problem(models, None, dict.fromkeys(models, optimizer), train)


# A log of events


class EventLog:
    """Record, as text, every event and context that comes, those of the user's own events included.

    ``lines`` grows by one line at a time: the phase's name if there is one, then the hook. A context has two lines,
    which end in ``enter`` and ``leave``::

        ["fit_begin", "train epoch_context enter", "train epoch_begin", "train step_begin", ...]

    Events that are defined after the log was made are not recorded.

    Args:
        name: The plugin's name.
    """

    def __init__(self, name: str = "event_log") -> None:
        self.name = name
        self.lines: list[str] = []
        self.optional = tuple(Event.by_hook)
        """Events that no phase may emit are listened to all the same."""
        for hook in hooks().values():
            if hook.kind == "event":
                setattr(self, hook.name, self._event(hook))
            elif hook.kind == "context":
                setattr(self, hook.name, self._context(hook))

    def _event(self, hook: Hook) -> Callable[..., None]:
        if "phase" not in hook.arguments:
            return hookimpl(lambda: self.lines.append(hook.name))
        return hookimpl(lambda phase: self.lines.append(f"{phase.name} {hook.name}"))

    def _context(self, hook: Hook) -> Callable[..., Any]:
        @contextmanager
        def context(phase: Phase) -> Iterator[None]:
            self.lines.append(f"{phase.name} {hook.name} enter")
            try:
                yield
            finally:
                self.lines.append(f"{phase.name} {hook.name} leave")

        return hookimpl(lambda phase: context(phase))


# What a check is given


@dataclass(frozen=True)
class Case:
    """A plugin to check, and what to check it with."""

    factory: Callable[[], Any]
    phases: tuple[Phase, ...] = ()
    problem: Callable[[], Problem] = tiny_problem
    volatile: tuple[str, ...] = ("seconds",)

    def plugins(self) -> list[Any]:
        """A fresh plugin, followed by its companions."""
        made = self.factory()
        return list(made) if isinstance(made, (tuple, list)) else [made]

    @property
    def train_phase(self) -> Phase | str:
        """The phase that ``fit`` trains with."""
        return next((phase for phase in self.phases if phase.training), "train")

    @property
    def val_phase(self) -> Phase | str:
        """The phase that ``fit`` validates with."""
        fits = (p for p in self.phases if not p.training and not isinstance(p, PredictionPhase))
        return next(fits, "val")

    def bench(self, plugins: Iterable[Any], watch: Instrument | None = None, **options: Any) -> Bench:
        """A quiet learner for a fresh problem; ``watch`` is its instrument."""
        return Bench(self, self.problem(), watch, plugins=plugins, phases=self.phases, standard=False, **options)


class Bench(Learner):
    """A learner with the problem that it is for."""

    def __init__(self, case: Case, problem: Problem, watch: Instrument | None = None, **options: Any) -> None:
        self.case = case
        self.problem = problem
        if isinstance(watch, _AccessWatch):
            watch.learner = self  # before setup_model is called
        super().__init__(problem.model, problem.loss_fn, problem.optimizer, instrument=watch, **options)

    def train(self, epochs: int = 2, max_steps: int | None = None) -> None:
        """Fit with validation, on data that no earlier fit can have changed."""
        train, val = copy.deepcopy((self.problem.train, self.problem.val))
        phase, val_phase = self.case.train_phase, self.case.val_phase
        self.fit(train, val, epochs=epochs, max_steps=max_steps, phase=phase, val_phase=val_phase)

    def events(self) -> list[type[Event]]:
        """The events that come in every pass of the training phase."""
        events = dict.fromkeys(self._phase(self.case.train_phase).events())
        return [event for event in events if event not in (StepCancelled, UpdateSkipped)]


Check = Callable[[Case], list[str]]


def check_plugin(
    factory: Callable[[], Any],
    *,
    phases: Iterable[Phase] = (),
    problem: Callable[[], Problem] = tiny_problem,
    checks: Iterable[str] | None = None,
    skip: Iterable[str] = (),
    volatile: Iterable[str] = ("seconds",),
) -> None:
    """Run a plugin through the contract, and report every promise that it breaks.

    Each check is documented by its function in `CHECKS`. The generators of random numbers and the
    number of torch's threads are left as they were.

    Args:
        factory: Makes a fresh plugin at each call; or a tuple of it and the companions that it needs (such as a plugin
            that makes the metric which it reads).
        phases: Phases of your own that the plugin is for, besides the standard ones. Its fits use the first of them
            that trains.
        problem: Makes what is fitted, if the plugin or the phases need something else than `tiny_problem`.
        checks: Names of `CHECKS` to run; all by default.
        skip: Names of `CHECKS` not to run, for what a plugin cannot promise.
        volatile: Keys of the plugin's state whose values need not be repeatable, such as measured seconds.

    Raises:
        ContractError: The plugin breaks promises; there is one message for each.
        PluginError: A check has another name, or the factory returns the same plugin again.

    Example::

        check_plugin(lambda: (EarlyStopping("val/loss"), Metrics()))
    """
    names = list(CHECKS) if checks is None else list(checks)
    left_out = list(skip)
    for name in (*names, *left_out):
        if name not in CHECKS:
            raise PluginError(f"no check is called {name!r}{nearest(name, CHECKS)}; there are: {', '.join(CHECKS)}")
    case = Case(factory, tuple(phases), problem, tuple(volatile))
    plugin = case.plugins()[0]
    if plugin is case.plugins()[0]:
        raise PluginError(f"the factory returned {plugin!r} twice: it must make a fresh plugin at each call")
    broken: list[str] = []
    cause: BaseException | None = None
    for name in names:
        if name not in left_out:
            with _alone():
                try:
                    broken += [f"{name}: {message}" for message in CHECKS[name](case)]
                except Exception as error:
                    broken.append(f"{name}: {_describe(error)}")
                    cause = cause or error
    if broken:
        raise ContractError(plugin_name(plugin), broken) from cause


def _describe(error: BaseException) -> str:
    """An error with the place that the engine noted on it."""
    notes = [note for note in getattr(error, "__notes__", ()) if note.startswith("loopkit: ")]
    where = f" ({notes[0].removeprefix('loopkit: ')})" if notes else ""
    inner = f" [{'; '.join(map(_describe, error.exceptions))}]" if isinstance(error, BaseExceptionGroup) else ""
    return f"raised {type(error).__name__}: {error}{inner}{where}"


@contextmanager
def _alone() -> Iterator[None]:
    """Seed the generators, and use one thread, which is fastest for tiny tensors; put all back afterwards."""
    python = random.getstate()
    numpy = sys.modules["numpy"].random if "numpy" in sys.modules else None
    state = None if numpy is None else numpy.get_state()
    threads = torch.get_num_threads()
    with torch.random.fork_rng(devices=[]):
        try:
            torch.set_num_threads(1)
            _seed()
            yield
        finally:
            torch.set_num_threads(threads)
            random.setstate(python)
            if numpy is not None:
                numpy.set_state(state)


def _seed() -> None:
    torch.manual_seed(0)
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)


# The checks


def any_list_order(case: Case) -> list[str]:
    """The order of the plugin list does not matter: with the standard plugins around, each gives the same plan."""
    plans: list[str] = []
    for trial in range(4):
        given = case.plugins()
        words = {word for plugin in given for word in (plugin_name(plugin), provided(plugin))}
        standard = Learner(nn.Identity()).plugins.items()
        given += [p for name, p in standard if name not in words and provided(p) not in words]
        if trial == 1:
            given.reverse()
        elif trial > 1:
            random.Random(trial).shuffle(given)
        plans.append(str(case.bench(given).explain()))
        if plans[-1] != plans[0]:
            lines = zip_longest(plans[0].splitlines(), plans[-1].splitlines(), fillvalue="nothing")
            one, other = next((a.strip(), b.strip()) for a, b in lines if a != b)
            return [
                f"lists of the same plugins in another order give another plan ({one!r} became {other!r}): names and "
                f"declarations must follow from the plugin's arguments alone"
            ]
    return []


def declared_access(case: Case) -> list[str]:
    """Each hook declares what it reads and changes.

    Reads that are observed: attributes of the step and entries of ``learner.metrics``. Free to read: a step's
    ``index``, ``samples``, ``weight``, ``seed``, ``last``, ``optimizer_name``, and ``params`` and ``optimizer``,
    which are the way to the gradients; ``learner.progress``. Reads of parameters, gradients, hyperparameters, and of
    other plugins, cannot be observed.

    Changes that are observed: attributes set on the step or on the learner, tensors on the step changed in place,
    entries of ``learner.metrics``; and, by comparing before and after each call: parameters and buffers, gradients,
    hyperparameters (``optimizer.<key>``) and state of optimizers (``optimizer.state``), modes of modules,
    ``learner.progress`` and the generators of random numbers (``rng``). Free: ``step.seed``, votes and stop requests;
    ``learner.world`` for what provides ``"sync"``.
    In ``optimizer_step``, parameters and ``optimizer.state`` are free; in ``setup_model``, ``"model"`` covers them too.
    """
    plugins = case.plugins()
    watch = _AccessWatch(plugin_name(plugins[0]))
    learner = case.bench([*plugins, _Disturbance()], watch)
    try:
        learner.train()
        if isinstance(learner.model, nn.Module) and not case.phases:
            learner.predict(learner.problem.train)
    except StepStateError:
        pass  # another check reports it
    return list(watch.broken.values())


def fit_twice(case: Case) -> list[str]:
    """A second ``fit`` works like the first: ``fit_end`` comes once, and what was changed outside is put back."""
    plugins = case.plugins()
    calls = _Calls(plugins[0])
    learner = case.bench(plugins, calls)
    before = _environment(learner)
    threads = set(threading.enumerate())
    for count, which in enumerate(("first", "second"), 1):
        try:
            learner.train()
        except Exception as error:
            return [f"the {which} fit {_describe(error)}"]
        if broken := [*_left_behind(before, learner, None), *calls.unbalanced()]:
            return [f"after the {which} fit {message}" for message in broken]
        if count == 1:
            threads = set(threading.enumerate())  # one that serves all fits of the process may stay
    return [f"after the second fit {message}" for message in _threads_left(threads)]


def cancelled_step(case: Case) -> list[str]:
    """After another plugin has cancelled a step, an epoch or the fit, everything goes on."""
    trouble = _Trouble(last=False)
    learner = case.bench([*case.plugins(), trouble])
    before, threads = _environment(learner), set(threading.enumerate())
    cancels: list[tuple[str, type[Exception]]] = [
        (e.hook, CancelStep) for e in learner.events() if "step" in e.arguments
    ]
    cancels += [("step_begin", CancelEpoch), ("step_begin", CancelFit)]
    for hook, cancel in cancels:
        where = f"{cancel.__name__} raised in {hook} by another plugin"
        trouble.arm(hook, cancel)
        try:
            learner.train()
        except Exception as error:
            return [f"with {where}, the fit {_describe(error)}"]
        if broken := _left_behind(before, learner, threads):
            return [f"after {where}, {message}" for message in broken]
    return []


def error_elsewhere(case: Case) -> list[str]:
    """After an error in another plugin ``fit_end`` has come once, all is put back, and a new ``fit`` works.

    Put back are: grad mode, autocast, global settings of torch, modes and hooks of modules, ``requires_grad``, signal
    handlers, standard output and error, exception hooks, handlers of the root logger, threads.
    """
    for last in (False, True):
        trouble, plugins = _Trouble(last), case.plugins()
        calls = _Calls(plugins[0])
        learner = case.bench([*plugins, trouble], calls)
        before, threads = _environment(learner), set(threading.enumerate())
        for hook in ("fit_begin", *(event.hook for event in learner.events())):
            where = f"an error in {hook} of another plugin"
            trouble.arm(hook, _Deliberate)
            try:
                learner.train(epochs=1)
            except _Deliberate:
                pass
            except Exception as error:
                return [f"after {where}, the fit {_describe(error)}"]
            if broken := [*_left_behind(before, learner, threads), *calls.unbalanced()]:
                return [f"after {where}, {message}" for message in broken]
            trouble.disarm()
            try:
                learner.train(epochs=1)
            except Exception as error:
                return [f"after {where}, the next fit {_describe(error)}"]
            if broken := calls.unbalanced():
                return [f"in the next fit after {where}, {message}" for message in broken]
    return []


def state_round_trip(case: Case) -> list[str]:
    """Saved state is of the allowed kinds, is a copy, and going on from it is as if nothing had happened.

    Allowed are None, booleans, numbers, strings, lists, tuples, dicts with string or int keys, and tensors. The state
    is saved between two fits; together with the weights, optimizers, counters, metrics and generators, and the state
    of the companions, it goes into a fresh learner. A plugin without state passes.
    """
    plugins = case.plugins()
    plugin = plugins[0]
    methods = [name for name in ("state_dict", "load_state_dict") if callable(getattr(plugin, name, None))]
    if not methods:
        return []
    if len(methods) == 1:
        return [f"it has {methods[0]} alone: state_dict and load_state_dict go together"]

    straight = case.bench(plugins)
    straight.train()
    saved = {name: p.state_dict() for name, p in straight.plugins.items() if hasattr(p, "state_dict")}
    state = saved[plugin_name(plugin)]
    if broken := _not_allowed(state, "state_dict()"):
        return broken
    copied = copy.deepcopy(saved)
    rest = copy.deepcopy(
        (
            {name: model.state_dict() for name, model in straight.models.items()},
            {name: optimizer.state_dict() for name, optimizer in straight.optimizers.items()},
            straight.progress,
            straight.metrics,
        )
    )
    _seed()
    straight.train()
    broken = []
    if path := _difference(copied[plugin_name(plugin)], state, "state_dict()", ()):
        broken.append(
            f"what it returned was changed by later training, at {path}: return copies (tensor.clone(), list(...))"
        )

    fresh = case.plugins()
    resumed = case.bench(fresh)
    given = copy.deepcopy(copied)
    for name, other in resumed.plugins.items():
        if name in given:
            other.load_state_dict(given[name])
    again = copy.deepcopy(fresh[0].state_dict())
    if path := _difference(copied[plugin_name(plugin)], again, "state_dict()", case.volatile):
        return [*broken, f"a fresh plugin that has loaded the state does not return it again: {path} differs"]
    models, optimizers, progress, metrics = rest
    for name, model in resumed.models.items():
        model.load_state_dict(models[name])
    for name, optimizer in resumed.optimizers.items():
        optimizer.load_state_dict(optimizers[name])
    for counter in fields(progress):
        setattr(resumed.progress, counter.name, getattr(progress, counter.name))
    resumed.metrics.update(metrics)
    _seed()
    resumed.train()
    if path := _difference(copied[plugin_name(plugin)], given[plugin_name(plugin)], "state", ()):
        broken.append(f"what load_state_dict was given was changed by later training, at {path}: keep copies")
    if path := _difference(_weights(straight), _weights(resumed), "weights", ()):
        broken.append(f"going on from saved state gives other parameters than an uninterrupted run: {path} differs")
    if path := _difference(plugin.state_dict(), fresh[0].state_dict(), "state_dict()", case.volatile):
        broken.append(f"going on from saved state gives another state than an uninterrupted run: {path} differs")
    return broken


def no_graph_kept(case: Case) -> list[str]:
    """A step's graph is freed before the next step's forward pass, without the garbage collector.

    It is observed on what the models return; a phase that does not call them as a whole is not observed.
    """
    plugins = case.plugins()
    without = _graphs_alive(case, plugins[1:])
    kept = [
        step
        for step, (with_it, base) in enumerate(zip(_graphs_alive(case, plugins), without, strict=False))
        if with_it > base
    ]
    if not kept:
        return []
    return [
        f"it keeps the graph of step {kept[0] - 1} alive while step {kept[0]} runs: it holds step.loss, step.outputs "
        f"or the step itself. Keep step.loss.detach() or step.outputs.detach()"
    ]


def no_device_sync(case: Case) -> list[str]:
    """Nothing that belongs to a step waits for the device, but what the plugin declares.

    Observed in hooks that take a step, in their contexts and in ``move_batch``: calls that read a tensor on the host
    (`SYNCS`), and what has a size that depends on values. On the CPU these cost nothing, so a plugin that reads there
    alone, or must read, says so with a class attribute: ``syncs = ("backward_begin",)`` names the hooks in which it
    may, ``syncs = True`` is all of them. Not counted: the ``default`` of ``optimizer_step``, and
    `loopkit.plugins.late.LateValues`, which does not wait on an accelerator.
    """
    plugins = case.plugins()
    watch = _SyncWatch(plugins[0])
    case.bench([*plugins, _Disturbance()], watch).train()
    return [
        f"{hook} calls {call}, which waits for the device in every step. Keep the tensor and read it in epoch_end; or, "
        f'if it must be, say syncs = ("{hook}",) in the class'
        for hook, call in watch.found
    ]


def unknown_phases(case: Case) -> list[str]:
    """It works under phases that its author never saw, and with accumulation.

    They are: a phase without backward, one with two models, two optimizers and two backwards, one with two backwards
    for one update, one whose step puts nothing on the step, and prediction. A plugin that is for some phases only
    limits its hooks to them with ``@hookimpl(phase=...)``.
    """
    broken = []
    for phase in (_NoBackward(), _Adversarial(), _TwoBackwards(), _Bare(), PredictionPhase()):
        problem = tiny_problem()
        if isinstance(phase, _Adversarial):
            problem = _adversarial_problem(problem.train)
        try:
            learner = problem.learner(plugins=case.plugins(), phases=(*case.phases, phase), standard=False)
            with learner.fitting():
                for _ in range(2):
                    learner.run(phase, problem.train)
        except Exception as error:
            unset = next((e for e in (error, error.__cause__) if isinstance(e, StepStateError)), None)
            hint = "; ask with getattr(step, ..., None), or limit the hook with @hookimpl(phase=...)" if unset else ""
            what = phase.what if isinstance(phase, _Unknown) else "prediction (outputs alone)"
            broken.append(f"under {what}, the fit {_describe(unset or error)}{hint}")
    try:
        case.bench(case.plugins(), accumulate=3).train()
    except Exception as error:
        broken.append(f"with accumulate=3, the fit {_describe(error)}")
    return broken


def no_undeclared_effect(case: Case) -> list[str]:
    """A plugin that declares no change leaves the parameters bitwise as they are without it.

    Changes are what its hooks update or write of anything but metrics and its own state, what it ``owns``, and
    ``optimizer_step``. A plugin may end the fit earlier; one that cancels a step or votes to skip an update is not
    compared.
    """
    plugins = case.plugins()
    name, log = plugin_name(plugins[0]), EventLog("~log")
    learner = case.bench([*plugins, log])
    entries = [(hook, impl.entry) for hook in hooks() for impl in learner._registry.implementations(hook)]
    changed = [s for _, e in entries if e.plugin == name for s in (*e.updates, *e.writes)]
    changed += declared(plugins[0], "owns", getattr(plugins[0], "owns", ()))
    if any(state.split(".")[0] in EFFECTS for state in changed) or any(
        hook == "optimizer_step" and e.plugin == name for hook, e in entries
    ):
        return []
    _seed()
    learner.train()
    if any(line.endswith(("step_cancelled", "update_skipped")) for line in log.lines) or not learner.progress.steps:
        return []
    plain = case.bench(case.plugins()[1:])
    _seed()
    plain.train(max_steps=learner.progress.steps)
    if path := _difference(_weights(plain), _weights(learner), "weights", ()):
        return [
            f"it declares no change, yet a fit with it gives other parameters than one without it: {path} differs. "
            f'Declare what it changes (updates=("grads",), updates=("rng",), ...)'
        ]
    return []


CHECKS: dict[str, Check] = {
    check.__name__: check
    for check in (
        any_list_order,
        declared_access,
        fit_twice,
        cancelled_step,
        error_elsewhere,
        state_round_trip,
        no_graph_kept,
        no_device_sync,
        unknown_phases,
        no_undeclared_effect,
    )
}
"""Every check by name. A check takes a `Case` and returns a message for each broken promise."""

EFFECTS = STATES.keys() - {"metrics", "progress"}
"""The states whose declared change means that the parameters may come out differently."""

SYNCS = (
    "item",
    "tolist",
    "cpu",
    "numpy",
    "__array__",
    "__bool__",
    "__int__",
    "__float__",
    "__complex__",
    "__index__",
    "__contains__",
    "__format__",
    "__repr__",
    "is_nonzero",
    "nonzero",
    "argwhere",
    "masked_select",
    "unique",
    "unique_consecutive",
    "equal",
    "allclose",
)
"""The functions of torch that read values on the host."""


# Companions and phases that make trouble


class _Deliberate(Exception):
    """Raised on purpose."""

    def __init__(self) -> None:
        super().__init__("a deliberate error of a test")


class _Trouble:
    """Raise in one hook, once: at the first ``fit_begin``, or the second time that anything else comes."""

    def __init__(self, last: bool) -> None:
        self.name = "~trouble" if last else "!trouble"  # last or first in the order of names
        self.optional = tuple(Event.by_hook)
        self._armed = ""
        self._quiet = 0
        self._error: Callable[[], BaseException] = _Deliberate
        for hook in Event.by_hook:
            setattr(self, hook, self._implementation(hook))

    def arm(self, hook: str, error: Callable[[], BaseException]) -> None:
        self._armed, self._error = hook, error
        self._quiet = 0 if hook == "fit_begin" else 1

    def disarm(self) -> None:
        self._armed = ""

    def _implementation(self, hook: str) -> Callable[[], None]:
        def implementation() -> None:
            if hook == self._armed:
                if self._quiet:
                    self._quiet -= 1
                else:
                    self.disarm()
                    raise self._error()

        return hookimpl(implementation)


class _Disturbance:
    """Vote to skip one update and cancel one step, so that the rarer events come too."""

    name = "~disturbance"

    def __init__(self) -> None:
        self._updates = self._steps = 0

    @hookimpl
    def update_begin(self, step: Step) -> None:
        self._updates += 1
        if self._updates == 2:
            step.skip_update("a vote of a test")

    @hookimpl
    def step_begin(self) -> None:
        self._steps += 1
        if self._steps == 3:
            raise CancelStep("a cancel of a test")


TRAINING = (BackwardBegin, BackwardEnd, UpdateBegin, UpdateEnd, UpdateSkipped)


class _Unknown(Phase):
    training = True
    what = ""


class _NoBackward(_Unknown):
    name = "no_backward"
    what = "a phase without loss and backward"

    def step(self, learner: Learner, step: Step) -> None:
        step.inputs, step.targets = step.batch
        step.outputs = learner.model(step.inputs)  # type: ignore[operator]


class _Adversarial(_Unknown):
    name = "adversarial"
    what = "a phase with two models and optimizers (it sets critic_loss and generator_loss; no loss, no outputs)"
    emits = TRAINING

    def step(self, learner: Learner, step: Any) -> None:
        real, _ = step.batch
        critic, generator = learner.models["critic"], learner.models["generator"]
        fake = generator(real)
        step.critic_loss = critic(fake.detach()).mean() - critic(real).mean()
        step.backward(step.critic_loss, "critic")
        step.update("critic")
        step.generator_loss = -critic(fake).mean()
        step.backward(step.generator_loss, "generator")
        step.update("generator")


class _TwoBackwards(_Unknown):
    name = "two_backwards"
    what = "a phase with two backwards for one update"
    emits = TRAINING

    def step(self, learner: Learner, step: Step) -> None:
        step.inputs, step.targets = step.batch
        for _ in range(2):
            step.outputs = learner.model(step.inputs)  # type: ignore[operator]
            step.loss = learner.loss_fn(step.outputs, step.targets)
            step.backward(step.loss)
        step.update()


class _Bare(_Unknown):
    name = "bare"
    what = "a phase that puts nothing on its steps"
    emits = TRAINING

    def step(self, learner: Learner, step: Step) -> None:
        inputs, targets = step.batch
        step.backward(learner.loss_fn(learner.model(inputs), targets))  # type: ignore[operator]
        step.update()


# Declared access


class _AccessWatch:
    """An instrument that hands guarded views to one plugin, and compares before and after its calls."""

    def __init__(self, plugin: str) -> None:
        self.plugin = plugin
        self.learner: Learner
        self.broken: dict[tuple[str, str, str], str] = {}
        self._calls: list[Entry] = []
        self._hooks: list[str] = []
        self._learner_view: _LearnerView | None = None

    def __call__(self, hook: str, plugin: str, call: partial[Any]) -> Any:
        if plugin != self.plugin:
            return call()
        step = next((value for value in call.args if isinstance(value, Step)), None)
        with self.during(hook, step):
            result = call.func(*(self.view(value) for value in call.args))
        if result is not None and hook in ("step_context", "epoch_context"):
            return self._context(hook, step, result)
        if hook in ("setup_model", "move_batch") and not any(result is value for value in call.args):
            with self.entered(hook):
                self.change("model" if hook == "setup_model" else "batch")
        return result

    @contextmanager
    def _context(self, hook: str, step: Step | None, context: Any) -> Iterator[None]:
        """The plugin's context, with its two ends watched."""
        with self.during(hook, step):
            context.__enter__()
        try:
            yield
        except BaseException as error:
            with self.during(hook, step):
                context.__exit__(type(error), error, error.__traceback__)
            raise
        with self.during(hook, step):
            context.__exit__(None, None, None)

    @contextmanager
    def entered(self, hook: str) -> Iterator[None]:
        """Charge to this hook what happens inside."""
        entries = [impl.entry for impl in self.learner._registry.implementations(hook)]
        self._hooks.append(hook)
        self._calls.append(next(entry for entry in entries if entry.plugin == self.plugin))
        try:
            yield
        finally:
            self._calls.pop()
            self._hooks.pop()

    @contextmanager
    def during(self, hook: str, step: Step | None) -> Iterator[None]:
        """Charge to this hook what happens inside, and compare before and after."""
        before = _snapshot(self.learner)
        tensors = [] if step is None else _step_tensors(step)
        with self.entered(hook):
            yield
            after = _snapshot(self.learner)
            for key in (before.keys() | after.keys()) - {
                k for k in before.keys() & after.keys() if before[k] == after[k]
            }:
                self.change(*key[0])
            for tensor, version, states in tensors:
                if tensor._version != version:
                    self.change(*states)

    def view(self, value: Any) -> Any:
        """What the plugin gets in place of a learner or a step."""
        if value is self.learner:
            self._learner_view = self._learner_view or _LearnerView(self)
            return self._learner_view
        if isinstance(value, Step):
            return vars(value).setdefault("_view", _StepView(value, self))
        return value

    def read(self, state: str) -> None:
        """The plugin reads this state now."""
        if self._calls:
            entry = self._calls[-1]
            if not _covered(state, (*entry.reads, *entry.updates, *entry.writes)):
                self._break("reads", state, f'reads=("{state}",)')

    def change(self, *states: str) -> None:
        """The plugin changes state that has these names now; one of them must be declared."""
        if not self._calls:
            return
        entry, hook = self._calls[-1], self._hooks[-1]
        declared = (*entry.updates, *entry.writes)
        if hook == "optimizer_step":
            declared += ("params", "optimizer.state")
        elif hook == "setup_model" and "model" in declared:
            declared += ("params", "buffers", "optimizer.state")
        if not any(_covered(state, declared) for state in states):
            how = "writes" if states[0].startswith("metrics.") else "updates"
            self._break("changes", states[0], f'{how}=("{states[0]}",)')

    def set_on_learner(self, name: str) -> None:
        """The plugin sets an attribute of the learner now."""
        state = {"models": "model", "optimizers": "optimizer"}.get(name, name)
        if state in ("model", "optimizer", "metrics", "progress"):
            self.change(state)
        elif self._calls and (name, self._calls[-1].provides) != ("world", "sync"):
            self._break("changes", f"learner.{name}", "an attribute of the plugin itself instead")

    def _break(self, verb: str, state: str, remedy: str) -> None:
        hook = self._hooks[-1]
        message = f"{hook} of plugin {self.plugin!r} {verb} {state!r}, which it does not declare: add {remedy}"
        self.broken.setdefault((hook, verb, state), message)


def _covered(state: str, names: Iterable[str]) -> bool:
    """Whether one of the names is this state, or above it."""
    have = state.split(".")
    for name in names:
        want = name.split(".")
        if name == EVERYTHING:
            return True
        if len(want) <= len(have) and all(fnmatchcase(a, b) for a, b in zip(have, want, strict=False)):
            return True
    return False


DOCUMENTED = ("batch", "inputs", "targets", "outputs", "loss")
HANDLES = ("index", "samples", "weight", "seed", "optimizer_name", "optimizer", "params", "_epoch")


def _state_of(attribute: str) -> str:
    return attribute if attribute in DOCUMENTED else f"step.{attribute}"


class _StepView(Step):
    """A step that tells the watch what is read and set."""

    def __init__(self, step: Step, watch: _AccessWatch) -> None:
        object.__setattr__(self, "_seen", (step, watch))

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("__") and name != "__dict__":
            return object.__getattribute__(self, name)
        step, watch = object.__getattribute__(self, "_seen")
        if name == "__dict__":
            return _Entries(vars(step), watch, _state_of)
        if name not in HANDLES and not hasattr(Step, name):
            watch.read(_state_of(name))
        return getattr(step, name)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            return getattr(object.__getattribute__(self, "_seen")[0], name)  # raises again, with the step's message

    def __setattr__(self, name: str, value: Any) -> None:
        step, watch = object.__getattribute__(self, "_seen")
        if name != "seed":
            watch.change(_state_of(name))
        setattr(step, name, value)

    def __delattr__(self, name: str) -> None:
        step, watch = object.__getattribute__(self, "_seen")
        watch.change(_state_of(name))
        delattr(step, name)


class _LearnerView(Learner):
    """A learner that tells the watch what is read in its metrics and what is set on it."""

    def __init__(self, watch: _AccessWatch) -> None:
        entries = _Entries(watch.learner.metrics, watch, lambda key: f"metrics.{key}")
        object.__setattr__(self, "_seen", (watch, entries))

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("__"):
            return object.__getattribute__(self, name)
        watch, entries = object.__getattribute__(self, "_seen")
        if name == "metrics":
            entries.data = watch.learner.metrics
            return entries
        return getattr(watch.learner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        watch = object.__getattribute__(self, "_seen")[0]
        watch.set_on_learner(name)
        setattr(watch.learner, name, value)


class _Entries(UserDict[str, Any]):
    """A mapping that tells the watch what is read and set in it."""

    def __init__(self, data: dict[str, Any], watch: _AccessWatch, state: Callable[[str], str]) -> None:
        self.data = data
        self._watch = watch
        self._state = state

    def __contains__(self, key: object) -> bool:
        self._watch.read(self._state(str(key)))
        return key in self.data

    def __getitem__(self, key: str) -> Any:
        self._watch.read(self._state(key))
        return self.data[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._watch.change(self._state(key))
        self.data[key] = value

    def __delitem__(self, key: str) -> None:
        self._watch.change(self._state(key))
        del self.data[key]

    def copy(self) -> dict[str, Any]:  # type: ignore[override]
        return dict(self.items())


class _Bits:
    """The bytes of a tensor, which a ``nan`` does not make unequal."""

    def __init__(self, tensor: Tensor) -> None:
        self._shape, self._dtype = tensor.shape, tensor.dtype
        self._bytes = tensor.detach().clone().reshape(-1).view(torch.uint8) if tensor.numel() else None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Bits) or (self._shape, self._dtype) != (other._shape, other._dtype):
            return False
        return self._bytes is None or torch.equal(self._bytes, other._bytes)  # type: ignore[arg-type]

    __hash__ = None  # type: ignore[assignment]


Key = tuple[tuple[str, ...], str]


def _print(tensor: Tensor) -> Any:
    """What changes when the tensor is changed, or replaced."""
    version = 0 if tensor.is_inference() else tensor._version
    if tensor.layout is not torch.strided:
        return (id(tensor), version)
    return (id(tensor), tensor.data_ptr(), version, _Bits(tensor))


@torch.no_grad()
def _snapshot(learner: Learner) -> dict[Key, Any]:
    """The state that is compared, by the names under which a change of it may be declared."""
    found: dict[Key, Any] = {}
    params: dict[str, Tensor] = {}
    for name, module in learner.models.items():
        params.update({f"{name}.{key}": p for key, p in module.named_parameters()})
        for key, buffer in module.named_buffers():
            found[("buffers",), f"{name}.{key}"] = _print(buffer)
        found[("model",), name] = [(id(m), m.training) for m in module.modules()]
    for name, optimizer in learner.optimizers.items():
        found[("optimizer",), f"{name} groups"] = [[id(p) for p in g["params"]] for g in optimizer.param_groups]
        for number, group in enumerate(optimizer.param_groups):
            for key, value in group.items():
                if key != "params":
                    label = str(group.get("name", number)).replace(".", "_")
                    states = (f"optimizer.{key}", f"optimizer.{key}.{name}.{label}")
                    for i, item in enumerate(value if isinstance(value, (tuple, list)) else [value]):
                        item = _Bits(item) if isinstance(item, Tensor) else copy.deepcopy(item)
                        found[(*states, f"{states[1]}.{i}"), f"{name} {number}"] = item
            params.update({f"{name} {number} {i}": p for i, p in enumerate(group["params"])})
        for index, state in enumerate(optimizer.state.values()):
            for key, value in state.items():
                value = _Bits(value) if isinstance(value, Tensor) and value.layout is torch.strided else id(value)
                found[("optimizer.state",), f"{name} {index} {key}"] = value
    seen: set[int] = set()
    for name, p in params.items():
        if id(p) not in seen:
            seen.add(id(p))
            found[("params",), name] = _print(p)
            found[("params", "model"), name] = p.requires_grad
            found[("grads",), name] = None if p.grad is None else _print(p.grad)
    found[("progress",), ""] = astuple(learner.progress)
    found[("rng",), "torch"] = _Bits(torch.get_rng_state())
    found[("rng",), "python"] = random.getstate()
    if "numpy" in sys.modules:
        kind, keys, *rest = sys.modules["numpy"].random.get_state()
        found[("rng",), "numpy"] = (kind, keys.tobytes(), *rest)
    return found


def _tensors(value: Any, depth: int = 3) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif depth:
        for _, part in parts(value):
            yield from _tensors(part, depth - 1)


def _step_tensors(step: Step) -> list[tuple[Tensor, int, tuple[str, ...]]]:
    """The tensors on a step, their versions and the states that they belong to, the most special name first."""
    found: dict[int, tuple[Tensor, list[str]]] = {}
    names = [name for name in vars(step) if name not in HANDLES and not name.startswith("_")]
    for name in sorted(names, key=lambda name: name == "batch"):
        for tensor in _tensors(vars(step)[name]):
            if not tensor.is_inference():
                found.setdefault(id(tensor), (tensor, []))[1].append(_state_of(name))
    return [(tensor, tensor._version, tuple(states)) for tensor, states in found.values()]


# What a fit must put back


class _Calls:
    """An instrument that counts the fits that one plugin has begun and ended."""

    def __init__(self, plugin: Any) -> None:
        self.plugin = plugin
        self.begun = self.ended = 0

    def __call__(self, hook: str, plugin: str, call: partial[Any]) -> Any:
        mine = plugin == plugin_name(self.plugin)
        self.ended += mine and hook == "fit_end"
        result = call()
        self.begun += mine and hook == "fit_begin"
        return result

    def unbalanced(self) -> list[str]:
        """A message if the last fit had not one ``fit_end``, or none where no ``fit_begin`` was completed."""
        due = 1 if self.begun or not hasattr(self.plugin, "fit_begin") else 0
        ended, self.begun, self.ended = self.ended, 0, 0
        if ended != due and hasattr(self.plugin, "fit_end"):
            return [f"its fit_end was called {ended} times, not {due}"]
        return []


def _environment(learner: Learner) -> dict[str, Any]:
    """What a fit must leave as it found it."""
    modules = [(name, m) for top, model in learner.models.items() for name, m in model.named_modules(prefix=top)]
    params = [(f"{top}.{n}", p) for top, model in learner.models.items() for n, p in model.named_parameters()]
    return {
        "grad mode": torch.is_grad_enabled(),
        "autocast on the CPU": torch.is_autocast_enabled("cpu"),
        "inference mode": torch.is_inference_mode_enabled(),
        "the default dtype": torch.get_default_dtype(),
        "the number of threads of torch": torch.get_num_threads(),
        "torch.use_deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "anomaly detection": torch.is_anomaly_enabled(),
        **{f"the mode (training) of module {name!r}": module.training for name, module in modules},
        **{f"the number of hooks on module {name!r}": _count_hooks(module) for name, module in modules},
        **{f"requires_grad of parameter {name!r}": p.requires_grad for name, p in params},
        **{f"the handler of {number!s}": signal.getsignal(number) for number in signal.valid_signals()},
        "sys.stdout": sys.stdout,
        "sys.stderr": sys.stderr,
        "sys.excepthook": sys.excepthook,
        "threading.excepthook": threading.excepthook,
        "the root logger's handlers": list(logging.getLogger().handlers),
    }


def _count_hooks(module: nn.Module) -> int:
    return sum(
        len(getattr(module, kind))
        for kind in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    )


def _left_behind(before: dict[str, Any], learner: Learner, threads: set[threading.Thread] | None) -> list[str]:
    """One message for each thing that is not as before; the next checks find it as before."""
    after = _environment(learner)
    changed = [name for name in before if after.get(name) is not before[name] and after.get(name) != before[name]]
    for name in changed:
        if name == "grad mode":
            torch.set_grad_enabled(before[name])
        elif name == "autocast on the CPU":
            torch.set_autocast_enabled("cpu", before[name])
        elif name == "the default dtype":
            torch.set_default_dtype(before[name])
        elif name == "the number of threads of torch":
            torch.set_num_threads(before[name])
        elif name == "torch.use_deterministic_algorithms":
            torch.use_deterministic_algorithms(before[name])
        elif name == "anomaly detection":
            torch.autograd.set_detect_anomaly(before[name])
        elif name.startswith("the handler of "):
            number = next(n for n in signal.valid_signals() if name == f"the handler of {n!s}")
            signal.signal(number, before[name])
        elif name.startswith("sys."):
            setattr(sys, name.removeprefix("sys."), before[name])
        elif name == "threading.excepthook":
            threading.excepthook = before[name]
        elif name == "the root logger's handlers":
            logging.getLogger().handlers[:] = before[name]
    broken = [f"{name} is {after.get(name)!r}; it was {before[name]!r} before the fit" for name in changed]
    return broken if threads is None else broken + _threads_left(threads)


THREAD_SECONDS = 0.5


def _threads_left(before: set[threading.Thread]) -> list[str]:
    """A message for each thread that is there now and was not before, and does not end soon."""
    until = time.monotonic() + THREAD_SECONDS
    for thread in set(threading.enumerate()) - before:
        thread.join(max(until - time.monotonic(), 0))
    left = set(threading.enumerate()) - before
    return [f"a thread is left running: {thread.name!r}; end it in fit_end" for thread in left]


# State


def _not_allowed(value: Any, path: str) -> list[str]:
    """A message for each value of another kind than those that can be saved."""
    if isinstance(value, Tensor):
        if value.grad_fn is not None:
            return [f"{path} is a tensor with a graph: return it .detach()ed and cloned"]
        return []
    if value is None or type(value) in (bool, int, float, str):
        return []
    if isinstance(value, dict):
        found = [
            f"{path} has the key {key!r}: keys are strings or ints" for key in value if type(key) not in (str, int)
        ]
        return found + [m for key, item in value.items() for m in _not_allowed(item, f"{path}[{key!r}]")]
    if type(value) in (list, tuple):
        return [m for i, item in enumerate(value) for m in _not_allowed(item, f"{path}[{i}]")]
    kind = type(value)
    return [
        f"{path} is {kind.__module__}.{kind.__qualname__}: state is made of None, bool, int, float, str, list, tuple, "
        f"dict and tensors"
    ]


def _difference(one: Any, other: Any, path: str, volatile: Sequence[str]) -> str:
    """Where two states differ first, or an empty string."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return "" if _Bits(one) == _Bits(other) else path
    if isinstance(one, dict) and isinstance(other, dict):
        for key in [*one, *other]:
            if key not in one or key not in other:
                return f"{path}[{key!r}]"
            if key not in volatile and (found := _difference(one[key], other[key], f"{path}[{key!r}]", volatile)):
                return found
        return ""
    if type(one) is not type(other):
        return path
    if isinstance(one, (list, tuple)):
        for i, (a, b) in enumerate(zip(one, other, strict=False)):
            if found := _difference(a, b, f"{path}[{i}]", volatile):
                return found
        return "" if len(one) == len(other) else f"the length of {path}"
    return "" if one == other or (one != one and other != other) else path


def _weights(learner: Learner) -> dict[str, Tensor]:
    """Parameters and buffers by name."""
    return {f"{name}.{k}": v for name, model in learner.models.items() for k, v in model.state_dict().items()}


# Graphs


class _Token:
    """Lives as long as the graph of one forward pass."""


class _Mark(torch.autograd.Function):
    """The identity, whose node in the graph holds a token."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, token: _Token) -> Tensor:
        ctx.token = token
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], None


def _graphs_alive(case: Case, plugins: Sequence[Any]) -> list[int]:
    """For each forward pass of a fit, how many graphs of earlier ones are alive when it starts to return."""
    tokens: list[weakref.ref[_Token]] = []
    counts: list[int] = []

    def mark(module: nn.Module, inputs: Any, outputs: Any) -> Any:
        if not isinstance(outputs, Tensor) or not outputs.requires_grad:
            return outputs
        counts.append(sum(token() is not None for token in tokens))
        token = _Token()
        tokens.append(weakref.ref(token))
        return _Mark.apply(outputs, token)  # type: ignore[no-untyped-call]

    learner = case.bench(plugins)
    for model in learner.models.values():
        model.register_forward_hook(mark)
    collects = gc.isenabled()
    gc.disable()
    try:
        _seed()
        learner.train()
    finally:
        if collects:
            gc.enable()
    return counts


# Device syncs


class _SyncWatch(TorchFunctionMode):
    """An instrument that notes what one plugin reads on the host in hooks that belong to a step."""

    def __init__(self, plugin: Any) -> None:
        super().__init__()
        self.plugin = plugin_name(plugin)
        syncs = getattr(plugin, "syncs", ())
        known = hooks()
        self._watched = {
            name
            for name, hook in known.items()
            if ("step" in hook.arguments or name == "move_batch") and syncs is not True and name not in syncs
        }
        self._hook = ""
        self.found: dict[tuple[str, str], None] = {}

    def __call__(self, hook: str, plugin: str, call: partial[Any]) -> Any:
        if plugin != self.plugin or hook not in self._watched:
            return call()
        args = [self._unwatched(value) if hook == "optimizer_step" else value for value in call.args]
        with self._during(hook):
            result = call.func(*args)
        return self._context(hook, result) if hook == "step_context" and result is not None else result

    @contextmanager
    def _during(self, hook: str) -> Iterator[None]:
        outer, self._hook = self._hook, hook
        try:
            with self:
                yield
        finally:
            self._hook = outer

    @contextmanager
    def _context(self, hook: str, context: Any) -> Iterator[None]:
        with self._during(hook):
            context.__enter__()
        try:
            yield
        except BaseException as error:
            with self._during(hook):
                context.__exit__(type(error), error, error.__traceback__)
            raise
        with self._during(hook):
            context.__exit__(None, None, None)

    def _unwatched(self, value: Any) -> Any:
        """The default step and the closure, which are not the plugin's doing."""
        if not callable(value) or isinstance(value, (Learner, Phase, Step, torch.optim.Optimizer)):
            return value

        def run(*args: Any) -> Any:
            with torch._C.DisableTorchFunction():
                return value(*args)

        return run

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        kwargs = kwargs or {}
        to_host = name == "to" and "cpu" in [v for v in (*args[1:2], kwargs.get("device")) if isinstance(v, str)]
        masks = name == "__getitem__" and any(t.dtype is torch.bool and t.ndim for t in _tensors(args[1:]))
        if (name in SYNCS or to_host or masks or (name == "where" and len(args) == 1)) and not _is_late():
            shown = f"bool(), int() or float() ({name})" if name.startswith("__") and name != "__getitem__" else name
            shown = "tensor[mask]" if masks else shown
            self.found[self._hook, f"{shown}() on a tensor" if shown.isidentifier() else shown] = None
        return func(*args, **kwargs)


def _is_late() -> bool:
    """Whether the call comes from values that are read when they have arrived."""
    frame = sys._getframe(2)
    names: set[str] = set()
    while frame is not None and not (frame.f_globals is globals() and frame.f_code.co_name == "__call__"):
        if frame.f_globals.get("__name__") == "loopkit.plugins.late":
            names.add(frame.f_code.co_name)
        if frame.f_back is None:
            break
        frame = frame.f_back
    return bool(names) and not names & {"wait", "read"}
