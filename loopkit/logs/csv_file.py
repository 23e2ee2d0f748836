"""Scalars as a table: a row for each step of a phase."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loopkit.base.notes import warn
from loopkit.logs.backend import Backend, Run
from loopkit.logs.kinds import Value
from loopkit.logs.log_file import LogFile

if TYPE_CHECKING:
    from loopkit.logs.record import Record
    from loopkit.result import FitResult

PLACE = ["phase", "epoch", "step", "update", "time"]
"""The first columns."""
MOST_COLUMNS = 1_000
MOST_NAMES = 10_000
"""Names whose columns are kept, so that a run that makes up new ones all the time does not fill the memory."""


class Csv(Backend):
    """A CSV file with a column for each name and a row for each step of a phase that logs something.

    The first columns are phase, epoch, step, update and time, as in a `Record`; a name like ``step`` or ``step_`` gets
    one more ``_``. A row ends when the phase, epoch or step changes, or a name comes again. A new name adds a column,
    for which the file is written anew, at once or not at all; it is empty in the rows before. There are at most 1,000
    columns. Floats are written so that they read back the same, and a character that UTF-8 lacks by its code.

    Which file it is, and how a run resumes or begins, is as in `JsonLines`.

    Args:
        path: The file. The directories above it are made; a relative path is resolved now.

    Raises:
        LogError: On ``open``: the path cannot be written, or another run writes it.
    """

    kinds = (Value,)
    any_names = True

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).absolute()
        self._file = LogFile(self.path)
        self._rows: int | None = None
        """Rows that are this run's, without the header; None before the first ``open``."""
        self._columns: list[str] = []
        self._tail: list[str] = []
        """The last row of the file, without the empty cells at its end."""
        self._names: dict[str, str] = {}
        self._full = False
        """There was a warning of names that have no column."""
        self._last: dict[str, str] | None = None
        """The row that may still get values."""

    def open(self, run: Run) -> None:
        """Open the file and find the last row."""
        if self._rows is not None:
            self._seek(self._rows)
        self._file.open()
        self._columns, rows = _table(self._file.read())
        self._rows = len(rows)
        self._tail = _stripped(rows[-1]) if rows else []
        self._last = None

    def _seek(self, rows: int) -> None:
        """Go to the end of this run's rows; past the end of the file if it is another run's."""
        content = self.path.read_bytes() if self.path.is_file() else b""
        if content:
            end = self._end_of(rows, content)
            self._file.load_state_dict({"position": len(content) + 1 if end is None else end})

    def _end_of(self, own: int, content: bytes) -> int | None:
        """Where this run's rows end in the file, in bytes; None if it does not hold them."""
        ends = list(_ends(content))
        columns, rows = _table(content)
        if len(ends) <= own or columns[: len(self._columns)] != self._columns:
            return None
        if own and _stripped(rows[own - 1]) != self._tail:
            return None
        return ends[own]

    def write(self, records: Sequence[Record]) -> None:
        """Put values into rows, and append the complete ones."""
        done: list[dict[str, str]] = []
        for record in records:
            place = {"phase": _text(record.phase), "epoch": str(record.epoch), "step": str(record.step)}
            name = self._names.get(record.name) or self._name(record.name)
            row = self._last
            if row is None or name in row or any(row[key] != value for key, value in place.items()):
                if row is not None:
                    done.append(row)
                row = self._last = place
            row["update"] = str(record.update)
            row["time"] = f"{record.time:.3f}"
            row[name] = repr(record.value)
        self._append(done)

    def _name(self, name: str) -> str:
        """The name's column."""
        if len(self._names) >= MOST_NAMES:
            self._names.clear()
        made = self._names[name] = f"{name}_" if name.rstrip("_") in PLACE else _text(name)
        return made

    def _append(self, rows: Sequence[Mapping[str, str]]) -> None:
        if not rows:
            return
        if self._file.renewed():
            self._rows = 0
            self._columns = []
            self._tail = []
        columns = list(dict.fromkeys([*(self._columns or PLACE), *(name for row in rows for name in row)]))
        if len(columns) > MOST_COLUMNS:
            if not self._full:
                self._full = True
                warn(
                    f"log {str(self.path)!r} has {MOST_COLUMNS:,} columns and leaves out what has another name, such "
                    f"as {columns[MOST_COLUMNS]!r:.100}: log it as JSON lines"
                )
            del columns[MOST_COLUMNS:]
        if columns != self._columns:
            _, before = _table(self._file.read())
            added = [""] * (len(columns) - len(self._columns))
            self._file.replace(_rendered([columns, *([*row, *added] for row in before)]))
            self._columns = columns
        cells = [[row.get(name, "") for name in self._columns] for row in rows]
        self._file.write(_rendered(cells))
        assert self._rows is not None
        self._rows, self._tail = self._rows + len(rows), _stripped(cells[-1])

    def flush(self) -> None:
        """Append the last row, and make all durable."""
        last = self._last
        self._last = None
        self._append([] if last is None else [last])
        self._file.flush()

    def close(self, result: FitResult | None) -> None:
        """Let the file go."""
        self._file.close()

    def state_dict(self) -> dict[str, Any]:
        """How many rows there are, under which columns, and the last one."""
        if self._rows is None:
            return {}
        return {"rows": self._rows, "columns": list(self._columns), "last": list(self._tail)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume after so many rows."""
        self._rows = state.get("rows")
        self._columns, self._tail = list(state.get("columns", ())), list(state.get("last", ()))
        self._file.load_state_dict({})


def _text(text: str) -> str:
    """Text that a file can hold: characters that UTF-8 lacks, and carriage returns, by their code."""
    return text.encode("utf-8", "backslashreplace").decode().replace("\r", "\\r")


def _stripped(row: list[str]) -> list[str]:
    """A row without the empty cells at its end, of which it gets more when there are new columns."""
    filled = [i for i, cell in enumerate(row, 1) if cell]
    return row[: filled[-1]] if filled else []


def _table(content: bytes) -> tuple[list[str], list[list[str]]]:
    """The header and the rows of a file; an empty file has neither."""
    lines = [*csv.reader(io.StringIO(content.decode("utf-8", "backslashreplace"), newline=""))]
    return (lines[0], lines[1:]) if lines else ([], [])


def _ends(content: bytes) -> Iterator[int]:
    """Where each row of a file ends, in bytes; the header is the first. A torn last one is left out."""
    taken = 0

    def lines() -> Iterator[str]:
        nonlocal taken
        for line in content.split(b"\n")[:-1]:
            taken += len(line) + 1
            yield line.decode("utf-8", "backslashreplace") + "\n"

    for _ in csv.reader(lines()):
        yield taken


def _rendered(rows: Iterable[Sequence[str]]) -> bytes:
    made = io.StringIO(newline="")
    csv.writer(made, lineterminator="\n").writerows(rows)
    return made.getvalue().encode()
