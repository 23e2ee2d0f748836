"""Disk: the calls of checkpoints into the operating system, their failures, and the files of dead processes."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from loopkit.base.notes import warn
from loopkit.checkpoint.processes import Process, identity
from loopkit.errors import CheckpointError

FIXES = {
    errno.ENOSPC: "Free some space, or keep fewer checkpoints",
    errno.EDQUOT: "Free some of your quota, or keep fewer checkpoints",
    errno.EFBIG: "Raise the limit on the size of files (ulimit -f)",
    errno.EACCES: "Give this user the permission, or choose another directory",
    errno.EPERM: "Give this user the permission, or choose another directory",
    errno.EROFS: "The file system is read-only: mount it for writing, or choose another directory",
    errno.EIO: "Look at the disk or the file server, it reports a fault",
    errno.ENOENT: "It, or a directory above it, is not there: look at the path",
    errno.ENOTDIR: "A part of the path is a file: choose another directory",
    errno.ENAMETOOLONG: "Choose a shorter path or label",
    errno.EMFILE: "Close some files, or raise the limit (ulimit -n)",
}


class System:
    """Every call that checkpoints make into the operating system, so that tests can watch it, fail it or die in it."""

    def open(self, path: Path, flags: int, mode: int = 0o666) -> int:
        """Open without following a link at the end of the path; forked programs do not inherit it."""
        return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, mode)

    def read(self, file: int, buffer: memoryview) -> int:
        """Read into ``buffer``; return how many bytes came, 0 at the end of the file."""
        return os.readv(file, [buffer])

    def write(self, file: int, data: memoryview) -> int:
        """Write the beginning of ``data``; return how many bytes went."""
        return os.write(file, data)

    def flush_soon(self, file: int, start: int, size: int) -> None:
        """Begin to move bytes to the disk, without waiting and without a promise."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file, start, size, os.POSIX_FADV_DONTNEED)

    def fsync(self, file: int) -> None:
        """Make a file's bytes, or a directory's entries, survive the loss of power."""
        os.fsync(file)

    def truncate(self, file: int) -> None:
        """Empty an open file."""
        os.ftruncate(file, 0)

    def close(self, file: int) -> None:
        """Close a file."""
        os.close(file)

    def stat(self, file: int) -> os.stat_result:
        """Describe an open file."""
        return os.fstat(file)

    def lstat(self, path: Path) -> os.stat_result:
        """Describe what lies at a path; a link itself, not what it points to."""
        return os.lstat(path)

    def listdir(self, path: Path) -> list[str]:
        """Name the entries of a directory."""
        return os.listdir(path)

    def mkdir(self, path: Path) -> None:
        """Make a directory."""
        os.mkdir(path)

    def rename(self, source: Path, target: Path) -> None:
        """Rename within a file system, at once or not at all."""
        os.rename(source, target)

    def link(self, source: Path, target: Path) -> None:
        """Give a file a second name within a file system."""
        os.link(source, target, follow_symlinks=False)

    def unlink(self, path: Path) -> None:
        """Remove a file or a link."""
        os.unlink(path)

    def rmdir(self, path: Path) -> None:
        """Remove an empty directory."""
        os.rmdir(path)

    def flock(self, file: int) -> None:
        """Lock an open file for this process, or raise ``BlockingIOError``; the lock ends with the process."""
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


system = System()


def refused(action: str, path: Path, error: BaseException) -> CheckpointError:
    """A `CheckpointError` for an error of the operating system, with its number."""
    number = error.errno if isinstance(error, OSError) else None
    name = errno.errorcode.get(number or 0, type(error).__name__)
    fix = FIXES.get(number or 0, "Look at the path and the file system")
    failure = CheckpointError(f"cannot {action} {path}: {name}, {os.strerror(number) if number else error}. {fix}")
    failure.errno = number
    return failure


def is_ours(error: BaseException) -> bool:
    """Whether an error is the operating system's, without the words of `refused`."""
    return isinstance(error, OSError) and not isinstance(error, CheckpointError)


def names(directory: Path) -> list[str]:
    """The names in a directory."""
    try:
        return system.listdir(directory)
    except OSError as error:
        raise refused("list", directory, error) from error


def sync_directory(path: Path) -> None:
    """Wait until the names in a directory are on the disk."""
    file = system.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        system.fsync(file)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems cannot, and need not
            raise
    finally:
        system.close(file)


def make_directory(directory: Path) -> None:
    """Make ``directory`` and what is missing above it, durably."""
    missing = []
    at = directory
    try:
        while not os.path.isdir(at):
            missing.append(at)
            at = at.parent
        for at in reversed(missing):
            try:
                system.mkdir(at)
            except FileExistsError:
                if not at.is_dir():
                    raise
            sync_directory(at.parent)
    except FileExistsError as error:
        raise CheckpointError(
            f"{at} is a file, not a directory: checkpoints need their own directory. Choose another one"
        ) from error
    except OSError as error:
        raise refused("make", at, error) from error


def resolved(directory: Path | str) -> Path:
    """A directory's path, absolute and without links, which writing does not follow."""
    return Path(os.path.realpath(directory))


def delete(path: Path) -> None:
    """Remove a file, a link, or a directory with its contents, if it exists."""
    with suppress(FileNotFoundError):
        if not stat.S_ISDIR(system.lstat(path).st_mode):
            system.unlink(path)
            return
        for name in system.listdir(path):
            delete(path / name)
        system.rmdir(path)


def kind_of(info: os.stat_result) -> str:
    """The kind of a file, in words."""
    kinds = {stat.S_IFLNK: "a link", stat.S_IFDIR: "a directory", stat.S_IFIFO: "a pipe", stat.S_IFREG: "a file"}
    return kinds.get(stat.S_IFMT(info.st_mode), "a device or a socket")


def stat_of(path: Path, file: int) -> os.stat_result:
    """Describe an open file that is at this path."""
    try:
        return system.stat(file)
    except OSError as error:
        raise refused("read", path, error) from error


def close_read(file: int) -> None:
    """Close a file that was only read: errors make no difference then."""
    with suppress(OSError):
        system.close(file)


LEFTOVER = re.compile(
    r"\.(?:tmp|old)-(?P<host>.+)-(?P<machine>[0-9a-f]{8})-(?P<pid>[0-9]+)-(?P<started>[0-9]+)-[0-9a-f]+"
)
_in_use: set[Path] = set()
os.register_at_fork(after_in_child=_in_use.clear)


@contextmanager
def hidden(directory: Path, word: str = "tmp") -> Iterator[Path]:
    """A hidden name in a directory, with its owner; `clean` keeps it until then."""
    path = directory / f".{word}-{identity().token}-{secrets.token_hex(4)}"
    _in_use.add(path)
    try:
        yield path
    finally:
        _in_use.discard(path)


def clean(directory: Path, *, everything: bool = False) -> None:
    """Remove what dead processes of this host left in ``directory`` while they wrote or removed checkpoints.

    What cannot be removed is warned of and left. With ``everything``, leftovers of other hosts go too: right only for
    who holds the `Lock` of the directory.
    """
    for name in names(directory):
        match = LEFTOVER.fullmatch(name)
        path = directory / name
        if match is None or path in _in_use:
            continue
        owner = Process(match["host"], match["machine"], int(match["pid"]), int(match["started"]))
        own = identity()
        others = owner.machine != own.machine or owner.host != own.host or owner.alive()
        if others and owner != own and not everything:
            continue
        try:
            delete(path)
        except OSError as error:
            warn(f"{refused('remove the leftover', path, error)}", RuntimeWarning)
