"""Storage of checkpoints: atomic writing, verified reading, listing, rotation, probing.

A checkpoint is a directory ``<number>-<label>`` that holds files and ``manifest.json``, which names every file with
its size and SHA-256 and carries a digest of itself. It is written under a hidden name, flushed, and renamed, so that a
process or a machine that dies at any moment leaves either no new checkpoint or a whole one. There is no pointer to the
latest: it is the newest whose manifest verifies.
"""

from __future__ import annotations

import errno
import os
import queue
import re
import stat
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from loopkit.base.shield import Shield
from loopkit.base.words import nearest
from loopkit.checkpoint import disk
from loopkit.checkpoint.manifest import (
    FILE_NAME,
    FORMAT,
    MANIFEST,
    MANIFEST_LIMIT,
    FileInfo,
    Listing,
    Manifest,
    check_about,
    decode_manifest,
    encode,
    number_of,
)
from loopkit.checkpoint.streams import PIECE, QUEUE, Buffer, Hasher, PlainReader, Reader, create, write_file
from loopkit.errors import CheckpointError, CorruptCheckpointError

LABEL = re.compile(r"[A-Za-z0-9._=+-]{0,100}")
READ_LIMIT = 256 << 20  # bytes; for files read whole into memory
_Paths = queue.SimpleQueue[list[Path] | None]


