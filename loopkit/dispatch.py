"""From plugins to the calls that the engine makes: one compiled plan per phase.

pluggy holds the specifications and the registered plugins. Its own way of calling costs microseconds an event,
so the implementations that it lists are ordered once (`loopkit.order`) and compiled into flat tuples of calls.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

import pluggy
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from loopkit.batches import describe
from loopkit.errors import Cancel, CancelEpoch, CancelFit, CancelStep, OrderError, PluginConflict, PluginError
from loopkit.events import Event, FitBegin, FitEnd, SignalBegin, snake_case
from loopkit.hooks import (
    PROJECT,
    PROVIDES,
    STATES,
    Hook,
    HookOptions,
    Target,
    check_declaration,
    hooks,
    implemented,
    specification,
)
from loopkit.logs.backend import Backend
from loopkit.installed import plugin_names
from loopkit.logs.record import Packed, unpacked
from loopkit.metrics import MetricLike
from loopkit.order import EVERYTHING, Entry, Placed, arrange, nearest, overlaps
from loopkit.schedules import OfLength

if TYPE_CHECKING:
from loopkit.state_check import check_methods
    from loopkit.learner import Learner
    from loopkit.phases import Phase
    from loopkit.step import Step

__all__ = ["Implementation", "Instrument", "Plan", "Registry"]

Instrument = Callable[[str, str, "partial[Any]"], Any]
"""``fn(hook, plugin, call)``: must return ``call()``, a partial of the implementation and its arguments."""
Fire = Callable[["Step | None"], None]
LOG_VALUE = "log_value"
INSTRUMENT = "instrument_call"


@dataclass(frozen=True)
class Implementation:
    """One plugin's implementation of one hook."""

    plugin: Any
    hook: Hook
    function: Callable[..., Any]
    arguments: tuple[str, ...]
    phase: type[Phase] | tuple[type[Phase], ...] | None
    entry: Entry


@dataclass(frozen=True)
class Plan:
    """What the engine calls during one phase; every event that may fire is a key of ``fire``."""

    fire: dict[type[Event], Fire | None]
    epoch_contexts: tuple[Callable[[], Any], ...]
    step_contexts: tuple[Callable[[Step], Any], ...]
    setup_data: tuple[Implementation, ...]
    move_batch: Callable[[Any, int], Any] | None
    optimizer_step: Callable[..., Any] | None
    order: dict[str, list[Placed]]


