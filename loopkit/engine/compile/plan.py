"""Plan: the calls that the engine makes during one phase, compiled once from the plugins' implementations.

pluggy's own way of calling costs microseconds an event. So the implementations are ordered once, by
`loopkit.engine.compile.order`, and become flat tuples of calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from loopkit.base.batches import describe
from loopkit.base.notes import add_note, locate, shown
from loopkit.engine.compile.order import Entry, Placed
from loopkit.errors import Cancel, CancelStep, PluginError, rank, strongest
from loopkit.events import EpochBegin, Event, PhaseEnd
from loopkit.hooks import Hook, PhaseChoice, Target
from loopkit.phases import BRACKETS, TRAINING_EVENTS

if TYPE_CHECKING:
    from loopkit.phases import Phase

Fire = Callable[[object], None]
"""Calls the plugins that listen to an event, with the step; with the epoch, where the event is one of an epoch."""
INSTRUMENT = "instrument_call"


class Numbered(Protocol):
    """A step, as notes on errors name it."""

    index: int


class Resumable(Protocol):
    """An epoch, whose begin comes again when it resumes."""

    saved: Any
    """The saved state of this epoch, if it was open then."""

    def repeated(self, plugin: Any, name: str) -> AbstractContextManager[None]:
        """Inside, a hook of a plugin runs at its begin."""


Where = Callable[["Phase", Numbered | None], str]


@dataclass(frozen=True)
class Implementation:
    """One plugin's implementation of one hook."""

    plugin: Any
    hook: Hook
    function: Callable[..., Any]
    arguments: tuple[str, ...]
    phase: PhaseChoice
    entry: Entry


@dataclass(frozen=True)
class Plan:
    """The calls of one phase, by event; every event that may fire is a key of ``fire``."""

    fire: dict[type[Event], Fire | None]
    heard: frozenset[type[Event]]
    """The events that have listeners."""
    awaited: frozenset[type[Event]]
    """Events that the phase must emit itself because a plugin needs them."""
    epoch_contexts: tuple[Callable[[object], Any], ...]
    step_contexts: tuple[Callable[[object], Any], ...]
    setup_data: tuple[Implementation, ...]
    move_batch: Callable[[Any, int], Any] | None
    optimizer_step: Callable[..., Any] | None
    take_step: Callable[[object, Callable[[], None]], Any] | None
    order: dict[str, list[Placed]]

    def of_context(self, hook: str, where: str) -> str:
        """Describe the place of an error that was raised on entering or leaving a context of plugins."""
        plugins = " or ".join(repr(placed.entry.plugin) for placed in self.order[hook])
        who = f"in {hook} of plugin {plugins}" if plugins else "at the begin or end of the epoch"
        return f"{who}, {where}"

    def called(self, phase: Phase) -> dict[str, bool]:
        """Return the plugins that an epoch calls before its ``phase_end``, and whether a step calls them."""
        called: dict[str, bool] = {}
        for event in phase.events():
            if event is not PhaseEnd:
                for placed in self.order[event.hook]:
                    name = placed.entry.plugin
                    called[name] = called.get(name, False) or "step" in event.arguments
        return called


PLAIN_ERROR = rank(Exception())
"""The rank of errors that are neither cancels nor interrupts."""


