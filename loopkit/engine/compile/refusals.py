"""Refusals: every conflict between plugins, and all that is wrong with one, in words."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from loopkit.base.words import STATE, close_spellings, half_a_state, nearest
from loopkit.engine.compile.order import EVERYTHING, overlaps
from loopkit.errors import OrderError, PluginConflict, PluginError
from loopkit.events import CycleEnd, FitBegin, FitEnd, SignalBegin
from loopkit.hooks import (
    PROJECT,
    PROVIDES,
    STATES,
    TRAINING,
    Hook,
    HookOptions,
    concerns,
    has_hooks,
    hooks,
    methods,
    plain_arguments,
)
from loopkit.phases import TRAINING_EVENTS, is_standard
from loopkit.plugin import declared, provided, unwrapped

if TYPE_CHECKING:
    from loopkit.engine.compile.plan import Implementation
    from loopkit.phases import Phase

METRIC = re.compile(r"metrics\.(([^*/]+)/.+)")
OTHER_WORDS = {
    "validation": "val",
    "validate": "val",
    "evaluation": "val",
    "evaluate": "val",
    "inference": "predict",
}
"""Other names of standard phases, each with the name here."""


def check_self(name: str, plugin: Any) -> None:
    """Raise for a hook that is a method without ``self``: its first argument would be the plugin itself.

    Raises:
        PluginError: Names the plugin and the hook.
    """
    known = hooks()
    for word in methods(plugin).keys() & known.keys():
        method = getattr(plugin, word, None)
        code = getattr(method, "__code__", None)
        if code is None or not inspect.ismethod(method) or code.co_flags & inspect.CO_VARARGS:
            continue
        arguments = code.co_varnames[: code.co_argcount]
        if not arguments or arguments[0] in known[word].arguments:
            given = ", ".join(arguments)
            right = ", ".join(("self", *arguments))
            raise PluginError(f"plugin {name!r}: {word}({given}) is a method without self: write {word}({right})")


def check_names(
    plugins: Mapping[str, Any], implementations: Sequence[Implementation], chains: Iterable[tuple[str, ...]]
) -> None:
    """Raise for unknown names of states and plugins."""
    names = {*plugins, *map(provided, plugins.values())} - {""}
    written: set[str] = set()
    for impl in implementations:
        written.update(impl.entry.writes, impl.entry.updates)
    for impl in implementations:
        where = _place(impl)
        entry = impl.entry
        for state in (*entry.reads, *entry.updates, *entry.writes):
            _check_state(state, where, names, written)
        for word in (*entry.before, *entry.after):
            _check_word(word, where, names)
    for chain in chains:
        for word in chain:
            _check_word(word, "order", names)


def _place(impl: Implementation) -> str:
    return f"plugin {impl.entry.plugin!r}, {impl.hook.name}"


def _check_state(state: str, where: str, names: set[str], written: set[str]) -> None:
    root = state.split(".")[0]
    if root in STATES or root in names or root in PROVIDES or state == EVERYTHING:
        return
    known = [*STATES, *names]
    if close_spellings(root, known) or not any(overlaps(state, other) for other in written):
        raise PluginError(
            f"{where}: no state is called {state!r}{nearest(root, known)}; "
            f"known are {', '.join(STATES)}, step.<attribute> and <plugin>.<field>"
        )


def _check_word(word: str, where: str, names: set[str]) -> None:
    if word in names or word in PROVIDES:
        return
    from loopkit.found.installed import plugin_names

    elsewhere = plugin_names()
    if word in elsewhere:
        return
    known = {*names, *PROVIDES, *elsewhere}
    if close_spellings(word, known):  # else it may be a plugin that is not installed
        raise OrderError(f"{where}: no plugin is called {word!r}{nearest(word, known)}")


def check_owners(plugins: Mapping[str, Any]) -> None:
    """Raise for two owners of one state."""
    owners: list[tuple[str, str]] = []
    known = {*STATES, *PROVIDES, *plugins}
    for name, plugin in plugins.items():
        for state in _owned(plugin):
            root = state.split(".")[0]
            if root.isidentifier() and root not in known and close_spellings(root, STATES):
                hint = nearest(root, STATES)
                raise PluginError(f"plugin {name!r}: owns {state!r}, but no state is called so{hint}")
            for other, theirs in owners:
                if other == name or not overlaps(state, theirs):
                    continue
                if _pattern(state) and _pattern(theirs):
                    continue  # `check_trainable` compares the parameters
                raise PluginConflict(f'{other!r} and {name!r} both own "{state}": {_way_out(state)}')
            owners.append((name, state))


def _owned(plugin: Any) -> tuple[str, ...]:
    return declared(plugin, "owns", getattr(plugin, "owns", ()))


def check_replacement(hook: str, plugins: Sequence[str], phase: Phase) -> None:
    """Raise for two plugins that do one thing, of which no order makes sense."""
    if len(plugins) > 1:
        names = " and ".join(map(repr, plugins))
        raise PluginConflict(f"{names} both implement {hook} in phase {phase.name!r}: keep one")


def check_trainable(plugins: Mapping[str, Any], models: Mapping[str, nn.Module]) -> None:
    """Raise for two plugins that decide whether the same parameter is trained: owners of ``trainable.<pattern>``."""
    owned = []
    for name, plugin in plugins.items():
        patterns = filter(None, map(_pattern, _owned(plugin)))
        owned += [(name, pattern) for pattern in patterns]
    if not owned:
        return
    from loopkit.groups import covers, named_parameters

    for path, _ in named_parameters(models):
        names = sorted({name for name, pattern in owned if covers(pattern, path)})
        if len(names) > 1:
            both = " and ".join(map(repr, names))
            raise PluginConflict(
                f'{both} both own "trainable" of parameter {path!r}: give them patterns of different parameters, or '
                f"keep one of them"
            )


def _pattern(state: str) -> str:
    """The pattern in ``"trainable.<pattern>"``; else an empty string."""
    root, _, pattern = state.partition(".")
    return pattern if root == "trainable" else ""


def _way_out(state: str) -> str:
    """How two owners of a state can live together."""
    if overlaps(state, "weights"):
        return "give one of them phases=(), and use it by learner.evaluate(data, weights=...), or keep one of them"
    return "keep one of them"


def check_run(plugins: Mapping[str, Any], implementations: Sequence[Implementation], phases: Sequence[Phase]) -> None:
    """Check that hooks can work with these phases: their events are emitted, their states are made."""
    emitted = _emitted(phases)
    phase_names = [phase.name for phase in phases]
    makers = {*plugins, *map(provided, plugins.values())}
    written: list[str] = []
    for impl in implementations:
        changed = (*impl.entry.writes, *impl.entry.updates)
        written += [state for state in changed if state != EVERYTHING]
    for impl in implementations:
        where = _place(impl)
        _check_phase_names(impl.phase, where, phase_names)
        may_never_come = getattr(impl.plugin, "optional", ())  # hooks that a plugin can do without
        hook = impl.hook
        if hook.kind == "event" and hook.name not in emitted and hook.name not in may_never_come:
            raise PluginError(
                f"{where}: no known phase emits this event; the phases are {', '.join(phase_names)}. "
                f"Give the phase that does: Learner(phases=[...])"
            )
        for state in impl.entry.reads:
            root, _, rest = state.partition(".")
            if root == "metrics" and rest:
                _check_metric(state, where, phase_names, written)
            elif root in PROVIDES and root not in STATES and root not in makers:
                raise PluginError(f"{where}: reads {state!r}, but no plugin is called {root!r} or provides it")


def _emitted(phases: Sequence[Phase]) -> set[str]:
    """The hooks of the events that come with these phases."""
    emitted = {FitBegin.hook, CycleEnd.hook, SignalBegin.hook, FitEnd.hook, "log_value"}
    for phase in phases:
        emitted |= {event.hook for event in phase.events()}
        if phase.training and phase.own_updates:  # `check_own` goes by the phase and the plugin
            emitted |= {event.hook for event in TRAINING_EVENTS}
    return emitted


def _check_metric(state: str, where: str, phases: Sequence[str], written: Sequence[str]) -> None:
    """Raise for a metric that is read, and whose phase is not known or that no plugin makes."""
    metric = state.partition(".")[2]
    phase = metric.split("/")[0]
    if "/" in metric and "*" not in phase and phase not in phases:
        raise PluginError(f"{where}: reads {state!r}, but no phase is called {phase!r}{nearest(phase, phases)}")
    if any(overlaps(state, other) for other in written):
        return
    made = [other.partition(".")[2] for other in written if other.startswith("metrics.")]
    names = sorted({name.replace("*/", f"{phase}/") for name in made})
    hint = nearest(metric, names)
    listed = ", ".join(names) or "none"
    raise PluginError(f"{where}: reads {state!r}, which no plugin makes{hint}; made are {listed}")


def _check_phase_names(chosen: Any, where: str, known: Sequence[str]) -> None:
    """Raise for the name of a phase that is a misspelling of a known one; of others, no hook is ever called."""
    names = chosen if isinstance(chosen, tuple) else (chosen,)
    for name in names:
        if not isinstance(name, str) or name == TRAINING or name in known:
            continue
        hint = nearest(name, [*known, TRAINING]) if close_spellings(name, [*known, TRAINING]) else ""
        meant = OTHER_WORDS.get(name)
        if meant in known:
            hint = f" (did you mean {meant!r}?)"
        if hint:
            raise PluginError(
                f"{where}: phase={name!r}, and no phase is called so{hint}; the phases are {', '.join(known)}. If it "
                f"is one of your own, give it to the learner: Learner(phases=[ValidationPhase({name!r})])"
            )


def never_called(implementations: Sequence[Implementation], phases: Sequence[Phase]) -> dict[str, list[str]]:
    """The plugins of whose hooks of epochs and steps none can fire in these phases, with these hooks in words.

    Hooks that a plugin can do without (``optional``) do not count, but one that can fire is enough.
    """
    idle: dict[str, list[str]] = {}
    called: set[str] = set()
    for impl in implementations:
        if "phase" not in impl.hook.arguments:
            continue
        if any(_can_fire(impl, phase) for phase in phases):
            called.add(impl.entry.plugin)
        elif impl.hook.name not in getattr(impl.plugin, "optional", ()):
            idle.setdefault(impl.entry.plugin, []).append(_in_words(impl))
    return {name: hooks for name, hooks in idle.items() if name not in called}


def _can_fire(impl: Implementation, phase: Phase) -> bool:
    if not concerns(impl.phase, phase):
        return False
    if impl.hook.kind == "event":
        return any(event.hook == impl.hook.name for event in phase.events())
    return phase.training or impl.hook.name != "optimizer_step"


def _in_words(impl: Implementation) -> str:
    if impl.phase is None:
        return impl.hook.name
    kinds = impl.phase if isinstance(impl.phase, tuple) else (impl.phase,)
    names = [kind if isinstance(kind, str) else kind.__name__ for kind in kinds]
    return f"{impl.hook.name} of {' or '.join(names)}"


def idle(name: str, hooks: Sequence[str], phases: Sequence[Phase]) -> str:
    """The message for a plugin that is never called."""
    ran = ", ".join(sorted({phase.name for phase in phases}))
    return (
        f"plugin {name!r} is never called: none of its hooks ({', '.join(hooks)}) can fire in the phases that run "
        f"({ran}). Take it out, or give the data or the phase that it "
        f"waits for; a plugin that may stay idle lists these hooks in its class: optional = (...)"
    )


def check_monitors(
    implementations: Sequence[Implementation], phases: Mapping[str, Phase], runs: Container[str]
) -> None:
    """Raise for a metric that is read, and that a fit never makes, since it does not run the phase.

    Phases of the user's own count as run: a hook may run them.
    """
    for reader, phase in _readers(implementations):
        if phase in runs or phase not in phases or not is_standard(phases[phase]):
            continue
        give = "give fit(train, val) data, or " if phase == "val" else ""
        raise PluginError(
            f"{reader}, but this fit does not run phase {phase!r}: "
            f"{give}let it read a metric of a phase that is "
            f"run. If a hook runs it, give it a phase of its own: Learner(phases=[ValidationPhase(name='probe')])"
        )


def check_modes(plugins: Mapping[str, Any]) -> None:
    """Raise for a plugin that reads a metric of unknown mode, before any plugin has acted."""
    for plugin in plugins.values():
        monitors = isinstance(getattr(plugin, "monitor", None), str)
        if monitors and hasattr(plugin, "mode") and getattr(plugin, "needs_mode", True):
            from loopkit.criteria.directions import direction

            direction(plugin, plugins.values())


def wrong_modes(plugins: Mapping[str, Any]) -> list[str]:
    """The messages for plugins with ``mode="min"`` on a metric that is better where it is higher."""
    lowest = []
    for plugin in plugins.values():
        metric = getattr(plugin, "monitor", None)
        if isinstance(metric, str) and getattr(plugin, "mode", None) == "min":
            lowest.append((type(plugin).__name__, metric))
    if not lowest:
        return []
    from loopkit.criteria.directions import better

    return [
        f'{name}: {metric} is better where it is higher, and mode is "min": leave it out'
        for name, metric in lowest
        if better(metric, plugins.values()) == "max"
    ]


def never_made(implementations: Sequence[Implementation], made: Iterable[str]) -> list[str]:
    """The messages for metrics that were read in a user's own loop, but whose phases did not run there."""
    ran = {metric.partition("/")[0] for metric in made}
    return [
        f"{reader}, but phase {phase!r} did not run in this fit: run it in the loop, or let it read another metric"
        for reader, phase in _readers(implementations)
        if phase not in ran
    ]