class Registry:
    """The plugins of one learner, and the plans compiled from them."""

    def __init__(self, learner: Learner, order: Sequence[Any], instrument: Instrument | None) -> None:
        self.learner = learner
        self.chains = _chains(order)
        self.instrument = instrument
        self.version = 0
        """Changes whenever a plugin comes or goes."""
        self._manager = pluggy.PluginManager(PROJECT)
        self._specified: set[str] = set()
        self._plans: dict[int, tuple[Phase, Plan]] = {}
        self._learner_plans: dict[str, list[Implementation]] = {}
        self._implementations: list[Implementation] = []
        self._packs: list[tuple[Any, list[Packed]]] = []
        self.packed: list[Packed] | _Listeners | None = None
        """What takes what is logged to the plugins that listen to it; None if there are none."""

    @property
    def plugins(self) -> dict[str, Any]:
        """The plugins by name, sorted."""
        return dict(sorted(self._manager.list_name_plugin(), key=lambda item: item[0]))

    def change(self, add: Iterable[Any] = (), remove: Iterable[str] = ()) -> None:
        """Remove and add plugins, all or none.

        Raises:
            PluginError: What is wrong with a plugin, or how it clashes with another one.
        """
        removed: list[tuple[str, Any]] = []
        added: list[str] = []
        try:
            for name in remove:
                removed.append((name, self._unregister(name)))  # noqa: PERF401 - a comprehension loses the first ones
            for plugin in add:
                added.append(self._register(plugin))  # noqa: PERF401
            self._check()
        except BaseException:
            for name in added:
                self._manager.unregister(name=name)
            for name, plugin in removed:
                self._manager.register(plugin, name)
            self._collect()
            raise
        finally:
            self._bind_log()

    def find(self, word: str) -> str:
        """The name of the plugin that is called ``word`` or is the only one that provides it.

        Raises:
            PluginError: None is, or several provide it.
        """
        plugins = self.plugins
        if word in plugins:
            return word
        matches = [name for name, plugin in plugins.items() if provided(plugin) == word]
        if len(matches) == 1:
            return matches[0]
        if matches:
            raise PluginError(f"several plugins provide {word!r}: {', '.join(matches)}; use a name")
        raise PluginError(f"no plugin is called {word!r}{nearest(word, plugins)}; there are: {', '.join(plugins)}")

    def _register(self, plugin: Any) -> str:
        name = plugin_name(plugin)
        registered = self._manager.get_plugin(name)
        if registered is not None:
            again = "the same object" if registered is plugin else f"{registered!r} and {plugin!r}"
            raise PluginError(f"two plugins are called {name!r}: {again}; give it name=... to have both")
        self._specify()
        _check_plugin(plugin, name)
        self._manager.register(plugin, name)
        return name

    def _unregister(self, word: str) -> Any:
        return self._manager.unregister(name=self.find(word))

    def _specify(self) -> None:
        """Tell pluggy of the hooks that were defined since the last time."""
        new = [hook for name, hook in hooks().items() if name not in self._specified]
        if new:
            self._manager.add_hookspecs(specification(new))
            self._specified.update(hook.name for hook in new)

    def _collect(self) -> None:
        self.version += 1
        self._plans.clear()
        self._learner_plans.clear()
        self._implementations = []
        for name, hook in hooks().items():
            if name in self._specified:
                for impl in getattr(self._manager.hook, name).get_hookimpls():
                    self._implementations.append(_implementation(impl, hook))

    def _check(self) -> None:
        """Everything that can be told before a phase runs."""
        self._collect()
        self._check_names()
        self._check_owners()
        for hook in ("setup_model", "fit_begin", LOG_VALUE, INSTRUMENT):
            self.ordered(hook)
        for phase in self.learner.phases.values():
            self.plan(phase)

    def _check_names(self) -> None:
        plugins = self.plugins
        names = {*plugins, *map(provided, plugins.values())} - {""}
        written = {s for i in self._implementations for s in (*i.entry.writes, *i.entry.updates)}
        declared = [(i.entry.plugin, i.hook.name, i.entry) for i in self._implementations]
        for plugin, hook, entry in declared:
            for state in (*entry.reads, *entry.updates, *entry.writes):
                root = state.split(".")[0]
                if root in STATES or root in names or root in PROVIDES or state == EVERYTHING:
                    continue
                hint = nearest(root, [*STATES, *names])
                if hint or not any(overlaps(state, other) for other in written):
                    raise PluginError(
                        f"plugin {plugin!r}, {hook}: no state is called {state!r}{hint}; "
                        f"known are {', '.join(STATES)}, step.<attribute> and <plugin>.<field>"
                    )
            for word in (*entry.before, *entry.after):
                self._check_word(word, f"plugin {plugin!r}, {hook}", names)
        for chain in self.chains:
            for word in chain:
                self._check_word(word, "order", names)

    def _check_word(self, word: str, where: str, names: set[str]) -> None:
        if word in names or word in PROVIDES or word in plugin_names():
            return
        if hint := nearest(word, {*names, *PROVIDES, *plugin_names()}):
            raise OrderError(f"{where}: no plugin is called {word!r}{hint}")

    def _check_owners(self) -> None:
        owners: list[tuple[str, str]] = []
        for name, plugin in self.plugins.items():
            for state in declared(plugin, "owns", getattr(plugin, "owns", ())):
                root = state.split(".")[0]
                if root.isidentifier() and root not in {*STATES, *PROVIDES, *self.plugins}:
                    if hint := nearest(root, STATES):
                        raise PluginError(f"plugin {name!r}: owns {state!r}, but no state is called so{hint}")
                for other, theirs in owners:
                    if other != name and overlaps(state, theirs):
                        raise PluginConflict(f'{other!r} and {name!r} both own "{state}": keep one of them')
                owners.append((name, state))

    def implementations(self, hook: str, phase: Phase | None = None) -> list[Implementation]:
        """The implementations of a hook, those for ``phase`` if given, in no order."""
        return [
            impl
            for impl in self._implementations
            if impl.hook.name == hook and (phase is None or impl.phase is None or isinstance(phase, impl.phase))
        ]

    def ordered(self, hook: str) -> list[Implementation]:
        """The implementations of a hook that belongs to no phase, in order."""
        if hook not in self._learner_plans:
            impls = {impl.entry.plugin: impl for impl in self.implementations(hook)}
            placed = arrange([impl.entry for impl in impls.values()], self.chains, hook)
            self._learner_plans[hook] = [impls[p.entry.plugin] for p in placed]
        return self._learner_plans[hook]

    def fit_order(self) -> list[Placed]:
        """The plugins that set up or tear down a fit, in the order of ``fit_begin``.

        A plugin with a ``fit_end`` alone stands where its ``before`` and ``after``, turned round, put it.
        """
        entries = {impl.entry.plugin: _reverse(impl.entry) for impl in self.implementations(FitEnd.hook)}
        entries.update({impl.entry.plugin: impl.entry for impl in self.implementations(FitBegin.hook)})
        return arrange(list(entries.values()), self.chains, FitBegin.hook)

    def call(self, impl: Implementation, **given: Any) -> Any:
        """Call an implementation that belongs to no phase."""
        call: Callable[[], Any] = partial(impl.function, *(given[name] for name in impl.arguments))
        try:
            if impl.hook.name != INSTRUMENT:
                call = self._instrumented(impl, given.get("phase"), call)
            if self.instrument is None:
                return call()
            return self.instrument(impl.hook.name, impl.entry.plugin, partial(call))
        except Cancel:
            raise
        except BaseException as error:
            locate(error, f"in {impl.hook.name} of plugin {impl.entry.plugin!r}")
            raise

    def check_run(self, phases: Sequence[Phase]) -> None:
        """Refuse what can never work with these phases: events that none emits, state that nobody makes."""
        emitted = {event.hook for phase in phases for event in phase.events()}
        emitted |= {FitBegin.hook, SignalBegin.hook, FitEnd.hook, LOG_VALUE}
        phase_names = [phase.name for phase in phases]
        makers = {*self.plugins, *map(provided, self.plugins.values())}
        changed = [state for impl in self._implementations for state in (*impl.entry.writes, *impl.entry.updates)]
        written = [state for state in changed if state != EVERYTHING]
        for impl in self._implementations:
            where = f"plugin {impl.entry.plugin!r}, {impl.hook.name}"
            may_never_come = getattr(impl.plugin, "optional", ())  # hooks that a plugin can do without
            if impl.hook.kind == "event" and impl.hook.name not in emitted and impl.hook.name not in may_never_come:
                raise PluginError(
                    f"{where}: no known phase emits this event; the phases are {', '.join(phase_names)}. "
                    f"Give the phase that does: Learner(phases=[...])"
                )
            for state in impl.entry.reads:
                root, _, rest = state.partition(".")
                if root == "metrics" and rest:
                    phase = rest.split("/")[0]
                    made = [other.partition(".")[2] for other in written if other.startswith("metrics.")]
                    if "/" in rest and "*" not in phase and phase not in phase_names:
                        raise PluginError(
                            f"{where}: reads {state!r}, but no phase is called {phase!r}{nearest(phase, phase_names)}"
                        )
                    if not any(overlaps(state, other) for other in written):
                        names = sorted({name.replace("*/", f"{phase}/") for name in made})
                        raise PluginError(
                            f"{where}: reads {state!r}, which no plugin makes{nearest(rest, names)}; "
                            f"made are {', '.join(names) or 'none'}"
                        )
                elif root in PROVIDES and root not in STATES and root not in makers:
                    raise PluginError(f"{where}: reads {state!r}, but no plugin is called {root!r} or provides it")

    def plan(self, phase: Phase) -> Plan:
        """The compiled plan of a phase."""
        if id(phase) not in self._plans:
            self._plans[id(phase)] = (phase, self._compile(phase))
        return self._plans[id(phase)][1]

    def _compile(self, phase: Phase) -> Plan:
        self._specify()
        order: dict[str, list[Placed]] = {}
        impls: dict[str, list[Implementation]] = {}
        for name, hook in hooks().items():
            if "phase" in hook.arguments:
                found = {impl.entry.plugin: impl for impl in self.implementations(name, phase)}
                order[name] = arrange([impl.entry for impl in found.values()], self.chains, name)
                impls[name] = [found[placed.entry.plugin] for placed in order[name]]
        verbs = impls["optimizer_step"]
        if len(verbs) > 1:
            names = " and ".join(repr(impl.entry.plugin) for impl in verbs)
            raise PluginConflict(f"{names} both implement the verb optimizer_step in phase {phase.name!r}: keep one")
        call = partial(self._located, phase=phase)
        return Plan(
            fire={event: self._event(event, impls[event.hook], phase) for event in phase.events()},
            epoch_contexts=tuple(self._context(impl, (), phase) for impl in impls["epoch_context"]),
            step_contexts=tuple(self._context(impl, ("step",), phase) for impl in impls["step_context"]),
            setup_data=tuple(impls["setup_data"]),
            move_batch=_chain([self._mover(impl, phase) for impl in impls["move_batch"]]),
            optimizer_step=call(verbs[0], ("step", "optimizer", "closure", "default")) if verbs else None,
            order=order,
        )

    def _event(self, event: type[Event], impls: list[Implementation], phase: Phase) -> Fire | None:
        if not impls:
            return None
        names = [impl.entry.plugin for impl in impls]
        calls: list[Callable[..., Any]] = []
        for impl in impls:
            call = self._call(impl, ("step",), phase)
            calls.append(partial(call) if call in calls else call)  # two plugins can share a function: tell them apart
        learner = self.learner

        def fire(step: Step | None) -> None:
            cancels: list[Cancel] | None = None
            for call in calls:
                try:
                    call(step)
                except Cancel as cancel:  # the remaining plugins are called all the same
                    cancel.by = cancel.by or names[calls.index(call)]
                    cancels = [*(cancels or ()), cancel]
                except BaseException as error:
                    for earlier in cancels or ():
                        add_note(error, f"{earlier!r} by plugin {earlier.by!r} came before it")
                    plugin = names[calls.index(call)]
                    locate(error, f"in {event.hook} of plugin {plugin!r}, {learner.where(phase, step)}")
                    raise
            if cancels:
                chosen = strongest(cancels)
                if step is None and isinstance(chosen, CancelStep):  # there is no step to end: an error
                    locate(chosen, f"in {event.hook} of plugin {chosen.by!r}, {learner.where(phase, step)}")
                try:
                    raise chosen
                finally:
                    del cancels, chosen  # else a cycle with the traceback would keep the step and its graph

        return fire

    def pack(self, plugin: Any, packed: list[Packed] | None) -> None:
        """What `Learner.pack_log` does."""
        self._packs = [each for each in self._packs if each[0] is not plugin]
        if packed is not None and self.instrument is None:
            self._packs.append((plugin, packed))
        self._bind_log()

    def _bind_log(self) -> None:
        """Find what takes what is logged to the plugins."""
        impls = self.ordered(LOG_VALUE)
        packs = [packed for plugin, packed in self._packs if any(impl.plugin is plugin for impl in impls)]
        heard = [impl for impl in impls if all(impl.plugin is not plugin for plugin, _ in self._packs)]
        calls = [(self._call(impl, ("record",), None), impl.entry.plugin) for impl in heard]
        if calls or len(packs) > 1:
            self.packed = _Listeners(packs, calls)
        else:
            self.packed = packs[0] if packs else None

    def _context(self, impl: Implementation, dynamic: tuple[str, ...], phase: Phase) -> Callable[..., Any]:
        """`_call` for a context, with a note on its errors and on those of entering and leaving what it returns."""
        make, plugin, hook, learner = (
            self._located(impl, dynamic, phase),
            impl.entry.plugin,
            impl.hook.name,
            self.learner,
        )

        def context(*values: Any) -> _Context | None:
            made = make(*values)
            where = partial(learner.where, phase, *values or (None,))
            return None if made is None else _Context(made, plugin, hook, where)

        return context

    def _located(self, impl: Implementation, dynamic: tuple[str, ...], phase: Phase) -> Callable[..., Any]:
        """`_call` for a context or a verb, with a note on its errors."""
        call, name, learner = self._call(impl, dynamic, phase), impl.entry.plugin, self.learner

        def located(*values: Any) -> Any:
            try:
                return call(*values)
            except Cancel as cancel:
                cancel.by = cancel.by or name
                raise
            except BaseException as error:
                locate(error, f"in {impl.hook.name} of plugin {name!r}, {learner.where(phase, *values[:1] or (None,))}")
                raise

        return located

    def _mover(self, impl: Implementation, phase: Phase) -> Callable[[Any, int], Any]:
        """`_call` for a transform of batches, with a note on its errors that describes the batch."""
        call, name, learner = self._call(impl, ("batch",), phase), impl.entry.plugin, self.learner

        def move(batch: Any, index: int) -> Any:
            try:
                return call(batch)
            except Cancel as cancel:
                cancel.by = cancel.by or name
                raise
            except BaseException as error:
                where = f"{learner.where(phase, None)}, batch {index}: {describe(batch)}"
                locate(error, f"in move_batch of plugin {name!r}, {where}")
                raise

        return move

    def _call(self, impl: Implementation, dynamic: tuple[str, ...], phase: Phase | None) -> Callable[..., Any]:
        """A callable that takes the ``dynamic`` arguments by position and passes on those that are wanted."""
        return self._instrumented(impl, phase, self._adapted(impl, dynamic, phase))

    def _instrumented(self, impl: Implementation, phase: Phase | None, call: Callable[..., Any]) -> Callable[..., Any]:
        """What other plugins' ``instrument_call`` puts in the place of a call."""
        for each in self.ordered(INSTRUMENT):
            if each.plugin is not impl.plugin:
                name = "" if phase is None else phase.name
                target = Target(name, impl.hook.name, impl.entry.plugin, impl.function)
                call = self.call(each, learner=self.learner, target=target, call=call)
                if not callable(call):
                    raise PluginError(
                        f"plugin {each.entry.plugin!r}: instrument_call returned {describe(call)}, not what to call in "
                        f"the place of {target.plugin}.{target.hook}: return call, or a function that calls it"
                    )
        return call

    def _adapted(self, impl: Implementation, dynamic: tuple[str, ...], phase: Phase | None) -> Callable[..., Any]:
        fixed = {"learner": self.learner, "phase": phase}
        wanted = impl.arguments
        function, instrument = impl.function, self.instrument
        if instrument is not None:
            hook, plugin = impl.hook.name, impl.entry.plugin

            def measured(*values: Any) -> Any:
                given = {**fixed, **dict(zip(dynamic, values, strict=False))}
                return instrument(hook, plugin, partial(function, *(given[name] for name in wanted)))

            return measured
        leading = wanted[: len(wanted) - len(dynamic)]
        if wanted == leading + dynamic and all(name in fixed for name in leading):
            return partial(function, *(fixed[name] for name in leading)) if leading else function

        def adapted(*values: Any) -> Any:
            given = {**fixed, **dict(zip(dynamic, values, strict=False))}
            return function(*(given[name] for name in wanted))

        if not set(wanted) & set(dynamic):
            bound = partial(function, *(fixed[name] for name in wanted))
            return lambda *values: bound()
        return adapted


