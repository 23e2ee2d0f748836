"""Whether the process of a run is there."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

__all__ = ["find"]

SLACK = 120.0
"""Seconds that clocks may disagree by."""


def find(pid: Any, seen: float) -> bool | None:
    """Whether a process of this machine runs.

    Args:
        pid: The value in a log; of any type.
        seen: When it ran, in seconds since 1970.

    Returns:
        None if a process has the number, but seems to be a later one: the number was given again, or the clock was set.
    """
    if type(pid) is not int or not 0 < pid < 2**31:
        return False
    try:
        said = Path(f"/proc/{pid}/stat").read_bytes()
    except FileNotFoundError:
        return False if os.path.exists("/proc/self/stat") else _signal(pid)
    except OSError:
        return False
    state, *fields = said.rpartition(b")")[2].split()
    if state in (b"Z", b"X"):
        return False
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[18]) / os.sysconf("SC_CLK_TCK")
    return True if time.time() - age <= seen + SLACK else None


def _signal(pid: int) -> bool:
    """Ask without ``/proc``."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
