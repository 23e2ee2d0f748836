"""The lock of a directory of checkpoints: one writer at a time, and a dead one is not waited for."""

from __future__ import annotations

import errno
import os
import stat
import time
from dataclasses import asdict
from pathlib import Path
from types import TracebackType

from loopkit.checkpoint import disk, strict_json
from loopkit.checkpoint.processes import Process, identity
from loopkit.errors import CheckpointError

LOCK = ".lock"
LOCK_DEPTH = 1  # how deep its JSON is nested


class Lock:
    """Keeps a directory of checkpoints for one writer, by a file ``.lock`` that says who it is.

    The file is created exclusively, which holds between hosts on every file system, and locked (``flock``), which the
    kernel undoes when the process ends, however it ends. A lock of a dead process of this host is taken over; one
    of another host is respected. A forked child neither holds nor releases its parent's lock.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     with Lock(Path(directory)):
    ...         print(os.listdir(directory))
    ['.lock']
    """

    def __init__(self, directory: Path) -> None:
        self.path = Path(directory) / LOCK
        self.took_over = ""
        """Which dead process had left the lock, if one had."""
        self._file: int | None = None

    def __enter__(self) -> Lock:
        self.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def acquire(self) -> None:
        """Take the lock.

        Raises:
            CheckpointError: somebody else has it, and the message says who; or the operating system refused.
        """
        if self._file is not None:
            raise CheckpointError(f"{self.path} is already held by this very object. Release it first")
        try:
            while self._file is None:
                self._file = self._attempt()
        except CheckpointError:
            raise
        except OSError as error:
            raise disk.refused("lock", self.path, error) from error
        _held.add(self)

    def release(self) -> None:
        """Let the lock go, if this process holds it."""
        if self._file is None:
            return
        file, self._file = self._file, None
        _held.discard(self)
        try:
            try:
                if self._is_at_path(file):
                    disk.system.unlink(self.path)
                else:  # it went with a directory that was renamed, where it must not keep others out
                    disk.system.truncate(file)
            finally:
                disk.system.close(file)
        except OSError as error:
            raise disk.refused("unlock", self.path, error) from error

    @property
    def in_place(self) -> bool:
        """Whether this process holds the lock, and its file is where it was."""
        try:
            return self._file is not None and self._is_at_path(self._file)
        except OSError as error:
            raise disk.refused("look at", self.path, error) from error

    def _attempt(self) -> int | None:
        """The lock's open file; None if somebody changed it meanwhile."""
        try:
            file = disk.system.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NONBLOCK)
            fresh = True
        except FileExistsError:
            fresh = False
            try:
                file = disk.system.open(self.path, os.O_RDWR | os.O_NONBLOCK)
            except FileNotFoundError:
                return None
        taken = False
        try:
            if not stat.S_ISREG(disk.system.stat(file).st_mode):
                raise CheckpointError(f"{self.path} is no regular file. Remove it, or choose another directory")
            try:
                disk.system.flock(file)
                locks = True
            except BlockingIOError as error:
                raise self._refusal(self._holder(file)) from error
            except OSError as error:
                if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP, errno.EINVAL):
                    raise
                locks = False
            if not self._is_at_path(file):
                return None
            if not fresh:
                self._check_stale(file, locks)
                if not locks:
                    disk.system.unlink(self.path)
                    return None
            disk.system.truncate(file)
            said = {**asdict(identity()), "flock": locks, "time": time.strftime("%Y-%m-%d %H:%M:%S %z")}
            rest = memoryview(strict_json.render(said, sort=True))
            os.lseek(file, 0, os.SEEK_SET)
            while rest:
                rest = rest[disk.system.write(file, rest) :]
            taken = True
            return file
        finally:
            if not taken:
                if fresh:
                    disk.system.unlink(self.path)
                disk.system.close(file)

    def _is_at_path(self, file: int) -> bool:
        try:
            return os.path.samestat(disk.system.stat(file), disk.system.lstat(self.path))
        except FileNotFoundError:
            return False

    def _holder(self, file: int) -> tuple[Process, str, bool] | None:
        """Who wrote the lock file, when, and whether the kernel's lock was held; None if it does not say."""
        buffer = memoryview(bytearray(65536))
        count = disk.system.read(file, buffer)
        try:
            said = strict_json.parse(bytes(buffer[:count]).decode("ascii"), LOCK_DEPTH)
            holder = Process(str(said["host"]), str(said["machine"]), int(said["pid"]), int(said["started"]))
            return holder, str(said["time"])[:40], bool(said["flock"])
        except (ValueError, TypeError, KeyError):
            return None

    @staticmethod
    def _is_unfinished(file: int) -> bool:
        """Whether the lock file holds only a beginning of what is written there."""
        os.lseek(file, 0, os.SEEK_SET)
        buffer = memoryview(bytearray(65536))
        said = bytes(buffer[: disk.system.read(file, buffer)])
        return not said or (said[:1] == b"{" and said[-1:] != b"}")

    def _check_stale(self, file: int, locks: bool) -> None:
        """Return, and note whose it was, if the holder is surely dead."""
        if (holder := self._holder(file)) is None:
            if locks and self._is_unfinished(file):  # it died while it took the lock, which the kernel says is free
                return
            raise self._refusal(None)
        process, since, held = holder
        own = identity()
        if process.host != own.host:
            raise self._refusal(holder)
        if process.machine == own.machine:
            if process.alive():
                raise self._refusal(holder)
        elif not (locks and held):  # restarted, or a container that shares our name: only the kernel can tell
            raise self._refusal(holder)
        self.took_over = f"{self.path} was left by process {process.pid} on {process.host} ({since}), which is gone"

    def _refusal(self, holder: tuple[Process, str, bool] | None) -> CheckpointError:
        directory = self.path.parent
        if holder is None:
            return CheckpointError(
                f"{directory} is locked, and {self.path} does not say by whom. Remove that file if no run uses the "
                f"directory, or choose another directory"
            )
        process, since, _ = holder
        own = identity()
        if process == own:
            return CheckpointError(
                f"{directory} is locked by this process since {since}: two savers would write into one directory. "
                f"Give each its own directory"
            )
        if process.host != own.host:
            fix = f"If it is dead (this host cannot tell), remove {self.path}; else choose another directory"
        else:
            fix = "Stop that run, or choose another directory"
        return CheckpointError(
            f"{directory} is locked by process {process.pid} on {process.host} since {since}: two runs would write "
            f"into one directory. {fix}"
        )


_held: set[Lock] = set()


def _forget_locks() -> None:
    """In a forked child: close the parent's locks, else they would outlive the parent."""
    for lock in _held:
        if lock._file is not None:
            os.close(lock._file)
            lock._file = None
    _held.clear()


os.register_at_fork(after_in_child=_forget_locks)
