"""All file access of checkpoints: atomic writing, verified reading, listing, rotation, probing.

A checkpoint is a directory ``<number>-<label>`` that holds files and ``manifest.json``, which names every file with
its size and SHA-256 and carries a digest of itself. It is written under a hidden name, flushed, and renamed, so that a
process or a machine that dies at any moment leaves either no new checkpoint or a whole one. There is no pointer to the
latest: it is the newest whose manifest verifies.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import queue
import re
import secrets
import stat
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from loopkit.checkpoint import strict_json
from loopkit.checkpoint.processes import Process, identity
from loopkit.checkpoint.structure import plain
from loopkit.errors import CheckpointError, CorruptCheckpointError, FormatVersionError, StateError
from loopkit.notes import warn
from loopkit.tabular import aligned, html, paragraph
from loopkit.words import nearest

Buffer = bytes | bytearray | memoryview

FORMAT = 1
MANIFEST = "manifest.json"
MANIFEST_LIMIT = 1 << 20  # bytes; a manifest is a few kilobytes, and a hostile one is slow to parse
MANIFEST_DEPTH = 100  # how deep its JSON may be nested
READ_LIMIT = 256 << 20  # bytes; for files read whole into memory
PIECE = 4 << 20  # bytes written, read and hashed at a time
INLINE = 64 << 10  # bytes; below, handing over to a thread costs more than hashing
QUEUE = 4  # pieces that hashing may lag behind
LINE = 500  # characters; of a printed manifest, whose metrics can be many
FLUSH = 32 << 20  # bytes after which the disk is set to work, so that the final flush has little left to do

CHECKPOINT_NAME = re.compile(r"([0-9]{6,})(?:-[A-Za-z0-9._=+-]+)?")
LABEL = re.compile(r"[A-Za-z0-9._=+-]{0,100}")
FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._=+-]{0,199}")
LEFTOVER = re.compile(
    r"\.(?:tmp|old)-(?P<host>.+)-(?P<machine>[0-9a-f]{8})-(?P<pid>[0-9]+)-(?P<started>[0-9]+)-[0-9a-f]+"
)
SHA256 = re.compile(r"[0-9a-f]{64}")
OPENING = b'{"sha256":"'  # of a manifest; then its digest, then CLOSING, then what the digest is of
CLOSING = b'",'

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
    """Every call that this module makes into the operating system, so that tests can watch it, fail it or die in it."""

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


HEADINGS = ("number", "name", "epoch", "step", "reason", "time", "size", "metrics")
"""Of `Manifest.row`."""
METRICS = 3
"""How many metrics a row shows."""


@dataclass(frozen=True)
class FileInfo:
    """What a manifest says of one file: its size in bytes and the SHA-256 of its content, in hexadecimal."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint says of itself, verified."""

    path: Path
    """Its directory."""
    number: int
    """Its place among the checkpoints of its directory; later ones have higher numbers."""
    about: dict[str, Any]
    """What the writer said of it."""
    files: dict[str, FileInfo]
    """Its files by name, without the manifest."""
    format: int
    """The version of the format in which it was written."""

    @property
    def size(self) -> int:
        """Bytes in its files."""
        return sum(info.size for info in self.files.values())

    @property
    def metrics(self) -> dict[str, Any]:
        """The metrics of the run when it was saved: numbers, or texts for what JSON has no number for."""
        said = self.about.get("metrics")
        return dict(said) if isinstance(said, Mapping) else {}

    def row(self) -> tuple[str, ...]:
        """What a line of a list says of it; see `HEADINGS`."""
        counts = said if isinstance(said := self.about.get("progress"), Mapping) else {}
        by = said.get("metric") if isinstance(said := self.about.get("monitored"), Mapping) else None
        values = sorted(self.metrics.items(), key=lambda item: (item[0] != by, not item[0].startswith("val/")))
        few = [f"{name} {_short(value, 4)}" for name, value in values[:METRICS]] + ["..."] * (len(values) > METRICS)
        told = [counts.get(key, "-") for key in ("epochs", "steps")]
        told += [self.about.get(key, "-") for key in ("reason", "time")]
        cells = (self.number, self.path.name, *told, in_bytes(self.size), " ".join(few) or "-")
        return tuple(plain(str(cell), 80) for cell in cells)

    def __repr__(self) -> str:
        """What a person looks for; ``about`` and ``files`` have the rest."""
        progress = said if isinstance(said := self.about.get("progress"), Mapping) else {}
        counters = [f"{progress[word]} {word}" for word in ("epochs", "steps") if word in progress]
        when = [str(self.about[key]) for key in ("reason", "time") if key in self.about]
        values = [f"{name} {_short(value)}" for name, value in self.metrics.items()]
        size = f"{len(self.files)} file{'s' * (len(self.files) != 1)}, {in_bytes(self.size)}"
        lines = [f"checkpoint {self.path}", ", ".join([*counters, *when]), ", ".join(values), size]
        return "\n  ".join(plain(line, LINE) for line in lines if line)


