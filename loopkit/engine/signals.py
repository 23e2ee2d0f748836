"""Signals during a fit: a handler only sets a flag, which the engine looks at between two steps."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

ENDING = (signal.SIGINT, signal.SIGTERM)
# There are none on Windows.
SAVING, CHILD = ([getattr(signal, name)] if hasattr(signal, name) else [] for name in ("SIGUSR1", "SIGCHLD"))
Handler = Callable[[int, FrameType | None], None]


class Signals:
    """Catch SIGINT, SIGTERM and SIGUSR1 from `install` to `remove`; afterwards the handlers are those from before.

    A handler that was there before is called, too, unless it is Python's or the system's default. Off the main thread,
    where Python allows no handlers, nothing is installed; a signal that was ignored stays ignored.

    In a forked child it is as if nothing was installed. A signal to the whole process group ends the workers of
    loaders, too; what torch then raises in the middle of a step is held back, so that the step can end.

    Args:
        notice: Called by the handlers, after the flag is set.
        in_step: Tells whether a step is under way.
    """

    def __init__(self, notice: Callable[[], None], in_step: Callable[[], bool]) -> None:
        self.ending: signal.Signals | None = None
        """The signal that asks for the end."""
        self.caught: signal.Signals | None = None
        """The last signal that nobody has acted upon yet."""
        self._notice = notice
        self._in_step = in_step
        self._process = os.getpid()
        self._before: dict[int, Any] = {}
        self._installed: dict[int, Handler] = {}

    def take(self) -> signal.Signals | None:
        """The last signal that nobody has acted upon, which from now on somebody has."""
        caught, self.caught = self.caught, None
        return caught

    def install(self, *given: tuple[int, Handler]) -> None:
        """Install these handlers, or its own."""
        if threading.current_thread() is threading.main_thread():
            for number, handler in given or [(number, self._handle) for number in (*ENDING, *SAVING)]:
                if (before := signal.getsignal(number)) not in (None, signal.SIG_IGN):
                    self._before[number], self._installed[number] = before, handler
                    signal.signal(number, handler)

    def remove(self) -> None:
        """Put the handlers from before back."""
        for number in (*ENDING, *SAVING, *CHILD):  # the child's last: a signal in between may install it
            if number in self._before and signal.getsignal(number) == self._installed[number]:  # nobody put another
                signal.signal(number, self._before[number])

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a forked child, to which the fit does not belong
            before = self._before[number]
            signal.signal(number, before)
            os.kill(os.getpid(), number)
            return
        self.caught = signal.Signals(number)
        if number in ENDING:
            if number == signal.SIGINT and self.ending is not None:
                raise KeyboardInterrupt
            if self.ending is None:
                for child in CHILD:
                    if callable(signal.getsignal(child)):
                        self.install((child, self._lose_child))
                _say(f"loopkit: {self.caught.name}: the fit ends after this step (Ctrl-C ends it at once)\n")
            self.ending = self.ending or self.caught
        self._notice()
        before = self._before[number]
        if callable(before) and before is not signal.default_int_handler:
            before(number, frame)

    def _lose_child(self, number: int, frame: FrameType | None) -> None:
        try:
            self._before[number](number, frame)
        except RuntimeError:  # torch's: a worker is dead
            if not self._in_step():
                raise


def _say(text: str) -> None:
    with suppress(OSError):
        os.write(2, text.encode())  # a handler may run in the middle of a print