class _Context:
    """A plugin's context manager. What it raises says whose it is; what is raised inside is never lost."""

    __slots__ = ("_context", "_hook", "_plugin", "_where")

    def __init__(self, context: Any, plugin: str, hook: str, where: Callable[[], str]) -> None:
        self._context, self._plugin, self._hook, self._where = context, plugin, hook, where
        if not (hasattr(type(context), "__enter__") and hasattr(type(context), "__exit__")):
            raise self._own(
                PluginError(
                    f"plugin {plugin!r}: {hook} returned {describe(context)}, which is no context manager: return one, "
                    f"or None; a function that yields needs @contextmanager below @hookimpl"
                )
            )

    def __enter__(self) -> None:
        try:
            self._context.__enter__()
        except BaseException as error:
            self._own(error)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the context. Its answer has no say: it cannot swallow what others have to see."""
        try:
            self._context.__exit__(kind, error, trace)
            return
        except BaseException as own:
            raised = own
        if raised is error:
            return
        self._own(raised)
        if error is None or raised.__cause__ is error:
            raise raised
        ranks = _rank(error), _rank(raised)
        if ranks[0] == ranks[1] == _rank(Exception()):
            causes = [error, raised]
            raise self._own(BaseExceptionGroup("an error, then another one on leaving a context", causes))
        if ranks[1] > ranks[0]:
            add_note(raised, f"{shown(error)} came before it")
            raise raised
        add_note(error, f"loopkit: leaving {self._hook} of plugin {self._plugin!r} failed too: {shown(raised)}")

    def _own(self, error: BaseException) -> BaseException:
        """The error, saying that it is this plugin's."""
        if isinstance(error, Cancel):
            error.by = error.by or self._plugin
        else:
            locate(error, f"in {self._hook} of plugin {self._plugin!r}, {self._where()}")
        return error


