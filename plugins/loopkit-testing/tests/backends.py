"""Log backends that repeat, lose or spoil rows, and some that are right: what `backend_contract` must say of them."""

import json
import os
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loopkit.logs import Backend, Text, Value


@dataclass
class Broken:
    """A backend that breaks `check`, and what must be said of it."""

    name: str
    make: Callable[[Path], Any]
    check: str
    words: tuple[str, ...]

    def __repr__(self) -> str:
        return self.name


BROKEN: list[Broken] = []
RIGHT: list[Callable[[Path], Any]] = []


def breaks(check: str, *words: str) -> Callable[[type], type]:
    def add(cls: type) -> type:
        BROKEN.append(Broken(cls.__name__, cls, check, words))
        return cls

    return add


def right(cls: type) -> type:
    RIGHT.append(cls)
    return cls


def rows(path: Path) -> list[tuple[Any, ...]]:
    """The numbers that were written, in order."""
    for file, read in ((path / "log.jsonl", lambda f: f.read_text().splitlines()), (path / "log.db", database_rows)):
        if file.exists():
            return [tuple(row) for row in map(json.loads, read(file)) if not isinstance(row[2], str)]
    return []


def row(record: Any) -> list[Any]:
    return [record.name, record.step, record.value.text if isinstance(record.value, Text) else record.value]


class Lines(Backend):
    """JSON lines, cut at a resume to what the checkpoint knew."""

    kinds = (Value, Text)

    def __init__(self, folder: Path):
        self.path = folder / "log.jsonl"
        self.file: Any = None
        self.position: int | None = None

    def open(self, run: Any) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.file = open(self.path, "ab")  # noqa: SIM115 - closed in close
        if self.position is not None:
            self.file.truncate(self.position)
            self.position = None

    def write(self, records: Any) -> None:
        for record in records:
            self.file.write(json.dumps(row(record)).encode() + b"\n")

    def flush(self) -> None:
        if self.file is not None:
            self.file.flush()

    def state_dict(self) -> dict[str, Any]:
        return {"position": os.path.getsize(self.path)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]

    def close(self, result: Any) -> None:
        if self.file is not None:
            self.file.close()
            self.file = None


right(Lines)


@right
class Database(Lines):
    """Rows by their place: what comes again replaces what was there."""

    def __init__(self, folder: Path):
        self.path = folder / "log.db"
        self.base: sqlite3.Connection | None = None
        self.last: int | None = None

    def open(self, run: Any) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.base = sqlite3.connect(self.path)
        self.base.execute("create table if not exists log (row text)")
        if self.last is not None:
            self.base.execute("delete from log where rowid > ?", (self.last,))
            self.base.commit()
            self.last = None

    def write(self, records: Any) -> None:
        assert self.base is not None
        self.base.executemany("insert into log values (?)", [(json.dumps(row(r)),) for r in records])

    def flush(self) -> None:
        if self.base is not None:
            self.base.commit()

    def state_dict(self) -> dict[str, Any]:
        base = sqlite3.connect(self.path)
        (last,) = base.execute("select coalesce(max(rowid), 0) from log").fetchone()
        base.close()
        return {"last": last}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.last = state["last"]

    def close(self, result: Any) -> None:
        if self.base is not None:
            self.base.commit()
            self.base.close()
            self.base = None


def database_rows(file: Path) -> list[str]:
    base = sqlite3.connect(file)
    found = [text for (text,) in base.execute("select row from log order by rowid")]
    base.close()
    return found


@breaks("killed_and_resumed", "repeated", "state_dict")
class Appends(Lines):
    """Goes on behind what was written, also behind what will be written again."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


@breaks("killed_and_resumed", "lost")
class BeginsAnew(Lines):
    """Empties its file at each begin, at a resume too."""

    def open(self, run: Any) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.file = open(self.path, "wb")  # noqa: SIM115


@breaks("killed_and_resumed", "lost")
class KeepsItInMemory(Lines):
    """Writes at the end alone: what was logged before a kill is gone."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        self.kept: list[bytes] = []

    def write(self, records: Any) -> None:
        self.kept += [json.dumps(row(r)).encode() + b"\n" for r in records]

    def close(self, result: Any) -> None:
        if self.file is not None:
            self.file.writelines(self.kept)
            self.kept.clear()
        super().close(result)


@breaks("every_row", "lost")
class LosesTheLast(Lines):
    """Writes by the hundred, and forgets what is left at the end."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        self.kept: list[bytes] = []

    def write(self, records: Any) -> None:
        self.kept += [json.dumps(row(r)).encode() + b"\n" for r in records]
        while len(self.kept) >= 10:
            self.file.writelines(self.kept[:10])
            del self.kept[:10]


@breaks("every_row", "repeated")
class WritesTwice(Lines):
    def write(self, records: Any) -> None:
        super().write(records)
        super().write([r for r in records if r.name.endswith("loss")])


@breaks("every_row", "order")
class TurnsRound(Lines):
    def write(self, records: Any) -> None:
        super().write(reversed(list(records)))


@breaks("close_twice", "close")
class ClosesOnce(Lines):
    def close(self, result: Any) -> None:
        self.file.close()
        self.file = None


@breaks("two_runs", "lost")
class OneRunOnly(Lines):
    """The second run takes the first one's rows away."""

    def open(self, run: Any) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.file = open(self.path, "ab")  # noqa: SIM115
        self.file.truncate(self.position or 0)
        self.position = None


@breaks("every_kind", "Text")
class CannotDoText(Lines):
    """Says that it can write texts, and cannot."""

    def write(self, records: Any) -> None:
        for record in records:
            self.file.write(json.dumps([record.name, record.step, record.value + 0.0]).encode() + b"\n")


LEFT_OPEN: list[Any] = []


@breaks("nothing_left", "file")
class LeavesItOpen(Lines):
    def close(self, result: Any) -> None:
        LEFT_OPEN.append(self.file)
        self.file.flush()
        self.file = None


@breaks("failing_write", "lost")
class TakesItBack(Lines):
    """Ends a log that is not whole by emptying it."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        self.writes = 0

    def write(self, records: Any) -> None:
        self.writes += 1
        super().write(records)

    def close(self, result: Any) -> None:
        if self.file is not None and self.writes < 3:
            self.file.truncate(0)
        super().close(result)


@breaks("nested_names", "lost", "train/loss")
class GrowsATree(Lines):
    """Keeps the values in nested dicts: a name below another one takes its place."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        self.tree: dict[str, Any] = {}

    def write(self, records: Any) -> None:
        for record in records:
            *above, last = record.name.split("/")
            node = self.tree
            for word in above:
                if not isinstance(node.get(word), dict):
                    node[word] = {}
                node = node[word]
            if not isinstance(node.get(last), dict):
                node[last] = record.value
                super().write([record])


@breaks("nested_names", "lost", "train/loss/step")
class CutsNames(Lines):
    """Takes the first two words of a name: what lies below becomes the same."""

    def write(self, records: Any) -> None:
        super().write([record._replace(name="/".join(record.name.split("/")[:2])) for record in records])


@breaks("nested_names", "lost", "train/loss")
class WritesFilesOfNames(Lines):
    """Leaves out a value for whose name there is a folder."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        self.folder = folder / "names"

    def write(self, records: Any) -> None:
        for record in records:
            path = self.folder / record.name
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.is_dir():
                path.touch()
                super().write([record])


@right
class UnderOtherNames(Lines):
    """Writes a dot for the second slash of a name."""

    def write(self, records: Any) -> None:
        super().write([record._replace(name=record.name.replace("/step", ".step")) for record in records])
