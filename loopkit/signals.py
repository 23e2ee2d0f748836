"""Signals during a fit: a handler only sets a flag, which the engine looks at between two steps."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

__all__ = ["Signals"]

ENDING = (signal.SIGINT, signal.SIGTERM)
SAVING = getattr(signal, "SIGUSR1", None)  # there is none on Windows


class Signals:
    """Catch SIGINT, SIGTERM and SIGUSR1 inside a ``with`` block; afterwards the handlers are those from before.

    A handler that was there before is called, too, unless it is Python's or the system's default. Off the main thread,
    where Python allows no handlers, nothing is installed; a signal that was ignored stays ignored.

    Args:
        notice: Called by the handlers, after the flag is set.
    """

    def __init__(self, notice: Callable[[], None]) -> None:
        self.ending: signal.Signals | None = None
        """The signal that asks for the end."""
        self.caught: signal.Signals | None = None
        """The last signal that nobody has acted upon yet."""
        self._notice = notice
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            for number in (*ENDING, SAVING):
                before = None if number is None else signal.getsignal(number)
                if number is not None and before is not None and before is not signal.SIG_IGN:
                    self._before[number] = before
                    signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, before in self._before.items():
            if signal.getsignal(number) == self._handle:  # else somebody has put another one in its place
                signal.signal(number, before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.caught = signal.Signals(number)
        if number in ENDING:
            if number == signal.SIGINT and self.ending is not None:
                raise KeyboardInterrupt
            if self.ending is None:
                _say(f"loopkit: {self.caught.name}: the fit ends after this step (Ctrl-C ends it at once)\n")
            self.ending = self.ending or self.caught
        self._notice()
        before = self._before[number]
        if callable(before) and before is not signal.default_int_handler:
            before(number, frame)


def _say(text: str) -> None:
    try:
        os.write(2, text.encode())  # a handler may run in the middle of a print
    except OSError:
        pass
