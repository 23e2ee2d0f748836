"""A plugin that writes down every event."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from loopkit.author import Hook, hooks
from loopkit.events import Event
from loopkit.hooks import hookimpl
from loopkit.phases import Phase


class EventLog:
    """Record, as text, every event and context that comes, the user's own events included.

    ``lines`` grows by one line at a time: the phase's name if there is one, then the hook. A context has two lines,
    which end in ``enter`` and ``leave``::

        ["fit_begin", "train epoch_context enter", "train epoch_begin", "train step_begin", ...]

    Events that are defined after the log was made are not recorded.

    Args:
        name: The plugin's name.
    """

    volatile = ("lines",)

    def __init__(self, name: str = "event_log") -> None:
        self.name = name
        self.lines: list[str] = []
        self.optional = tuple(Event.by_hook)
        """Events that no phase may emit are listened to all the same."""
        for name, hook in hooks().items():
            if name in Event.by_hook:
                setattr(self, name, self._event(hook))
            elif hook.kind == "context":
                setattr(self, name, self._context(hook))

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
