"""The spool: logged values that are still to be sent, in a directory that outlives the run."""

from __future__ import annotations

import json
import os
import shutil
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from io import FileIO
from itertools import count
from pathlib import Path
from typing import Any

from loopkit.author import Lock, nearest
from loopkit.errors import LoopkitError

__all__ = ["Header", "Sent", "Spool", "SpoolError", "find"]

LOG, SENT, REFUSED, FILES = "log.jsonl", "sent.json", "refused.jsonl", "files"


class SpoolError(LoopkitError):
    """A spool is not what it should be."""


@dataclass(frozen=True)
class Header:
    """The first line of a spool: which run it is for."""

    uri: str
    experiment: str
    run_name: str | None
    tags: dict[str, str]
    start_time: int
    """Milliseconds since 1970."""
    source: str = field(default_factory=lambda: uuid.uuid4().hex)
    """The run is found by it, as the value of its tag ``loopkit.source``."""
    log: str = field(default_factory=lambda: uuid.uuid4().hex)
    """The id of this file of batches among several for the same run."""
    run_id: str | None = None
    """The run, if it was there before the spool."""


@dataclass(frozen=True)
class Sent:
    """How far a spool was sent."""

    seq: int = 0
    """The number of the last batch that the server has."""
    offset: int = 0
    """Bytes of the log up to its end."""
    run_id: str | None = None
    artifact_uri: str = ""