class Compiler:
    """Makes calls from implementations: with the arguments that each asks for, and a note on what it raises.

    Args:
        learner: The ``learner`` argument of implementations.
        where: Returns the place of a step of a phase in words, for notes on errors.
        instruments: The implementations of ``instrument_call``, in order.
    """

    def __init__(self, learner: object, where: Where, instruments: Sequence[Implementation]) -> None:
        self._learner = learner
        self._where = where
        self._instruments = instruments

    def plan(self, phase: Phase, impls: dict[str, list[Implementation]], order: dict[str, list[Placed]]) -> Plan:
        """The plan of a phase, from its implementations by hook, in order."""
        steps = impls["optimizer_step"]
        wholes = impls["take_step"]
        replaced = ("step", "optimizer", "closure", "default")
        fire = {event: self._event(event, impls[event.hook], phase) for event in phase.events()}
        return Plan(
            fire=fire,
            heard=frozenset(event for event, call in fire.items() if call is not None),
            awaited=frozenset(event for event in phase.emits if _waits(event, impls[event.hook])),
            epoch_contexts=tuple(self._context(impl, "epoch", phase) for impl in impls["epoch_context"]),
            step_contexts=tuple(self._context(impl, "step", phase) for impl in impls["step_context"]),
            setup_data=tuple(impls["setup_data"]),
            move_batch=_chain([self._mover(impl, phase) for impl in impls["move_batch"]]),
            optimizer_step=self._located(steps[0], replaced, phase) if steps else None,
            take_step=self._located(wholes[0], ("step", "default"), phase) if wholes else None,
            order=order,
        )

    def call(self, impl: Implementation, **given: Any) -> Any:
        """Call an implementation that belongs to no epoch."""
        try:
            call = impl.function if impl.hook.name == INSTRUMENT else self._instrumented(impl, given.get("phase"))
            return call(*({"learner": self._learner, **given}[name] for name in impl.arguments))
        except Cancel:
            raise
        except BaseException as error:
            locate(error, f"in {impl.hook.name} of plugin {impl.entry.plugin!r}")
            raise

    def bound(self, impl: Implementation, dynamic: tuple[str, ...], phase: Phase | None) -> Callable[..., Any]:
        """A callable that takes the ``dynamic`` arguments by position and passes on the wanted ones."""
        fixed = {"learner": self._learner, "phase": phase}
        function = self._instrumented(impl, phase)
        wanted = impl.arguments
        leading = tuple(name for name in wanted if name in fixed)
        if wanted[: len(leading)] == leading:  # in the order in which hooks list them
            first = partial(function, *(fixed[name] for name in leading)) if leading else function
            direct = _direct(first, dynamic, wanted[len(leading) :])
            if direct is not None:
                return direct

        def adapted(*values: Any) -> Any:
            given = {**fixed, **dict(zip(dynamic, values, strict=False))}
            if "step" in given:
                given["epoch"] = given["step"].epoch
            return function(*(given[name] for name in wanted))

        return adapted

    def _event(self, event: type[Event], impls: list[Implementation], phase: Phase) -> Fire | None:
        if not impls:
            return None
        calls = self._named_calls(impls, phase)
        of_steps = "step" in event.arguments
        whereabouts = self._where

        def where(at: Any) -> str:
            return whereabouts(phase, at if of_steps else None)

        def fire(at: object) -> None:
            cancels: list[Cancel] | None = None
            for plugin, call in calls:
                try:
                    call(at)
                except Cancel as cancel:  # the remaining plugins are called all the same
                    cancel.by = cancel.by or plugin
                    cancels = [*(cancels or ()), cancel]
                except BaseException as error:
                    for earlier in cancels or ():
                        add_note(error, f"{earlier!r} by plugin {earlier.by!r} came before it")
                    locate(error, f"in {event.hook} of plugin {plugin!r}, {where(at)}")
                    raise
            if cancels:
                chosen = strongest(cancels)
                if not of_steps and isinstance(chosen, CancelStep):  # there is no step to end: an error
                    locate(chosen, f"in {event.hook} of plugin {chosen.by!r}, {where(at)}")
                try:
                    raise chosen
                finally:
                    del cancels, chosen  # else a cycle with the traceback would keep the step and its graph

        return fire

    def _named_calls(self, impls: Sequence[Implementation], phase: Phase) -> list[tuple[str, Callable[..., Any]]]:
        """The functions of an event, each with the name of its plugin."""
        calls = []
        for impl in impls:
            call = self.bound(impl, ("step",) if "step" in impl.hook.arguments else ("epoch",), phase)
            call = _watched_if_repeated(impl, call) if impl.hook.name == EpochBegin.hook else call
            calls.append((impl.entry.plugin, call))
        return calls

    def _context(self, impl: Implementation, dynamic: str, phase: Phase) -> Callable[[Any], Any]:
        """`bound` for a context, with a note on its errors, also on entering and leaving the context."""
        make = self._located(impl, (dynamic,), phase)
        plugin = impl.entry.plugin
        hook = impl.hook.name

        def context(at: Any) -> _Context | None:
            made = make(at)
            where = partial(self._where, phase, at if dynamic == "step" else None)
            return None if made is None else _Context(made, plugin, hook, where)

        return context

    def _located(self, impl: Implementation, dynamic: tuple[str, ...], phase: Phase) -> Callable[..., Any]:
        """`bound` for a context or a replacement, with a note on its errors."""
        call = self.bound(impl, dynamic, phase)
        name = impl.entry.plugin

        def located(*values: Any) -> Any:
            try:
                return call(*values)
            except Cancel as cancel:
                cancel.by = cancel.by or name
                raise
            except BaseException as error:
                step = values[0] if dynamic[0] == "step" else None
                locate(error, f"in {impl.hook.name} of plugin {name!r}, {self._where(phase, step)}")
                raise

        return located

    def _mover(self, impl: Implementation, phase: Phase) -> Callable[[Any, int], Any]:
        """`bound` for a transform of batches, with a note on its errors that describes the batch."""
        call = self.bound(impl, ("batch",), phase)
        name = impl.entry.plugin

        def move(batch: Any, index: int) -> Any:
            try:
                return call(batch)
            except Cancel as cancel:
                cancel.by = cancel.by or name
                raise
            except BaseException as error:
                where = f"{self._where(phase, None)}, batch {index}: {describe(batch)}"
                locate(error, f"in move_batch of plugin {name!r}, {where}")
                raise

        return move

    def _instrumented(self, impl: Implementation, phase: Phase | None) -> Callable[..., Any]:
        """The implementation, or what other plugins' ``instrument_call`` puts in its place."""
        call = impl.function
        for each in self._instruments:
            if each.plugin is not impl.plugin:
                name = "" if phase is None else phase.name
                target = Target(name, impl.hook.name, impl.entry.plugin, impl.function, impl.arguments)
                call = self.call(each, target=target, call=call)
                if not callable(call):
                    raise PluginError(
                        f"plugin {each.entry.plugin!r}: instrument_call returned {describe(call)}, not what to call in "
                        f"the place of {target.plugin}.{target.hook}: return call, or a function that calls it"
                    )
        return call


