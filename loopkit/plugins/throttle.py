"""Run a plugin less often."""

from __future__ import annotations

import inspect
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from loopkit.base import checks
from loopkit.errors import PluginError
from loopkit.hooks import PROJECT, hooks
from loopkit.plugin import plugin_name, unwrapped


def throttle(
    plugin: Any, *, every: int | None = None, seconds: float | None = None, when: Callable[..., bool] | None = None
) -> Any:
    """The plugin, called on some steps only; it has the name, order, access and state of the plugin.

    Hooks of a step (its events and ``step_context``) are called on the first step and then on every ``every``-th,
    or once at least ``seconds`` have passed; all hooks of one step go together, and each phase has its own count. Steps
    in which the plugin is idle, such as steps without an update for a plugin of ``update_begin``, do not
    count. Or a function decides in which steps. Hooks of epochs and fits, replacements and transforms are always
    called.

    Several processes must all call a plugin in the same steps, which clocks do not guarantee: give them ``every``.

    Args:
        plugin: Any plugin.
        every: Steps, from 1.
        seconds: Seconds, from 0.
        when: Asked once a step, with the ones of ``learner``, ``phase``, ``epoch`` and ``step`` that it takes by name.
            It has no state, and must answer the same in all processes.

    Raises:
        PluginError: Not exactly one of ``every``, ``seconds`` and ``when`` is given, or it is out of
            range; in the first step, there are several processes and ``seconds``.

    Example::

        throttle(call_on(StepEnd, lambda step: print(step.index), name="show"), every=100)
    """
    if [every, seconds, when].count(None) != 2:
        raise PluginError("throttle: give one of every=... (steps), seconds=... and when=... (a function)")
    if when is not None and not callable(when):
        raise PluginError(f"throttle: when={when!r}: it is a function, such as lambda step: step.index < 10")
    if every is not None:
        checks.whole("throttle", every=every)
    if seconds is not None:
        checks.not_negative("throttle", "seconds", seconds=seconds, infinite=True)
    return _Throttled(plugin, every, seconds, when)


class _Throttled:
    def __init__(self, plugin: Any, every: int | None, seconds: float | None, when: Callable[..., bool] | None) -> None:
        self.plugin = plugin
        self.__wrapped__ = unwrapped(plugin)
        self.name = plugin_name(plugin)
        self._every = every
        self._seconds = seconds
        self._when = when
        self._asked = [] if when is None else list(inspect.signature(when).parameters)
        self._decided: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
        """By step, since a step of another phase can run inside one."""
        self._counts: dict[str, int] = {}
        self._times: dict[str, float] = {}
        for hook in hooks().values():
            method = getattr(plugin, hook.name, None)
            if method is not None and hasattr(method, f"{PROJECT}_impl"):
                on_steps = "step" in hook.arguments and hook.kind in ("event", "context")
                setattr(self, hook.name, self._sometimes(method) if on_steps else method)

    def __getattr__(self, name: str) -> Any:
        if name in ("plugin", "__wrapped__"):
            raise AttributeError(name)
        return getattr(self.plugin, name)

    def _sometimes(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """The method behind the decision for its step, which it must be given whatever the method takes."""
        wanted = list(inspect.signature(method).parameters)

        def implementation(learner: Any, phase: Any, step: Any) -> Any:
            if self._decide(learner, phase, step):
                given = {"learner": learner, "phase": phase, "epoch": step.epoch, "step": step}
                return method(*(given[name] for name in wanted))
            return None

        setattr(implementation, f"{PROJECT}_impl", getattr(method, f"{PROJECT}_impl"))
        options = replace(method.loopkit_options, traced=None)  # type: ignore[attr-defined]  # it counts its calls
        implementation.loopkit_options = options  # type: ignore[attr-defined]
        return implementation

    def _decide(self, learner: Any, phase: Any, step: Any) -> bool:
        if (active := self._decided.get(step)) is None:
            if self._seconds is not None and learner.world.size > 1:
                raise PluginError(
                    f"throttle(seconds={self._seconds!r}) of plugin {self.name!r}: each of {learner.world.size} "
                    f"processes has its own clock, and they would call it in different steps: give a number of "
                    f"steps, every=..."
                )
            if self._when is not None:
                given = {"learner": learner, "phase": phase, "epoch": step.epoch, "step": step}
                active = bool(self._when(**{name: given[name] for name in self._asked}))
            elif self._every is not None:
                count = self._counts.get(phase.name, 0)
                self._counts[phase.name] = count + 1
                active = count % self._every == 0
            else:
                now = time.monotonic()
                active = now - self._times.get(phase.name, -float("inf")) >= (self._seconds or 0.0)
                if active:
                    self._times[phase.name] = now
            self._decided[step] = active
        return active

    def state_dict(self) -> dict[str, Any]:
        state = self.plugin.state_dict() if hasattr(self.plugin, "state_dict") else {}
        return {"counts": dict(self._counts), "plugin": state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._counts = dict(state["counts"])
        if hasattr(self.plugin, "load_state_dict"):
            self.plugin.load_state_dict(state["plugin"])