def _readers(implementations: Sequence[Implementation]) -> list[tuple[str, str]]:
    """The hooks that read a metric, in words, and its phase."""
    readers = []
    for impl in implementations:
        for state in impl.entry.reads:
            match = METRIC.fullmatch(state)
            if match:
                metric, phase = match.groups()
                readers.append((f"{_place(impl)}: reads the metric {metric!r}", phase))
    return readers


def shown_plugin(plugin: Any) -> str:
    """The plugin, or its class where its ``repr`` is no more than an address."""
    shown = repr(plugin)
    if " object at 0x" in shown:
        return f"a {type(plugin).__name__}"
    return shown


def check_plugin(plugin: Any, name: str) -> None:
    """Check a plugin where pluggy would accept it silently, or raise without a fix."""
    where = f"plugin {name!r} ({type(plugin).__name__})"
    word = provided(plugin)
    if not isinstance(word, str) or (word and not word.isidentifier()):
        raise PluginError(f"{where}: provides is {word!r}; it is one word, such as 'clip'")
    optional = getattr(plugin, "optional", ())
    if isinstance(optional, str):
        raise PluginError(f"{where}: optional is {optional!r}: give a tuple of hooks, optional = ({optional!r},)")
    for attribute, method in methods(plugin).items():
        _check_method(plugin, attribute, method, where)
    if not has_hooks(plugin):
        raise PluginError(f"{where} has no hooks, so nothing would call it: mark its methods with @hookimpl")
    _check_average(unwrapped(plugin), where)
    own = [each for each in STATE if callable(getattr(plugin, each, None))]
    half = half_a_state(own)
    if half:
        raise PluginError(f"{where} {half}")