def _rank(error: BaseException) -> int:
    """What goes on where two meet: an interrupt or exit, else an error, else the stronger cancel."""
    kinds = (CancelStep, CancelEpoch, CancelFit, Exception, BaseException)
    return next(rank for rank, kind in enumerate(kinds) if isinstance(error, kind))


def strongest(cancels: Sequence[Cancel]) -> Cancel:
    """The cancel that ends the most; the first of its kind."""
    for kind in (CancelFit, CancelEpoch):
        for cancel in cancels:
            if isinstance(cancel, kind):
                return cancel
    return cancels[0]


def locate(error: BaseException, where: str) -> None:
    """Note on an error where it was raised, unless a note says so already."""
    notes = getattr(error, "__notes__", ())
    texts = [note for note in notes if isinstance(note, str)] if isinstance(notes, list) else []
    if not any(text.startswith("loopkit: ") for text in texts):
        add_note(error, f"loopkit: {where}")


def add_note(error: BaseException, note: str) -> None:
    """Add a note; an exception whose class makes that impossible goes on without."""
    try:
        BaseException.add_note(error, note)
    except Exception:
        pass  # the error itself is what matters, and must not give way to one about its notes


def shown(error: BaseException) -> str:
    """The ``repr`` of an error, or of its class if it has a broken one."""
    try:
        return repr(error)
    except Exception:
        return type(error).__name__