def _short(value: Any, digits: int = 6) -> str:
    """A metric, which may be saved as text, in few digits."""
    try:
        return f"{float(value):.{digits}g}"
    except (TypeError, ValueError):
        return plain(str(value), 20)


def in_bytes(count: int) -> str:
    """A number of bytes, for people.

    >>> in_bytes(1023), in_bytes(1536)
    ('1023 B', '1.5 KiB')
    """
    size, units = float(count), ["KiB", "MiB", "GiB", "TiB"]
    if count < 1024:
        return f"{count} B"
    while size >= 1024 and units:
        size, unit = size / 1024, units.pop(0)
    return f"{size:.1f} {unit}"


class Listing(list[Manifest]):
    """The checkpoints of a directory whose manifests verify, newest first."""

    problems: dict[Path, CheckpointError]
    """Those that do not verify, newest first, each with its error."""

    def __init__(self, manifests: Iterable[Manifest] = (), problems: Mapping[Path, CheckpointError] | None = None):
        super().__init__(manifests)
        self.problems = dict(problems or {})

    def __repr__(self) -> str:
        return "\n".join(
            [aligned(HEADINGS, [each.row() for each in self]) if self else "no checkpoints", *self._damaged()]
        )

    def _repr_html_(self) -> str:
        return "".join([html(HEADINGS, [each.row() for each in self]), *map(paragraph, self._damaged())])

    def _damaged(self) -> list[str]:
        return [f"damaged: {plain(path.name)}: {plain(str(error), 1000)}" for path, error in self.problems.items()]


# ------------------------------------------------------------------------------------------------- moving bytes


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
            for piece in _pieces(chunk):
                hasher.update(piece)
                rest = piece
                while rest:
                    count = system.write(file, rest)
                    if count == 0:
                        raise OSError(errno.EIO, "nothing more can be written")
                    rest = rest[count:]
                size += len(piece)
                if size - flushed >= FLUSH:
                    system.flush_soon(file, flushed, size - flushed)
                    flushed = size
            hasher.drain()
        return FileInfo(size, hasher.hexdigest())


def _pieces(buffer: Buffer) -> Iterator[memoryview]:
    view = memoryview(buffer)
    if view.nbytes:  # a view with a zero in its shape cannot be cast
        view = view.cast("B")
        for start in range(0, len(view), PIECE):
            yield view[start : start + PIECE]


class Reader:
    """One file of a checkpoint, read from its beginning; trust nothing of it before ``finish`` has returned."""

    def __init__(self, path: Path, info: FileInfo, file: int, hasher: Hasher, kept: bool) -> None:
        self.size = info.size
        """Bytes in the file, as the manifest says and the file system confirms."""
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
                f"{self._path} is asked for {wanted} bytes at byte {self._position} of {self.size}: what it says of "
                f"its own content is wrong. Use an older checkpoint"
            )
        for piece in _pieces(buffer):
            rest = piece
            while rest:
                count = _reading(self._path, self._file, rest)
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
                f"{self._path} has changed since it was written: its SHA-256 is {digest}, the manifest says "
                f"{self._info.sha256} ({self.size} bytes both). Use an older checkpoint"
            )


