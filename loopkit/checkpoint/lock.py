"""The lock of a directory of checkpoints: one writer at a time, and a dead one is not waited for."""

from __future__ import annotations

import errno
import os
import stat
import threading
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from loopkit.base.notes import say
from loopkit.base.shield import Shield
from loopkit.checkpoint import disk, strict_json
from loopkit.checkpoint.mounts import is_local
from loopkit.checkpoint.processes import Process, boot, identity
from loopkit.errors import CheckpointError

LOCK = ".lock"
LOCK_DEPTH = 1  # how deep its JSON is nested


AFTER = 120.0
"""Seconds without a touch after which a lock is taken over, where the kernel does not know."""
BEAT = 30.0
"""Seconds between two touches, at most."""
POLL = 2.0
SETTLE = 0.5
"""Seconds in which another process that takes the lock at the same time has done so."""
NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP, errno.EINVAL)


class _Holder(NamedTuple):
    """The content of a lock file: the process that holds it."""

    process: Process
    since: str
    locked: bool
    """Whether the kernel's lock was held as well."""
    boot: str
    device: int
    """The number of the file system, in the holder's kernel."""


class Lock:
    """Keeps a directory of checkpoints for one writer, by a file ``.lock`` with the writer's name.

    The file is created exclusively, which holds between hosts on every file system, and locked (``flock``), which the
    kernel undoes when the process ends, however it ends. The kernel's word counts for processes of the same boot of a
    machine, whatever their container or host name is, and on a local file system. Elsewhere, such as on NFS, FUSE or
    an unknown file system, the holder touches the file, and a lock is taken over that has not been touched for long
    enough by the file server's clock. A forked child neither holds nor releases its parent's lock.

    Args:
        directory: The locked directory.
        after: Seconds without a touch after which a lock is taken over, where the kernel does not know. Give the same
            to all that use a directory; the holder touches the file four times in it, at least every 30 seconds.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     with Lock(Path(directory)):
    ...         print(os.listdir(directory))
    ['.lock']
    """

    def __init__(self, directory: Path, after: float = AFTER) -> None:
        self.path = Path(directory) / LOCK
        self._after = after
        self._released = threading.Event()
        self._heart: threading.Thread | None = None
        self.took_over = ""
        """Which dead process had left the lock, if one had."""
        self._file: int | None = None
        self._abandoned: _Holder | None = None
        """Who has the lock, if only time will show whether it lives."""

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
            CheckpointError: another process has it, which the message names; or the operating system failed.
        """
        if self._file is not None:
            raise CheckpointError(f"{self.path} is already held by this very object. Release it first")
        try:
            while self._file is None:
                self._abandoned = None
                with Shield():
                    self._file = self._attempt()
                    if self._file is not None:
                        _held.add(self)
                        self._start_heart(self._file)
                if self._file is None and self._abandoned is not None:
                    self._wait(self._abandoned)
        except CheckpointError:
            raise
        except OSError as error:
            raise disk.refused("lock", self.path, error) from error

    def release(self) -> None:
        """Let the lock go, if this process holds it."""
        if self._file is None:
            return
        with Shield():
            self._release()

    def _release(self) -> None:
        file = self._file
        self._file = None
        assert file is not None
        _held.discard(self)
        self._released.set()
        try:
            if self._heart is not None:
                self._heart.join()  # else it may touch another file that gets this one's number
        finally:  # a third interrupt does not wait
            self._unlock(file)

    def _unlock(self, file: int) -> None:
        """Remove the file, and close it."""
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

    @property
    def taken_by(self) -> str:
        """Which other process has the lock now; empty if none has."""
        try:
            file = disk.system.open(self.path, os.O_RDONLY | os.O_NONBLOCK)
        except OSError:
            return ""
        try:
            holder = self._holder(file)
        finally:
            disk.system.close(file)
        if holder is None or holder.process == identity():
            return ""
        return f"process {holder.process.pid} on {holder.process.host} (since {holder.since})"

    def _start_heart(self, file: int) -> None:
        """Touch the file from now on, until the release."""
        self._released.clear()
        self._heart = threading.Thread(target=self._beat, args=(file,), name="loopkit-lock", daemon=True)
        self._heart.start()

    def _beat(self, file: int) -> None:
        while not self._released.wait(min(BEAT, self._after / 4)):
            with suppress(OSError):  # it counts as missed
                os.utime(file)

    def _wait(self, holder: _Holder) -> None:
        """Wait until the lock was silent for long enough, then take it by a rename; return early if it has changed.

        Raises:
            CheckpointError: It was touched: its holder lives.
        """
        began = self._touched()
        told = False
        while (touched := self._touched()) == began and touched is not None:
            age = max(0.0, self._now() - touched)
            if age >= self._after:
                self._seize(holder, began)
                return
            if not told:
                told = True
                left = self._after - age
                say(
                    f"{self.path.parent} is locked by process {holder.process.pid} on {holder.process.host}. This "
                    f"machine cannot look at that: the lock is taken over if it is silent for {left:.0f} s more"
                )
            time.sleep(min(POLL, self._after - age))
        if touched is not None:
            raise self._refusal(holder)

    def _touched(self) -> float | None:
        """When the lock file was touched last, by the file server's clock; None if it is gone."""
        try:
            file = disk.system.open(self.path, os.O_RDONLY | os.O_NONBLOCK)  # opening asks the server
        except FileNotFoundError:
            return None
        try:
            return disk.system.stat(file).st_mtime
        finally:
            disk.system.close(file)

    def _now(self) -> float:
        """The file server's clock, by the time of a file that is touched there."""
        with disk.hidden(self.path.parent) as probe:
            file = disk.system.open(probe, os.O_RDWR | os.O_CREAT | os.O_EXCL)
            try:
                os.utime(file)
                return disk.system.stat(file).st_mtime
            finally:
                disk.system.close(file)
                disk.system.unlink(probe)

    def _seize(self, holder: _Holder, touched: float | None) -> None:
        """Put a lock of this process in the place of an abandoned one; the last of several that do so has it."""
        with disk.hidden(self.path.parent) as beside, Shield():
            file = disk.system.open(beside, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NONBLOCK)
            taken = False
            try:
                self._sign(file, self._flock(file))
                if self._touched() == touched:
                    disk.system.rename(beside, self.path)
                    time.sleep(min(SETTLE, self._after))
                    taken = self._is_at_path(file)
                if taken:
                    self._file = file
                    _held.add(self)
                    self._start_heart(file)
                    self.took_over = self._left_by(holder) + ", or has been silent for too long"
            finally:
                if not taken:
                    with suppress(FileNotFoundError):
                        disk.system.unlink(beside)
                    disk.system.close(file)

    @staticmethod
    def _flock(file: int) -> bool:
        """Lock a file of this process's own; returns whether the system can."""
        try:
            disk.system.flock(file)
        except BlockingIOError:
            raise
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            return False
        return True

    @staticmethod
    def _sign(file: int, locks: bool) -> None:
        """Write into the lock file whose it is."""
        disk.system.truncate(file)
        more = {"boot": boot(), "device": disk.system.stat(file).st_dev}
        said = {**asdict(identity()), **more, "flock": locks, "time": time.strftime("%Y-%m-%d %H:%M:%S %z")}
        rest = memoryview(strict_json.render(said, sort=True))
        os.lseek(file, 0, os.SEEK_SET)
        while rest:
            rest = rest[disk.system.write(file, rest) :]

    def _attempt(self) -> int | None:
        """The lock's open file; None if another process changed it, or if only time will show (``_abandoned``)."""
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
                locks = self._flock(file)
            except BlockingIOError as error:
                holder = self._holder(file)
                if holder is None or self._kernel_knows(holder, file):
                    raise self._refusal(holder) from error
                self._abandoned = holder  # a file server may keep the locks of a machine that is gone
                return None
            if not self._is_at_path(file):
                return None
            if not fresh:
                if not self._is_stale(file, locks):
                    return None
                if not locks:
                    disk.system.unlink(self.path)
                    return None
            self._sign(file, locks)
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

    def _holder(self, file: int) -> _Holder | None:
        """The writer of the lock file; None if it is not named there."""
        buffer = memoryview(bytearray(65536))
        count = disk.system.read(file, buffer)
        try:
            said = strict_json.parse(bytes(buffer[:count]).decode("ascii"), LOCK_DEPTH)
            process = Process(str(said["host"]), str(said["machine"]), int(said["pid"]), int(said["started"]))
            where = str(said.get("boot", "")), int(said.get("device", 0))
            return _Holder(process, str(said["time"])[:40], bool(said["flock"]), *where)
        except (ValueError, TypeError, KeyError):
            return None

    def _kernel_knows(self, holder: _Holder, file: int) -> bool:
        """Whether this machine's kernel knows if the holder has the file locked still."""
        if is_local(self.path.parent):
            return True
        same_boot = bool(holder.boot) and holder.boot == boot()
        return same_boot and holder.device == disk.system.stat(file).st_dev  # another mount has locks of its own

    @staticmethod
    def _is_unfinished(file: int) -> bool:
        """Whether the lock file holds only a beginning of its text."""
        os.lseek(file, 0, os.SEEK_SET)
        buffer = memoryview(bytearray(65536))
        said = bytes(buffer[: disk.system.read(file, buffer)])
        return not said or (said[:1] == b"{" and said[-1:] != b"}")

    def _is_stale(self, file: int, locks: bool) -> bool:
        """Whether the holder is surely dead, which is noted; if only time will show, that is noted instead.

        Raises:
            CheckpointError: It lives, or the lock has no owner.
        """
        if (holder := self._holder(file)) is None:
            if locks and self._is_unfinished(file):  # it died while it took the lock, which the kernel says is free
                return True
            raise self._refusal(None)
        process = holder.process
        own = identity()
        if process.machine == own.machine and (process.host == own.host or holder.boot == boot() != ""):
            if process.alive():
                raise self._refusal(holder)
        elif not (locks and holder.locked and self._kernel_knows(holder, file)):
            self._abandoned = holder
            return False
        self.took_over = self._left_by(holder)
        return True

    def _left_by(self, holder: _Holder) -> str:
        process = holder.process
        return f"{self.path} was left by process {process.pid} on {process.host} ({holder.since}), which is gone"

    def _refusal(self, holder: _Holder | None) -> CheckpointError:
        directory = self.path.parent
        if holder is None:
            return CheckpointError(
                f"{directory} is locked, and {self.path} does not name its owner. Remove that file if no run uses the "
                f"directory, or choose another directory"
            )
        process = holder.process
        since = holder.since
        own = identity()
        if process == own:
            return CheckpointError(
                f"{directory} is locked by this process since {since}: two savers would write into one directory. "
                f"Give each its own directory"
            )
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
