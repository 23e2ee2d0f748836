"""The commit of the source code that a run is started from."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

PATIENCE = 2.0
"""Seconds that git may take; in a very large repository it takes longer, and the log does without."""


def commit() -> dict[str, Any] | None:
    """The commit that is checked out where the script is, and whether tracked files differ from it; None without git.

    Returns:
        ``{"commit": "<40 digits>", "dirty": True}``; ``"dirty"`` is None if git has not answered in time.
    """
    folder = _folder()
    head = _git(folder, "rev-parse", "HEAD")
    if not head:
        return None
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return {"commit": head, "dirty": None if changed is None else bool(changed)}


def _folder() -> Path:
    """The folder of the script; the working directory where there is none, as in a notebook."""
    script = Path(sys.argv[0]) if sys.argv and sys.argv[0] else None
    is_file = script is not None and script.is_file() and script.suffix == ".py"
    return script.resolve().parent if script is not None and is_file else Path.cwd()


def _git(folder: Path, *words: str) -> str | None:
    """The output of a git command; None if it fails, or git is not installed."""
    try:
        done = subprocess.run(
            ["git", *words],
            cwd=folder,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},  # or a look at the state would write to the repository
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=PATIENCE,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
