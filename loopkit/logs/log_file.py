"""A file that one run at a time appends to, and that can resume from where a checkpoint found it."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import weakref
import zlib
from collections.abc import Mapping
from pathlib import Path

from loopkit.base.notes import warn
from loopkit.base.shield import Shield
from loopkit.errors import LogError

FIXES = {
    errno.EACCES: "give this user the permission, or choose another path",
    errno.EPERM: "give this user the permission, or choose another path",
    errno.EROFS: "the file system is read-only: choose another path",
    errno.EISDIR: "it is a directory: name a file in it",
    errno.ENOTDIR: "a part of the path is a file: choose another path",
    errno.EEXIST: "a part of the path is a file: choose another path",
    errno.ENOENT: "the directory cannot be made there: choose another path",
    errno.ENAMETOOLONG: "choose a shorter path",
    errno.ELOOP: "it is a link that leads to itself: choose another path",
}

CHECKED = 4096
"""Bytes before the position by which a log is known again."""


class LogFile:
    """Appends to ``path``, which is locked while it is open.

    A file that is there already belongs to an earlier run: it is renamed (`set_aside`), unless ``position`` is the
    length of this run's part. The rest after the position is cut off by the first write, not before: opening a
    log without writing leaves it as it is.

    Args:
        path: The directories above it are made. A device, or a pipe, is written to without ceremony.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.position: int | None = None
        """Bytes that are this run's; None before the first ``open``."""
        self._check: int | None = None
        """The checksum of the last of these bytes, while the file is not open."""
        self._file: int | None = None
        self._regular = True
        self._behind = False
        """Something was written and not flushed."""
        self._at_end = False
        """Whether the file ends at the position."""

    def open(self) -> None:
        """Lock the file and find the position. If this object holds the file still, it lets it go first.

        Raises:
            LogError: The path cannot be a log, or another run has it.
        """
        self.close()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with Shield():
                while not self._attempt():
                    pass
        except OSError as error:
            if (fix := FIXES.get(error.errno or 0)) is None:
                raise
            raise LogError(f"the log {self.path} cannot be written: {error.strerror}; {fix}") from error
        _open_files.add(self)

    def _attempt(self) -> bool:
        """Open the file; False if it has to be looked at again."""
        file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
        taken = False
        try:
            about = os.fstat(file)
            self._regular = stat.S_ISREG(about.st_mode)
            if self._regular:
                lock(file, self.path)
                if not is_at(self.path, file):
                    return False  # renamed or removed before it was locked
                if self.position is None and about.st_size:
                    set_aside(self.path)
                    return False
                if self.position and not about.st_size:
                    self.position = 0  # it is to go on elsewhere
                if self.position and not self._is_known(file):
                    other = set_aside(self.path)
                    self.position = None
                    warn(
                        f"the log {self.path} is not what it was when the checkpoint was saved: it is {other.name} "
                        f"now, and another one begins"
                    )
                    return False
            self.position = self.position or 0
            self._check = None
            self._at_end = False
            self._file = file
            taken = True
            return True
        finally:
            if not taken:
                os.close(file)

    def _is_known(self, file: int) -> bool:
        """Whether the file has what was there when the state was saved."""
        assert self.position is not None
        if os.fstat(file).st_size < self.position:
            return False
        return self._check is None or self._check == _checksum(file, self.position)

    def state_dict(self) -> dict[str, int]:
        """Where it stands; empty before the first ``open``."""
        if self.position is None:
            return {}
        check = self._check
        if self._file is not None and self._regular:
            check = _checksum(self._file, self.position)
        return {"position": self.position} if check is None else {"position": self.position, "check": check}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Let the next ``open`` resume from there."""
        self.position, self._check = state.get("position"), state.get("check")

    def renewed(self) -> bool:
        """Begin another file with a warning if this one was removed, renamed or cut off under the run; whether it was.

        Raises:
            LogError: Another one cannot be written there, or another run writes it.
        """
        file = self._file
        position = self.position
        if file is None or not self._regular:
            return False
        assert position is not None
        if not is_at(self.path, file):
            what = "removed or renamed"
        elif (size := os.fstat(file).st_size) < position:
            what = f"cut off at byte {size} of {position}"
        else:
            return False
        self.close()
        self.position = self._check = None  # what is there is not this run's, and is set aside
        self.open()
        warn(f"the log {self.path} was {what} while the run wrote it: another one begins")
        return True

    def write(self, data: bytes) -> None:
        """Append; if that fails, the earlier contents stay whole."""
        assert self._file is not None
        assert self.position is not None
        if not self._at_end:
            self.cut()
        self._behind = True
        self._at_end = False
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except OSError:
            if self._regular:
                os.ftruncate(self._file, self.position)
            raise
        self.position += len(data)
        self._at_end = True

    def cut(self) -> None:
        """Cut off what comes after the position, and stand there."""
        assert self._file is not None
        assert self.position is not None
        if self._regular:
            if os.fstat(self._file).st_size > self.position:
                os.ftruncate(self._file, self.position)
            os.lseek(self._file, self.position, os.SEEK_SET)

    def read(self) -> bytes:
        """Return the content up to the position."""
        assert self._file is not None
        return os.pread(self._file, self.position or 0, 0) if self._regular else b""

    def replace(self, data: bytes) -> None:
        """Put other content in the place of all that is there, at once or not at all; a device gets it as it is."""
        assert self._file is not None
        if not self._regular:
            self.write(data)
            return
        path = self.path.resolve()  # a link stays one
        beside = path.with_name(f".{path.name}.new")
        file = os.open(beside, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        try:
            lock(file, self.path)
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(file, rest) :]
            os.fsync(file)
            os.rename(beside, path)
        except BaseException:
            os.close(file)
            beside.unlink(missing_ok=True)
            raise
        os.close(self._file)
        self._file = file
        self.position = len(data)
        self._behind = True
        self._at_end = False

    def flush(self) -> None:
        """Make durable what was written."""
        if self._behind and self._regular and self._file is not None:
            os.fsync(self._file)
        self._behind = False

    def close(self) -> None:
        """Let the file go."""
        with Shield():
            _open_files.discard(self)
            if self._file is None:
                return
            file = self._file
            try:
                if self._regular and self.position is not None:
                    self._check = _checksum(file, self.position)
            finally:
                self._file = None
                os.close(file)


def lock(file: int, path: Path) -> None:
    """Lock an open file until it is closed, or its process ends.

    Raises:
        LogError: It is locked by another run.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise LogError(
            f"the log {path} is being written by another run: stop that one, or give this one its own log"
        ) from None
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP, errno.EINVAL):  # no locks on this system
            raise


def _checksum(file: int, position: int) -> int:
    """The CRC-32 of the last bytes before a position."""
    size = min(position, CHECKED)
    return zlib.crc32(os.pread(file, size, position - size))


def is_at(path: Path, file: int) -> bool:
    """Whether an open file is the one at a path."""
    try:
        return os.path.samestat(os.fstat(file), os.stat(path))
    except FileNotFoundError:
        return False


def set_aside(path: Path) -> Path:
    """Rename ``log.jsonl`` to ``log-1.jsonl``, or the first such name that is free; returns it."""
    number = 1
    while (other := path.with_name(f"{path.stem}-{number}{path.suffix}")).exists():
        number += 1
    path.rename(other)
    return other


_open_files: weakref.WeakSet[LogFile] = weakref.WeakSet()


def _forget_files() -> None:
    """In a forked child: close the parent's files, else it would keep their locks when the parent has died."""
    for log in list(_open_files):
        if log._file is not None:
            os.close(log._file)
            log._file = None
    _open_files.clear()


os.register_at_fork(after_in_child=_forget_files)
