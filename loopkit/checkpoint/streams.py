"""Streams: bytes on their way to a file and back, hashed meanwhile; and single files that belong to no checkpoint."""

from __future__ import annotations

import errno
import hashlib
import os
import queue
import stat
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from loopkit.checkpoint import disk
from loopkit.checkpoint.manifest import FileInfo
from loopkit.errors import CheckpointError, CorruptCheckpointError

Buffer = bytes | bytearray | memoryview
PIECE = 4 << 20  # bytes written, read and hashed at a time
INLINE = 64 << 10  # bytes; below, handing over to a thread costs more than hashing
QUEUE = 4  # pieces that hashing may lag behind
FLUSH = 32 << 20  # bytes after which the disk is set to work, so that the final flush has little left to do


class Hasher:
    """SHA-256 in a second thread, which may ``lag`` some pieces behind the caller's reading or writing (0: any number).

    >>> with Hasher() as hasher:
    ...     hasher.update(memoryview(b"abc"))
    ...     print(hasher.hexdigest()[:8])
    ba7816bf
    """

    def __init__(self, lag: int = QUEUE) -> None:
        self._sha256 = hashlib.sha256()
        self._pieces: queue.Queue[memoryview | None] = queue.Queue(lag)
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Hasher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._thread is not None:
            self._pieces.put(None)
            self._thread.join()
            self._thread = None

    def update(self, piece: memoryview) -> None:
        """Hash ``piece``, a flat view of bytes, soon; its memory must not change before ``drain`` returns."""
        if len(piece) < INLINE and not self._pieces.unfinished_tasks:
            self._sha256.update(piece)
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="loopkit-hasher", daemon=True)
            self._thread.start()
        self._pieces.put(piece)

    def drain(self) -> None:
        """Wait until everything is hashed."""
        self._pieces.join()

    def hexdigest(self) -> str:
        """The digest of everything so far."""
        self.drain()
        return self._sha256.hexdigest()

    def _work(self) -> None:
        while (piece := self._pieces.get()) is not None:
            self._sha256.update(piece)
            self._pieces.task_done()


def write_stream(file: int, chunks: Iterable[Buffer]) -> FileInfo:
    """Write ``chunks`` to an open file and hash them meanwhile; a chunk may be reused once the next is asked for."""
    size = flushed = 0
    with Hasher() as hasher:
        for chunk in chunks:
            for piece in pieces(chunk):
                hasher.update(piece)
                rest = piece
                while rest:
                    count = disk.system.write(file, rest)
                    if count == 0:
                        raise OSError(errno.EIO, "no more bytes can be written")
                    rest = rest[count:]
                size += len(piece)
                if size - flushed >= FLUSH:
                    disk.system.flush_soon(file, flushed, size - flushed)
                    flushed = size
            hasher.drain()
        return FileInfo(size, hasher.hexdigest())


def pieces(buffer: Buffer) -> Iterator[memoryview]:
    """A buffer in flat views of at most `PIECE` bytes."""
    view = memoryview(buffer)
    if view.nbytes:  # a view with a zero in its shape cannot be cast
        view = view.cast("B")
        for start in range(0, len(view), PIECE):
            yield view[start : start + PIECE]


def create(path: Path, chunks: Iterable[Buffer]) -> FileInfo:
    """Write one new file, durably; errors of the operating system are raised as they are."""
    file = disk.system.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        info = write_stream(file, chunks)
        disk.system.fsync(file)
    finally:
        disk.system.close(file)
    return info


def write_file(path: Path, chunks: Iterable[Buffer]) -> FileInfo:
    """Write one new file, durably.

    Raises:
        CheckpointError: the operating system failed; its error is the cause.
    """
    try:
        return create(path, chunks)
    except OSError as error:
        if not disk.is_ours(error):
            raise
        raise disk.refused("write", path, error) from error