class Spool:
    """Batches in order, each with a number from 1, in ``log.jsonl``, which only grows; and what was sent of it.

    One line is one batch: ``{"seq": 1, "metrics": [...], "params": [...], "tags": [...], "artifacts": [...],
    "status": {...}}``, in MLflow's form; empty keys are left out. The files of a
    batch lie in a directory of ``files/`` until they are sent. A line without its end, as a kill in the middle of
    writing leaves it, does not count.

    Raises:
        SpoolError: ``directory`` is no spool.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.header, self._begin = self._read_header()
        self._file: FileIO | None = None
        self._lock = Lock(directory / FILES)
        """The lock of the writing run; the sender has the lock of the directory."""
        self._end = self._begin
        self.seq = 0
        """The number of the last batch; known after `open_for_writing`."""

    @classmethod
    def create(cls, parent: Path, header: Header) -> Spool:
        """A new one, in a directory that is named by the time and the source.

        Raises:
            OSError: It cannot be written.
        """
        parent.mkdir(parents=True, exist_ok=True)
        began = time.strftime("%Y%m%d-%H%M%S", time.localtime(header.start_time / 1000))
        for number in count(1):
            directory = parent / f"{began}{f'-{number}' if number > 1 else ''}-{header.source[:8]}"
            with suppress(FileExistsError):  # of the same run, in the same second
                directory.mkdir()
                break
        with (directory / LOG).open("xb") as file:
            file.write(_line({"run": asdict(header)}))
            file.flush()
            os.fsync(file.fileno())
        return cls(directory)

    def _read_header(self) -> tuple[Header, int]:
        path = self.directory / LOG
        try:
            with path.open("rb") as file:
                line = file.readline()
            return Header(**json.loads(line)["run"]), len(line)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise SpoolError(f"{self.directory} is no spool: {path} does not begin with a run ({error})") from error

    def open_for_writing(self, seq: int = 0, offset: int = 0) -> None:
        """Resume after the last whole line; ``seq`` is the batch that ends at ``offset``, if there is one.

        Raises:
            SpoolError: A line cannot be read.
            CheckpointError: Another run writes it.
            OSError: It cannot be written.
        """
        (self.directory / FILES).mkdir(exist_ok=True)
        self._lock.acquire()
        try:
            self._open(seq, offset)
        except BaseException:
            self._lock.release()
            raise

    def _open(self, seq: int, offset: int) -> None:
        self.seq, self._end = seq, max(offset, self._begin)
        for batch, end in self.batches(offset):
            self.seq, self._end = batch["seq"], end
        self._file = (self.directory / LOG).open("r+b", buffering=0)
        self._cut()

    @property
    def end(self) -> int:
        """Bytes of the log; known after `open_for_writing`."""
        return self._end

    @property
    def size(self) -> int:
        """Bytes of the log's file."""
        return (self.directory / LOG).stat().st_size

    def append(self, **batch: Any) -> None:
        """Write one batch; it survives the process, and after `sync` the machine.

        Raises:
            OSError: It could not be written.
        """
        assert self._file is not None
        line = _line({"seq": self.seq + 1, **{key: value for key, value in batch.items() if value}})
        rest = memoryview(line)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError:
            self._cut()
            raise
        self.seq, self._end = self.seq + 1, self._end + len(line)

    def _cut(self) -> None:
        """Remove what is after the last whole line."""
        assert self._file is not None
        self._file.truncate(self._end)
        self._file.seek(self._end)

    def sync(self) -> None:
        """Make durable what was written."""
        if self._file is not None:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the log, and let another run write it."""
        if self._file is not None:
            self._file.close()
            self._file = None
            self._lock.release()

    def batches(self, offset: int = 0) -> Iterator[tuple[dict[str, Any], int]]:
        """The batches from a place of the log on, each with the place of its end.

        Raises:
            SpoolError: A line cannot be read.
        """
        with (self.directory / LOG).open("rb") as file:
            file.seek(max(offset, self._begin))
            for line in iter(file.readline, b""):
                if not line.endswith(b"\n"):
                    return
                try:
                    batch = json.loads(line)
                    batch["seq"] += 0
                except (ValueError, TypeError, KeyError) as error:
                    raise SpoolError(
                        f"{self.directory / LOG}: the line that ends at byte {file.tell()} is damaged ({error})"
                    ) from error
                yield batch, file.tell()

    # Files

    def place_for(self, name: str) -> Path:
        """Where a file of the next batch is to be written."""
        directory = self.directory / FILES / f"{self.seq + 1:06d}"
        number = sum(1 for _ in directory.iterdir()) if directory.is_dir() else 0
        path = directory / str(number) / name
        path.parent.mkdir(parents=True)
        return path

    def drop_files(self, artifacts: Iterable[dict[str, Any]]) -> None:
        """Remove the files of artifacts that were sent; rejected ones stay."""
        kept = {each["item"].get("file") for each in self.refused}
        for file in {artifact["file"] for artifact in artifacts} - kept:
            path = self.directory / file
            if path.is_relative_to(self.directory / FILES):
                shutil.rmtree(path.parent, ignore_errors=True)
                with suppress(OSError):
                    path.parent.parent.rmdir()

    # What became of them

    @property
    def sent(self) -> Sent:
        """How far it was sent, as far as is known here."""
        try:
            return Sent(**json.loads((self.directory / SENT).read_text()))
        except (OSError, ValueError, TypeError):
            return Sent(run_id=self.header.run_id)

    @sent.setter
    def sent(self, sent: Sent) -> None:
        draft = self.directory / f"{SENT}.new"
        draft.write_text(json.dumps(asdict(sent)))
        draft.replace(self.directory / SENT)

    @property
    def left(self) -> int:
        """How many batches are still to be sent."""
        return sum(1 for _ in self.batches(self.sent.offset))

    @property
    def refused(self) -> list[dict[str, Any]]:
        """The items that the server did not take: ``kind``, ``item`` and ``why``."""
        path = self.directory / REFUSED
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def set_aside(self, kind: str, item: dict[str, Any], why: str) -> None:
        """Keep something that the server did not take."""
        if all((each["kind"], each["item"]) != (kind, item) for each in self.refused):
            with (self.directory / REFUSED).open("ab") as file:
                file.write(_line({"kind": kind, "item": item, "why": why}))

    def forget_refused(self) -> None:
        """Start again with the rejected items."""
        (self.directory / REFUSED).unlink(missing_ok=True)


def find(path: Path) -> list[Path]:
    """The directories of spools: this one, or those in it, oldest first.

    Raises:
        SpoolError: There is none.
    """
    if (path / LOG).is_file():
        return [path]
    found = sorted(each.parent for each in path.glob(f"*/{LOG}")) if path.is_dir() else []
    if not found:
        others = [each.name for each in path.parent.iterdir() if each.is_dir()] if path.parent.is_dir() else []
        raise SpoolError(f"{path} holds no spool (a directory with {LOG}){nearest(path.name, others)}")
    return found


def _line(value: dict[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode() + b"\n"
