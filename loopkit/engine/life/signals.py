"""Signals during a fit: a handler only sets a flag, which the engine looks at between two steps."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from types import FrameType
from typing import Any

from loopkit.base import shield

ENDING = (signal.SIGINT, signal.SIGTERM)
# There are none on Windows.
SAVING, CHILD = ([getattr(signal, name)] if hasattr(signal, name) else [] for name in ("SIGUSR1", "SIGCHLD"))
Handler = Callable[[int, FrameType | None], None]
SAME = 0.2
"""Seconds in which a further SIGTERM is the same one: launchers and shells send one in several ways."""


def interruption() -> KeyboardInterrupt:
    """Return Ctrl-C in a fit as an error that a notebook shows in one line.

    It is no subclass: only after a plain `KeyboardInterrupt` does Python end the process as one that SIGINT ended.
    """
    error = KeyboardInterrupt()
    error._render_traceback_ = _in_one_line  # type: ignore[attr-defined]
    return error


def _in_one_line() -> list[str]:
    """Return the lines that IPython shows in place of a traceback."""
    return ["KeyboardInterrupt: the fit was interrupted; call fit again to resume it"]


class Signals:
    """Catch SIGINT, SIGTERM and SIGUSR1 from `install` to `remove`; afterwards the handlers are those from before.

    A handler that was there before is called by `pass_on`, after the save, unless it is Python's or the system's
    default. If it is the handler of a fit around this one, it stays, and that fit acts on the signals. Off the main
    thread, where Python allows no handlers, it installs none; a signal that was ignored stays ignored.

    A forked child is without handlers. A signal to the whole process group ends the workers of
    loaders, too; torch's error for that in the middle of a step is held back, so that the step can end.

    Args:
        notice: Called by the handlers, after the flag is set.
        in_step: Whether a step is under way.
    """

    def __init__(self, notice: Callable[[], None], in_step: Callable[[], bool]) -> None:
        self.ending: signal.Signals | None = None
        """The signal that asks for the end."""
        self.caught: signal.Signals | None = None
        """The last signal that still waits."""
        self._notice = notice
        self._in_step = in_step
        self._process = os.getpid()
        self._before: dict[int, Any] = {}
        self._installed: dict[int, Handler] = {}
        self._to_pass_on: list[int] = []
        """The signals of which the handlers from before have not heard yet."""
        self._terminated: float | None = None
        """When the first SIGTERM came."""
        self._over = False
        """The handlers from before are being put back."""

    def take(self) -> signal.Signals | None:
        """Return the last signal and clear it."""
        caught = self.caught
        self.caught = None
        return caught

    @property
    def reaches(self) -> bool:
        """Whether signals reach this thread, so that they can be caught."""
        return threading.current_thread() is threading.main_thread()

    def install(self) -> None:
        """Install the handlers, unless a fit around this one has."""
        if not self.reaches:
            return
        if not any(_is_of_a_fit(signal.getsignal(number)) for number in ENDING):
            shield.begin()
        for number in (*ENDING, *SAVING):
            self._put(number, self._handle)

    def _put(self, number: int, handler: Handler) -> None:
        before = signal.getsignal(number)
        if before in (None, signal.SIG_IGN) or _is_of_a_fit(before):
            return
        self._before[number] = before
        self._installed[number] = handler
        signal.signal(number, handler)

    def remove(self) -> None:
        """Put the handlers from before back."""
        self._over = True  # a signal that comes now installs none
        for number in (*SAVING, signal.SIGTERM, *CHILD, signal.SIGINT):  # last the one whose own handler raises
            if number in self._before and signal.getsignal(number) == self._installed[number]:  # nobody put another
                signal.signal(number, self._before[number])

    def pass_on(self, numbers: Collection[int] = (*ENDING, *SAVING)) -> None:
        """Call the handlers from before for what has come of these signals."""
        for number in [each for each in self._to_pass_on if each in numbers]:
            self._to_pass_on.remove(number)
            self._before[number](number, sys._getframe())

    def _handle(self, number: int, frame: FrameType | None) -> None:
        before = self._before[number]
        if os.getpid() != self._process:  # a forked child, to which the fit does not belong
            signal.signal(number, before)
            os.kill(os.getpid(), number)
            return
        self.caught = signal.Signals(number)
        if callable(before) and before is not signal.default_int_handler and number not in self._to_pass_on:
            self._to_pass_on.append(number)
        if number not in ENDING:
            self._notice()
            return
        first = self.ending is None
        if first:
            self._begin_end(number)
        now = time.monotonic()
        again = self._terminated is not None and now - self._terminated >= SAME
        if number == signal.SIGTERM and self._terminated is None:
            self._terminated = now
        self._notice()
        if number == signal.SIGINT:
            self._raise(interruption(), first)
        elif again:
            self._raise(SystemExit(128 + number), first)

    def _begin_end(self, number: int) -> None:
        """The first signal that asks for the end has come."""
        self.ending = signal.Signals(number)
        for child in () if self._over else CHILD:
            if callable(signal.getsignal(child)):
                self._put(child, self._lose_child)
        again = " again" if number == signal.SIGINT else ""
        _say(f"{self.ending.name}: stopping after this step (press Ctrl-C{again} to stop at once)")

    @staticmethod
    def _raise(error: BaseException, first: bool) -> None:
        """Raise it where the program is, if it is not to be counted only."""
        if shield.raises(error, first):
            raise error

    def _lose_child(self, number: int, frame: FrameType | None) -> None:
        try:
            self._before[number](number, frame)
        except RuntimeError:  # torch's: a worker is dead
            if not self._in_step():
                raise


def _is_of_a_fit(handler: Any) -> bool:
    """Whether a handler is one of a fit of this process."""
    owner = getattr(handler, "__self__", None)
    return isinstance(owner, Signals) and owner._process == os.getpid()


def _say(text: str) -> None:
    """Print a line; below a bar and its ``^C`` in a terminal."""
    with suppress(OSError):
        line = f"loopkit: {text}\n"
        os.write(2, (f"\n{line}" if os.isatty(2) else line).encode())  # a handler may run in the middle of a print
