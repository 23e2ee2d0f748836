"""Answers: how a run acts on what was asked for between two steps or epochs."""

from __future__ import annotations

from collections.abc import Callable

from loopkit.engine.compile.registry import Registry
from loopkit.engine.life.requests import Interrupted, Requests
from loopkit.engine.life.running import Running
from loopkit.events import SignalBegin


class Answers:
    """Carries out the requests for a save and for the end of the process.

    Args:
        requests: The mailbox.
        running: The fit and its epochs.
        registry: The plugins that save.
        hold: Keeps what is open for the next fit of this process.
    """

    def __init__(self, requests: Requests, running: Running, registry: Registry, hold: Callable[[], None]) -> None:
        self._requests = requests
        self._running = running
        self._registry = registry
        self._hold = hold

    def answer(self) -> None:
        """Between two steps, or two epochs: let plugins save, and end the process if that is asked for.

        Raises:
            Interrupted: It is.
        """
        requests = self._requests
        running = self._running
        if not requests.waits or not running.can_save:
            return
        if requests.together and running.window_open:
            return  # a window holds gradients of this process alone, which cannot be saved
        wishes = requests.take()
        if running.fit is None or not (wishes.save or wishes.ending):
            return
        for impl in self._registry.ordered(SignalBegin.hook):
            self._registry.call(impl)
        requests.pass_on_saves()
        if wishes.ending is not None:
            self._hold()
            raise Interrupted(wishes.ending)
