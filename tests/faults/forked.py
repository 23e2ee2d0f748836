"""Runs a function in a forked child, within a time limit: for what kills, hangs or changes its process."""

from __future__ import annotations

import os
import pickle
import select
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from loopkit.checkpoint.processes import Process, identity


@dataclass(frozen=True)
class Outcome:
    """How a child ended."""

    code: int
    """Its exit status; negative: the signal that killed it."""
    value: Any
    """What the function returned; None if it did not."""
    error: str
    """The traceback of what it raised; empty if nothing."""


def forked(function: Callable[[], Any], limit: float = 60.0) -> Outcome:
    """Call ``function`` in a forked child; more than ``limit`` seconds are an AssertionError."""
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads are running: the children here are short-lived
        child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setpgid(0, 0)
            os.close(read)
            try:
                answer = (function(), "")
                code = 0
            except BaseException:
                answer = (None, traceback.format_exc())
            data = memoryview(pickle.dumps(answer))
            while data:
                data = data[os.write(write, data) :]
        finally:
            os._exit(code)  # neither pytest nor atexit may run a second time
    os.close(write)
    received = bytearray()
    ended = os.pidfd_open(child)
    deadline = time.monotonic() + limit
    late = open_end = True
    try:
        while left := max(0.0, deadline - time.monotonic()):
            ready, _, _ = select.select([read, ended] if open_end else [ended], [], [], left)
            if read in ready:
                part = os.read(read, 1 << 16)
                received += part
                open_end = part != b""
            elif ended in ready:  # what it started may still hold the pipe
                late = False
                break
    finally:
        os.close(read)
        os.close(ended)
        try:
            os.killpg(child, signal.SIGKILL)  # and what it started
        except (ProcessLookupError, PermissionError):
            pass
        _, status = os.waitpid(child, 0)
    assert not late, f"the child did not end within {limit} s"
    code = os.waitstatus_to_exitcode(status)
    try:
        value, error = pickle.loads(bytes(received))
    except (EOFError, pickle.UnpicklingError):  # killed before it could answer
        value, error = None, ""
    return Outcome(code, value, error)


def call_forked(function: Callable[[], Any], limit: float = 60.0) -> Any:
    """What ``function`` returns in a forked child; what it raises there fails the test."""
    outcome = forked(function, limit)
    assert outcome.code == 0, outcome.error or f"the child ended with {outcome.code}"
    return outcome.value


def other(**changes: Any) -> Process:
    """This process, but for some of what identifies it."""
    own = identity()
    values = {"host": own.host, "machine": own.machine, "pid": own.pid, "started": own.started, **changes}
    return Process(**values)


def dead_pid() -> int:
    """The number of a process that has ended."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid
