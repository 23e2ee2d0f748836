"""Ctrl-C while a command is being imported, or has ended, is one line: importing torch takes seconds.

Importing this module does it, if the process is ``loopkit ...`` or ``python -m loopkit``. Others keep Python's handler.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from itertools import pairwise
from pathlib import Path
from typing import NoReturn

LINE = "loopkit: interrupted"
CODE = 130
"""The exit code of a program that SIGINT ended."""


def _end(*_: object) -> NoReturn:
    os.write(2, f"{LINE}\n".encode())
    os._exit(CODE)


def is_command() -> bool:
    """Whether this process is the command. One that it starts has the same ``sys.argv``, and other first words."""
    if sys.argv[:1] == ["-m"]:  # which is imported, and has not begun
        return ("-m", "loopkit") in pairwise(sys.orig_argv)
    return any(Path(word).name == "loopkit" for word in sys.orig_argv[1:2])


def in_one_line() -> None:
    """From now on, Ctrl-C ends the process at once, with one line."""
    if threading.current_thread() is threading.main_thread() and is_command():
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is ignored, or somebody's own
            signal.signal(signal.SIGINT, _end)


def as_usual() -> None:
    """From now on, Ctrl-C raises `KeyboardInterrupt` again."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


in_one_line()
