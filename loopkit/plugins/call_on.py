"""A function as a plugin."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from loopkit.errors import PluginError
from loopkit.events import Event
from loopkit.hooks import Declaration, hookimpl
from loopkit.phases import Phase


class _CallOn:
    def __init__(self, name: str, hook: str, implementation: Callable[..., Any]) -> None:
        self.name = name
        setattr(self, hook, implementation)

    def __repr__(self) -> str:
        return f"call_on({self.name!r})"


def call_on(
    event: type[Event],
    function: Callable[..., Any],
    *,
    name: str | None = None,
    phase: type[Phase] | tuple[type[Phase], ...] | None = None,
    reads: Declaration = (),
    updates: Declaration = (),
    writes: Declaration = (),
    before: Declaration = (),
    after: Declaration = (),
) -> Any:
    """A plugin that calls ``function`` on one event.

    Args:
        event: The event's class, such as ``EpochEnd``.
        function: Takes the arguments that it needs of ``learner``, ``phase``, ``step`` (``result`` in ``FitEnd``).
        name: The plugin's name, the function's by default.
        phase, reads, updates, writes, before, after: As in `loopkit.hookimpl`.

    Raises:
        PluginError: ``event`` is no event, or a lambda has no name.

    Example::

        call_on(EpochEnd, lambda phase: print(phase.name), name="shout")
    """
    if not (isinstance(event, type) and issubclass(event, Event)):
        raise PluginError(f"call_on: {event!r} is no event; give a class of loopkit.events, such as EpochEnd")
    name = name or str(getattr(function, "__name__", type(function).__name__))
    if name == "<lambda>":
        raise PluginError('call_on: a lambda has no name; give it one, call_on(..., name="...")')

    @functools.wraps(function)
    def implementation(*args: Any) -> Any:
        return function(*args)

    options = {"reads": reads, "updates": updates, "writes": writes, "before": before, "after": after}
    return _CallOn(name, event.hook, hookimpl(phase=phase, **options)(implementation))
