"""The hooks that plugins can implement, and ``hookimpl``, which marks an implementation.

Each event of `loopkit.events` is a hook of the same name in snake case. The hooks below are the other three
kinds: contexts, replacements and transforms; and an event of no phase, ``log_value``. An implementation takes only the
arguments it needs, by name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache, lru_cache
from types import BuiltinFunctionType, MethodType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

import pluggy
import torch
from torch import nn

from loopkit.base.notes import locate
from loopkit.errors import PluginError
from loopkit.events import Event
from loopkit.phases import Phase

if TYPE_CHECKING:
    from loopkit.engine.life.epoch import Epoch
    from loopkit.engine.step.step import Step
    from loopkit.learner import Learner
    from loopkit.logs.record import Record

PROJECT = "loopkit"
OWN_UPDATES = "own_updates"
"""Instead of a class of phases: phases that update in their own way."""
TRAINING = "training"
"""Instead of a class of phases: all that train, whatever their class."""
F = TypeVar("F", bound=Callable[..., Any])
Declaration = tuple[str, ...] | Callable[[Any], tuple[str, ...]]
"""State or plugin names, or a function of the plugin that returns them, called when the plugin is added."""
PhaseChoice = type[Phase] | str | tuple[type[Phase] | str, ...] | None
"""The phases in which a hook is called: of these classes or names, or all that train (``"training"``), or all."""

STATES = {
    "batch": "the batch of the loader",
    "inputs": "the model's inputs",
    "targets": "the targets that the loss compares with the outputs",
    "outputs": "the return value of the model",
    "loss": "the scalar that backward starts from",
    "step": "any other attribute of a step, as `step.<attribute>`",
    "grads": "the gradients of an update; `grads.scale` and `grads.sync` are owned by one plugin each",
    "params": "the values of the parameters, which an update changes",
    "buffers": "the values of the buffers, such as running statistics, which a forward changes",
    "model": "the modules themselves, without these values: their device, mode, wrapping",
    "optimizer": "the optimizers; `optimizer.lr` and other hyperparameters are under it",
    "metrics": "`learner.metrics`, as `metrics.<phase>/<metric>`",
    "progress": "`learner.progress`: counts of epochs, steps, updates and samples",
    "rng": "the random generators",
    "data": "the position and order of the loaders",
    "trainable": "which parameters require grad; `trainable.<pattern>` for the ones that match a pattern",
    "weights": "weights that replace the models' own, such as an average; `weights.<phase>` in the epochs of a phase",
}
"""The names of state that ``reads``, ``updates``, ``writes`` and ``owns`` can hold; each covers all under it."""

PROVIDES = {
    "average": "averaged weights",
    "checkpoint": "saving and restoring of the run",
    "clip": "bounded gradients",
    "compile": "a compiled model",
    "device": "models and batches on a device",
    "early_stopping": "a stop of the fit by a criterion",
    "freeze": "parameters that are not trained",
    "history": "a record of the metrics",
    "log": "log files and servers",
    "memory_format": "models and batches in another memory layout",
    "metrics": "metrics of each epoch",
    "mixed_precision": "autocast and loss scaling",
    "noise": "noise on the gradients",
    "non_finite": "a guard against infinite and undefined numbers",
    "norm": "the norms of the gradients",
    "observer": "a look at the run; training is the same without it",
    "progress": "a display of the run's progress",
    "sanity_check": "checks before anything is trained",
    "schedule": "hyperparameters as functions of the progress",
    "sync": "gradients averaged over processes",
}
"""Roles of plugins (``provides``); you can use others."""


@dataclass(frozen=True)
class Target:
    """One plugin's implementation of one hook, an argument of ``instrument_call``."""

    phase: str
    """The phase in whose plan it stands; empty for hooks that belong to no phase."""
    hook: str
    plugin: str
    function: Callable[..., Any]
    """The implementation itself."""
    arguments: tuple[str, ...]
    """The arguments of the hook that the implementation takes, in its order."""


