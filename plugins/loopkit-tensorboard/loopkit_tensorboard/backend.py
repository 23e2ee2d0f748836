"""The backend: records in, event files out."""

from __future__ import annotations

import os
import socket
import time
import warnings
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.graph_pb2 import GraphDef
from tensorboardX.proto.summary_pb2 import Summary

from loopkit.author import log_file, shown
from loopkit.errors import LogError
from loopkit.logs import (
    Audio,
    Backend,
    Figure,
    Graph,
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
from loopkit_tensorboard import summaries
from loopkit_tensorboard.event_file import EventFile, whole
from loopkit_tensorboard.graph import modules_graph, traced_graph
from loopkit_tensorboard.tags import tag_of

__all__ = ["TensorBoard"]

PREFIX, SUFFIX = "events.out.tfevents.", ".loopkit"
"""How the names of our event files begin and end."""
Logged = tuple[Event, Sequence[bytes]]
"""An event, and the scalars that are added to it as they are sent: it takes a third of the time."""
VERSION = "brain.Event:2"
"""The version of event files, which TensorBoard asks for."""
MOST_TEMPLATES = 100
"""How many are kept, so that a run that makes up new names all the time does not fill the memory."""
PLUGINS = {"figure": "image", "hyperparameters": "text", "table": "text"}
"""Which plugin of TensorBoard shows a kind, if that has another name."""


class TensorBoard(Backend):
    """Write what is logged to event files, which TensorBoard shows during the run.

    ``loss`` in the phase ``train`` is shown as ``train/loss``; other kinds than scalars as images,
    texts and other panels. The table of hyperparameters has the learner's known ones, any logged before
    the first writing, and the last value of each tag.

    Each fit makes a new file. One that resumes from a checkpoint cuts off what was logged after it, with the first
    record that it adds, so that curves have neither gap nor duplicate. A new run moves the files of an earlier one from
    ``runs/a`` to ``runs/a-1``. While a run writes there, the directory is locked.

    Args:
        directory: Only of this run, such as ``runs/a``; ``tensorboard --logdir runs`` shows all that are in ``runs``.
            It is made; a relative path is resolved now.

    Raises:
        LogError: On ``open``: the directory cannot be written to, or another run writes to it.

    Example::

        Learner(model, loss_fn, optimizer, plugins=[LogTo(TensorBoard("runs/a")), LogMetrics()])
    """

    name = "tensorboard"
    kinds = (Value, Text, Image, Figure, Histogram, Table, Audio, Hyperparameters, Graph)
    any_names = True

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory).absolute()
        self._run: Run | None = None
        self._lock: int | None = None
        """The directory, opened and locked."""
        self._file: EventFile | None = None
        """The file of this fit; none before a fit that resumes has something to add."""
        self._position: tuple[str, int] | None = None
        """The last file of this run and its size in bytes; None before the first ``open``."""
        self._first_step = 0
        self._phases: tuple[str, ...] = ()
        self._tags: dict[tuple[str, str, str], str] = {}
        """By phase, name and kind."""
        self._templates: dict[tuple[str, tuple[str, ...]], summaries.Scalars] = {}
        """By phase, and the names that are logged together."""
        self._shown: dict[str, list[str]] = {}
        """By tag, which plugin of TensorBoard shows it, and the name that has it: there can be only one of each."""

    def open(self, run: Run) -> None:
        """Lock the directory and begin a file. A resumed run begins it when it has something to add."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.directory, os.O_RDONLY | os.O_CLOEXEC)
            _locked.add(self)
            log_file.lock(self._lock, self.directory)
            self._run, self._phases, self._first_step = run, tuple(run.learner.phases), run.learner.progress.steps + 1
            if self._position is None:
                self._begin()
        except BaseException as error:
            self._unlock()
            if isinstance(error, OSError) and (fix := log_file.FIXES.get(error.errno or 0)):
                raise LogError(f"the log {self.directory} cannot be written: {error.strerror}; {fix}") from error
            raise

    def write(self, records: Sequence[Record]) -> None:
        """Append records, one event per step."""
        self._begin()
        events = self._session(records)
        at, event = None, Event()
        scalars: list[bytes] = []
        for group in Records.of(records).groups:
            phase, _, step, _ = group.place
            if step != at:
                at = step
                event, scalars = Event(wall_time=group.time, step=at), []
                events.append((event, scalars))
            if group.kinds == {float}:
                scalars.append(self._scalars(phase, tuple(group.values))(group.values.values()))
                continue
            for name, value, phase, *_, seconds in group:
                if isinstance(value, float):
                    scalars.append(self._scalars(phase, (name,))([value]))
                    continue
                try:
                    if isinstance(value, Graph):
                        events.append((Event(wall_time=seconds, graph_def=_graph(value).SerializeToString()), []))
                    else:
                        made = Summary.Value(tag=self._tag(phase, name, value.kind))
                        summaries.add(value, made)
                        event.summary.value.append(made)
                except Exception as error:  # the other records are worth more than this one
                    warnings.warn(
                        f"log {str(self.directory)!r} leaves out {name!r:.100}, which cannot be written, "
                        f"{type(error).__name__}: {error}",
                        stacklevel=2,
                    )
        self._append(events)

    def _scalars(self, phase: str, names: tuple[str, ...]) -> summaries.Scalars:
        """The template for messages of scalars that are logged together."""
        if (made := self._templates.get((phase, names))) is None:
            if len(self._templates) >= MOST_TEMPLATES:
                self._templates.clear()
            tags = [self._tag(phase, name, "value") for name in names]
            made = self._templates[phase, names] = summaries.Scalars(tags)
        return made

    def flush(self) -> None:
        """Make durable what was written."""
        if self._file is not None:
            self._file.sync()

    def close(self, result: FitResult | None) -> None:
        """Write how the run ended, for the table of hyperparameters, and release the directory."""
        try:
            if self._file is not None and result is not None and result.reason != "signal":  # which will go on
                self._append([*self._session(()), (self._end(result), ())])
                self._file.sync()
        finally:
            if self._file is not None:
                self._file.close()
            self._file = self._run = None
            self._unlock()

    def state_dict(self) -> dict[str, Any]:
        """The last file, its size in bytes, and what the tags are."""
        if self._position is None:
            return {}
        name, size = self._position
        return {"file": name, "bytes": size, "shown": dict(self._shown)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume after so many bytes of that file."""
        self._position = (state["file"], state["bytes"]) if state else None
        self._forget_tags()
        self._shown |= state.get("shown", {})

    def _begin(self) -> None:
        """Make way for a new file, and begin it."""
        if self._file is not None:
            return
        ours = sorted(self.directory.glob(f"{PREFIX}*{SUFFIX}"))
        if self._position is not None and (last := self.directory / self._position[0]) in ours:
            for later in reversed(ours[ours.index(last) + 1 :]):
                later.unlink()
            _cut(last, self._position[1])
        else:
            if self._position is not None:
                warnings.warn(
                    f"the log {self.directory} has no file {self._position[0]}, which the checkpoint knows of: it "
                    f"begins at step {self._first_step}",
                    stacklevel=2,
                )
                self._forget_tags()
            if ours:
                _set_aside(self.directory, ours)
        name = f"{PREFIX}{_seconds(ours)}.{socket.gethostname()}{SUFFIX}"
        self._file = EventFile(self.directory / name)
        now = time.time()
        # At a start, a TensorBoard that runs forgets what it has of this step and later ones.
        start = Event(wall_time=now, step=self._first_step, session_log=SessionLog(status=SessionLog.START))
        self._append([(Event(wall_time=now, file_version=VERSION), ()), (start, ())])
        if self._lock is not None:
            os.fsync(self._lock)  # the name of the file has to survive a crash of the machine, too

    def _append(self, events: Sequence[Logged]) -> None:
        assert self._file is not None
        self._file.append([event.SerializeToString() + summaries.joined(scalars) for event, scalars in events])
        self._position = self._file.path.name, self._file.size

    def _tag(self, phase: str, name: str, kind: str) -> str:
        """The tag of a name; a tag of another name, as ``loss`` of ``train`` and ``train/loss``, gets a suffix."""
        key = phase, name, kind
        if key not in self._tags:
            own = [PLUGINS.get(kind, kind), tag_of("", name)]
            tag = tag_of(phase, name, self._phases)
            if other := [mine for mine, theirs in zip(own, self._shown.get(tag, own), strict=True) if mine != theirs]:
                tag = f"{tag} ({', '.join(other)})"
            self._shown[tag], self._tags[key] = own, tag
        return self._tags[key]

    def _forget_tags(self) -> None:
        self._shown.clear()
        self._tags.clear()
        self._templates.clear()

    def _session(self, records: Sequence[Record]) -> list[Logged]:
        """The run's first events, once: TensorBoard takes hyperparameters with the first of their events."""
        assert self._run is not None
        if summaries.START in self._shown:
            return []
        self._shown[summaries.START] = ["hparams", ""]
        values = dict(self._run.hyperparameters)
        for record in records:
            if isinstance(record.value, Hyperparameters):
                values |= record.value.values
        now = time.time()
        event = Event(wall_time=now)
        event.summary.value.append(summaries.session_start(values, now))
        if self._run.config is not None:
            summaries.add(
                Text(f"```toml\n{self._run.config.strip()}\n```"),
                event.summary.value.add(tag=self._tag("", "config", "text")),
            )
        return [(event, ())]

    def _end(self, result: FitResult) -> Event:
        """The end of the run, and the metrics that were not logged."""
        assert self._run is not None
        now = time.time()
        event = Event(wall_time=now, step=self._run.learner.progress.steps)
        names = {name for _, name in self._shown.values()}
        for name, value in result.metrics.items():
            if tag_of("", name) not in names:
                event.summary.value.add(tag=self._tag("", name, "value"), simple_value=float(value))
        event.summary.value.append(summaries.session_end(result.reason == "error", now))
        return event

    def _unlock(self) -> None:
        _locked.discard(self)
        if self._lock is not None:
            directory, self._lock = self._lock, None
            os.close(directory)


