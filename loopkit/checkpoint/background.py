"""Writing in the background: a copy of the state in main memory, and a thread that writes it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from torch import Tensor

from loopkit.base import devices
from loopkit.base.notes import warn
from loopkit.base.shield import Shield
from loopkit.checkpoint.bundle import ONCE, Contents
from loopkit.checkpoint.processes import give_way

SLOW = 0.1
"""Seconds for which a write that is slower than the interval is not worth a warning."""


class Snapshot:
    """Copies of tensors in main memory, in buffers that are kept from one save to the next."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, str], Tensor] = {}
        self._arrival = devices.Arrival(())

    @property
    def nbytes(self) -> int:
        """Bytes of main memory that the copies take."""
        return sum({id(buffer): buffer.nbytes for buffer in self._buffers.values()}.values())

    def take(self, contents: Contents) -> None:
        """Replace the contents' tensors by copies, without waiting for them where that can be."""
        made: dict[tuple[str, str], Tensor] = {}
        used: set[int] = set()
        shared: dict[tuple[Any, ...], Tensor] = {}
        for file, tensors in contents.tensors.items():
            if file.startswith(ONCE) and all(tensor.is_cpu for tensor in tensors.values()):
                continue  # such values are copies already, and change no more
            for name, tensor in tensors.items():
                same = (tensor.device, tensor.dtype, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.is_conj())
                buffer = shared.get(same) if tensor.numel() else None
                if buffer is None:
                    old = self._buffers.get((file, name))  # two names may have shared it in the save before
                    buffer = devices.to_host(tensor.detach(), None if id(old) in used else old)
                    shared[same] = buffer
                    used.add(id(buffer))
                made[file, name] = tensors[name] = buffer
        self._buffers = made
        self._arrival = devices.Arrival(device for device, *_ in shared)

    def wait(self) -> None:
        """Wait until the copies are there."""
        self._arrival.wait()

    def clear(self) -> None:
        """Free the memory."""
        self._buffers = {}


class Writer:
    """Runs one write at a time in a thread."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._done = threading.Event()
        """Set while no write is running. `threading.Thread` takes a thread for ended whose ``join`` was interrupted."""
        self._done.set()
        self._error: BaseException | None = None
        self._begun = 0.0
        """When the write that is under way began."""
        self._told = False
        """There was a warning of the pace."""

    @property
    def busy(self) -> bool:
        """Whether a write is under way."""
        return not self._done.is_set()

    def start(self, write: Callable[[], None]) -> None:
        """Run a write in a thread."""

        def run() -> None:
            give_way()
            try:
                write()
            except BaseException as error:
                self._error = error
            finally:
                self._done.set()

        with Shield():
            self._done.clear()
            self._begun = time.monotonic()
            self._thread = threading.Thread(target=run, name="loopkit-checkpoint")
            try:
                self._thread.start()
            except RuntimeError:  # the system gives no more threads
                self._thread = None
                self._done.set()
                raise

    def check(self) -> None:
        """Raise what went wrong."""
        if (error := self.forgive()) is not None:
            raise error

    def join(self) -> None:
        """Wait for the write that is under way."""
        self._done.wait()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def wait(self) -> None:
        """Wait for the write that is under way; raise what went wrong."""
        self.join()
        self.check()

    def forgive(self) -> BaseException | None:
        """Return the error of the last write and clear it."""
        error = self._error
        self._error = None
        return error

    def warn_of_pace(self, what: str) -> None:
        """Warn once that the loop saves more often than a write takes."""
        if not self._told and time.monotonic() - self._begun >= SLOW:
            self._told = True
            warn(
                f"checkpoints come less often than {what} asks for: writing one takes longer than the interval, and "
                f"the next one waits for it, so a kill loses what was trained meanwhile. Save less often, or to a "
                f"faster disk"
            )
