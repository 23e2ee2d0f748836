"""The server in a background process."""

from __future__ import annotations

import select
import subprocess
import sys
import tempfile
import time
from pathlib import Path

__all__ = ["Background", "running"]

PATIENCE = 20.0
"""Seconds until it must have printed its address."""
LONGEST = 1000
"""Characters of its output."""
IDLE = 3600
"""Seconds without a request and a live run after which it ends."""
_started: list[Background] = []
"""Servers are left running, and Python warns of a process that is forgotten while it runs."""


class Background:
    """A server of the page in its own process, which lives on when this one has ended, while it is of use.

    Args:
        root: The folder of the runs; made if it is not there.
        port: Where it listens; 0 for any that is free.

    Raises:
        OSError: It could not be started; gives the reason.
    """

    def __init__(self, root: Path, port: int = 0) -> None:
        root.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-P", "-m", "loopkit_monitor.server", str(root), "--port", str(port)]
        command += ["--idle", str(IDLE)]
        self.place = root.resolve(), port
        """The folder, and the port that was asked for."""
        self._says = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - it is read when the process has died
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._says,
            text=True,
            start_new_session=True,  # a signal from the terminal is not for it
        )
        _started.append(self)
        self.address = self._read_address()
        self.pid = self._process.pid
        """The number of the process."""

    def _read_address(self) -> str:
        """Read the address for the browser from the server's output."""
        said = self._process.stdout
        assert said is not None
        end = time.monotonic() + PATIENCE
        with said:
            while not select.select([said], [], [], max(end - time.monotonic(), 0.0))[0]:
                if time.monotonic() >= end:
                    self._process.kill()
                    self._process.wait()
                    raise TimeoutError(f"it has not printed its address in {PATIENCE:.0f} s")
            words = said.readline(LONGEST).split()
        if not words:
            self._process.wait(PATIENCE)
            raise OSError(self.death())
        return words[-1]

    def end(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait(PATIENCE)

    def death(self) -> str:
        """How the process ended; empty while it runs."""
        if (code := self._process.poll()) is None:
            return ""
        self._says.seek(0)
        lines = self._says.read().strip().splitlines()
        why = f": {lines[-1][:LONGEST]}" if lines else ""
        return f"the server of the page ended with {code}{why}"


def running(root: Path, port: int = 0) -> Background | None:
    """The server that this process has started with the same arguments, if it still runs."""
    place = root.resolve(), port
    return next((each for each in _started if each.place == place and not each.death()), None)