def _graph(graph: Graph) -> GraphDef:
    """The operations if there are inputs to trace them with and the model allows it, else the modules."""
    if graph.inputs is None:
        return modules_graph(graph.model)
    try:
        return traced_graph(graph.model, graph.inputs)
    except Exception as error:
        warnings.warn(
            f"the graph of {type(graph.model).__name__} shows only its modules: tracing it without values failed, "
            f"{shown(error)}",
            stacklevel=2,
        )
        return modules_graph(graph.model)


def _cut(path: Path, size: int) -> None:
    """Cut a file to a size; one that is shorter, to the records that are whole."""
    there = path.stat().st_size
    if there < size:
        warnings.warn(
            f"the log {path} ends at byte {there:,}, before byte {size:,}, where it was when the checkpoint was saved: "
            f"the bytes between are missing",
            stacklevel=2,
        )
        size = whole(path, there)
    os.truncate(path, size)


def _set_aside(directory: Path, files: Sequence[Path]) -> None:
    """Move the files of an earlier run from ``runs/a`` to ``runs/a-1``, or the first such directory that is free."""
    number = 1
    while (other := directory.with_name(f"{directory.name}-{number}")).exists():
        number += 1
    other.mkdir()
    for file in files:
        file.rename(other / file.name)


def _seconds(files: Sequence[Path]) -> int:
    """The time for the name of a new file, whole seconds since 1970: TensorBoard reads files in the order of names."""
    return max([int(time.time()), *(int(file.name.removeprefix(PREFIX).split(".")[0]) + 1 for file in files)])


_locked: weakref.WeakSet[TensorBoard] = weakref.WeakSet()


def _forget_locks() -> None:
    """In a forked child: let the parent's directories go, else they would stay locked when the parent has died."""
    for backend in list(_locked):
        backend._unlock()


os.register_at_fork(after_in_child=_forget_locks)
