"""Runs a function in several forked processes that find each other on loopback, within a time limit."""

from __future__ import annotations

import faulthandler
import gc
import os
import pickle
import secrets
import select
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from loopkit.base import world

GRACE = 3.0  # seconds that the others get after the first failure, so that they can say what they saw


@dataclass(frozen=True)
class Outcome:
    """How one process ended."""

    code: int | None
    """Its exit status; negative: the signal that killed it; None: it had to be killed after all."""
    value: Any
    """What the function returned; None if it did not."""
    error: str
    """The traceback of what it raised; empty if nothing."""
    output: str
    """What it printed, to both streams."""
    seconds: float
    """When it ended, after the start."""

    @property
    def failed(self) -> bool:
        return self.code != 0


def run(
    fn: Callable[..., Any],
    processes: int,
    *args: Any,
    timeout: float = 120.0,
    env: Mapping[str, str | None] | None = None,
    check: bool = True,
) -> list[Any]:
    """Call ``fn(rank, *args)`` in ``processes`` forked children with a launcher's environment; the results by rank.

    A child that returns leaves its process group first. Results are pickled.

    Args:
        timeout: Seconds for all of them together; what still runs then is killed.
        env: More variables for the children; None takes one away.
        check: Fail the test if a child raises, is killed or does not end. Else return one `Outcome` per rank.
    """
    port = str(free_port())
    children: list[_Child] = []
    try:
        for rank in range(processes):
            children.append(_Child(fn, rank, processes, args, port, env or {}, timeout))  # noqa: PERF401 - all must be closed
        deadline = time.monotonic() + timeout
        hurried = False
        while (waiting := [child for child in children if not child.ended]) and time.monotonic() < deadline:
            select.select([handle for child in waiting for handle in child.handles], [], [], 0.5)
            for child in waiting:
                child.poll()
            if check and not hurried and any(child.ended and child.code != 0 for child in children):
                deadline, hurried = min(deadline, time.monotonic() + GRACE), True
    finally:
        for child in children:
            child.close()
    outcomes = [child.outcome() for child in children]
    if not check:
        return outcomes
    if failed := [rank for rank in range(processes) if outcomes[rank].failed]:
        failed.sort(key=lambda rank: outcomes[rank].seconds)
        raise AssertionError("\n".join(_report(rank, outcomes[rank], timeout) for rank in failed))
    return [outcome.value for outcome in outcomes]


def run_each(fn: Callable[..., Any], processes: int, cases: Iterable[tuple[Any, ...]], **options: Any) -> list[Any]:
    """`run` for several cases in one start: for each case, what ``fn(rank, *case)`` returned, by rank."""
    return list(zip(*run(_each, processes, fn, list(cases), **options), strict=True))


def _each(rank: int, fn: Callable[..., Any], cases: list[tuple[Any, ...]]) -> list[Any]:
    return [fn(rank, *case) for case in cases]


def free_port() -> int:
    """A port on loopback that nobody uses, from below those that the system gives to outgoing connections."""
    while True:
        port = 20000 + secrets.randbelow(12000)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


def _report(rank: int, outcome: Outcome, timeout: float) -> str:
    if outcome.code is None:
        how = f"was still running after {outcome.seconds:.1f} s (timeout={timeout:g}) and was killed\n"
    elif outcome.code < 0:
        how = f"was killed by {signal.Signals(-outcome.code).name} after {outcome.seconds:.1f} s\n"
    else:
        how = f"ended with {outcome.code} after {outcome.seconds:.1f} s\n"
    return f"rank {rank} {how}{outcome.error}{outcome.output}"


Environment = Mapping[str, str | None]


class _Child:
    """One forked process, its answer and what it prints."""

    def __init__(
        self,
        fn: Callable[..., Any],
        rank: int,
        size: int,
        args: tuple[Any, ...],
        port: str,
        env: Mapping[str, str | None],
        timeout: float,
    ) -> None:
        self.code: int | None = None
        self.ended = False
        self.started = time.monotonic()
        self.seconds = 0.0
        self._received = bytearray()
        self._printed = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        self._read, write = os.pipe()
        with warnings.catch_warnings(), _left_alone_in_children():
            warnings.simplefilter("ignore", DeprecationWarning)  # threads are running: the children are short-lived
            self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                os.setpgid(0, 0)
                os.close(self._read)
                os.dup2(self._printed.fileno(), 1)
                os.dup2(self._printed.fileno(), 2)
                faulthandler.dump_traceback_later(0.9 * timeout)  # where it hangs, if it does
                code = _inside(fn, rank, size, args, port, env, write)
            finally:
                os._exit(code)  # neither pytest nor atexit may run a second time
        os.close(write)
        self._process = os.pidfd_open(self.pid)
        self._open = True

    @property
    def handles(self) -> list[int]:
        """What becomes readable when there is something to do."""
        return [self._read, self._process] if self._open else [self._process]

    def poll(self) -> None:
        """Take what has arrived; notice the end."""
        ended = bool(select.select([self._process], [], [], 0)[0])
        while self._open and select.select([self._read], [], [], 0)[0]:
            part = os.read(self._read, 1 << 16)
            self._received += part
            self._open = part != b""
        if ended and not self.ended:
            self._end()

    def _end(self) -> None:
        self.seconds = time.monotonic() - self.started
        self.ended = True
        told = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)  # not collected: its number stays its own
        assert told is not None
        self.code = told.si_status if told.si_code == os.CLD_EXITED else -told.si_status

    def close(self) -> None:
        """Kill what still runs, and all that it started."""
        self.poll()
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            os.kill(self.pid, signal.SIGKILL)  # not yet the leader of a group; nothing happens to one that ended
        os.waitpid(self.pid, 0)
        if not self.ended:
            self.seconds = time.monotonic() - self.started
        os.close(self._read)
        os.close(self._process)

    def outcome(self) -> Outcome:
        try:
            value, error = pickle.loads(bytes(self._received))
        except (EOFError, pickle.UnpicklingError):  # it ended before it could answer
            value, error = None, ""
        self._printed.seek(0)
        with self._printed:
            output = self._printed.read().decode(errors="replace")
        return Outcome(self.code, value, error, output, self.seconds)


@contextmanager
def _left_alone_in_children() -> Iterator[None]:
    """Hide what there is from the garbage collector of a process that is forked now.

    Garbage of this process can hold a process group, whose destructor waits for threads that a child does not have.
    """
    enabled, parent = gc.isenabled(), os.getpid()
    gc.disable()
    try:
        yield
    finally:
        if os.getpid() != parent:
            gc.freeze()
        if enabled:
            gc.enable()


def _inside(
    fn: Callable[..., Any],
    rank: int,
    size: int,
    args: tuple[Any, ...],
    port: str,
    env: Mapping[str, str | None],
    pipe: int,
) -> int:
    """Call the function in the child, and answer; the exit status."""
    sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))  # noqa: SIM115
    given = {
        "RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_RANK": rank,
        "LOCAL_WORLD_SIZE": size,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "OMP_NUM_THREADS": 1,
        "GLOO_SOCKET_IFNAME": "lo",
    }
    os.environ.update({name: str(value) for name, value in given.items()})
    for name, value in env.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # it is ignored in what a shell runs in the background
    world._current = None
    try:
        value = fn(rank, *args)
        if dist.is_initialized():
            dist.destroy_process_group()
        answer, code = pickle.dumps((value, "")), 0
    except BaseException:
        answer, code = pickle.dumps((None, traceback.format_exc())), 1
    view = memoryview(answer)
    while view:
        view = view[os.write(pipe, view) :]
    sys.stdout.flush()
    sys.stderr.flush()
    return code