def write(
    directory: Path,
    files: Mapping[str, Iterable[Buffer]],
    about: Mapping[str, Any],
    *,
    label: str = "",
    there: Callable[[Manifest], object] | None = None,
    kept: tuple[str, ...] = (),
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
        there: called with its manifest once the checkpoint has its name; no interrupt comes in between.
        kept: how the names of files begin that always hold the same bytes: such a file is not written again if the
            newest checkpoint that has it can be linked to.

    Raises:
        CheckpointError: the operating system failed; its error is the cause.
        StateError: ``about`` is no plain JSON.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     manifest = write(Path(directory), {"words.txt": [b"one ", b"two"]}, {"epoch": 3}, label="best")
    ...     print(manifest.path.name, manifest.about, read_file(manifest, "words.txt"))
    000001-best {'epoch': 3} b'one two'
    """
    with drafted(directory, about, label=label, there=there) as draft:
        others = listing(directory) if any(name.startswith(kept) for name in files if kept) else Listing()
        for name, chunks in files.items():
            if not (kept and name.startswith(kept) and draft.link(name, others)):
                draft.write(name, chunks)
    return draft.manifest


class Draft:
    """A checkpoint that is being written, below a hidden name."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        """Where its files are until it is whole."""
        self.at = path
        """The path of the new checkpoint, for errors."""
        self.manifest = manifest
        """The manifest of the new checkpoint."""

    def write(self, name: str, chunks: Iterable[Buffer]) -> None:
        """Write one file."""
        self.add(name, write_file(self.path / _checked(name), chunks))

    def link(self, name: str, there: Iterable[Manifest]) -> bool:
        """Link to the file of that name in one of these checkpoints; return whether that worked."""
        holder = next((manifest for manifest in there if name in manifest.files), None)
        if holder is None:
            return False
        try:
            disk.system.link(holder.path / name, self.path / _checked(name))
        except OSError:  # the file system has no links, or the checkpoint is being removed
            return False
        self.add(name, holder.files[name])
        return True

    def add(self, name: str, info: FileInfo) -> None:
        """Take in a file that was written to its ``path``, by this process or another one."""
        self.manifest.files[_checked(name)] = info


@contextmanager
def drafted(
    directory: Path, about: Mapping[str, Any], *, label: str = "", there: Callable[[Manifest], object] | None = None
) -> Iterator[Draft]:
    """Inside, the files of a checkpoint are written; it is there at the end, as by `write`, or not at all.

    Args:
        directory, about, label, there: as for `write`.


    Raises:
        CheckpointError: the operating system failed; its error is the cause.
        StateError: ``about`` is no plain JSON.
    """
    if not LABEL.fullmatch(label):
        raise CheckpointError(
            f"the label {label!r} cannot be a part of a file name. Use at most 100 letters, digits and ._=+-"
        )
    check_about(about)
    disk.make_directory(directory)
    disk.clean(directory)
    number = 1 + max((number for name in disk.names(directory) if (number := number_of(name))), default=0)
    final = directory / (f"{number:06d}-{label}" if label else f"{number:06d}")
    with disk.hidden(directory) as at:
        draft = Draft(at, Manifest(final, number, dict(about), {}, FORMAT))
        try:
            disk.system.mkdir(at)
            yield draft
            draft.at = at / MANIFEST
            create(draft.at, [encode(draft.manifest)])
            draft.at = at
            disk.sync_directory(at)
            draft.at = final
            with Shield():
                disk.system.rename(at, final)
                draft.at = directory
                if there is not None:
                    there(draft.manifest)
            disk.sync_directory(directory)
        except BaseException as error:
            failure = disk.refused("write", draft.at, error) if disk.is_ours(error) else error
            try:
                if draft.at == directory:  # renamed, but perhaps not for long
                    disk.system.rename(final, at)
                disk.delete(at)
            except OSError as second:
                failure.add_note(f"and {at} could not be removed ({second}); the next save tries again")
            if failure is error:
                raise
            raise failure from error


def _checked(name: str) -> str:
    if not FILE_NAME.fullmatch(name) or name == MANIFEST:
        raise CheckpointError(
            f"{name!r} cannot be the name of a file in a checkpoint. Use letters, digits and ._=+-, and another "
            f"name than {MANIFEST}"
        )
    return name


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
        info = disk.system.lstat(path)
    except OSError as error:
        raise disk.refused("find the checkpoint", path, error) from error
    if stat.S_ISLNK(info.st_mode):
        raise CheckpointError(f"{path} is a link, and links are not followed to checkpoints. Give the directory itself")
    if not stat.S_ISDIR(info.st_mode):
        raise CheckpointError(f"{path} is {disk.kind_of(info)}, a checkpoint is a directory. Give the directory")
    file, size = _open_regular(path / MANIFEST)
    try:
        if size > MANIFEST_LIMIT:
            raise CorruptCheckpointError(
                f"{path / MANIFEST} has {size} bytes, a manifest has at most {MANIFEST_LIMIT}. Use an older checkpoint"
            )
        data = bytearray(size)
        PlainReader(path / MANIFEST, file, size).readinto(data)
    finally:
        disk.close_read(file)
    manifest = decode_manifest(path, bytes(data))
    if (number_of(path.name) or manifest.number) != manifest.number:
        raise CorruptCheckpointError(
            f"{path / MANIFEST} has number {manifest.number}: {path.name} was renamed, or its files exchanged for "
            f"another checkpoint's. Give it back that number, or use another one"
        )
    extra = [name for name in disk.names(path) if name not in manifest.files and name != MANIFEST and name[0] != "."]
    if extra:
        raise CorruptCheckpointError(
            f"{path} holds {extra[0]!r} ({len(extra)} such), which its manifest does not name. Remove it if you know it"
        )
    for name, said in manifest.files.items():
        try:
            info = disk.system.lstat(path / name)
        except FileNotFoundError as error:
            raise _missing(path / name, said) from error
        except OSError as error:
            raise disk.refused("read", path / name, error) from error
        _check_file(path / name, info, said)
    return manifest


def _missing(path: Path, said: FileInfo | None = None) -> CorruptCheckpointError:
    expected = f" (in the manifest: {said.size} bytes with SHA-256 {said.sha256})" if said else ""
    return CorruptCheckpointError(f"{path} is missing{expected}: the checkpoint is not whole. Use an older checkpoint")


def _check_file(path: Path, info: os.stat_result, said: FileInfo) -> None:
    if not stat.S_ISREG(info.st_mode):
        raise CorruptCheckpointError(
            f"{path} is {disk.kind_of(info)} instead of a regular file of {said.size} bytes with SHA-256 "
            f"{said.sha256}. Use an older checkpoint"
        )
    if info.st_size != said.size:
        raise CorruptCheckpointError(
            f"{path} has {info.st_size} bytes, the manifest has {said.size} (with SHA-256 {said.sha256}): it was cut "
            f"or changed. Use an older checkpoint"
        )


def _open_regular(path: Path) -> tuple[int, int]:
    """Open a regular file for reading -> the file and its size; anything else raises at once."""
    try:
        file = disk.system.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except FileNotFoundError as error:
        raise _missing(path) from error
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise CorruptCheckpointError(
                f"{path} is a link or a socket instead of a regular file; links are not followed. "
                f"Use another checkpoint"
            ) from error
        raise disk.refused("open", path, error) from error
    try:
        info = disk.stat_of(path, file)
        if not stat.S_ISREG(info.st_mode):
            raise CorruptCheckpointError(
                f"{path} is {disk.kind_of(info)} instead of a regular file. Use another checkpoint"
            )
    except BaseException:
        disk.close_read(file)
        raise
    return file, info.st_size


@contextmanager
def open_file(manifest: Manifest, name: str, *, kept: bool = False) -> Iterator[Reader]:
    """Open one file of a checkpoint to read it once from its beginning; call ``finish()`` before using what came.

    Args:
        manifest: of the checkpoint.
        name: of the file.
        kept: the buffers that are read into stay as they are until ``finish()``: hashing may end after reading.

    Raises:
        CorruptCheckpointError: it is missing, no regular file, or differs in size from the manifest.
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
        _check_file(path, disk.stat_of(path, file), said)
        with Hasher(0 if kept else QUEUE) as hasher:
            yield Reader(path, said, file, hasher, kept)
    finally:
        disk.close_read(file)


def read_file(manifest: Manifest, name: str, limit: int = READ_LIMIT) -> bytes:
    """The whole content of one file, verified; raises if it has more than ``limit`` bytes."""
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


def listing(directory: Path | str) -> Listing:
    """The checkpoints of ``directory``, newest first; those whose manifest does not verify are in its ``problems``.

    Only manifests and sizes are looked at; reading or `verify` compares the contents. Entries without the name of
    a checkpoint are ignored. A missing directory holds no checkpoints.
    """
    result = Listing()
    directory = Path(directory)
    if not os.path.lexists(directory):
        return result
    numbered = [(number, name) for name in disk.names(directory) if (number := number_of(name))]
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


def probe(directory: Path | str) -> Path:
    """See that checkpoints can be written below ``directory``, which is made if missing; return it, `resolved`.

    Raises:
        CheckpointError: they cannot: it is a file, permission is missing, the file system is read-only or full.
    """
    path = disk.resolved(directory)
    disk.make_directory(path)
    with disk.hidden(path) as trial, disk.hidden(path) as renamed:
        try:
            create(trial, [bytes(4096)])
            disk.system.rename(trial, renamed)
            disk.system.unlink(renamed)
            disk.sync_directory(path)
        except OSError as error:
            with suppress(OSError):  # the first error says why
                disk.delete(trial)
                disk.delete(renamed)
            raise disk.refused("write a trial file in", path, error) from error
    return path


def keep(manifests: Listing, last: int, protected: Collection[Path] = ()) -> list[Path]:
    """Which checkpoints of a listing to remove, so that the ``last`` newest and the protected ones stay.

    Checkpoints without training in between, such as the last update and the end of the fit, count as one: the newest
    stays, and the newest with a monitored value.

    At least two stay, whatever ``last`` is: the one to resume from, and one to fall back to. Damaged ones
    neither count nor are removed: look at them, then remove them yourself.
    """
    if last < 1:
        raise CheckpointError(f"keeping the last {last} checkpoints would remove the one just written. Keep at least 1")
    alike: dict[Any, dict[bool, Path]] = {}
    for manifest in manifests:
        group = alike.setdefault(_trained(manifest), {})
        monitored = manifest.about.get("monitored") is not None
        if not group or (monitored and True not in group):
            group[monitored] = manifest.path
    kept = {path for group in [*alike.values()][:last] for path in group.values()}
    kept |= {manifest.path for manifest in manifests if manifest.path in protected}
    for manifest in manifests:
        if len(kept) < 2:
            kept.add(manifest.path)
    return [manifest.path for manifest in manifests if manifest.path not in kept]


def _trained(manifest: Manifest) -> Any:
    """How much training a checkpoint has seen; if unknown, a unique value."""
    progress = manifest.about.get("progress")
    if not isinstance(progress, Mapping) or not {"steps", "updates"} <= set(progress):
        return manifest.path
    return str(progress["steps"]), str(progress["updates"])


def remove(paths: Iterable[Path]) -> None:
    """Remove checkpoints; each first gets a hidden name, so that a half removed one is never listed.

    Raises:
        CheckpointError: the operating system failed.
    """
    for path in paths:
        with disk.hidden(path.parent, "old") as old:
            try:
                try:
                    disk.system.rename(path, old)
                except FileNotFoundError:
                    continue
                # Else its files may be gone after a loss of power, and its name still there.
                disk.sync_directory(path.parent)
                disk.delete(old)
            except OSError as error:
                raise disk.refused("remove", path, error) from error


class Remover:
    """Removes checkpoints in its own thread; ``close`` waits for it, and raises its error."""

    def __init__(self) -> None:
        self._paths: _Paths = queue.SimpleQueue()
        """The queue of the thread; each thread has its own."""
        self._thread: threading.Thread | None = None
        self._errors: list[Exception] = []

    def remove(self, paths: Iterable[Path]) -> None:
        """Remove ``paths`` soon; raise what went wrong with earlier ones."""
        wanted = list(paths)
        if wanted:
            if self._thread is None:
                self._start()
            self._paths.put(wanted)
        self._raise()

    def close(self) -> None:
        """Wait until everything is removed; raise what went wrong. The remover can be used again."""
        thread = self._thread
        if thread is not None:
            self._thread = None
            self._paths.put(None)
            thread.join()
        self._raise()

    def _start(self) -> None:
        with Shield():  # else it may wait for ever for paths that nobody gives it
            self._paths = queue.SimpleQueue()
            self._thread = threading.Thread(target=self._work, args=(self._paths,), name="loopkit-remover", daemon=True)
            self._thread.start()

    def _raise(self) -> None:
        if self._errors:
            raise self._errors.pop(0)

    def _work(self, given: _Paths) -> None:
        while (paths := given.get()) is not None:
            for path in paths:
                try:
                    remove([path])
                except Exception as error:
                    self._errors.append(error)
