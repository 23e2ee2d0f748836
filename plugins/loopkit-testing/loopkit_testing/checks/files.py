"""A check of the files that a plugin writes: in the folder that it was given, and nowhere else."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from torch import nn

from loopkit.learner import Learner
from loopkit_testing.case import Case, described

DEPTH = 5
"""How deep the attributes of a plugin are searched for paths."""
CACHES = ("__pycache__", ".cache", "torchinductor_")
"""How the names of folders begin whose files are made again if they are gone: any plugin may write there."""
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
CHANGES = ("os.mkdir", "os.remove", "os.rmdir", "os.rename", "os.symlink", "os.link", "os.truncate", "sqlite3.connect")
"""The audit events of Python for changes in the file system besides ``open``; the first argument is the path."""


class _Audit:
    """The paths that this process writes to while somebody listens. Such a hook of Python can never be removed."""

    listening: list[tuple[str, str]] | None = None
    installed = False

    @classmethod
    def hear(cls, event: str, arguments: tuple[Any, ...]) -> None:
        """Note a path that is written to, with the function."""
        if cls.listening is None:
            return
        for path in _changed(event, arguments):
            if isinstance(path, (str, bytes, os.PathLike)):
                cls.listening.append((os.path.abspath(os.fsdecode(path)), event))


def _changed(event: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """The paths that an event of Python's audit changes."""
    if event == "open":
        path, mode, flags = arguments
        return (path,) if (flags or 0) & WRITES or set(mode or "") & set("wax+") else ()
    if event not in CHANGES:
        return ()
    if event not in ("sqlite3.connect", "os.symlink", "os.truncate") and arguments[-1] not in (-1, None):
        return ()  # a name within a folder that is open, as when a whole folder is removed
    return arguments[:2] if event in ("os.rename", "os.link") else arguments[:1]


@contextmanager
def _heard() -> Iterator[list[tuple[str, str]]]:
    """The paths that are written to inside."""
    if not _Audit.installed:
        sys.addaudithook(_Audit.hear)
        _Audit.installed = True
    found: list[tuple[str, str]] = []
    _Audit.listening = found
    try:
        yield found
    finally:
        _Audit.listening = None


@contextmanager
def _elsewhere() -> Iterator[Path]:
    """A working directory and a home that are empty."""
    with tempfile.TemporaryDirectory(prefix="loopkit-testing-") as directory:
        folder = Path(directory).resolve()  # as paths below the working directory are
        with chdir(folder), mock.patch.dict(os.environ, HOME=str(folder)):
            yield folder


def files_within(case: Case) -> list[str]:
    """Files are written in a folder that an option names, and nowhere else.

    The fit has a working directory and a home of its own, which are empty. Allowed are paths that the plugin, or an
    object in its attributes, holds: all below them, and beside a file those that begin with its name. Files for a
    moment belong in ``tempfile``, and must be gone after the fit. Files written by other processes, or by libraries
    in C outside of these folders, are not seen.
    """
    with _elsewhere() as folder:
        plugins = case.plugins()
        with _heard() as written:
            try:
                case.bench(plugins).train(epochs=2, short=True)
            except Exception as error:
                return [f"in a working directory that is empty, the fit {described(error)}"]
        given = {path for plugin in plugins for path in _paths(plugin, DEPTH, set())}
        known = {path for path, _ in written}
        written += [(str(path), "in C") for path in folder.rglob("*") if path.is_file() and str(path) not in known]
        made = {path for path, how in written if how not in ("os.remove", "os.rmdir")}
        outside = [each for each in written if not (_may(each[0], given, folder) or _gone(each[0], folder, made))]
    if not outside:
        return []
    path, how = outside[0]
    done = {"open": "written", "in C": "written", "sqlite3.connect": "written"}.get(how, how.removeprefix("os."))
    return [
        f"{path!r} is outside of what the plugin was given, and is changed there ({done}): take the folder as an "
        f"option, and keep files below it; those for a moment belong in tempfile, and must be gone after the fit"
    ]


def _paths(value: Any, depth: int, seen: set[int]) -> Iterator[str]:
    """The paths among the attributes of an object, and of those that it holds."""
    if isinstance(value, (str, os.PathLike)):
        if text := os.fspath(value):
            yield os.path.abspath(text)
        return
    if depth == 0 or id(value) in seen or isinstance(value, (type, Learner, nn.Module)):
        return
    seen.add(id(value))
    if isinstance(value, dict):
        held = list(value.values())
    elif isinstance(value, (list, tuple)):
        held = list(value)
    else:
        held = list(getattr(value, "__dict__", {}).values())
        held += [getattr(value, name, None) for name in getattr(type(value), "__slots__", ())]
    for each in held:
        yield from _paths(each, depth - 1, seen)


def _may(path: str, given: set[str], folder: Path) -> bool:
    """Whether this path is the plugin's to change."""
    parts = Path(path).parts
    if parts[1] in ("dev", "proc") or any(part.startswith(CACHES) or part.endswith(".pyc") for part in parts[1:]):
        return True
    for allowed in given - {str(folder), os.sep}:
        name = os.path.basename(allowed)
        beside = os.path.dirname(path) == os.path.dirname(allowed)
        if f"{path}{os.sep}".startswith(f"{allowed}{os.sep}") or f"{allowed}{os.sep}".startswith(f"{path}{os.sep}"):
            return True
        if beside and os.path.basename(path).lstrip(".").startswith(name.partition(".")[0]):
            return True
    return False


def _gone(path: str, folder: Path, made: set[str]) -> bool:
    """Whether this was a file for a moment: made in the system's folder for them, and removed."""
    temporary, real = os.path.realpath(tempfile.gettempdir()), os.path.realpath(path)
    within = real.startswith(temporary + os.sep) and not real.startswith(os.path.realpath(folder) + os.sep)
    return within and path in made and not os.path.exists(path)