def _reading(path: Path, file: int, buffer: memoryview) -> int:
    try:
        count = system.read(file, buffer)
    except OSError as error:
        raise refused("read", path, error) from error
    if count == 0:
        raise CorruptCheckpointError(f"{path} became shorter while it was read. Use an older checkpoint")
    return count


# ------------------------------------------------------------------------------------------------- writing


def write(
    directory: Path, files: Mapping[str, Iterable[Buffer]], about: Mapping[str, Any], *, label: str = ""
) -> Manifest:
    """Write one checkpoint as a new directory ``<number>-<label>`` below ``directory``; atomic and durable.

    Its number is one above the highest there. When this returns, the checkpoint survives the loss of power; when it
    raises, or the process dies, there is no new checkpoint and the older ones are as they were. Removes what dead
    writers left (see `clean`). A missing ``directory`` is made.

    Args:
        directory: where the checkpoints are; `resolved`.
        files: the content of each file by its name, in chunks of any size; a chunk may be reused once the next is
            asked for.
        about: plain JSON to put into the manifest; other values must have been encoded.
        label: letters, digits and ``._=+-``, at most 100.

    Raises:
        CheckpointError: the operating system refused; its error is the cause.
        StateError: ``about`` is no plain JSON.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     manifest = write(Path(directory), {"words.txt": [b"one ", b"two"]}, {"epoch": 3}, label="best")
    ...     print(manifest.path.name, manifest.about, read_file(manifest, "words.txt"))
    000001-best {'epoch': 3} b'one two'
    """
    with drafted(directory, about, label=label) as draft:
        for name, chunks in files.items():
            draft.write(name, chunks)
    return draft.manifest


