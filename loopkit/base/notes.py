"""Notes on errors: where one was raised, and what else happened; and lines and warnings for people."""

from __future__ import annotations

import contextlib
import inspect
import sys
import warnings
from pathlib import Path

OWN = str(Path(__file__).parents[1])
"""Where loopkit is."""


def locate(error: BaseException, where: str) -> None:
    """Note on an error where it was raised, unless it has such a note."""
    notes = getattr(error, "__notes__", ())
    texts = [note for note in notes if isinstance(note, str)] if isinstance(notes, list) else []
    if not any(text.startswith("loopkit: ") for text in texts):
        add_note(error, f"loopkit: {where}")


def add_note(error: BaseException, note: str) -> None:
    """Add a note; an exception whose class makes that impossible stays without."""
    with contextlib.suppress(Exception):  # the error itself is what matters, and must not give way to one of notes
        BaseException.add_note(error, note)


def shown(value: object) -> str:
    """The ``repr`` of something such as an error, or its class if that is broken."""
    try:
        return repr(value)
    except Exception:
        return type(value).__name__


def say(text: str) -> None:
    """Print a line for people on standard error, if it is open."""
    with contextlib.suppress(OSError, ValueError):  # it is closed
        print(f"loopkit: {text}", file=sys.stderr)


def warn(text: str, category: type[Warning] = UserWarning) -> None:
    """Warn of something, at the line of the user's that led to it."""
    frame = sys._getframe(1)
    level = 2
    while frame.f_code.co_filename.startswith(OWN) or frame.f_code.co_filename == contextlib.__file__:
        if frame.f_back is None:
            level = 2
            break
        frame = frame.f_back
        level += 1
    warnings.warn(text, category, stacklevel=level)


def line_with(of: object, text: str, unless: str = "") -> str:
    """The first line of an object's class that holds a text, for messages; empty without one."""
    try:
        lines, first = inspect.getsourcelines(type(of))
        file = inspect.getsourcefile(type(of))
    except (OSError, TypeError):  # it was typed in, or made by exec
        return ""
    for number, line in enumerate(lines, first):
        code = line.split("#")[0]
        if text in code and not (unless and unless in code):
            return f"line {number} of {file}, {code.strip()!r}"
    return ""
