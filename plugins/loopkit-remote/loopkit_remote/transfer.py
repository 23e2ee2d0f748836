"""Transfers between a run's directory and its folder in a store, in both directions.

A checkpoint is a folder of its name, with the files that it has here. Its manifest comes last, when all other files
have arrived: a folder without a whole manifest is no checkpoint. Logs are objects below ``logs/<number>/``. Their
index, ``logs/<number>.json``, again comes last; a file that has not changed stays where the index before has it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, TypeVar

from loopkit.author import (
    CHECKPOINT_NAME,
    LOGGED,
    MANIFEST,
    FileInfo,
    bundle,
    decode_manifest,
    disk,
    processes,
    storage,
    warn,
)
from loopkit.checkpoint import Manifest, listing, verify
from loopkit.errors import CorruptCheckpointError
from loopkit_remote.store import Changed, RemoteError, Store, Verify

LOGS, INDEX = "logs", re.compile(r"([0-9]{6,})\.json")
WHOLE = 2
"""Checkpoints, and indexes of logs, that a store keeps at least, if it has so many."""
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
"""Seconds between attempts: doubled after each that fails."""

T = TypeVar("T")


def pauses() -> Iterator[float]:
    """Seconds to wait after each attempt that fails."""
    pause = FIRST_PAUSE
    while True:
        yield pause
        pause = min(2 * pause, LONGEST_PAUSE)


def repeated(act: Callable[[], T], tries: int) -> T:
    """Try a few times, with waits."""
    for pause, left in zip(pauses(), range(tries - 1, -1, -1), strict=False):
        try:
            return act()
        except Changed:
            raise
        except RemoteError:
            if not left:
                raise
            time.sleep(pause)
    raise AssertionError


# Up


class Mirror:
    """Brings what a directory holds to a store: the newest checkpoint first, then others, and logs before each.

    Every method asks the store, and raises `RemoteError` if it fails; finished parts stay.
    """

    def __init__(self, directory: Path, store: Store, verify: Verify = "size", logs: bool = True) -> None:
        self._directory, self._store, self._verify, self._logs = directory, store, verify, logs
        self._known: dict[str, str] | None = None
        """The whole checkpoints in the store, each with the SHA-256 of its manifest; None: not looked at yet."""
        self._arrived: tuple[str, set[str]] = "", set()
        """The digest of the manifest that is being uploaded, and its files that are there: not written again."""
        self._kept: set[str] = set()
        """Checkpoints that the store keeps, and the directory does not."""
        self._damaged: set[str] = set()
        """Checkpoints here whose files are not what they were."""
        self._index: dict[str, dict[str, Any]] = {}
        """The files of the log in the store: the path of the object, size and digest of each."""
        self._indexes: list[int] = []
        self._seen: dict[str, tuple[int, int]] = {}
        """Size and time of each file of the log, when it was uploaded."""

    @property
    def pending(self) -> list[str]:
        """The files that the store is not known to have: checkpoints by name, newest first, and files of the log."""
        known, left = self._known or {}, []
        for manifest in listing(self._directory):
            with suppress(OSError):
                digest = hashlib.sha256((manifest.path / MANIFEST).read_bytes()).hexdigest()
                if known.get(manifest.path.name) != digest and manifest.path.name not in self._damaged:
                    left.append(manifest.path.name)
        return [*left, *self._changed_logs()]

    def bring(self, logs: bool = True) -> bool:
        """Upload one checkpoint that the store lacks, with the log before it, or only ``logs``; False: all is there.

        Raises:
            RemoteError: The store fails.
            Changed: The checkpoint is damaged here; it is passed over from now on.
        """
        if self._known is None:
            self._look()
        assert self._known is not None
        found = [name for name in self.pending if CHECKPOINT_NAME.fullmatch(name)]
        if (found or logs) and self._changed_logs():
            self._bring_logs()
        if not found:
            if {*self._known} - self._here() != self._kept:
                self._drop()
            return False
        with _opened(self._directory / found[0]) as held:
            if held is not None:  # else it was removed here meanwhile
                self._bring(found[0], *held)
        return True

    def _look(self) -> None:
        """Learn what the store has."""
        known = {str(manifest.path): hashlib.sha256(data).hexdigest() for manifest, data in whole(self._store)}
        self._indexes, self._index = newest_index(self._store)
        self._known = known

    def _bring(self, name: str, files: Mapping[str, BinaryIO], data: bytes) -> None:
        said = decode_manifest(self._directory / name, data).files
        assert self._known is not None
        digest = hashlib.sha256(data).hexdigest()
        if self._arrived[0] != digest:
            self._known.pop(name, None)
            self._store.remove(f"{name}/{MANIFEST}")  # of a line of the run that was left
            self._arrived = digest, set()
        there = self._arrived[1]
        for file in said.keys() - there:
            if self._store.write(f"{name}/{file}", files[file], said[file].size) != said[file]:
                self._damaged.add(name)
                raise Changed(f"{self._directory / name / file} does not fit its manifest: it is not uploaded")
            there.add(file)
        for file in said:
            there.discard(file)  # unless it is whole
            self._store.check(name, {file: said[file]}, self._verify)
            there.add(file)
        self._store.put(f"{name}/{MANIFEST}", data)
        self._known[name] = digest
        self._drop()

    def _here(self) -> set[str]:
        return {manifest.path.name for manifest in listing(self._directory)}

    def _drop(self) -> None:
        """Remove from the store what the directory has no more, and what comes after its newest; keep two at least."""
        here = self._here()
        top = max(here, key=number_of, default="")
        if self._known is None or top not in self._known:
            return
        older = sorted((each for each in {*self._known} - here if number_of(each) < number_of(top)), key=number_of)
        older = older[len(older) - max(0, WHOLE - len(here & {*self._known})) :]
        for each in folders(self._store):
            if each not in here and each not in older:  # one of the same number, or a higher one, is of a line left
                self._store.remove(f"{each}/{MANIFEST}")  # first: it is no checkpoint any more
                self._store.remove(each, recursive=True)
                self._known.pop(each, None)
        self._kept = {*self._known} - here

    def _changed_logs(self) -> list[str]:
        return [name for name, (_, seen) in self._log_files().items() if self._seen.get(name) != seen]

    def _log_files(self) -> dict[str, tuple[Path, tuple[int, int]]]:
        found: dict[str, tuple[Path, tuple[int, int]]] = {}
        for top in sorted(self._directory.iterdir()) if self._logs and self._directory.is_dir() else ():
            if not LOGGED.fullmatch(top.name) or top.name[0] == "." or top.is_symlink():
                continue
            for path in sorted(top.rglob("*")) if top.is_dir() else (top,):
                with suppress(OSError):
                    about = path.stat(follow_symlinks=False)
                    if path.is_file() and not path.is_symlink():
                        name = path.relative_to(self._directory).as_posix()
                        found[name] = path, (about.st_size, about.st_mtime_ns)
        return found

    def _bring_logs(self) -> None:
        number, found = max(self._indexes, default=0) + 1, self._log_files()
        folder = f"{LOGS}/{number:06d}"
        index, seen = {name: self._index[name] for name in found if name in self._index}, {}
        written: dict[str, FileInfo] = {}
        for count, (name, (path, at)) in enumerate(found.items()):
            if name in index and self._seen.get(name) == at:
                seen[name] = at
                continue
            try:
                file = path.open("rb")
            except FileNotFoundError:
                index.pop(name, None)
                continue
            with file:
                about = os.fstat(file.fileno())
                info = self._store.write(f"{folder}/{count}", file, about.st_size)
            written[str(count)] = info
            index[name] = {"at": f"{folder}/{count}", "size": info.size, "sha256": info.sha256}
            seen[name] = (about.st_size, about.st_mtime_ns)
        self._store.check(folder, written, self._verify)
        self._store.put(f"{folder}.json", json.dumps(index, sort_keys=True).encode())
        self._index, self._seen = index, seen
        self._indexes = [*self._indexes, number]
        self._drop_logs()

    def _drop_logs(self) -> None:
        """Remove all indexes but the newest two, and the objects that neither names."""
        old, self._indexes = self._indexes[:-WHOLE], self._indexes[-WHOLE:]
        if not old:
            return
        kept = {each["at"] for each in self._index.values()}
        kept |= {each["at"] for each in (read_index(self._store, self._indexes[0]) or {}).values()}
        for number in old:
            self._store.remove(f"{LOGS}/{number:06d}.json")
        for folder, size in self._store.sizes(LOGS).items():
            for name in self._store.sizes(f"{LOGS}/{folder}") if size is None else ():
                if f"{LOGS}/{folder}/{name}" not in kept:
                    self._store.remove(f"{LOGS}/{folder}/{name}")


@contextmanager
def _opened(path: Path) -> Iterator[tuple[dict[str, BinaryIO], bytes] | None]:
    """All files of a checkpoint, open, so that it may be removed meanwhile, and the bytes of its manifest."""
    with ExitStack() as stack:
        try:
            data = (path / MANIFEST).read_bytes()
            names = decode_manifest(path, data).files
            files: dict[str, BinaryIO] = {name: stack.enter_context((path / name).open("rb")) for name in names}
        except (FileNotFoundError, NotADirectoryError, CorruptCheckpointError):
            yield None
            return
        yield files, data


# Down


def number_of(name: str) -> int:
    """The number of a checkpoint by its name."""
    return int(name.partition("-")[0])


def folders(store: Store) -> list[str]:
    """The folders that have names of checkpoints, newest first; they may be in the making."""
    found = [name for name, size in store.sizes().items() if size is None and CHECKPOINT_NAME.fullmatch(name)]
    return sorted(found, key=number_of, reverse=True)


def manifest_in(store: Store, name: str) -> tuple[Manifest, bytes] | None:
    """The manifest of a checkpoint in a store, and its bytes; None if it is not whole, by the sizes of its files."""
    sizes = store.sizes(name)
    if MANIFEST not in sizes:
        return None
    data = store.read(f"{name}/{MANIFEST}")
    try:
        manifest = decode_manifest(Path(name), data)
    except CorruptCheckpointError:
        return None
    complete = all(sizes.get(file) == info.size for file, info in manifest.files.items())
    return (manifest, data) if complete and manifest.number == number_of(name) else None


def whole(store: Store) -> list[tuple[Manifest, bytes]]:
    """The whole checkpoints of a store with the bytes of their manifests, newest first; their paths are their names."""
    return [found for name in folders(store) if (found := manifest_in(store, name)) is not None]


def read_index(store: Store, number: int) -> dict[str, dict[str, Any]] | None:
    """An index of the log; None if it is not whole."""
    try:
        said = json.loads(store.read(f"{LOGS}/{number:06d}.json"))
        safe = {name: each for name, each in said.items() if not {"..", ""} & set(name.split("/"))}
        return {
            name: {"at": str(each["at"]), "size": int(each["size"]), "sha256": str(each["sha256"])}
            for name, each in safe.items()
            if not PurePosixPath(name).is_absolute() and LOGGED.fullmatch(name.partition("/")[0])
        }
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def newest_index(store: Store) -> tuple[list[int], dict[str, dict[str, Any]]]:
    """The numbers of all indexes of the log, in their order, and the newest that is whole."""
    numbers = sorted(int(match[1]) for name in store.sizes(LOGS) if (match := INDEX.fullmatch(name)))
    for number in reversed(numbers):
        if (found := read_index(store, number)) is not None:
            return numbers, found
    return numbers, {}


def upload(
    directory: str | Path,
    url: str,
    *,
    verify: Verify = "size",
    logs: bool = True,
    tries: int = 5,
    storage_options: Mapping[str, Any] | None = None,
) -> list[str]:
    """Bring all checkpoints and logs of a directory to a store, as `Upload` does; return the checkpoints there.

    Args:
        directory: Of a run's ``Checkpoint``.
        url: The folder in the store, such as ``"s3://bucket/runs/a"``.
        verify: ``"size"``: compare sizes after the upload; ``"digest"``: read everything again.
        logs: Logs in the directory go along.
        tries: How often to try each, with waits of 0.5 s, twice as long after each.
        storage_options: For the file system, such as credentials.

    Raises:
        RemoteError: The store fails, or a checkpoint is damaged here.

    Example::

        upload("runs/a", "s3://bucket/runs/a")
    """
    store = Store(url, storage_options)
    mirror = Mirror(disk.resolved(directory), store, verify, logs)
    while repeated(mirror.bring, tries):
        pass
    return [str(manifest.path) for manifest, _ in repeated(partial(whole, store), tries)]


def download(
    url: str,
    directory: str | Path,
    *,
    logs: bool = True,
    tries: int = 5,
    storage_options: Mapping[str, Any] | None = None,
) -> Path | None:
    """Fetch the newest whole checkpoint of a store, the best one and the log; existing files stay.

    Each checkpoint is verified by its digests and gets its name last, so that a download may be killed at any time. One
    that is damaged in the store is passed over with a warning.

    Args:
        url: The folder in the store.
        directory: Of the ``Checkpoint`` that resumes; it is made if it is not there.
        logs: The files of the log that are not in the directory come, too.
        tries: How often to try each, with waits of 0.5 s, twice as long after each.
        storage_options: For the file system, such as credentials.

    Returns:
        The newest checkpoint, or None if the store holds none.

    Raises:
        RemoteError: The store fails.

    Example::

        download("s3://bucket/runs/a", "runs/a")
        learner = Learner(model, loss_fn, optimizer, plugins=[Checkpoint("runs/a", resume="auto")])
    """
    store, target = Store(url, storage_options), disk.resolved(directory)
    found = repeated(partial(whole, store), tries)
    newest = None
    while found and newest is None:
        newest = repeated(lambda: _fetch(store, *found[0], target), tries)
        if newest is None:
            found.pop(0)
    if newest is None:
        return None
    for manifest, data in _best(found[1:], found[0][0]):
        repeated(partial(_fetch, store, manifest, data, target), tries)
    if logs:
        repeated(lambda: _fetch_logs(store, target), tries)
    return newest


def _best(older: list[tuple[Manifest, bytes]], newest: Manifest) -> list[tuple[Manifest, bytes]]:
    """The older one that is the best by the metric that was monitored last, if one is better than the newest."""
    values = [(each, value) for each in [(newest, b""), *older] if (value := bundle.monitored(each[0])) is not None]
    if not values:
        return []
    metric, mode, _ = values[0][1]
    ranked = [each for each in reversed(values) if each[1][0] == metric]
    chosen = min(ranked, key=lambda each: each[1][2] if mode == "min" else -each[1][2])[0]
    return [] if chosen[0] is newest else [chosen]


def _fetch(store: Store, manifest: Manifest, data: bytes, directory: Path) -> Path | None:
    """Fetch one checkpoint -> where it is; None if it is damaged in the store."""
    name = str(manifest.path)
    target = directory / name
    if target.exists():
        return target
    directory.mkdir(parents=True, exist_ok=True)
    made = (
        directory / f".tmp-{processes.identity().token}-{secrets.token_hex(4)}"
    )  # so a later run removes what is left of it
    made.mkdir()
    try:
        for file in manifest.files:
            _write(made / file, store.pieces(f"{name}/{file}"))
        _write(made / MANIFEST, [data])
        try:
            verify(made)
        except CorruptCheckpointError as error:
            warn(f"the checkpoint {store}/{name} is damaged, and passed over: {error}")
            return None
        made.rename(target)
        disk.sync_directory(directory)
        return target
    finally:
        if made.exists():
            storage.remove([made])


def _fetch_logs(store: Store, directory: Path) -> None:
    """Fetch the files of the log that are not there; each gets its name when it is whole."""
    for name, said in newest_index(store)[1].items():
        target = directory / name
        if target.exists():
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        made = target.parent / f".tmp-{processes.identity().token}-{secrets.token_hex(4)}"
        try:
            found = _write(made, store.pieces(said["at"]))
            if found == FileInfo(said["size"], said["sha256"]):
                made.rename(target)
            else:
                warn(f"the log {store}/{said['at']} ({name}) is damaged, and passed over")
        finally:
            made.unlink(missing_ok=True)


def _write(path: Path, pieces: Any) -> FileInfo:
    size, sha256 = 0, hashlib.sha256()
    with path.open("wb") as file:
        for piece in pieces:
            file.write(piece)
            size += len(piece)
            sha256.update(piece)
        file.flush()
        os.fsync(file.fileno())
    return FileInfo(size, sha256.hexdigest())