class Draft:
    """A checkpoint that is being written, below a hidden name."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        """Where its files are until it is whole."""
        self.at = path
        """What is being made, for errors."""
        self.manifest = manifest
        """What it will say of itself."""

    def write(self, name: str, chunks: Iterable[Buffer]) -> None:
        """Write one file."""
        self.add(name, write_file(self.path / _checked(name), chunks))

    def add(self, name: str, info: FileInfo) -> None:
        """Take in a file that was written to its ``path``, by this process or another one."""
        self.manifest.files[_checked(name)] = info


@contextmanager
def drafted(directory: Path, about: Mapping[str, Any], *, label: str = "") -> Iterator[Draft]:
    """Inside, the files of a checkpoint are written; it is there at the end, as by `write`, or not at all.

    Raises:
        CheckpointError: the operating system refused; its error is the cause.
        StateError: ``about`` is no plain JSON.
    """
    if not LABEL.fullmatch(label):
        raise CheckpointError(
            f"the label {label!r} cannot be a part of a file name. Use at most 100 letters, digits and ._=+-"
        )
    _check_about(about)
    _make_directory(directory)
    clean(directory)
    number = 1 + max((number for name in names(directory) if (number := _number(name))), default=0)
    final = directory / (f"{number:06d}-{label}" if label else f"{number:06d}")
    at = directory / f".tmp-{identity().token}-{secrets.token_hex(4)}"
    _in_flight.add(at)
    draft = Draft(at, Manifest(final, number, dict(about), {}, FORMAT))
    try:
        system.mkdir(at)
        yield draft
        draft.at = at / MANIFEST
        _write_file(draft.at, [_encode(draft.manifest)])
        draft.at = at
        sync_directory(at)
        draft.at = final
        system.rename(at, final)
        draft.at = directory
        sync_directory(directory)
    except BaseException as error:
        failure = refused("write", draft.at, error) if _is_ours(error) else error
        try:
            if draft.at == directory:  # renamed, but perhaps not for long
                system.rename(final, at)
            _delete(at)
        except OSError as second:
            failure.add_note(f"and {at} could not be removed ({second}); the next save tries again")
        if failure is error:
            raise
        raise failure from error
    finally:
        _in_flight.discard(at)


def _is_ours(error: BaseException) -> bool:
    return isinstance(error, OSError) and not isinstance(error, CheckpointError)


def write_file(path: Path, chunks: Iterable[Buffer]) -> FileInfo:
    """Write one new file, durably.

    Raises:
        CheckpointError: the operating system refused; its error is the cause.
    """
    try:
        return _write_file(path, chunks)
    except OSError as error:
        if not _is_ours(error):
            raise
        raise refused("write", path, error) from error


def _write_file(path: Path, chunks: Iterable[Buffer]) -> FileInfo:
    file = system.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        info = write_stream(file, chunks)
        system.fsync(file)
    finally:
        system.close(file)
    return info


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


def _make_directory(directory: Path) -> None:
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
            f"{at} is a file, not a directory: checkpoints need a directory of their own. Choose another one"
        ) from error
    except OSError as error:
        raise refused("make", at, error) from error


def _checked(name: str) -> str:
    if not FILE_NAME.fullmatch(name) or name == MANIFEST:
        raise CheckpointError(
            f"{name!r} cannot be the name of a file in a checkpoint. Use letters, digits and ._=+-, and another "
            f"name than {MANIFEST}"
        )
    return name


def _check_about(about: Mapping[str, Any]) -> None:
    try:
        data = strict_json.render(dict(about), sort=True)
        same = strict_json.parse(data.decode(), MANIFEST_DEPTH - 1) == about  # the manifest is one level around it
    except ValueError as error:
        raise StateError(f"what a checkpoint says of itself is no plain JSON: {error}. Encode it first") from error
    if not same:
        raise StateError(
            "what a checkpoint says of itself changes as JSON (tuples? keys that are no strings?). Encode it first"
        )
    if len(data) > MANIFEST_LIMIT // 2:
        raise StateError(
            f"what a checkpoint says of itself takes more than {MANIFEST_LIMIT // 2} bytes as JSON. Put it into a file"
        )


# ------------------------------------------------------------------------------------------------- plain files


def write_plain(path: Path | str, chunks: Iterable[Buffer]) -> FileInfo:
    """Write one file that belongs to no checkpoint; atomic and durable, and missing directories are made.

    A regular file that is there is replaced, or stays as it was. A link is followed.

    Raises:
        CheckpointError: something else is at ``path``, or the operating system refused; its error is the cause.
    """
    path = Path(os.path.realpath(path))
    try:
        info = system.lstat(path)
        if not stat.S_ISREG(info.st_mode):
            raise CheckpointError(f"{path} is {_kind(info)}, which is not replaced by a file. Choose another path")
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:
        if not _is_ours(error):
            raise
        raise refused("write", path, error) from error
    _make_directory(path.parent)
    clean(path.parent)
    at = path.parent / f".tmp-{identity().token}-{secrets.token_hex(4)}"
    _in_flight.add(at)
    try:
        written = _write_file(at, chunks)
        system.rename(at, path)
        sync_directory(path.parent)
    except BaseException as error:
        failure = refused("write", path, error) if _is_ours(error) else error
        try:
            _delete(at)
        except OSError as second:
            failure.add_note(f"and {at} could not be removed ({second}); the next save tries again")
        if failure is error:
            raise
        raise failure from error
    finally:
        _in_flight.discard(at)
    return written


class PlainReader:
    """A file of which no manifest says what it has to hold, read from its beginning."""

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
        for piece in _pieces(buffer):
            rest = piece
            while rest:
                rest = rest[_reading(self._path, self._file, rest) :]


@contextmanager
def open_plain(path: Path | str) -> Iterator[PlainReader]:
    """Open a regular file that belongs to no checkpoint; a link is followed, a pipe or a device is not waited for.

    Raises:
        CheckpointError: there is no regular file at ``path``, or it cannot be opened.
    """
    given, path = path, Path(os.path.realpath(path))
    try:
        file = system.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        raise refused("open", Path(given), error) from error
    try:
        info = _stat(path, file)
        if not stat.S_ISREG(info.st_mode):
            raise CheckpointError(f"{given} is {_kind(info)} instead of a regular file. Give the path of a file")
        yield PlainReader(path, file, info.st_size)
    finally:
        _close_read(file)


# ------------------------------------------------------------------------------------------------- the manifest


def _encode(manifest: Manifest) -> bytes:
    """The only bytes that this manifest may have."""
    files = {name: asdict(info) for name, info in manifest.files.items()}
    said = {"about": manifest.about, "files": files, "format": manifest.format, "number": manifest.number}
    rest = strict_json.render(said, sort=True)[1:]
    return OPENING + hashlib.sha256(rest).hexdigest().encode() + CLOSING + rest


def decode_manifest(path: Path, data: bytes) -> Manifest:
    """The manifest of the checkpoint ``path`` from the bytes of its file; its other files are not looked at.

    Raises:
        CorruptCheckpointError: they are not those that were written.
        FormatVersionError: a newer loopkit wrote them.
    """
    file = path / MANIFEST
    start = len(OPENING) + 64
    said, rest = data[len(OPENING) : start], data[start + len(CLOSING) :]
    digest = hashlib.sha256(rest).hexdigest()
    if data[: len(OPENING)] != OPENING or data[start : start + len(CLOSING)] != CLOSING or said != digest.encode():
        raise CorruptCheckpointError(
            f"{file} has changed since it was written: its SHA-256 is {digest}, it says "
            f"{said.decode('ascii', 'backslashreplace')!r}. Use an older checkpoint"
        )
    try:
        manifest = _interpret(path, strict_json.parse("{" + rest.decode("ascii"), MANIFEST_DEPTH))
        if _encode(manifest) != data:
            raise ValueError("it is not in the canonical form")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CorruptCheckpointError(
            f"{file} is no manifest, although its SHA-256 {digest} is right: {error}. It was not written by loopkit; "
            f"use another checkpoint"
        ) from error
    return manifest


def _interpret(path: Path, said: dict[str, Any]) -> Manifest:
    version = said["format"]
    if type(version) is not int or version < 1:
        raise ValueError(f"the format is {version!r}")
    if version > FORMAT:
        raise FormatVersionError(
            f"{path} has format {version}, this loopkit reads up to format {FORMAT}: it was written by a newer one. "
            f"Install that one to read it"
        )
    if type(said["number"]) is not int or said["number"] < 1:
        raise ValueError(f"the number is {said['number']!r}")
    if type(said["about"]) is not dict:
        raise ValueError("'about' is no mapping")
    files = {}
    for name, info in said["files"].items():
        if not FILE_NAME.fullmatch(name) or name == MANIFEST:
            raise ValueError(f"{name[:300]!r} is no name of a file in a checkpoint")
        if type(info["size"]) is not int or info["size"] < 0 or not SHA256.fullmatch(info["sha256"]):
            raise ValueError(f"the size or the SHA-256 of {name!r} is malformed")
        files[name] = FileInfo(info["size"], info["sha256"])
    return Manifest(path, said["number"], said["about"], files, version)


def read_manifest(path: Path | str) -> Manifest:
    """Read the manifest of the checkpoint ``path``, verified, and see that just its files are there, in their sizes.

    Hidden files, such as network file systems and desktops leave, are ignored.

    Raises:
        CheckpointError: there is no checkpoint at ``path``, or it cannot be read.
        CorruptCheckpointError: it is not what was written.
        FormatVersionError: a newer loopkit wrote it.
    """
    path = Path(path)
    try:
        info = system.lstat(path)
    except OSError as error:
        raise refused("find the checkpoint", path, error) from error
    if stat.S_ISLNK(info.st_mode):
        raise CheckpointError(f"{path} is a link, and links are not followed to checkpoints. Give the directory itself")
    if not stat.S_ISDIR(info.st_mode):
        raise CheckpointError(f"{path} is {_kind(info)}, a checkpoint is a directory. Give the directory")
    file, size = _open_regular(path / MANIFEST)
    try:
        if size > MANIFEST_LIMIT:
            raise CorruptCheckpointError(
                f"{path / MANIFEST} has {size} bytes, a manifest has at most {MANIFEST_LIMIT}. Use an older checkpoint"
            )
        data = bytearray(size)
        PlainReader(path / MANIFEST, file, size).readinto(data)
    finally:
        _close_read(file)
    manifest = decode_manifest(path, bytes(data))
    if (_number(path.name) or manifest.number) != manifest.number:
        raise CorruptCheckpointError(
            f"{path / MANIFEST} says number {manifest.number}: {path.name} was renamed, or its files exchanged for "
            f"those of another checkpoint. Give it back that number, or use another one"
        )
    extra = [name for name in names(path) if name not in manifest.files and name != MANIFEST and name[0] != "."]
    if extra:
        raise CorruptCheckpointError(
            f"{path} holds {extra[0]!r} ({len(extra)} such), which its manifest does not name: somebody put it there. "
            f"Remove it if you know it"
        )
    for name, said in manifest.files.items():
        try:
            info = system.lstat(path / name)
        except FileNotFoundError as error:
            raise _missing(path / name, said) from error
        except OSError as error:
            raise refused("read", path / name, error) from error
        _check_file(path / name, info, said)
    return manifest


def _missing(path: Path, said: FileInfo | None = None) -> CorruptCheckpointError:
    expected = f" (the manifest says {said.size} bytes with SHA-256 {said.sha256})" if said else ""
    return CorruptCheckpointError(f"{path} is missing{expected}: the checkpoint is not whole. Use an older checkpoint")


def _check_file(path: Path, info: os.stat_result, said: FileInfo) -> None:
    if not stat.S_ISREG(info.st_mode):
        raise CorruptCheckpointError(
            f"{path} is {_kind(info)} instead of a regular file of {said.size} bytes with SHA-256 {said.sha256}. "
            f"Use an older checkpoint"
        )
    if info.st_size != said.size:
        raise CorruptCheckpointError(
            f"{path} has {info.st_size} bytes, the manifest says {said.size} (with SHA-256 {said.sha256}): it was cut "
            f"or changed. Use an older checkpoint"
        )


def _kind(info: os.stat_result) -> str:
    kinds = {stat.S_IFLNK: "a link", stat.S_IFDIR: "a directory", stat.S_IFIFO: "a pipe", stat.S_IFREG: "a file"}
    return kinds.get(stat.S_IFMT(info.st_mode), "a device or a socket")


def _open_regular(path: Path) -> tuple[int, int]:
    """Open a regular file for reading -> the file and its size; whatever else lies there is refused, not waited for."""
    try:
        file = system.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except FileNotFoundError as error:
        raise _missing(path) from error
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise CorruptCheckpointError(
                f"{path} is a link or a socket instead of a regular file; links are not followed. "
                f"Use another checkpoint"
            ) from error
        raise refused("open", path, error) from error
    try:
        info = _stat(path, file)
        if not stat.S_ISREG(info.st_mode):
            raise CorruptCheckpointError(f"{path} is {_kind(info)} instead of a regular file. Use another checkpoint")
    except BaseException:
        _close_read(file)
        raise
    return file, info.st_size


def _stat(path: Path, file: int) -> os.stat_result:
    try:
        return system.stat(file)
    except OSError as error:
        raise refused("read", path, error) from error


def _close_read(file: int) -> None:
    """Close a file that was only read: what can go wrong makes no difference to what was read."""
    try:
        system.close(file)
    except OSError:
        pass


@contextmanager
def open_file(manifest: Manifest, name: str, *, kept: bool = False) -> Iterator[Reader]:
    """Open one file of a checkpoint to read it once from its beginning; call ``finish()`` before using what came.

    Args:
        manifest: of the checkpoint.
        name: of the file.
        kept: the buffers that are read into stay as they are until ``finish()``: hashing may end after reading.

    Raises:
        CorruptCheckpointError: it is missing, no regular file, or not of the size that the manifest says.
    """
    if name not in manifest.files:
        raise CheckpointError(
            f"{manifest.path} holds no {name!r}{nearest(name, list(manifest.files))}: it has "
            f"{', '.join(sorted(manifest.files)) or 'no files'}. Use one of those"
        )
    said = manifest.files[name]
    path = manifest.path / name
    file, _ = _open_regular(path)
    try:
        _check_file(path, _stat(path, file), said)
        with Hasher(0 if kept else QUEUE) as hasher:
            yield Reader(path, said, file, hasher, kept)
    finally:
        _close_read(file)


def read_file(manifest: Manifest, name: str, limit: int = READ_LIMIT) -> bytes:
    """The whole content of one file, verified; refused if it has more than ``limit`` bytes."""
    with open_file(manifest, name) as reader:
        if reader.size > limit:
            raise CheckpointError(
                f"{manifest.path / name} has {reader.size} bytes, more than the {limit} that are read at once. "
                f"Read it in parts with open_file"
            )
        data = bytearray(reader.size)
        reader.readinto(data)
        reader.finish()
    return bytes(data)


def verify(path: Path | str) -> Manifest:
    """Read a whole checkpoint and compare it with its manifest, file by file.

    Raises:
        CorruptCheckpointError: a file is not what was written; the message names it and both digests.
    """
    manifest = read_manifest(path)
    buffer = bytearray(min(QUEUE * PIECE, max((info.size for info in manifest.files.values()), default=0)))
    for name in manifest.files:
        with open_file(manifest, name) as reader:
            left = reader.size
            while left:
                part = memoryview(buffer)[:left]
                reader.readinto(part)
                left -= len(part)
            reader.finish()
    return manifest


# ------------------------------------------------------------------------------------------------- which there are


def _number(name: str) -> int | None:
    """The number of a checkpoint's directory; None for other names."""
    match = CHECKPOINT_NAME.fullmatch(name)
    return int(match[1]) or None if match and match[1] == f"{int(match[1]):06d}" else None