def plugin_name(plugin: Any) -> str:
    """A plugin's ``name``, else its class's in snake case."""
    if isinstance(plugin, Backend):
        made = type(plugin).__name__
        raise PluginError(f"{made} is where a log goes, and no plugin: wrap it, LogTo({made}(...))")
    if inspect.isclass(plugin):
        raise PluginError(f"{plugin.__name__} is a class; a plugin is an instance: {plugin.__name__}(...)")
    if plugin is None or type(plugin) in (str, list, tuple, set, dict):
        raise PluginError(
            f"{plugin!r} is no plugin: plugins are objects with hooks, such as Learner(plugins=[Metrics()])"
        )
    if (wrapped := _wrapped(plugin)) and not implemented(plugin):
        raise PluginError(f"{plugin!r:.80} is no plugin: wrap it, {wrapped}")
    name = getattr(plugin, "name", None)
    if name is None:
        name = snake_case(type(plugin).__name__)
    if not isinstance(name, str) or not name or "." in name or not name.isprintable():
        raise PluginError(f"plugin {plugin!r}: its name is {name!r}; a name is printable text without a dot")
    return name


class _Listeners:
    """Gives what is logged to several plugins: as it is to those that keep it, as records to the others.

    Args:
        packs: The lists of those that keep it.
        calls: Of the others, with their names.
    """

    def __init__(self, packs: Sequence[list[Packed]], calls: Sequence[tuple[Callable[..., Any], str]]) -> None:
        self._packs, self._calls = packs, calls

    def append(self, packed: Packed) -> None:
        """Give them what one call has logged."""
        for pack in self._packs:
            pack.append(packed)
        cancels: list[Cancel] = []
        for record in unpacked(packed):
            for call, plugin in self._calls:
                try:
                    call(record)
                except Cancel as cancel:  # the remaining plugins are called all the same
                    cancel.by = cancel.by or plugin
                    cancels.append(cancel)
                except BaseException as error:
                    locate(error, f"in {LOG_VALUE} of plugin {plugin!r}, of {record.name!r:.100}")
                    raise
        if cancels:
            try:
                raise strongest(cancels)
            finally:
                del cancels  # else a cycle with the traceback