class _Context:
    """A plugin's context manager. Its errors name it; errors from inside are never lost."""

    __slots__ = ("_context", "_hook", "_plugin", "_where")

    def __init__(self, context: Any, plugin: str, hook: str, where: Callable[[], str]) -> None:
        self._context = context
        self._plugin = plugin
        self._hook = hook
        self._where = where
        if not (hasattr(type(context), "__enter__") and hasattr(type(context), "__exit__")):
            raise self._located_here(
                PluginError(
                    f"plugin {plugin!r}: {hook} returned {describe(context)}, which is no context manager: return one, "
                    f"or None; a function that yields needs @contextmanager below @hookimpl"
                )
            )

    def __enter__(self) -> None:
        try:
            self._context.__enter__()
        except BaseException as error:
            self._located_here(error)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the context. Its return value is ignored, so that a plugin cannot swallow an error."""
        try:
            self._context.__exit__(kind, error, trace)
            return
        except BaseException as own:
            raised = own
        if raised is error:
            return
        self._located_here(raised)
        if error is None or raised.__cause__ is error:
            raise raised
        if rank(error) == rank(raised) == PLAIN_ERROR:
            causes = [error, raised]
            raise self._located_here(BaseExceptionGroup("an error, then another one on leaving a context", causes))
        if rank(raised) > rank(error):
            add_note(raised, f"{shown(error)} came before it")
            raise raised
        add_note(error, f"loopkit: leaving {self._hook} of plugin {self._plugin!r} failed too: {shown(raised)}")

    def _located_here(self, error: BaseException) -> BaseException:
        """The error, saying that it is this plugin's."""
        if isinstance(error, Cancel):
            error.by = error.by or self._plugin
        else:
            locate(error, f"in {self._hook} of plugin {self._plugin!r}, {self._where()}")
        return error


def _watched_if_repeated(impl: Implementation, call: Callable[[Any], Any]) -> Callable[[Resumable], None]:
    """A hook of ``epoch_begin``, with `Resumable.repeated` around it where an epoch resumes and it runs again."""

    def begin(epoch: Resumable) -> None:
        if epoch.saved is None:
            call(epoch)
            return
        with epoch.repeated(impl.plugin, impl.entry.plugin):
            call(epoch)

    return begin


def _direct(
    function: Callable[..., Any], dynamic: tuple[str, ...], wanted: tuple[str, ...]
) -> Callable[..., Any] | None:
    """A callable that takes the ``dynamic`` arguments and hands on the wanted ones; None if it takes more than that."""
    if wanted == dynamic:
        return function
    if not wanted:
        return lambda *values: function()
    if dynamic == ("step",) and wanted == ("epoch", "step"):
        return lambda step: function(step.frame.epoch, step)
    if dynamic == ("step",) and wanted == ("epoch",):
        return lambda step: function(step.frame.epoch)
    return None


def _waits(event: type[Event], impls: Sequence[Implementation]) -> bool:
    """Whether an event is a phase's own, and one of these plugins cannot do without it."""
    own = event not in BRACKETS and event not in TRAINING_EVENTS
    return own and any(event.hook not in getattr(impl.plugin, "optional", ()) for impl in impls)


def _chain(calls: list[Callable[[Any, int], Any]]) -> Callable[[Any, int], Any] | None:
    if len(calls) <= 1:
        return calls[0] if calls else None

    def move(batch: Any, index: int) -> Any:
        for call in calls:
            batch = call(batch, index)
        return batch

    return move