def names(directory: Path) -> list[str]:
    """What is in a directory."""
    try:
        return system.listdir(directory)
    except OSError as error:
        raise refused("list", directory, error) from error


def listing(directory: Path | str) -> Listing:
    """The checkpoints of ``directory``, newest first; those whose manifest does not verify are in its ``problems``.

    Only manifests and sizes are looked at; reading or `verify` compares the contents. What does not have the name of
    a checkpoint is ignored. A missing directory holds no checkpoints.
    """
    result, directory = Listing(), Path(directory)
    if not os.path.lexists(directory):
        return result
    numbered = [(number, name) for name in names(directory) if (number := _number(name))]
    for _, name in sorted(numbered, reverse=True):
        path = directory / name
        try:
            manifest = read_manifest(path)
        except CheckpointError as error:
            if os.path.lexists(path):
                result.problems[path] = error
        else:
            result.append(manifest)
    return result


def keep(manifests: Listing, last: int, protected: Collection[Path] = ()) -> list[Path]:
    """Which checkpoints of a listing to remove, so that the ``last`` newest and the protected ones stay.

    Those between which nothing was trained, such as the last update and the end of the fit, count as one: the newest
    stays, and the newest with a monitored value.

    At least two stay, whatever ``last`` says: the one to go on from, and one to fall back to. Those that do not verify
    neither count nor are removed: look at them, then remove them yourself.
    """
    if last < 1:
        raise CheckpointError(f"keeping the last {last} checkpoints would remove the one just written. Keep at least 1")
    alike: dict[Any, dict[bool, Path]] = {}
    for manifest in manifests:
        group, monitored = alike.setdefault(_trained(manifest), {}), manifest.about.get("monitored") is not None
        if not group or (monitored and True not in group):
            group[monitored] = manifest.path
    kept = {path for group in [*alike.values()][:last] for path in group.values()}
    kept |= {manifest.path for manifest in manifests if manifest.path in protected}
    for manifest in manifests:
        if len(kept) < 2:
            kept.add(manifest.path)
    return [manifest.path for manifest in manifests if manifest.path not in kept]