def _wrapped(part: Any) -> str:
    """The plugin that takes what is a part of one: a metric, a scheduler of torch, a schedule; else an empty string."""
    made = f"{type(part).__name__}(...)"
    if isinstance(part, MetricLike):
        return f"Metrics({made})"
    if isinstance(part, ReduceLROnPlateau):
        return "Plateau(monitor=...)"
    if isinstance(part, LRScheduler):
        return f"TorchSchedule({made})"
    if getattr(part, "__module__", None) == OfLength.__module__:
        return f"Schedule({part.name if isinstance(part, OfLength) else part.__name__})"
    return ""


def unwrapped(plugin: Any) -> Any:
    """The plugin in a plugin that wraps it, as `throttle` does, else itself."""
    return getattr(plugin, "__wrapped__", plugin)


def provided(plugin: Any) -> str:
    """What a plugin says that it is, or an empty string."""
    return getattr(plugin, "provides", "")


def declared(plugin: Any, label: str, declaration: Any) -> tuple[str, ...]:
    """The names of a declaration; a function of the plugin is called."""
    if isinstance(declaration, tuple) and not declaration:
        return ()
    check_declaration(f"plugin {plugin_name(plugin)!r}: {label}", declaration)
    if callable(declaration):
        names = declaration() if inspect.ismethod(declaration) else declaration(plugin)
        check_declaration(f"plugin {plugin_name(plugin)!r}: what {label} returns", names)
        return tuple(names)
    return tuple(declaration)


