"""MyName: a log as lines of name, step and value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from loopkit.logs import Backend, Record, Run, Value
from loopkit.plugins import LogTo
from loopkit.result import FitResult

__all__ = ["MyName", "my_name", "read"]


class MyName(Backend):
    """Write each number as a line: name, step and value, with tabs between them.

    Args:
        path: The file. A new run appends to it; one that is resumed first cuts off what came after its checkpoint.
    """

    name = "my_name"
    kinds = (Value,)

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._file: BinaryIO | None = None
        self._size: int | None = None
        """How long the log was at the checkpoint that was loaded."""

    def open(self, run: Run) -> None:
        """Continue after the checkpoint's last line, or after an earlier run."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("ab")
        if self._size is not None:
            self._file.truncate(self._size)
            self._size = None

    def write(self, records: Sequence[Record]) -> None:
        """Write what was logged since the last time."""
        if self._file is not None:
            lines = [f"{record.name}\t{record.step}\t{record.value!r}\n" for record in records]
            self._file.write("".join(lines).encode())

    def flush(self) -> None:
        """Write all to the file, before a checkpoint records its length."""
        if self._file is not None:
            self._file.flush()

    def state_dict(self) -> dict[str, Any]:
        """How long the log is."""
        return {"size": self.path.stat().st_size}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Cut the log to that length when it is opened; a state of a run without this log is empty."""
        self._size = state.get("size")

    def close(self, result: FitResult | None) -> None:
        """Close the file, if it is open."""
        if self._file is not None:
            self._file.close()
            self._file = None


def my_name(path: str, *, every: int | None = None, name: str = "my_name") -> LogTo:
    """A `LogTo` that writes only to `MyName`, as a plugin that a configuration can name.

    Args:
        path: As for `MyName`.
        every: As for ``LogTo``: write after so many training steps, too.
        name: The plugin's name.
    """
    return LogTo(MyName(path), every=every, name=name)


def read(path: str | Path) -> list[tuple[str, int, float]]:
    """The lines of a log: name, step and value."""
    lines = [line.split("\t") for line in Path(path).read_text(encoding="utf-8").splitlines()]
    return [(name, int(step), float(value)) for name, step, value in lines]