def _trained(manifest: Manifest) -> Any:
    """How much training a checkpoint has seen; if it does not say, something of its own."""
    progress = manifest.about.get("progress")
    if not isinstance(progress, Mapping) or not {"steps", "updates"} <= set(progress):
        return manifest.path
    return str(progress["steps"]), str(progress["updates"])


def remove(paths: Iterable[Path]) -> None:
    """Remove checkpoints; each first gets a hidden name, so that a half removed one is never listed.

    Raises:
        CheckpointError: the operating system refused.
    """
    for path in paths:
        hidden = path.parent / f".old-{identity().token}-{secrets.token_hex(4)}"
        _in_flight.add(hidden)
        try:
            try:
                system.rename(path, hidden)
            except FileNotFoundError:
                continue
            # Else its files may be gone after a loss of power, and its name still there.
            sync_directory(path.parent)
            _delete(hidden)
        except OSError as error:
            raise refused("remove", path, error) from error
        finally:
            _in_flight.discard(hidden)


def clean(directory: Path, *, everything: bool = False) -> None:
    """Remove what dead processes of this host left in ``directory`` while they wrote or removed checkpoints.

    What cannot be removed is warned of and left. With ``everything``, leftovers of other hosts go too: right only for
    who holds the `Lock` of the directory.
    """
    for name in names(directory):
        match = LEFTOVER.fullmatch(name)
        path = directory / name
        if match is None or path in _in_flight:
            continue
        owner = Process(match["host"], match["machine"], int(match["pid"]), int(match["started"]))
        own = identity()
        if (
            not everything
            and owner != own
            and (owner.machine != own.machine or owner.host != own.host or owner.alive())
        ):
            continue
        try:
            _delete(path)
        except OSError as error:
            warn(f"{refused('remove the leftover', path, error)}", RuntimeWarning)