def _implementation(impl: pluggy.HookImpl, hook: Hook) -> Implementation:
    options: HookOptions = impl.function.loopkit_options  # type: ignore[attr-defined]
    plugin = impl.plugin

    def names(label: str) -> tuple[str, ...]:
        return declared(plugin, label, getattr(options, label) or getattr(plugin, label, ()))

    labels = ("reads", "updates", "writes", "before", "after")
    entry = Entry(impl.plugin_name, provided(plugin), **{label: names(label) for label in labels})
    arguments = tuple(inspect.signature(impl.function).parameters)  # pluggy sees those of plain functions alone
    return Implementation(plugin, hook, impl.function, arguments, options.phase, entry)


def _check_plugin(plugin: Any, name: str) -> None:
    """Refuse what pluggy would take silently, or with a message that does not say what to write instead."""
    known = hooks()
    where = f"plugin {name!r} ({type(plugin).__name__})"
    word = provided(plugin)
    has_hooks = False
    if not isinstance(word, str) or not (word == "" or word.isidentifier()):
        raise PluginError(f"{where}: provides is {word!r}; it is one word, such as {'clip'!r}")
    for attribute in dir(plugin):
        method = inspect.getattr_static(plugin, attribute)
        if isinstance(method, (staticmethod, classmethod)):
            method = method.__func__
        if not inspect.isroutine(method):
            continue
        options = getattr(method, f"{PROJECT}_impl", None)
        own_options: HookOptions | None = getattr(method, "loopkit_options", None)
        if options is None:
            if attribute in known:
                raise PluginError(
                    f"{where}: {attribute} has a hook's name but no @hookimpl; add it, or rename the method"
                )
            continue
        if any(options.get(key) for key in ("tryfirst", "trylast", "wrapper", "hookwrapper")):
            raise PluginError(f"{where}: {attribute} uses pluggy's own options; use before=, after= or a context")
        if own_options is None:
            raise PluginError(f"{where}: {attribute} is marked by pluggy's marker; use loopkit.hookimpl")
        has_hooks = True
        if attribute not in known:
            raise PluginError(f"{where}: there is no hook {attribute!r}{nearest(attribute, known)}")
        _check_arguments(getattr(plugin, attribute), known[attribute], f"{where}, {attribute}")
        if "phase" not in known[attribute].arguments and own_options.phase is not None:
            raise PluginError(f"{where}: {attribute} belongs to no phase, so it takes no phase=...")
    if not has_hooks:
        raise PluginError(f"{where} has no hooks, so nothing would call it: mark its methods with @hookimpl")


