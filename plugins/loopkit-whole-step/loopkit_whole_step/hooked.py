"""The hooks of plugins that are recorded with a step."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import ref

from loopkit import Event
from loopkit.events import StepEnd, UpdateEnd
from loopkit_whole_step.sealed import Refused

if TYPE_CHECKING:
    from loopkit import Epoch, Learner, Phase

AFTER = {"update_end", "update_skipped", "step_end"}
"""Hooks that come after the phase's own step, or may."""
BEFORE = {"step_begin", "step_cancelled"}
"""Hooks that are no part of it."""


class Unliftable(Refused):
    """A hook of step_end that has to be called behind the graph."""

    def __init__(self, plugin: str, reason: str) -> None:
        super().__init__(reason)
        self.plugin = plugin


@dataclass(frozen=True)
class Hook:
    """A plugin's hook that is recorded."""

    plugin: str
    owner: Any
    function: Callable[..., Any]
    arguments: tuple[str, ...]
    traced: tuple[str, ...]
    """The attributes of the plugin that it sets."""
    vote: bool = False
    """Whether it is recorded as a vote, by the plugin's own check."""


@dataclass(frozen=True)
class Hooks:
    """The recorded hooks of plugins."""

    calls: dict[type[Event], list[Hook]]
    ends: list[Hook]

    @property
    def owners(self) -> dict[str, Any]:
        """Their plugins."""
        every = [*self.ends, *(hook for hooks in self.calls.values() for hook in hooks)]
        return {hook.plugin: hook.owner for hook in every}

    @property
    def sets(self) -> dict[tuple[str, str], Any]:
        """The attributes that they set, with their plugins."""
        every = [*(hook for hooks in self.calls.values() for hook in hooks), *self.ends]
        return {(hook.plugin, name): hook.owner for hook in every for name in hook.traced}


class RecordedHooks:
    """The hooks that a plan's steps are recorded with."""

    def __init__(self) -> None:
        self.after: set[str] = set()
        """Plugins whose hook of ``step_end`` cannot be recorded."""
        self._found: tuple[Callable[[], Any], Hooks, str] | None = None
        """The plan that they belong to, its recorded hooks, and the reason if none can be recorded."""

    def of(self, learner: Learner, phase: Phase, epoch: Epoch) -> Hooks:
        """The recorded hooks of plugins, in the plan's order.

        Raises:
            Refused: A hook in the step has to be called.
        """
        plan = epoch.plan
        if self._found is None or self._found[0]() is not plan:
            hooks, reasons = _sorted(learner, phase, plan.order, self.after)
            self._found = ref(plan), hooks, "; ".join(reasons)
        if self._found[2]:
            raise Refused(self._found[2])
        return self._found[1]

    def leave_out(self, plugin: str) -> None:
        """Call a plugin's hook of ``step_end`` after the graph."""
        self.after.add(plugin)
        self._found = None

    def load(self, after: list[str]) -> None:
        """Restore the plugins whose hooks are called after the graph."""
        self.after = set(after)
        self._found = None


def _sorted(learner: Learner, phase: Phase, order: Any, after: set[str]) -> tuple[Hooks, list[str]]:
    """The recorded hooks in the plan's order, without the hooks of plugins that come after; and why there are none."""
    plugins: Any = learner.plugins
    calls: dict[type[Event], list[Hook]] = {}
    ends: list[Hook] = []
    reasons = [
        f"plugin {placed.entry.plugin!r} takes the optimizer's step"
        for placed in (order.get("optimizer_step", ()) if phase.training else ())
    ]
    for placed in order.get("update_end", ()) if len(learner.optimizers) > 1 else ():
        if read := (*placed.entry.reads, *placed.entry.updates):
            plugin = f"update_end of plugin {placed.entry.plugin!r}"
            reasons.append(f"{plugin} reads {', '.join(read)} between the updates of two optimizers")
    for event in dict.fromkeys(phase.events()):
        if "step" not in event.arguments or event.hook in (BEFORE | AFTER) - {"step_end"}:
            continue
        if event is not StepEnd:
            calls[event] = []
        for placed in order[event.hook]:
            name = placed.entry.plugin
            if event is not StepEnd and is_idle(plugins[name]):
                continue
            hook = _hook(name, plugins[name], event.hook)
            if event is StepEnd:
                if hook is not None and not hook.vote and name not in after:
                    ends.append(hook)
            elif hook is None:
                reasons.append(f"{event.hook} of plugin {name!r} has to be called in it")
            else:
                calls[event].append(hook)
    calls.setdefault(UpdateEnd, [])
    return Hooks(calls, ends), reasons


def is_idle(plugin: Any) -> bool:
    """Whether a plugin syncs processes, and has nothing to do since there is only one."""
    return getattr(plugin, "provides", "") == "sync" and getattr(plugin, "own_updates", False) is True


def _hook(name: str, plugin: Any, hook: str) -> Hook | None:
    """The recorded form of a plugin's hook; None if it has to be called."""
    function = getattr(plugin, hook)
    options = function.loopkit_options
    if options.traced is not None:
        return Hook(name, plugin, function, tuple(inspect.signature(function).parameters), options.traced)
    if hasattr(plugin, "vote") and (voting := plugin.vote(hook)) is not None:
        return Hook(name, plugin, voting, (), (), vote=True)
    return None
