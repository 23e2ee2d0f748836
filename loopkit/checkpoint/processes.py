"""The writing process, named so that another can check later whether it lives; and when to give way."""

from __future__ import annotations

import hashlib
import os
import re
import socket
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

NICENESS = 10


@dataclass(frozen=True)
class Process:
    """Which process, on which machine."""

    host: str
    machine: str
    """Eight digits that differ after a restart of the machine, and between containers."""
    pid: int
    started: int
    """Clock ticks from the machine's start to the process's; 0 where that is not known."""

    @property
    def token(self) -> str:
        """The process as a part of a file name."""
        return f"{re.sub(r'[^A-Za-z0-9.-]', '_', self.host)[:64]}-{self.machine}-{self.pid}-{self.started}"

    def alive(self) -> bool:
        """Whether it lives; asked of a process of this machine."""
        try:
            os.kill(self.pid, 0)
        except (ProcessLookupError, OverflowError):
            return False
        except PermissionError:
            pass
        state, started = status(self.pid)
        return state not in ("Z", "X") and (0 in (started, self.started) or started == self.started)


def status(pid: int) -> tuple[str, int]:
    """The state letter of a process and the clock tick of its start; "" and 0 where there is no way to know."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return fields[0], int(fields[19])
    except (OSError, IndexError, ValueError):
        return "", 0


def boot() -> str:
    """Eight digits that are one for all containers of a machine until it restarts; empty where that is not known."""
    try:
        return hashlib.sha256(Path("/proc/sys/kernel/random/boot_id").read_bytes()).hexdigest()[:8]
    except OSError:
        return ""


def identity() -> Process:
    """This process."""
    parts = []
    for path in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid"):
        try:
            parts.append(str(os.stat(path).st_ino) if path.endswith("pid") else Path(path).read_text())
        except OSError:
            parts.append("")
    machine = hashlib.sha256("|".join(parts).encode()).hexdigest()[:8]
    return Process(socket.gethostname() or "localhost", machine, os.getpid(), status(os.getpid())[1])


def give_way() -> None:
    """Let this thread, and those it starts, run when others do not; without effect where threads have no priority."""
    if sys.platform == "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