class Hooks:
    """The contexts, replacements and transforms, and the event of no phase, as pluggy reads them."""

    def epoch_context(self, learner: Learner, phase: Phase, epoch: Epoch) -> AbstractContextManager[Any] | None:
        """A fresh context manager around one epoch of a phase, entered before ``epoch_begin``, or None.

        It is left after ``epoch_end`` and before ``phase_end``, whatever was raised inside.
        """

    def step_context(
        self, learner: Learner, phase: Phase, epoch: Epoch, step: Step
    ) -> AbstractContextManager[Any] | None:
        """A fresh context manager around the phase's ``step``, entered after ``step_begin``, or None.

        It is left before ``step_end``, whatever was raised inside.
        """

    def optimizer_step(
        self,
        learner: Learner,
        phase: Phase,
        epoch: Epoch,
        step: Step,
        optimizer: torch.optim.Optimizer,
        closure: Callable[[], Any] | None,
        default: Callable[[], Any],
    ) -> None:
        """Replacement: take one optimizer step between ``update_begin`` and ``update_end``.

        At most one plugin implements it. Without one the engine runs ``default()``, which is
        ``optimizer.step(closure)``. Call ``step.skip_update(reason)`` if the parameters were left unchanged.
        """

    def take_step(self, learner: Learner, phase: Phase, epoch: Epoch, step: Step, default: Callable[[], None]) -> None:
        """Replacement: process one batch instead of the phase's ``step``, between ``step_begin`` and ``step_end``.

        At most one plugin implements it. ``default()`` runs the phase's own ``step``. A plugin that does not call it
        gives its results to ``step.applied(values, grads, updated)``; ``step.window_state`` has the due updates.
        """

    def setup_model(self, learner: Learner, name: str, model: nn.Module) -> nn.Module:
        """Transform: move, freeze, compile or wrap one of the learner's modules; return it or its wrapper.

        Called once per module, when the learner is built or the plugin is added, before an optimizer factory
        is called. ``name`` is the module's key, ``"model"`` if there is only one.
        """
        return model

    def setup_optimizer(self, learner: Learner, name: str, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Transform: change, wrap or replace one of the learner's optimizers; return it, or what stands in its place.

        Called once per optimizer, when the learner is built, after ``setup_model`` and after a factory has made it, and
        again by ``learner.set_optimizer`` or when the plugin is added. ``name`` is its key, ``"optimizer"`` if there is
        only one.
        """
        return optimizer

    def setup_data(self, learner: Learner, phase: Phase, data: Any) -> Any:
        """Transform: return the data of an epoch, or a replacement, such as this process's shard.

        Called with an iterable of batches before its length is asked for, once a fit, or at the begin of every
        epoch of ``learner.run``: give the same object each time, and data that is your own already as it is.
        """
        return data

    def move_batch(self, learner: Learner, phase: Phase, batch: Any) -> Any:
        """Transform: return the batch, or a changed one. Runs before ``step_begin``."""
        return batch

    def instrument_call(self, learner: Learner, target: Target, call: Callable[..., Any]) -> Callable[..., Any]:
        """Transform: return the function to call instead of another plugin's hook, for example to measure it.

        Called for each hook of each other plugin when the plan is made: in a step only the returned function has a
        cost. It gets ``target.arguments`` by position, and must return the result of ``call``, or raise its error.
        """
        return call

    def log_value(self, learner: Learner, record: Record) -> None:
        """A phase or a plugin called ``learner.log``, in an epoch or between two.

        ``record.value`` is a number, a scalar tensor that may still be computed on its device, or a kind of
        `loopkit.logs`. It comes many times in a step: keep the record, and look at it later.
        """


Kind = Literal["event", "context", "replacement", "transform"]


@dataclass(frozen=True)
class Hook:
    """One hook: its name, kind and the arguments that an implementation can take."""

    name: str
    kind: Kind
    arguments: tuple[str, ...]
    doc: str


_OTHERS: dict[str, Kind] = {
    "epoch_context": "context",
    "step_context": "context",
    "optimizer_step": "replacement",
    "take_step": "replacement",
    "setup_model": "transform",
    "setup_optimizer": "transform",
    "setup_data": "transform",
    "move_batch": "transform",
    "instrument_call": "transform",
    "log_value": "event",
}


def hooks() -> dict[str, Hook]:
    """Every hook by name: the events of phases and fits known so far, then the others."""
    return _hooks(tuple(Event.by_hook.values()))


@lru_cache(maxsize=1)
def _hooks(events: tuple[type[Event], ...]) -> dict[str, Hook]:
    found = {event.hook: Hook(event.hook, "event", event.arguments, event.__doc__ or "") for event in events}
    for name, kind in _OTHERS.items():
        function = getattr(Hooks, name)
        arguments = function.__code__.co_varnames[1 : function.__code__.co_argcount]
        found[name] = Hook(name, kind, arguments, function.__doc__ or "")
    return found


def methods(plugin: Any) -> dict[str, Any]:
    """The functions of a plugin, or of its class, by name in order; no property of it is run."""
    owners = plugin.__mro__[:-1] if isinstance(plugin, type) else (plugin, *type(plugin).__mro__[:-1])  # not object
    found = {name: each for owner in reversed(owners) for name, each in getattr(owner, "__dict__", {}).items()}
    bound = staticmethod, classmethod
    plain = {name: each.__func__ if isinstance(each, bound) else each for name, each in sorted(found.items())}
    return {name: each for name, each in plain.items() if _is_routine(type(each))}


def _is_routine(kind: type) -> bool:
    """Whether objects of this type are routines, as ``inspect.isroutine``, in a tenth of the time."""
    return kind in (BuiltinFunctionType, MethodType) or (hasattr(kind, "__get__") and not hasattr(kind, "__set__"))


def plain_arguments(method: Any) -> tuple[str, ...]:
    """The arguments of a plain function or method, in a tenth of the time that ``inspect.signature`` takes.

    None of one with defaults, ``*args`` or the like, or with its own signature: use ``inspect`` then.
    """
    code = getattr(method, "__code__", None)  # a method has its function's
    if code is None or method.__defaults__ or not vars(method).keys().isdisjoint(("__wrapped__", "__signature__")):
        return ()
    others = code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS)
    if others or code.co_posonlyargcount or code.co_kwonlyargcount:
        return ()
    return code.co_varnames[inspect.ismethod(method) : code.co_argcount]  # type: ignore[no-any-return]


def implemented(plugin: Any) -> list[str]:
    """The names of the hooks that a plugin has, or its class can have: marked, and wanted by ``hookimpl(when=)``."""
    return [name for name, method in methods(plugin).items() if is_wanted(method, plugin)]


def has_hooks(plugin: Any) -> bool:
    """Whether a plugin, or its class, has marked functions, whether or not its options need them."""
    return any(hasattr(method, "loopkit_options") for method in methods(plugin).values())


def is_wanted(method: Any, plugin: Any) -> bool:
    """Whether a function is marked as a hook's implementation, and the plugin wants it; a class has no options yet."""
    options: HookOptions | None = getattr(method, "loopkit_options", None)
    if options is None:
        return False
    if options.when is None or isinstance(plugin, type):
        return True
    try:
        return bool(options.when(plugin))
    except Exception as error:
        locate(error, f"in hookimpl(when=...) of {type(plugin).__name__}.{method.__name__}")
        raise


@cache
def specification(hooks: tuple[Hook, ...]) -> Any:
    """An object that pluggy's ``add_hookspecs`` accepts, with these hooks."""
    lines = [f"def {hook.name}({', '.join(('self', *hook.arguments))}): ..." for hook in hooks]
    functions: dict[str, Any] = {}
    exec("\n".join(lines), {}, functions)
    for hook in hooks:
        pluggy.HookspecMarker(PROJECT)(functions[hook.name]).__doc__ = hook.doc
    return type("Specification", (), functions)()


def concerns(chosen: PhaseChoice, phase: Phase) -> bool:
    """Whether a hook that was limited to the chosen phases is called in this one."""
    if chosen is None:
        return True
    return any(_is_of(kind, phase) for kind in (chosen if isinstance(chosen, tuple) else (chosen,)))


def _is_of(kind: type[Phase] | str, phase: Phase) -> bool:
    """Whether a phase is of this class, or has this name."""
    if not isinstance(kind, str):
        return isinstance(phase, kind)
    if kind == OWN_UPDATES:
        return phase.training and phase.own_updates
    return phase.training if kind == TRAINING else phase.name == kind


@dataclass(frozen=True)
class HookOptions:
    """The arguments of `hookimpl`."""

    phase: PhaseChoice
    reads: Declaration
    updates: Declaration
    writes: Declaration
    before: Declaration
    after: Declaration
    traced: tuple[str, ...] | None
    when: Callable[[Any], bool] | None = None


@overload
def hookimpl(function: F, /) -> F: ...
@overload
def hookimpl(
    *,
    phase: PhaseChoice = None,
    reads: Declaration = (),
    updates: Declaration = (),
    writes: Declaration = (),
    before: Declaration = (),
    after: Declaration = (),
    traced: tuple[str, ...] | None = None,
    when: Callable[[Any], bool] | None = None,
    **refused: Any,
) -> Callable[[F], F]: ...
def hookimpl(
    function: F | None = None,
    /,
    *,
    phase: PhaseChoice = None,
    reads: Declaration = (),
    updates: Declaration = (),
    writes: Declaration = (),
    before: Declaration = (),
    after: Declaration = (),
    traced: tuple[str, ...] | None = None,
    when: Callable[[Any], bool] | None = None,
    **refused: Any,
) -> F | Callable[[F], F]:
    """Mark a method as a hook's implementation.

    Args:
        phase: Phases in which it is called: ``"training"`` for all that train, ``"own_updates"`` for all that update in
            their own way, a name, such as ``"val"``, a class, which includes its subclasses, or a tuple of these. By
            default it is called in all phases.
        reads: State that it looks at, as dotted names (`STATES`, or ``"<plugin>.<field>"``); ``"*"`` is everything.
        updates: State that it changes, starting from the existing value: it runs after writers and before readers.
        writes: State that it creates or makes valid: it runs before all others.
        before: Plugins, by name or role (``provides``), that run after this one in this event.
        after: Plugins, by name or role, that run before this one in this event.
        traced: Whether it can be recorded once and replayed: it computes tensors only from tensors, reads none of their
            values, and does not depend on anything that changes from step to step. The names are the attributes of the
            plugin that it sets, tensors or dicts of them. None: it must be called.
        when: A function of the plugin, called when the plugin is added: whether its options need this hook. Without
            the hook, steps cost nothing, and its declarations do not count. By default the hook is always there.

    Raises:
        PluginError: An option of pluggy's that would order or wrap hooks by other means, or one of another kind.

    Example::

        class ClipValue:
            provides = "clip"

            @hookimpl(updates=("grads",))
            def update_begin(self, step):
                torch.nn.utils.clip_grad_value_(step.params, 1.0)
    """
    if refused:
        option = sorted(refused)[0]
        instead = "a step_context or epoch_context" if "wrapper" in option else "before=(...) or after=(...)"
        raise PluginError(f"hookimpl({option}=...): loopkit orders hooks by declared access; use {instead}")
    if when is not None and not callable(when):
        raise PluginError(
            f"hookimpl(when={when!r}): write a function of the plugin, such as when=lambda plugin: plugin.every > 1"
        )
    options = HookOptions(phase, reads, updates, writes, before, after, traced, when)
    for label in ("reads", "updates", "writes", "before", "after"):
        check_declaration(f"hookimpl({label}=...)", getattr(options, label))
    if traced is not None:
        check_declaration("hookimpl(traced=...)", traced)
    if phase is not None:
        _check_phases(phase)

    def mark(function: F) -> F:
        if not callable(function):
            raise PluginError(f"hookimpl({function!r}): give options by name, such as @hookimpl(phase='train')")
        marked = pluggy.HookimplMarker(PROJECT)(function)
        marked.loopkit_options = options  # type: ignore[attr-defined]
        return marked

    return mark if function is None else mark(function)


def _check_phases(chosen: type[Phase] | str | tuple[type[Phase] | str, ...]) -> None:
    """Raise for phases that are neither named nor classes."""
    for kind in chosen if isinstance(chosen, tuple) else (chosen,):
        named = isinstance(kind, str) and kind
        if not named and not isinstance(kind, type):
            raise PluginError(
                f"hookimpl(phase={kind!r}): write the name of a phase, such as phase='val', or its class, such as "
                f"ValidationPhase, or phase={TRAINING!r} for all that train"
            )


def check_declaration(where: str, value: object) -> None:
    """Raise for values that are no declaration; a plain string is the common mistake."""
    if isinstance(value, str):
        raise PluginError(f"{where} is the string {value!r}: write a tuple, ({value!r},)")
    if not callable(value) and not (isinstance(value, tuple) and all(isinstance(item, str) for item in value)):
        raise PluginError(
            f"{where} is {value!r}: write a tuple of names, or a function of the plugin returning one (the name is "
            f"kept for declarations: call your own data something else)"
        )