def _check_method(plugin: Any, attribute: str, method: Any, where: str) -> None:
    known = hooks()
    options = getattr(method, f"{PROJECT}_impl", None)
    own_options: HookOptions | None = getattr(method, "loopkit_options", None)
    if options is None:
        if attribute in known:
            raise PluginError(f"{where}: {attribute} has a hook's name but no @hookimpl; add it, or rename the method")
        return
    if any(options.get(key) for key in ("tryfirst", "trylast", "wrapper", "hookwrapper")):
        raise PluginError(f"{where}: {attribute} uses pluggy's own options; use before=, after= or a context")
    if own_options is None:
        raise PluginError(f"{where}: {attribute} is marked by pluggy's marker; use loopkit.hookimpl")
    if attribute not in known:
        raise PluginError(f"{where}: there is no hook {attribute!r}{nearest(attribute, known)}")
    _check_arguments(getattr(plugin, attribute), known[attribute], f"{where}, {attribute}")
    if "phase" not in known[attribute].arguments and own_options.phase is not None:
        raise PluginError(f"{where}: {attribute} belongs to no phase, so it takes no phase=...")


def _check_average(plugin: Any, where: str) -> None:
    """Raise for an average without the methods that savers and evaluations need."""
    parts = ("averaged", "state_dict", "load_state_dict", "owns")
    missing = [part for part in parts if not hasattr(plugin, part)]
    if provided(plugin) == "average" and missing:
        raise PluginError(
            f"{where}: provides is 'average', and it has no {' and no '.join(missing)}. An average has "
            f"averaged(learner), a context with its weights in place; state_dict and load_state_dict; and owns, as "
            f"('weights.val',), the phases in whose epochs it stands there, or (): see loopkit.plugin.Average"
        )