class Reader:
    """One file of a checkpoint, read from its beginning; do not trust its contents before ``finish`` has returned."""

    def __init__(self, path: Path, info: FileInfo, file: int, hasher: Hasher, kept: bool) -> None:
        self.size = info.size
        """Bytes in the file, equal in the manifest and the file system."""
        self._path = path
        self._info = info
        self._file = file
        self._hasher = hasher
        self._kept = kept
        self._position = 0

    def readinto(self, buffer: Buffer) -> None:
        """Fill ``buffer`` with the next bytes.

        Raises:
            CorruptCheckpointError: the file has not that many left.
        """
        wanted = memoryview(buffer).nbytes
        if wanted > self.size - self._position:
            raise CorruptCheckpointError(
                f"{self._path} is asked for {wanted} bytes at byte {self._position} of {self.size}: the entry for "
                f"its content is wrong. Use an older checkpoint"
            )
        for piece in pieces(buffer):
            rest = piece
            while rest:
                count = read_some(self._path, self._file, rest)
                self._position += count
                rest = rest[count:]
            self._hasher.update(piece)
        if not self._kept:
            self._hasher.drain()

    def finish(self) -> None:
        """Compare what was read with the manifest.

        Raises:
            CorruptCheckpointError: it is not what was written, or bytes are left.
        """
        if self._position != self.size:
            raise CorruptCheckpointError(
                f"{self._path} has {self.size - self._position} bytes after the end of its content, which ends at byte "
                f"{self._position}: it is not what was meant to be written. Use an older checkpoint"
            )
        digest = self._hasher.hexdigest()
        if digest != self._info.sha256:
            raise CorruptCheckpointError(
                f"{self._path} has changed since it was written: its SHA-256 is {digest}, the manifest has "
                f"{self._info.sha256} ({self.size} bytes both). Use an older checkpoint"
            )


class PlainReader:
    """A file without an entry in a manifest, read from its beginning."""

    def __init__(self, path: Path, file: int, size: int) -> None:
        self.size = size
        """Bytes in the file."""
        self._path = path
        self._file = file

    def readinto(self, buffer: Buffer) -> None:
        """Fill ``buffer`` with the next bytes.

        Raises:
            CorruptCheckpointError: the file has not that many left.
        """
        for piece in pieces(buffer):
            rest = piece
            while rest:
                rest = rest[read_some(self._path, self._file, rest) :]


def read_some(path: Path, file: int, buffer: memoryview) -> int:
    """Read the beginning of ``buffer``; return how many bytes came.

    Raises:
        CorruptCheckpointError: no bytes are left.
    """
    try:
        count = disk.system.read(file, buffer)
    except OSError as error:
        raise disk.refused("read", path, error) from error
    if count == 0:
        raise CorruptCheckpointError(f"{path} became shorter while it was read. Use an older checkpoint")
    return count


def write_plain(path: Path | str, chunks: Iterable[Buffer]) -> FileInfo:
    """Write one file that belongs to no checkpoint; atomic and durable, and missing directories are made.

    A regular file that is there is replaced, or stays as it was. A link is followed.

    Raises:
        CheckpointError: something else is at ``path``, or the operating system failed; its error is the cause.
    """
    path = Path(os.path.realpath(path))
    try:
        info = disk.system.lstat(path)
        if not stat.S_ISREG(info.st_mode):
            raise CheckpointError(
                f"{path} is {disk.kind_of(info)}, which is not replaced by a file. Choose another path"
            )
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:
        if not disk.is_ours(error):
            raise
        raise disk.refused("write", path, error) from error
    disk.make_directory(path.parent)
    disk.clean(path.parent)
    with disk.hidden(path.parent) as at:
        try:
            written = create(at, chunks)
            disk.system.rename(at, path)
            disk.sync_directory(path.parent)
        except BaseException as error:
            failure = disk.refused("write", path, error) if disk.is_ours(error) else error
            try:
                disk.delete(at)
            except OSError as second:
                failure.add_note(f"and {at} could not be removed ({second}); the next save tries again")
            if failure is error:
                raise
            raise failure from error
    return written


@contextmanager
def open_plain(path: Path | str) -> Iterator[PlainReader]:
    """Open a regular file that belongs to no checkpoint; a link is followed, a pipe or a device is not waited for.

    Raises:
        CheckpointError: there is no regular file at ``path``, or it cannot be opened.
    """
    given = path
    path = Path(os.path.realpath(path))
    try:
        file = disk.system.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        raise disk.refused("open", Path(given), error) from error
    try:
        info = disk.stat_of(path, file)
        if not stat.S_ISREG(info.st_mode):
            raise CheckpointError(f"{given} is {disk.kind_of(info)} instead of a regular file. Give the path of a file")
        yield PlainReader(path, file, info.st_size)
    finally:
        disk.close_read(file)
