"""Another distribution called ``loopkit``: the package index has one, a library for feedback control.

Both install a package called ``loopkit`` into the same folder. Whichever was installed last overwrites files of the
other, and removing one removes files of both. The distributions of this project and ``loopkit --version`` look for it.
"""

from __future__ import annotations

import os
from functools import cache

from loopkit.base.notes import warn
from loopkit.base.version import DISTRIBUTION
from loopkit.found.installed import installed, name_and_version

NAME = "loopkit"
OWN_COMMAND = b"loopkit.commands.cli:main"
"""The metadata of this library name it, under any name."""


def namesake() -> str | None:
    """The name and version of an installed distribution called ``loopkit`` that is another library, or None."""
    folder = installed().distributions.get(NAME)
    if folder is None or _is_own(folder):
        return None
    return " ".join(name_and_version(folder))


def cure() -> str | None:
    """The problem and the commands that fix it, if there is a `namesake`; else None."""
    found = namesake()
    if found is None:
        return None
    return (
        f"another library, {found}, is installed under loopkit's import name, and each overwrites files of the other: "
        f"pip uninstall loopkit, then install this one again: pip install --force-reinstall --no-deps {DISTRIBUTION} "
        f"(in a clone: pip install --force-reinstall --no-deps -e .)"
    )


@cache
def check() -> None:
    """Warn once if there is a `namesake`. Each distribution of the project calls this when it is imported."""
    if (text := cure()) is not None:
        warn(text)


def _is_own(folder: str) -> bool:
    try:
        with open(os.path.join(folder, "entry_points.txt"), "rb") as file:
            return OWN_COMMAND in file.read()
    except OSError:
        return False
