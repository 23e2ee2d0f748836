"""A process that has torch imported and warm, and forks a child for every trial: 0.1 seconds instead of two.

The server runs operations in one thread only: a forked child has none of the threads that its parent had, and would
wait for them for ever. A child that ends by an exception unwinds to the top of its interpreter, so that its exit status
is the one that any program would have.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import io
import os
import pickle
import select
import signal
import struct
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from steady import use_huge_pages

TESTS = Path(__file__).resolve().parents[1]
SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER: what a killed child leaves becomes the server's to reap


@dataclass(frozen=True)
class Order:
    """What a child is to do, and what is done to it."""

    function: str
    """``module:name``."""
    arguments: tuple[Any, ...] = ()
    signals: tuple[tuple[float, int], ...] = ()
    """Which signals it gets, and how many seconds after it began."""
    after: str = ""
    """A file: the seconds count from when it is there; else from the fork."""
    limit: float = 60.0
    """Seconds after which it is killed, and the trial fails."""


@dataclass(frozen=True)
class Outcome:
    """How a child ended."""

    code: int
    """As a parent sees it: the exit status; negative: the signal that killed it."""
    value: Any
    """What the function returned; None if it did not."""
    said: str
    """What it wrote to stderr."""
    seconds: float
    late: bool
    """It was killed because it did not end within its limit."""


class ForkServer:
    """The client's side: starts the server, sends it orders, one at a time."""

    def __init__(self, warm: str = "") -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join((str(TESTS), *sys.path))}
        self._server = subprocess.Popen(
            [sys.executable, "-c", f"from faults import forkserver; forkserver.main({warm!r})"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            start_new_session=True,  # a Ctrl-C at the tests is not for the children
        )

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *details: Any) -> None:
        self.close()

    def run(self, function: str, *arguments: Any, **options: Any) -> Outcome:
        """Run ``module:name`` in a forked child; see `Order` for the options.

        Raises:
            AssertionError: It did not end by itself in time.
        """
        order = Order(function, arguments, **options)
        self._send(order)
        outcome: Outcome = self._receive(order.limit + 60.0)
        assert not outcome.late, f"{order} did not end within {order.limit} s: {outcome.said}"
        return outcome

    def call(self, function: str, *arguments: Any, **options: Any) -> Any:
        """What a function returns in a child that has to end well."""
        outcome = self.run(function, *arguments, **options)
        assert outcome.code == 0, f"ended with {outcome.code}: {outcome.said}"
        return outcome.value

    def sweep(self) -> None:
        """Kill what killed children have left, such as workers of their loaders."""
        self._send(None)
        self._receive(60.0)

    def close(self) -> None:
        """End the server and all that it started."""
        server = self._server
        if server.poll() is None:
            with contextlib.suppress(OSError):
                server.stdin.close()
            try:
                server.wait(10.0)  # it kills and reaps its children, then ends
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()
        server.stdout.close()

    def _send(self, value: Any) -> None:
        data = pickle.dumps(value)
        self._server.stdin.write(struct.pack("<Q", len(data)) + data)
        self._server.stdin.flush()

    def _receive(self, limit: float) -> Any:
        ready, _, _ = select.select([self._server.stdout], [], [], limit)
        if not ready:
            self.close()
            raise AssertionError(f"the fork server did not answer within {limit} s")
        return pickle.loads(_exactly(self._server.stdout.fileno()))


def _exactly(file: int) -> bytes:
    """One message."""
    data = bytearray()
    wanted = 8
    while len(data) < wanted:
        part = os.read(file, wanted - len(data))
        if not part:
            raise EOFError("the fork server has ended")
        data += part
        if len(data) == 8:
            wanted = 8 + struct.unpack("<Q", data[:8])[0]
    return bytes(data[8:])


# ------------------------------------------------------------------------------------------------- the server's side


def _resolve(function: str) -> Callable[..., Any]:
    module, _, name = function.partition(":")
    return getattr(importlib.import_module(module), name)


class _Server:
    def __init__(self, answers: int) -> None:
        self._answers = answers
        self._groups: list[int] = []
        """The process groups of children that have ended, and may have left something."""

    def serve(self) -> Callable[[], None] | None:
        """Answer orders until there are no more; returns in a child what that has to do, and in the server None."""
        while True:
            try:
                order = pickle.loads(_exactly(0))
            except EOFError:
                self._sweep()
                return None
            if order is None:
                self._sweep()
                self._answer(None)
                continue
            job = self._trial(order)
            if job is not None:
                return job

    def _trial(self, order: Order) -> Callable[[], None] | None:
        said, value = os.memfd_create("said"), os.memfd_create("value")
        began = time.monotonic()
        child = os.fork()
        if child == 0:
            os.setpgid(0, 0)
            os.dup2(said, 1)
            os.dup2(said, 2)
            os.close(self._answers)
            os.dup2(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC), 0)
            return lambda: _child(order, value)
        with contextlib.suppress(PermissionError):
            os.setpgid(child, child)
        late = self._watch(child, order, began)
        seconds = time.monotonic() - began
        _, status = os.waitpid(child, 0)
        self._groups.append(child)
        code = os.waitstatus_to_exitcode(status)
        text, data = _content(said).decode(errors="replace"), _content(value)
        found = pickle.loads(data) if data and code == 0 else None
        self._answer(Outcome(code, found, text, seconds, late))
        return None

    def _watch(self, child: int, order: Order, began: float) -> bool:
        """Send the signals, and wait until the child has ended, which is left to be reaped."""
        signals = sorted(order.signals)
        zero = began if not order.after else None
        while True:
            now = time.monotonic()
            if zero is None and os.path.exists(order.after):
                zero = now
            while signals and zero is not None and now >= zero + signals[0][0]:
                os.kill(child, signals.pop(0)[1])  # at worst a zombie: it is not reaped yet
            if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                return False
            if now > began + order.limit:
                os.kill(child, signal.SIGKILL)
                os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
                return True
            due = zero + signals[0][0] if signals and zero is not None else now + 0.002
            time.sleep(min(0.002, max(0.0, due - now)))

    def _sweep(self) -> None:
        for group in self._groups:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, signal.SIGKILL)
        self._groups.clear()
        deadline = time.monotonic() + 20.0
        while time.monotonic() < deadline:
            try:
                found, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if found == 0:
                time.sleep(0.002)

    def _answer(self, value: Any) -> None:
        data = pickle.dumps(value)
        rest = memoryview(struct.pack("<Q", len(data)) + data)
        while rest:
            rest = rest[os.write(self._answers, rest) :]


def _content(file: int) -> bytes:
    """All that is in a file, which is closed."""
    with open(file, "rb") as stream:
        stream.seek(0)
        return stream.read()


def _child(order: Order, file: int) -> None:
    """Do what was ordered; what it raises goes on to the interpreter, as in any program."""
    data = memoryview(pickle.dumps(_resolve(order.function)(*order.arguments)))
    while data:
        data = data[os.write(file, data) :]
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def main(warm: str) -> None:
    """Import and warm up, then serve."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    answers = os.dup(1)  # whatever is printed must not come between the answers
    os.set_inheritable(answers, False)
    os.dup2(2, 1)
    import torch

    torch.set_num_threads(1)
    ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)
    if warm:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            _resolve(warm)()
    gc.collect()
    gc.freeze()  # else each child's first collection would copy all of the memory that it shares with the server
    use_huge_pages()
    try:
        job = _Server(answers).serve()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    if job is None:
        os._exit(0)
    job()