def _delete(path: Path) -> None:
    """Remove a file, a link, or a directory with all that is in it; nothing there is fine."""
    try:
        if not stat.S_ISDIR(system.lstat(path).st_mode):
            system.unlink(path)
            return
        for name in system.listdir(path):
            _delete(path / name)
        system.rmdir(path)
    except FileNotFoundError:
        pass


class Remover:
    """Removes checkpoints in a thread of its own; ``close`` waits for it, and raises what went wrong."""

    def __init__(self) -> None:
        self._paths: queue.SimpleQueue[list[Path] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._errors: list[Exception] = []

    def remove(self, paths: Iterable[Path]) -> None:
        """Remove ``paths`` soon; raise what went wrong with earlier ones."""
        wanted = list(paths)
        if wanted:
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="loopkit-remover", daemon=True)
                self._thread.start()
            self._paths.put(wanted)
        self._raise()

    def close(self) -> None:
        """Wait until everything is removed; raise what went wrong. The remover can be used again."""
        if self._thread is not None:
            self._paths.put(None)
            self._thread.join()
            self._thread = None
        self._raise()

    def _raise(self) -> None:
        if self._errors:
            raise self._errors.pop(0)

    def _work(self) -> None:
        while (paths := self._paths.get()) is not None:
            for path in paths:
                try:
                    remove([path])
                except Exception as error:
                    self._errors.append(error)


