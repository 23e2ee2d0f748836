"""The backend: records in, rows of an offline run of wandb out."""

from __future__ import annotations

import os
import secrets
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loopkit.author import checks
from loopkit.errors import LogError
from loopkit.logs import (
    Audio,
    Backend,
    Figure,
    File,
    Group,
    Histogram,
    Hyperparameters,
    Image,
    Record,
    Records,
    Run,
    Table,
    Text,
    Value,
)
from loopkit.result import FitResult
from loopkit_wandb.log_file import BEGIN, LogFile, cut

if TYPE_CHECKING:
    from loopkit_wandb.session import Session

__all__ = ["Wandb"]

MODES = ("offline", "online")
PATIENCE = 30.0
"""Seconds that wandb's own process gets to write what it was given."""


class Wandb(Backend):
    """Writes logs as an offline run of Weights & Biases, without an account or a network.

    ``wandb leet runs/wandb`` shows it, ``wandb sync runs/wandb`` sends it when you like. Each group of values that were
    logged together is a row, with the training step as ``loopkit/step`` and the epoch as ``loopkit/epoch``.

    Each fit has its own folder. One that resumes from a checkpoint has the same id, in another folder; rows of the
    first one after the checkpoint are cut off, so that both together are the log of an uninterrupted run.

    Args:
        project: The project's name.
        directory: The folder ``wandb`` is made in it; a relative path is resolved now.
        run_name: The name of the run; by default wandb's.
        group: A name that runs of one experiment share, such as the folds of a cross-validation.
        tags: Words to find the run by.
        mode: ``"offline"``, or ``"online"`` to send the rows while they are written. A resumed run continues the same
            run on the server, which keeps the rows that it has; a warning counts missing ones.

    Raises:
        ValueError: There is no such mode.
        LogError: On ``open``: the directory cannot be written to, or the server cannot be reached.

    Example::

        Learner(model, loss_fn, optimizer, plugins=[LogTo(Wandb("digits")), LogMetrics()])
    """

    name = "wandb"
    kinds = (Value, Text, Image, Figure, Histogram, Table, Audio, File, Hyperparameters)
    any_names = True

    def __init__(
        self,
        project: str = "loopkit",
        directory: str | os.PathLike[str] = "runs",
        *,
        run_name: str | None = None,
        group: str | None = None,
        tags: Sequence[str] = (),
        mode: str = "offline",
    ) -> None:
        checks.one_of("Wandb", MODES, mode=mode)
        self.project = project
        self.mode = mode
        self.directory = Path(directory).absolute()
        self._options = {"name": run_name, "group": group, "tags": tuple(tags)}
        self.run_id: str | None = None
        """The run's id; None before the first fit."""
        self._loaded: dict[str, Any] = {}
        """The state to resume from."""
        self._session: Session | None = None
        self._file: LogFile | None = None
        """The log of this fit, or of the last one."""
        self._first, self._rows = 0, 0
        """Rows of the run before this fit, and now."""
        self._skipped = 0
        """Rows of this fit that the server has already."""
        self._phases: tuple[str, ...] = ()

    @property
    def folder(self) -> Path | None:
        """Where the last fit was written."""
        return None if self._file is None else self._file.path.parent

    def open(self, run: Run) -> None:
        """Import wandb and begin a run, or the next folder of one; it takes a second or two."""
        try:
            (self.directory / "wandb").mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.directory / "wandb"):
                pass  # else wandb would write elsewhere
        except OSError as error:
            raise LogError(
                f"the log {self.directory} cannot be written: {error.strerror}; give Wandb(directory=...) another one"
            ) from error
        loaded, self._loaded = self._loaded if run.resumed else {}, {}
        if loaded:
            self._take_up(loaded)
        self.run_id = loaded.get("id", secrets.token_hex(4))
        self._first = self._rows = loaded.get("rows", 0)
        self._skipped = 0
        self._phases = tuple(run.learner.phases)
        config = {} if run.config is None else {"config": run.config}

        self._session = self._begin({**run.hyperparameters, **config}, resumed=bool(loaded))
        if loaded and self.mode == "online":
            self._warn_of_unsent(loaded["folder"], self._first - self._session.first)
        self._file = LogFile(self._session.log_file)

    def _begin(self, config: Mapping[str, Any], resumed: bool) -> Session:
        """Begin the run, or continue it.

        Raises:
            LogError: The server cannot be reached, or nobody is logged in.
        """
        from loopkit_wandb.session import Session

        options: dict[str, Any] = {"project": self.project, **self._options, "mode": self.mode, "resumed": resumed}
        if self.mode == "offline":
            return Session(self.directory, str(self.run_id), config, **options)
        from wandb.errors import Error

        try:
            return Session(self.directory, str(self.run_id), config, **options)
        except Error as error:
            raise LogError(
                f"the run of Weights & Biases cannot begin online: {error}; call `wandb login`, or give mode='offline'"
            ) from error

    def _warn_of_unsent(self, folder: str, rows: int) -> None:
        """Warn of rows before the checkpoint that the server does not have."""
        if rows > 0:
            said = "1 row" if rows == 1 else f"{rows} rows"
            warnings.warn(
                f"{said} of run {self.run_id} before the checkpoint did not reach the server, and a resumed run does "
                f"not send them: `wandb sync {self.directory / 'wandb' / folder}` sends what is on this machine",
                stacklevel=2,
            )

    def _take_up(self, loaded: Mapping[str, Any]) -> None:
        """Cut off what was logged after the checkpoint; folders that are later are not part of the run any more."""
        if not loaded["folder"].startswith("offline-"):
            return  # the server has what was sent
        folder = self.directory / "wandb" / loaded["folder"]
        if trouble := cut(folder / f"run-{loaded['id']}.wandb", loaded["bytes"]):
            warnings.warn(
                f"{trouble}, where it was when the checkpoint was saved: rows are missing in it; the run continues in "
                f"another folder",
                stacklevel=2,
            )
        for other in sorted(folder.parent.glob(f"offline-run-*-{loaded['id']}*")):
            if other.name > folder.name:
                other.rename(other.with_name(f"replaced-{secrets.token_hex(4)}-{other.name}"))

    def write(self, records: Sequence[Record]) -> None:
        """Give wandb's process a row for each group; values that wandb does not take are left out, with a warning."""
        session = self._current()
        with tempfile.TemporaryDirectory() as scratch:
            for group in Records.of(records).groups:
                row: dict[str, Any] = {}
                for record in group:
                    name = self._name(record)
                    if name in row:  # such as "loss" in the phase "val", and "val/loss"
                        self._add(group, row)
                        row = {}
                    try:
                        row |= session.taken(name, record.value, Path(scratch))
                    except Exception as error:  # the other records are worth more than this one
                        warnings.warn(
                            f"log 'wandb' leaves out {name!r:.100}, which cannot be written, "
                            f"{type(error).__name__}: {error}",
                            stacklevel=2,
                        )
                self._add(group, row)

    def _add(self, group: Group, row: Mapping[str, Any]) -> None:
        """Append a row, if it has anything."""
        if not row:
            return
        if self._rows < self._current().first:  # sent before the run was killed; a resumed run makes the same row
            self._skipped += 1
        else:
            _, epoch, step, _ = group.place
            self._current().add_row(self._rows, {**row, "loopkit/epoch": epoch, "loopkit/step": step}, group.time)
        self._rows += 1

    def flush(self) -> None:
        """Wait until all rows are in the file, and make it durable.

        Raises:
            LogError: They do not come: wandb's process is gone, for example, or the disk is full.
        """
        if self._session is not None:
            self._read()

    def close(self, result: FitResult | None) -> None:
        """Write how the run ended, and end wandb's part of it."""
        session, self._session = self._session, None
        if session is not None:
            reason = "no fit" if result is None else result.reason
            session.finish(reason, failed=reason == "error")
            self._read()

    def state_dict(self) -> dict[str, Any]:
        """The run's id, its last folder, and how far the log was written there."""
        if self._file is None or self._first + self._skipped + self._file.rows < self._rows:
            return {}
        return {"id": self.run_id, "folder": self._file.path.parent.name, "bytes": self._file.end, "rows": self._rows}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume with this run, after so many bytes of that folder's log."""
        self._loaded = dict(state)

    def _read(self) -> None:
        """Follow the file until all rows are in it."""
        assert self._file is not None
        until = time.monotonic() + PATIENCE
        while True:
            self._file.read()
            if self._file.end > BEGIN and self._first + self._skipped + self._file.rows >= self._rows:
                break
            if time.monotonic() > until:
                missing = self._rows - self._first - self._skipped - self._file.rows
                raise LogError(f"wandb did not write {missing} rows to {self._file.path} within {PATIENCE:.0f} s")
            time.sleep(0.01)
        self._file.sync()

    def _current(self) -> Session:
        assert self._session is not None
        return self._session

    def _name(self, record: Record) -> str:
        """The phase comes first, unless the name begins with a phase; a name of wandb's own begins with "_"."""
        begin, slash, _ = record.name.partition("/")
        plain = not record.phase or (slash and begin in self._phases)
        name = record.name if plain else f"{record.phase}/{record.name}"
        return f"logged/{name}" if name.startswith("_") else name
