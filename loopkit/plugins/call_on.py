"""A function as a plugin."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

from loopkit.base.words import nearest
from loopkit.errors import PluginError
from loopkit.events import Event
from loopkit.hooks import Declaration, PhaseChoice, hookimpl, hooks


class _Counts:
    """In which calls of an event a function is called, from 1, counted for each phase."""

    def __init__(self, given: dict[str, Any]) -> None:
        self.counts: dict[str, int] = {}
        for word, value in given.items():
            numbers = list(value) if word == "at" and not isinstance(value, int) else [value]
            if not numbers or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in numbers):
                raise PluginError(f"call_on: {word} is {value!r}: it counts calls of the event, from 1")
        at = given.get("at")
        self._at = [at] if isinstance(at, int) else at
        self._every = given.get("every", 1)
        self._since = given.get("since", 1)
        self._until = given.get("until")

    def due(self, phase: str) -> bool:
        count = self.counts[phase] = self.counts.get(phase, 0) + 1
        if self._at is not None and count not in self._at:
            return False
        return count % self._every == 0 and self._since <= count and (self._until is None or count <= self._until)


class _CallOn:
    def __init__(self, name: str, hook: str, implementation: Callable[..., Any]) -> None:
        self.name = name
        setattr(self, hook, implementation)

    def __repr__(self) -> str:
        return f"call_on({self.name!r})"


class _CountedCallOn(_CallOn):
    def __init__(self, name: str, hook: str, implementation: Callable[..., Any], counts: _Counts) -> None:
        super().__init__(name, hook, implementation)
        self._counts = counts

    def state_dict(self) -> dict[str, Any]:
        return dict(self._counts.counts)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._counts.counts = dict(state)


def call_on(
    event: type[Event] | str,
    function: Callable[..., Any],
    *,
    name: str | None = None,
    phase: PhaseChoice = None,
    reads: Declaration = (),
    updates: Declaration = (),
    writes: Declaration = (),
    before: Declaration = (),
    after: Declaration = (),
    every: int | None = None,
    at: int | Iterable[int] | None = None,
    since: int | None = None,
    until: int | None = None,
) -> Any:
    """A plugin that calls ``function`` on one event.

    Args:
        event: The event's class or its hook's name: ``EpochEnd``, ``"epoch_end"``.
        function: Takes the arguments that it needs of ``learner``, ``phase``, ``step`` (``result`` in ``FitEnd``).
        name: The plugin's name, the function's by default.
        phase, reads, updates, writes, before, after: As in `loopkit.hookimpl`.
        every: Call it at each n-th time that the event fires in a phase, and no other. The counts run on from epoch to
            epoch and from a saved state.
        at: At these times, counted from 1.
        since: From this time on.
        until: Up to this time.

    Raises:
        PluginError: ``event`` is no event, a count is not from 1, or a lambda has no name.

    Example::

        call_on(EpochEnd, lambda phase: print(phase.name), name="shout")
    """
    event = _event(event)
    name = name or str(getattr(function, "__name__", type(function).__name__))
    if name == "<lambda>":
        raise PluginError('call_on: a lambda has no name; give it one, call_on(..., name="...")')

    @functools.wraps(function)
    def implementation(*args: Any) -> Any:
        return function(*args)

    given = {"every": every, "at": at, "since": since, "until": until}
    given = {word: value for word, value in given.items() if value is not None}
    mark = hookimpl(phase=phase, reads=reads, updates=updates, writes=writes, before=before, after=after)
    if not given:
        return _CallOn(name, event.hook, mark(implementation))
    counts = _Counts(given)
    wanted = list(inspect.signature(function).parameters.values())
    of_phases = "phase" in hooks()[event.hook].arguments
    asked = of_phases and "phase" not in [each.name for each in wanted]

    def counted(*args: Any) -> Any:
        found = dict(zip(names, args, strict=True))
        if counts.due(found["phase"].name if of_phases else ""):
            function(*args[: len(wanted)])

    more = [inspect.Parameter("phase", inspect.Parameter.POSITIONAL_OR_KEYWORD)] if asked else []
    names = [each.name for each in (*wanted, *more)]
    counted.__signature__ = inspect.Signature([*wanted, *more])  # type: ignore[attr-defined]
    return _CountedCallOn(name, event.hook, mark(counted), counts)


def _event(given: Any) -> type[Event]:
    """The class of an event, given by itself or by its hook's name."""
    event = Event.by_hook.get(given, given) if isinstance(given, str) else given
    if isinstance(event, type) and issubclass(event, Event):
        return event
    near = nearest(event, Event.by_hook) if isinstance(event, str) else ""
    raise PluginError(f"call_on: {event!r} is no event{near}; give a class of loopkit.events, such as EpochEnd")