_in_flight: set[Path] = set()
os.register_at_fork(after_in_child=_in_flight.clear)

# ------------------------------------------------------------------------------------------------- before the start


def resolved(directory: Path | str) -> Path:
    """A directory's path, absolute and without links, which writing does not follow."""
    return Path(os.path.realpath(directory))


def probe(directory: Path | str) -> Path:
    """See that checkpoints can be written below ``directory``, which is made if missing; return it, `resolved`.

    Raises:
        CheckpointError: they cannot: it is a file, permission is missing, the file system is read-only or full.
    """
    path = resolved(directory)
    _make_directory(path)
    trial = path / f".tmp-{identity().token}-{secrets.token_hex(4)}"
    renamed = trial.with_name(f"{trial.name}0")
    _in_flight.update((trial, renamed))
    try:
        _write_file(trial, [bytes(4096)])
        system.rename(trial, renamed)
        system.unlink(renamed)
        sync_directory(path)
    except OSError as error:
        try:
            _delete(trial)
            _delete(renamed)
        except OSError:
            pass  # the first error says why
        raise refused("write a trial file in", path, error) from error
    finally:
        _in_flight.difference_update((trial, renamed))
    return path


def refused(action: str, path: Path, error: BaseException) -> CheckpointError:
    """What the operating system refused, as an error of ours that keeps its number."""
    number = error.errno if isinstance(error, OSError) else None
    name = errno.errorcode.get(number or 0, type(error).__name__)
    fix = FIXES.get(number or 0, "Look at the path and the file system")
    failure = CheckpointError(f"cannot {action} {path}: {name}, {os.strerror(number) if number else error}. {fix}")
    failure.errno = number
    return failure