def _check_arguments(method: Callable[..., Any], hook: Hook, where: str) -> None:
    for argument in inspect.signature(method).parameters.values():
        if argument.default is not argument.empty:
            raise PluginError(f"{where}: argument {argument.name!r} has a default; a hook's arguments have none")
        if argument.kind is not argument.POSITIONAL_OR_KEYWORD or argument.name not in hook.arguments:
            raise PluginError(
                f"{where}: no argument is called {argument.name!r}{nearest(argument.name, hook.arguments)}; "
                f"it can take {', '.join(hook.arguments)}"
            )


def _chains(order: Sequence[Any]) -> list[tuple[str, ...]]:
    """``order=["a", "b"]`` is one chain, ``order=[["a", "b"], ["c", "d"]]`` are two."""
    check_methods(plugin, where)
    if isinstance(order, str):
        raise OrderError(f"order is the string {order!r}: write a list of plugin names")
    if all(isinstance(item, str) for item in order):
        return [tuple(order)] if order else []
    for chain in order:
        if isinstance(chain, str) or not all(isinstance(word, str) for word in chain):
            raise OrderError(f"order holds {chain!r}: write one list of plugin names, or a list of such lists")
    return [tuple(chain) for chain in order]


def _chain(calls: list[Callable[[Any, int], Any]]) -> Callable[[Any, int], Any] | None:
    if len(calls) <= 1:
        return calls[0] if calls else None

    def move(batch: Any, index: int) -> Any:
        for call in calls:
            batch = call(batch, index)
        return batch

    return move


def _reverse(entry: Entry) -> Entry:
    """The entry as it must stand in a list that is run backwards; access has no say there."""
    return Entry(entry.plugin, entry.provides, before=entry.after, after=entry.before)