def _check_arguments(method: Callable[..., Any], hook: Hook, where: str) -> None:
    plain = plain_arguments(method)
    if plain and set(plain) <= set(hook.arguments):
        return
    for argument in inspect.signature(method).parameters.values():
        name = argument.name
        if argument.default is not argument.empty:
            raise PluginError(f"{where}: argument {name!r} has a default; a hook's arguments have none")
        if argument.kind is not argument.POSITIONAL_OR_KEYWORD or name not in hook.arguments:
            hint = nearest(name, hook.arguments)
            takes = ", ".join(hook.arguments)
            raise PluginError(f"{where}: no argument is called {name!r}{hint}; it can take {takes}")


def chains(order: Sequence[Any]) -> list[tuple[str, ...]]:
    """``order=["a", "b"]`` is one chain, ``order=[["a", "b"], ["c", "d"]]`` are two."""
    if isinstance(order, str):
        raise OrderError(f"order is the string {order!r}: write a list of plugin names")
    if all(isinstance(item, str) for item in order):
        return [tuple(order)] if order else []
    for chain in order:
        if isinstance(chain, str) or not all(isinstance(word, str) for word in chain):
            raise OrderError(f"order holds {chain!r}: write one list of plugin names, or a list of such lists")
    return [tuple(chain) for chain in order]
