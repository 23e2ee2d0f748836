"""Registry: the plugins of one learner, and the plans compiled from them.

pluggy holds the specifications and the plugins, and validates and lists the implementations.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pluggy

from loopkit.base.named import Named
from loopkit.base.notes import warn
from loopkit.base.words import nearest
from loopkit.engine.compile import refusals
from loopkit.engine.compile.order import Entry, Placed, arrange
from loopkit.engine.compile.owners import Owners
from loopkit.engine.compile.plan import INSTRUMENT, Compiler, Implementation, Plan
from loopkit.engine.kept.plugin_states import PHASE
from loopkit.engine.life.logbook import LOG_VALUE, Listeners
from loopkit.errors import PluginError
from loopkit.events import FitBegin, FitEnd
from loopkit.hooks import PROJECT, Hook, HookOptions, concerns, hooks, implemented, plain_arguments, specification
from loopkit.logs.record import Packed
from loopkit.phases import Phase
from loopkit.plugin import declared, plugin_name, provided, unwrapped

if TYPE_CHECKING:
    from loopkit.engine.compile.phase_table import PhaseTable
    from loopkit.engine.compile.plan import Where
    from loopkit.engine.life.logbook import Logbook


class _Manager(pluggy.PluginManager):
    """One that looks only at the names of hooks: pluggy looks up whatever an object has, at some expense."""

    def parse_hookimpl_opts(self, plugin: Any, name: str) -> Any:
        """Return the options of a plugin's method, if its name is a hook's."""
        if name not in vars(self.hook):
            return None
        return super().parse_hookimpl_opts(plugin, name)

    def parse_hookspec_opts(self, module_or_class: Any, name: str) -> Any:
        """Return the options of a hook's specification."""
        if name.startswith("__"):
            return None
        return getattr(getattr(module_or_class, name), f"{PROJECT}_spec")


