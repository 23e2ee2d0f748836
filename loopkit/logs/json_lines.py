"""A log as lines of JSON, in a file that only grows."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import socket
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from loopkit.base.notes import warn
from loopkit.base.version import __version__
from loopkit.errors import LogError
from loopkit.logs.backend import Backend, Run
from loopkit.logs.kinds import Audio, Figure, File, Graph, Histogram, Hyperparameters, Image, Kind, Table, Text, Value
from loopkit.logs.log_file import LogFile
from loopkit.logs.masking import masked_arguments, masked_text
from loopkit.logs.record import Group, Records
from loopkit.logs.source import commit

if TYPE_CHECKING:
    from loopkit.logs.record import Record
    from loopkit.result import FitResult

ENCODER = msgspec.json.Encoder()


class JsonLines(Backend):
    """A JSON object on each line. Pictures, sounds and files are beside it in ``media/``, named by SHA-256.

    Numbers that were logged together are ``{"phase", "epoch", "step", "update", "time", "values": {name: number}}``;
    infinite and undefined ones are the strings ``"inf"``, ``"-inf"`` and ``"nan"``. Before the first number of a metric
    whose direction a plugin declares comes ``{"kind": "directions", "modes": {name: mode}}``. Other kinds have a line
    each, with ``"name"``, ``"kind"`` and their content, or ``"file"``, a path relative to the log's directory. A fit
    begins, or resumes, with a line ``{"kind": "run", ...}`` and ends with ``{"kind": "end", "reason", ...}``.
    `read_log` reads it.
    The line of the run has the command and the configuration, with ``***`` for the values of options that are called
    like a password, a token or a key, and for passwords in URLs, also in the errors of the last line.

    A fit that resumes from a checkpoint cuts off what was logged after it, with the first line that it adds. A new run
    renames the log of an earlier one, to ``log-1.jsonl``. While a run writes it, the file is locked. If it is removed,
    renamed or cut off meanwhile, the next write warns of that, sets aside what is left and begins another file.

    Args:
        path: The file. The directories above it are made; a relative path is resolved now.

    Raises:
        LogError: On ``open``: the path cannot be written, or another run writes it.
    """

    kinds = (Value, Text, Image, Figure, Histogram, Table, Audio, File, Hyperparameters, Graph)
    any_names = True

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).absolute()
        self._file = LogFile(self.path)
        self._run: Run | None = None
        self._begun = False
        """The line of this run is written."""
        self._names: set[str] = set()
        """The names of numbers in the file since that line, of which it has the direction, if one is declared."""

    def open(self, run: Run) -> None:
        """Open the file. A resumed run notes it with its first record, so that one without any leaves no trace."""
        self._file.open()
        self._run = run
        self._begun = False
        if not run.resumed:
            self._begin()

    def _begin(self) -> None:
        """Write the line of the run, if it is not in the file."""
        if renewed := self._file.renewed():
            self._begun = False
        if self._begun or self._run is None:
            return
        run = self._run
        self._begun = True
        self._names.clear()
        learner = run.learner
        fit = run.learner.current
        about: dict[str, Any] = {
            "kind": "run",
            "resumed": run.resumed or renewed,
            "fit": 1 if fit is None else fit.position.number,
            "epoch": learner.progress.epochs,
            "step": learner.progress.steps,
            "epochs_from": 1,
            "seed": None if fit is None else fit.result.seed,
            "planned": None if fit is None else asdict(fit.result.planned),
            "loopkit": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "argv": masked_arguments(sys.argv),
            "git": commit(),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "hyperparameters": dict(run.hyperparameters),
            "time": _time(time.time()),
        }
        if run.config is not None:
            about["config"] = run.config
        self._file.write(_line(about))

    def write(self, records: Sequence[Record]) -> None:
        """Append lines."""
        self._begin()
        groups = Records.of(records).groups
        self._file.write(self._directions(groups) + b"".join(map(self._lines, groups)))

    def _directions(self, groups: Sequence[Group]) -> bytes:
        """A line with the direction of each metric whose first number comes now, as far as a plugin declares it."""
        fresh: dict[str, None] = {}
        for group in groups:
            if not group.values.keys() <= self._names:
                fresh.update(dict.fromkeys(group.values.keys() - self._names))
        if not fresh or self._run is None:
            return b""
        self._names.update(fresh)
        modes = {name: self._run.direction(name) for name in sorted(fresh)}
        found = {name: mode for name, mode in modes.items() if mode is not None}
        return _line({"kind": "directions", "modes": found, "time": _time(time.time())}) if found else b""

    def _lines(self, group: Group) -> bytes:
        """The lines of a group: most are of only finite numbers, and one line."""
        if group.kinds == {float} and isfinite(sum(group.values.values())):
            with suppress(UnicodeEncodeError, TypeError):  # half of a surrogate pair, a kind of string of its own
                return ENCODER.encode({**_place(group), "values": group.values}) + b"\n"
        lines: list[bytes] = []
        numbers: dict[str, float] = {}

        def end_line() -> None:
            if numbers:
                lines.append(_line({**_place(group), "values": numbers}))
                numbers.clear()

        for record in group:
            if isinstance(record.value, float):
                numbers[record.name] = record.value
                continue
            end_line()
            try:
                lines.append(_line({**self._content(record), **_place(group)}))
            except Exception as error:  # the other lines are worth more than this one
                warn(
                    f"log {str(self.path)!r} leaves out {record.name!r:.100}, which cannot be written, "
                    f"{type(error).__name__}: {error}"
                )
        end_line()
        return b"".join(lines)

    def _content(self, record: Record) -> dict[str, Any]:
        """The content of a line for a record that is no scalar, without its place."""
        value: Kind = record.value
        made: dict[str, Any] = {"name": record.name, "kind": value.kind}
        if isinstance(value, Text):
            made["text"] = value.text
        elif isinstance(value, Image):
            made |= {"caption": value.caption, "file": self._media(value.png(), ".png")}
        elif isinstance(value, Figure):
            made["file"] = self._media(value.png(), ".png")
        elif isinstance(value, Histogram):
            made |= {"counts": value.counts, "edges": value.edges}
        elif isinstance(value, Table):
            made |= {"columns": value.columns, "rows": value.rows}
        elif isinstance(value, Audio):
            made |= {"rate": value.rate, "file": self._media(value.wav(), ".wav")}
        elif isinstance(value, File):
            path = Path(value.path)
            made |= {"path": path.name, "file": self._media(path.read_bytes(), path.suffix)}
        elif isinstance(value, Hyperparameters):
            made["values"] = value.values
        elif isinstance(value, Graph):
            made["modules"] = value.modules()
        else:
            raise LogError(f"{type(self).__name__} cannot write a {type(value).__name__}")
        return made

    def _media(self, content: bytes, suffix: str) -> str:
        """Keep a file beside the log, once; returns its path from there."""
        file = Path("media") / f"{hashlib.sha256(content).hexdigest()}{suffix}"
        path = self.path.parent / file
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            beside = path.with_name(f".{path.name}.{os.getpid()}")
            try:
                with beside.open("wb") as made:
                    made.write(content)
                    made.flush()
                    os.fsync(made.fileno())
                beside.rename(path)
            except BaseException:
                beside.unlink(missing_ok=True)
                raise
        return file.as_posix()

    def append(self, records: Sequence[Record]) -> None:
        """Add records after the end of a fit that has logged something, such as what was saved last of all.

        A fit that resumes from a checkpoint that was saved before cuts them off, and has to log them again.
        """
        if self._begun and self._run is None:
            self._file.open()
            try:
                self.write(records)
                self._file.flush()
            finally:
                self._file.close()

    def flush(self) -> None:
        """Make the lines durable."""
        self._file.flush()

    def close(self, result: FitResult | None) -> None:
        """Write how the fit ended, if it has logged anything, and let the file go."""
        try:
            if self._begun and result is not None and self._run is not None:
                fit = self._run.learner.current
                progress = self._run.learner.progress
                failure = None if fit is None else fit.failure
                ended = {
                    "kind": "end",
                    "epoch": progress.epochs,
                    "step": progress.steps,
                    "reason": result.reason,
                    "message": masked_text(result.message),
                    "by": result.by,
                    "error": None if failure is None else masked_text(f"{type(failure).__name__}: {failure}"),
                    "notes": [masked_text(str(note)) for note in getattr(failure, "__notes__", ())],
                    "traceback": masked_text("".join(traceback.format_tb(getattr(failure, "__traceback__", None)))),
                    "time": _time(time.time()),
                }
                self._begin()
                self._file.write(_line(ended))
                self._file.flush()
        finally:
            self._run = None
            self._file.close()

    def state_dict(self) -> dict[str, Any]:
        """How many bytes of the file are written, and what the last ones are."""
        return dict(self._file.state_dict())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume after so many bytes."""
        self._file.load_state_dict(state)


def _place(group: Group) -> dict[str, Any]:
    phase, epoch, step, update = group.place
    return {"phase": phase, "epoch": epoch, "step": step, "update": update, "time": _time(group.time)}


def _line(content: Any) -> bytes:
    text = json.dumps(_finite(content), allow_nan=False, separators=(",", ":"))  # as msgspec writes it
    return f"{text}\n".encode("ascii")


def _time(seconds: float) -> float:
    return round(seconds, 3)


def _finite(content: Any) -> Any:
    """The content with infinite and undefined numbers as strings."""
    if isinstance(content, float):
        return content if isfinite(content) else str(content)
    if isinstance(content, Mapping):
        return {key: _finite(value) for key, value in content.items()}
    return [_finite(value) for value in content] if isinstance(content, (list, tuple)) else content