class Registry:
    """The plugins of one learner.

    Args:
        learner: The ``learner`` argument of hooks.
        phases: The learner's.
        order: The user's ``order``.
        logbook: Where the listeners to logged values are entered.
        where: Returns the place of a step of a phase in words.
    """

    def __init__(
        self, learner: object, phases: PhaseTable, order: Sequence[Any], logbook: Logbook, where: Where
    ) -> None:
        self.chains = refusals.chains(order)
        self.owners = Owners()
        """Which of the plugins belong to this learner."""
        self.version = 0
        """Changes whenever a plugin comes or goes."""
        self._learner = learner
        self._phases = phases
        self._logbook = logbook
        self._where = where
        self._manager = _Manager(PROJECT)
        self._plans: dict[int, tuple[Phase, Plan]] = {}
        self._wanted: dict[str, list[str]] = {}
        """The hooks of each plugin that its options need."""
        self._placed: dict[tuple[Any, ...], list[Placed]] = {}
        """By hook and plugins: phases in which the same ones listen share it."""
        self.brackets: list[tuple[str, Implementation | None, Implementation | None]] = []
        """The plugins that set up or tear down a fit, in the order of ``fit_begin``, with both hooks."""
        self.implemented: list[Implementation] = []
        """The plugins' implementations of every hook."""
        self._names: dict[int, str] = {}
        self._packs: list[tuple[Any, list[Packed]]] = []
        self._checked: dict[int, tuple[Phase, int]] = {}
        """The phases that were run, and the version with which each was looked at."""

    @property
    def plugins(self) -> dict[str, Any]:
        """The plugins by name, sorted."""
        return Named("plugin", sorted(self._manager.list_name_plugin(), key=lambda item: item[0]))

    def name_of(self, plugin: Any) -> str:
        """The name of a plugin; a plugin that wraps it has the same."""
        name = self._names.get(id(plugin))
        if name is None:
            name = plugin_name(plugin)
            self._names[id(plugin)] = name
        return name

    def store_of(self, owner: Any) -> str:
        """Return the name under which a plugin, or the phase, keeps values for an epoch."""
        return PHASE if isinstance(owner, Phase) else self.name_of(owner)

    def change(self, add: Iterable[Any] = (), remove: Iterable[str] = ()) -> None:
        """Remove and add plugins, all or none.

        Raises:
            PluginError: A plugin is malformed, or clashes with another one.
        """
        removed: list[tuple[str, Any]] = []
        added: list[str] = []
        wanted = dict(self._wanted)
        try:
            for name in remove:
                removed.append((name, self._manager.unregister(name=self.find(name))))  # noqa: PERF401 - see below
            for plugin in add:
                added.append(self._register(plugin))  # noqa: PERF401 - a comprehension loses the first ones
            self._check()
            for _, plugin in removed:
                self.owners.free(plugin)
        except BaseException:
            for name in added:
                self._manager.unregister(name=name)
            for name, plugin in removed:
                self._manager.register(plugin, name)
            self._wanted = wanted
            self._collect()
            raise
        finally:
            self._bind_log()

    def owner_of_weights(self) -> str:
        """Return the plugin that owns the place of the weights with an average; an empty string without."""
        for name, plugin in self.plugins.items():
            own = unwrapped(plugin)
            if provided(own) != "average":
                continue
            owned = declared(own, "owns", getattr(own, "owns", ("weights",)))
            if any(state.partition(".")[0] == "weights" for state in owned):
                return name
        return ""

    def declared(self, label: str) -> list[str]:
        """Return what the plugins declare under a label, such as ``"owns"``."""
        names: list[str] = []
        for plugin in self.plugins.values():
            own = unwrapped(plugin)
            names += declared(own, label, getattr(own, label, ()))
        return names

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
            again = "the same object"
            if registered is not plugin:
                again = f"{refusals.shown_plugin(registered)} and {refusals.shown_plugin(plugin)}"
            raise PluginError(f"two plugins are called {name!r}: {again}; give it name=... to have both")
        self._specify()
        refusals.check_self(name, plugin)
        refusals.check_plugin(plugin, name)
        self._wanted[name] = implemented(plugin)
        self._manager.register(plugin, name)
        self.owners.meet(plugin)
        return name

    def _specify(self) -> None:
        """Register the hooks that were defined since the last time with pluggy."""
        known = self._manager.hook
        new = tuple(hook for name, hook in hooks().items() if not hasattr(known, name))
        if new:
            self._manager.add_hookspecs(specification(new))

    def _collect(self) -> None:
        self.version += 1
        self._plans.clear()
        self._names = {}
        for name, plugin in self.plugins.items():
            self._names[id(plugin)] = name
            self._names[id(unwrapped(plugin))] = name
        self._placed.clear()
        self._specify()
        callers = vars(self._manager.hook)
        self.implemented = []
        for name, hook in hooks().items():
            for impl in callers[name].get_hookimpls():
                if name in self._wanted[impl.plugin_name]:
                    self.implemented.append(_implementation(impl, hook))

    def _check(self) -> None:
        """Check all that is known before a phase runs."""
        self._collect()
        refusals.check_names(self.plugins, self.implemented, self.chains)
        refusals.check_owners(self.plugins)
        for hook in ("setup_model", "setup_optimizer", LOG_VALUE, INSTRUMENT):
            self.ordered(hook)  # raises if two of them have no order
        begins = {impl.entry.plugin: impl for impl in self.ordered(FitBegin.hook)}
        ends = {impl.entry.plugin: impl for impl in self.implementations(FitEnd.hook)}
        names = [placed.entry.plugin for placed in self.fit_order()]
        for phase in self._phases.values():
            self.plan(phase)  # raises errors that only a compiled plan shows
        self.brackets = [(name, begins.get(name), ends.get(name)) for name in names]

    def implementations(self, hook: str, phase: Phase | None = None) -> list[Implementation]:
        """The implementations of a hook, those for ``phase`` if given, in no order."""
        found = [impl for impl in self.implemented if impl.hook.name == hook]
        if phase is None:
            return found
        return [impl for impl in found if concerns(impl.phase, phase)]

    def ordered(self, hook: str) -> list[Implementation]:
        """The implementations of a hook that belongs to no phase, in order."""
        impls = {impl.entry.plugin: impl for impl in self.implementations(hook)}
        return [impls[placed.entry.plugin] for placed in self._arrange(hook, impls)]

    def _arrange(self, hook: str, impls: Mapping[str, Implementation]) -> list[Placed]:
        key = (hook, *impls)
        if key not in self._placed:
            entries = [impl.entry for impl in impls.values()]
            self._placed[key] = arrange(entries, self.chains, hook)
        return self._placed[key]

    def fit_order(self) -> list[Placed]:
        """The plugins that set up or tear down a fit, in the order of ``fit_begin``.

        A plugin with only a ``fit_end`` stands where its ``before`` and ``after``, turned round, put it.
        """
        entries = {}
        for impl in self.implementations(FitEnd.hook):
            entries[impl.entry.plugin] = _reverse(impl.entry)
        for impl in self.implementations(FitBegin.hook):
            entries[impl.entry.plugin] = impl.entry
        return arrange(list(entries.values()), self.chains, FitBegin.hook)

    def call(self, impl: Implementation, **given: Any) -> Any:
        """Call an implementation that belongs to no epoch."""
        return self._compiler().call(impl, **given)

    def check_phase(self, phase: Phase) -> None:
        """Check what shows only when a phase runs: events that never fire, states without a writer."""
        if self._checked.get(id(phase)) == (phase, self.version):
            return
        ran = [each for each, _ in self._checked.values()]
        known = {each.name: each for each in (*self._phases.values(), *ran, phase)}
        refusals.check_run(self.plugins, self.implemented, list(known.values()))
        self.owners.use(self.plugins)
        self._checked[id(phase)] = (phase, self.version)

    def idle(self, phases: Iterable[Phase]) -> list[str]:
        """The messages for the plugins that are never called in these phases."""
        known = list(phases)
        found = refusals.never_called(self.implemented, known)
        return [refusals.idle(name, missed, known) for name, missed in found.items()]

    def check_fit(self, runs: Sequence[Phase]) -> None:
        """Check what shows only when a fit begins. It runs these phases, and its hooks may run the user's own.

        Raises:
            PluginError: A plugin is never called, or it reads a metric that no phase makes, or one whose mode is not
                known.
        """
        for phase in runs:
            self.check_phase(phase)
        idle = self.idle([*runs, *self._phases.own])
        if idle:
            raise PluginError("; ".join(idle))
        refusals.check_monitors(self.implemented, self._phases, {phase.name for phase in runs})
        refusals.check_modes(self.plugins)
        for wrong in refusals.wrong_modes(self.plugins):
            warn(wrong)

    def never_made(self, metrics: Iterable[str]) -> list[str]:
        """The messages for metrics that were read and are not among these."""
        return refusals.never_made(self.implemented, metrics)

    def plan(self, phase: Phase) -> Plan:
        """The compiled plan of a phase."""
        if id(phase) not in self._plans:
            self._plans[id(phase)] = (phase, self._compile(phase))
        return self._plans[id(phase)][1]

    def _compiler(self) -> Compiler:
        return Compiler(self._learner, self._where, self.ordered(INSTRUMENT))

    def _compile(self, phase: Phase) -> Plan:
        self._specify()
        order: dict[str, list[Placed]] = {}
        impls: dict[str, list[Implementation]] = {}
        for name, hook in hooks().items():
            if "phase" not in hook.arguments:
                continue
            found = {impl.entry.plugin: impl for impl in self.implementations(name, phase)}
            if hook.kind == "replacement":
                refusals.check_replacement(name, list(found), phase)
            order[name] = self._arrange(name, found)
            impls[name] = [found[placed.entry.plugin] for placed in order[name]]
        return self._compiler().plan(phase, impls, order)

    def pack(self, plugin: Any, packed: list[Packed] | None) -> None:
        """Replace the packs of a plugin; see `Learner.pack_log`."""
        self._packs = [each for each in self._packs if each[0] is not plugin]
        if packed is not None:
            self._packs.append((plugin, packed))
        self._bind_log()

    def _bind_log(self) -> None:
        """Find what takes what is logged to the plugins."""
        impls = self.ordered(LOG_VALUE)
        compiler = self._compiler()
        listening = {id(impl.plugin) for impl in impls}
        packing = {id(plugin) for plugin, _ in self._packs}
        packs = [packed for plugin, packed in self._packs if id(plugin) in listening]
        heard = [impl for impl in impls if id(impl.plugin) not in packing]
        calls = [(compiler.bound(impl, ("record",), None), impl.entry.plugin) for impl in heard]
        if calls or len(packs) > 1:
            self._logbook.listen(Listeners(packs, calls))
        else:
            self._logbook.listen(packs[0] if packs else None)


def _implementation(impl: pluggy.HookImpl, hook: Hook) -> Implementation:
    options: HookOptions = impl.function.loopkit_options  # type: ignore[attr-defined]
    plugin = impl.plugin

    names = {}
    for label in ("reads", "updates", "writes", "before", "after"):
        given = getattr(options, label) or getattr(plugin, label, ())
        names[label] = declared(plugin, label, given)
    package = type(unwrapped(plugin)).__module__.partition(".")[0]
    entry = Entry(impl.plugin_name, provided(plugin), **names, package=package)
    arguments = plain_arguments(impl.function)
    if not arguments:
        arguments = tuple(inspect.signature(impl.function).parameters)
    return Implementation(plugin, hook, impl.function, arguments, options.phase, entry)


def _reverse(entry: Entry) -> Entry:
    """The entry as it must stand in a list that is run backwards; access has no say there."""
    return Entry(entry.plugin, entry.provides, before=entry.after, after=entry.before)
