"""The contents of a folder's logs, kept up to date by reading their new lines.

It only reads: a log is opened without following links, and closed again. It takes no lock and never waits.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from loopkit_monitor import notes, processes
from loopkit_monitor.folder import Folder
from loopkit_monitor.lines import Lines, Points, parse, parse_line
from loopkit_monitor.notes import Notes
from loopkit_monitor.series import FEWEST, References, Series, Shelf, Shelved

__all__ = ["Change", "Run", "Store", "UnknownRun", "pieces"]

PIECE = 1 << 20
"""Bytes that are read at once."""
LONGEST_LINE = 8 << 20
"""Bytes of a line, such as a large table; a longer one is left out."""
LONGEST_SKIPPED = 256 << 20
"""Bytes that are read of a line that is left out; after a longer one, reading stops. A hole takes none."""
GLANCE = 32 << 10
"""Bytes at the end of a log that give a run's state, until it is opened."""
HEAD = ("run/throughput/steps_per_second", "run/throughput/samples_per_second", "run/time_left", "val/loss")
"""Metrics that the page shows of each run, however many there are."""
SEARCHED = 16 << 20
"""Bytes before those in which the beginning of its last fit is looked for."""
SEARCHED_AT_ONCE = 64 << 20
"""Bytes of all logs in which that is done in one poll."""
FIRST_BYTES = 16 << 10
"""Bytes that are read of a line at first, when its length is unknown."""
TRIES = 3
"""To read a log from its beginning while it is not cut back."""
CHECKED = 256
"""Bytes before the position by which a log is known again."""
LOOK_SECONDS = 0.2
"""Between two looks at all logs while large ones are read."""
SCAN_SECONDS = 2.0
"""Between two searches for new logs."""
SILENT_SECONDS = 60.0
"""After which a run on another machine without news is called silent."""
IDLE_SECONDS = 60.0
"""After which the points of a run without requests are freed, if others need the memory."""
MOST_POINTS = 500_000
"""Points kept in memory of all runs together, 24 bytes each; more are in a temporary file."""
LARGE = 8 << 20
"""Bytes of a log that is read in parts where others wait for answers; a sample of its lines is shown until then."""
SAMPLED = 1_500
"""Lines of such a sample."""
SAMPLE = 2048
"""Bytes in which a line of a sample is looked for at first."""
MOST_RUNS = 5_000
"""The most runs; the last written ones are kept."""
MOST_NAMES = 10_000
MOST_CHARACTERS = 4 << 20
"""The most characters of all names of a run."""
GLANCED_NAMES, GLANCED_CHARACTERS = 200, 16 << 10
"""The same, for a run with only its state."""
MOST_SHOWN = 40
"""Names whose last value is in the list of runs."""
LONGEST_SHOWN = 200
"""Characters of such a name."""
LONGEST_HEADER = 1 << 20
"""Bytes of a line with which a fit begins or ends; a longer one is left out."""
CHANGE_POINTS = 2_000
"""Points in one change."""
RING_POINTS = 50_000
"""Points in the changes that are kept for clients that come back; names count as well, and each change as one more."""
MOST_EPOCHS = 2_000
"""The most epochs of a run whose steps are kept."""
MOST_FILES = 50_000
"""Files that are remembered of a run."""
FAILED_IN = re.compile(r"\bepoch (\d{1,9})\b")
"""The epoch in a note of an error."""
RUN = b'{"kind":"run",'
"""The first bytes of the line with which a fit begins."""
HOST = socket.gethostname()
NOTHING = Series()


class UnknownRun(KeyError):
    """There is no run of that id, or its log cannot be read."""


@dataclass
class Change:
    """Something new of one run.

    ``data`` has ``run`` (its id) and its entry in the list of runs: ``status``, ``step``, ``epoch``, ``updated``,
    ``metrics``. If the points of the run are kept, also ``series``, a list of ``[step, value, time]`` by name, and
    ``kinds``, how many lines of other kinds there are now, by name, where that has changed.

    With ``cut``, drop all points of higher steps before adding ``series``: the log was cut back by a fit
    that resumed from a checkpoint. With ``reload``, fetch the whole run again.
    """

    id: int
    data: dict[str, Any]
    weight: int = 1
    """The weight of the change among the kept changes."""
    frame: bytes | None = None
    """As it is sent, once it was."""


@dataclass
class Run:
    """One log."""

    id: str
    path: str
    """The path of the log, from the root."""
    opened: bool = False
    """Its points are kept."""
    runs: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=16))
    """The lines with which its last fits began."""
    end: dict[str, Any] | None = None
    """How the last of them ended."""
    series: dict[str, Series] = field(default_factory=dict)
    references: dict[str, References] = field(default_factory=dict)
    last: dict[str, float] = field(default_factory=dict)
    """The last value of each name."""
    step: int = 0
    epoch: int = 0
    updated: float = 0.0
    """The time of the last line."""
    started: float = 0.0
    foreign: int = 0
    """Lines that are no records, or of more names than are kept."""
    characters: int = 0
    """The characters of all names."""
    files: set[str] = field(default_factory=set)
    """Files beside the log that it names."""
    epochs: list[tuple[int, int]] = field(default_factory=list)
    """Each number of epochs with a step: the first that had so many complete epochs, or, where epochs count from 1, the
    last of that epoch. Of very many epochs, every second one is left out."""
    modes: dict[str, str] = field(default_factory=dict)
    """Which way metrics are better, ``"min"`` or ``"max"``, as the log declares."""
    extents: dict[str, list[float]] = field(default_factory=dict)
    """The lowest finite value of each name and its step, the highest and its step; of a run that was read."""
    whole: bool = False
    """All of it was read."""
    sampled: bool = False
    """Its points are a sample of its lines, until all are read."""
    notes: Notes = field(default_factory=Notes)
    """The notes and tags that people wrote."""
    changed: int = 0
    """The number of its last change."""
    read: float = 0.0
    """The part of the log that is read, while it grows."""
    status: str = "live"
    """``"live"``, ``"finished"``, ``"crashed"`` or ``"silent"``."""
    used: float = 0.0
    """When it was last asked for."""
    grown: float = 0.0
    """When it last grew, by the monotonic clock."""
    offset: int = 0
    """Bytes that were read."""
    seen: tuple[int, int, int] = (0, 0, 0)
    """Inode, size and time of change of the file as it was read."""
    check: bytes = b""
    """The last bytes before the offset."""
    unsearched: int = 0
    """Bytes at the beginning of which the last fit could still have begun; 0 if it is known."""
    late: int = 0
    """How often it grew when its process was gone. Its last lines can be seen once; if there are more, the process
    is one of another container."""

    @property
    def header(self) -> dict[str, Any]:
        """The line with which the last fit began."""
        return self.runs[-1] if self.runs else {}

    @property
    def folder(self) -> str:
        """The folder of the log, from the root, with a final ``/`` if it is not the root."""
        return self.path[: self.path.rfind("/") + 1]

    @property
    def name(self) -> str:
        """The last part of the id."""
        return self.id.rsplit("/", 1)[-1]

    @property
    def counts_from_one(self) -> bool:
        """Whether epochs have numbers from 1; in older logs a line has the number of complete epochs."""
        return self.header.get("epochs_from") == 1

    @property
    def complete_epochs(self) -> list[tuple[int, int]]:
        """How many epochs were complete, and at which step."""
        if not self.counts_from_one or not self.epochs:
            return self.epochs
        number, step = self.epochs[-1]
        over = self.end is not None and self.end.get("error") is None and self.end.get("reason") != "error"
        planned = self.header.get("planned")
        steps, epochs = (planned.get("steps"), planned.get("epochs")) if isinstance(planned, dict) else (None, None)
        if type(steps) is int and type(epochs) is int and epochs > 0:
            begin = next((each for each in self.runs if each.get("fit") == self.header.get("fit")), self.header)
            done = number - int(_number(begin.get("epoch")))
            over = step - int(_number(begin.get("step"))) >= done * steps // epochs
        return self.epochs if over else self.epochs[:-1]

    @property
    def total_steps(self) -> int | None:
        """How many steps the last fit is meant to end with, if known."""
        planned = self.header.get("planned")
        steps = planned.get("steps") if isinstance(planned, dict) else None
        return steps if type(steps) is int else None

    def summary(self) -> dict[str, Any]:
        """The row of the run in the list of runs."""
        short = (name for name in self.last if len(name) <= LONGEST_SHOWN)
        shown = sorted(short, key=_place)[:MOST_SHOWN]
        return {
            "run": self.id,
            "status": self.status,
            "step": self.step,
            "epoch": self.epoch,
            "updated": self.updated,
            "metrics": {name: self.last[name] for name in shown},
        }


class Store:
    """The runs below a folder.

    It is not safe to use from several threads at once.

    Args:
        root: The folder; or one log, or the folder of one.
        most_points: Points kept in memory of all runs together. Others are in a temporary file; if that has no room, of
            the longest series, half are forgotten until it is so.
        ahead: Seconds of each poll in which runs are read that were not asked for yet; a large log is then read in
            parts, and its points are a sample until all are. By default, a run is read when it is asked for.

    Example::

        store = Store("runs")
        store.poll()
        for run in store.runs.values():
            print(run.id, run.status, run.last)
    """

    def __init__(self, root: str | os.PathLike[str], *, most_points: int = MOST_POINTS, ahead: float = 0.0) -> None:
        path = Path(root)
        if not path.exists():
            raise FileNotFoundError(f"there is no {path}: name a folder with runs")
        self._only = None if path.is_dir() else path.resolve().name
        self.folder = Folder(path if self._only is None else path.resolve().parent)
        self._root = str(self.folder.root)
        self.runs: dict[str, Run] = {}
        self.boot = secrets.token_hex(4)
        """The id of this store; ids of changes are valid only in their store."""
        self.changes: deque[Change] = deque()
        """The latest; ``poll`` adds to them."""
        self.last_id = 0
        self.awaited: Callable[[], bool] = lambda: False
        """Whether a request waits for its answer, so that reading ahead ends early."""
        self.left_out = 0
        """Runs that were found and are older than the ones that are kept."""
        self._said = False
        self._weight = 0
        self._most_points = most_points
        self._ahead = ahead
        self._shelf = Shelf()
        self._openings: dict[str, Iterator[Run | None]] = {}
        """Large logs that are being read, in parts."""
        self._scanned = self._looked = -SCAN_SECONDS

    # ------------------------------------------------------------------------------------------------------- for views

    def get(self, id: str) -> Run:
        """A run, with its points.

        Raises:
            UnknownRun: There is none, or it cannot be read.
        """
        run = self.runs.get(id)
        if run is None:
            self._scanned = -SCAN_SECONDS
            self.poll()
            run = self.runs.get(id)
        if run is None:
            raise UnknownRun(id)
        run.used = time.monotonic()
        if not run.opened:
            try:
                if self._ahead and run.seen[1] > LARGE:
                    self._sample(run)
                else:
                    self.runs[id] = run = self._read_whole(run)
            except OSError as error:
                raise UnknownRun(id) from error
        return run

    @property
    def behind(self) -> bool:
        """Whether there are runs to read ahead."""
        return bool(self._ahead) and any(not run.whole for run in self.runs.values())

    def record(self, run: Run, name: str, index: int = -1) -> dict[str, Any] | None:
        """The content of a line of another kind, read from the log again; None if it is gone."""
        found = run.references.get(name)
        if found is None or not -len(found.begin) <= index < len(found.begin):
            return None
        begin, length = found.begin[index], found.length[index]
        try:
            file = self.folder.open(run.path)
        except OSError:
            return None
        try:
            said = parse_line(os.pread(file, length, begin))
        except OSError:
            return None
        finally:
            os.close(file)
        return said if said is not None and said.get("name") == name else None

    def note(self, id: str, changes: Mapping[str, Any]) -> Notes:
        """Change what is noted about a run, in the file beside its log.

        Raises:
            UnknownRun: There is none.
            NotesError: That cannot be noted.
            OSError: The file cannot be written.
        """
        run = self.runs.get(id)
        if run is None:
            raise UnknownRun(id)
        made = run.notes.changed(changes)
        notes.write(self.folder, run.path, made)
        run.notes = made
        self._add(run, {"new": True})
        return made

    def since(self, id: int) -> list[Change] | None:
        """The changes after the one of an id, or None if some of them are not kept any more."""
        kept_from = self.changes[0].id if self.changes else self.last_id + 1
        if not kept_from - 1 <= id <= self.last_id:
            return None
        return [change for change in self.changes if change.id > id]

    # --------------------------------------------------------------------------------------------------------- polling

    def poll(self) -> list[Change]:
        """Read what is new; returns the changes that were made of it."""
        before = self.last_id
        now = time.monotonic()
        if now - self._scanned >= SCAN_SECONDS:
            self._scanned = now
            self._scan()
        if not self.behind or now - self._looked >= LOOK_SECONDS:
            self._looked = now
            self._look(now)
        if self._ahead:
            self._read_ahead()
        self._bound()
        return self.since(before) or []

    def _look(self, now: float) -> None:
        """Read what the known logs have grown by."""
        for run in list(self.runs.values()):
            try:
                self._update(run, now)
            except FileNotFoundError:
                self._remove(run)
            except OSError:
                continue  # for now: a network file system, a permission that is taken away
        self._search()

    def _read_ahead(self) -> None:
        """Read runs that were not read yet, the ones that were asked for first, for as long as there is time."""
        until = time.monotonic() + self._ahead
        waiting = [run for run in self.runs.values() if not run.whole and not run.opened]
        for run in sorted(waiting, key=lambda run: (-run.used, -run.updated)):
            opening = self._openings.setdefault(run.id, self._reading(run))
            try:
                while (fresh := next(opening)) is None:
                    if time.monotonic() >= until or self.awaited():
                        return
            except (OSError, StopIteration):
                self._openings.pop(run.id, None)
                run.whole = True  # as far as it can be read; when it is asked for, that says why
                continue
            del self._openings[run.id]
            fresh.used = run.used
            self.runs[run.id] = fresh
            self._add(fresh, {"reload": True})
            if time.monotonic() >= until or self.awaited():
                return

    def _sample(self, run: Run) -> None:
        """Read some lines of a log, from all of its parts, and the whole of it in the polls to come."""
        if run.sampled:
            return
        file = self.folder.open(run.path)
        try:
            size = os.fstat(file).st_size
            lines = {}
            for begin in np.linspace(0, size, SAMPLED, dtype=np.int64).tolist():
                data = os.pread(file, SAMPLE, begin)
                if data.count(b"\n") < 2:
                    data = os.pread(file, 16 * SAMPLE, begin)
                first = data.find(b"\n") + 1
                if first and (end := data.find(b"\n", first) + 1):
                    lines[begin + first] = data[first:end]
        finally:
            os.close(file)
        made = parse(b"".join(line for _, line in sorted(lines.items())), {}, most_names=MOST_NAMES)
        run.series = {}
        for name, points in made.points.items():
            run.series.setdefault(name, Series()).add(points)
            run.last.setdefault(name, float(points.value[-1]))
        run.epochs = []
        _note_epochs(run.epochs, made.epochs)
        run.sampled = True

    def _scan(self) -> None:
        """Find new logs."""
        known = {run.path: run for run in self.runs.values()}
        found = [self._only] if self._only is not None else list(self.folder.logs())
        logs = {path for path in found if path in known or self._is_log(path)}
        self.left_out = max(len(logs) - MOST_RUNS, 0)
        if self.left_out:
            latest = sorted(logs, key=lambda path: (self._changed(path), path), reverse=True)[:MOST_RUNS]
            for path in logs.difference(latest) & known.keys():
                self._remove(known[path])
            logs = set(latest)
        self._say_what_is_left_out()
        for path in sorted(logs - known.keys()):
            folder, _, file = path.rpartition("/")
            try:
                id = (folder or ".") if file == "log.jsonl" else path.removesuffix(".jsonl")
                if id in self.runs:
                    id = path
                run = Run(id, path, notes=notes.read(self.folder, path))
                self._glance(run)
            except OSError:
                continue
            self.runs[id] = run
            self._add(run, {"new": True})

    def _is_log(self, path: str) -> bool:
        if path == self._only or path.rpartition("/")[2] == "log.jsonl":
            return True
        try:
            file = self.folder.open(path)
        except OSError:
            return False
        try:
            return os.pread(file, len(RUN), 0) == RUN
        except OSError:
            return False
        finally:
            os.close(file)

    def _changed(self, path: str) -> int:
        """When a log was written to last."""
        try:
            return os.stat(f"{self._root}/{path}", follow_symlinks=False).st_mtime_ns
        except OSError:
            return 0

    def _say_what_is_left_out(self) -> None:
        """Once."""
        if self._said or not (self.left_out or not self.folder.searched):
            return
        self._said = True
        if self.left_out:
            what = f"the {MOST_RUNS:,} of {MOST_RUNS + self.left_out:,} runs that were written to last are shown"
        else:
            what = "it has too many files to search them all, so some of its runs may not be shown"
        print(f"loopkit monitor: {self.folder.root}: {what}; name a folder within it to see others", file=sys.stderr)

    def _remove(self, run: Run) -> None:
        del self.runs[run.id]
        self._add(run, {"removed": True})

    def _update(self, run: Run, now: float) -> None:
        """Read what one log has grown by, or what it was changed to."""
        try:
            about = os.stat(f"{self._root}/{run.path}", follow_symlinks=False)
        except NotADirectoryError as error:
            raise FileNotFoundError(run.path) from error
        if (about.st_ino, about.st_size, about.st_mtime_ns) == run.seen:
            before = run.status
            if self._set_status(run) != before:
                self._add(run, {})
            return
        file = self.folder.open(run.path)
        try:
            about = os.fstat(file)
            if os.pread(file, len(run.check), run.offset - len(run.check)) != run.check:
                self._read_again(run)
                return
            if run.status == "crashed" and run.end is None:
                run.late += 1
            run.seen, run.grown = (about.st_ino, about.st_size, about.st_mtime_ns), now
            if not run.opened and about.st_size - run.offset > 8 * GLANCE:
                self._glance(run)
                self._add(run, {})
                return
            more: dict[str, list[Points]] = {}
            known = _totals(run)
            marks = [(run.offset, run.check)]
            for begin, data in pieces(file, run.offset, about.st_size):
                lines = self._take(run, begin, data)
                marks.append((run.offset, run.check))
                for name, points in lines.points.items():
                    if name in run.series:
                        more.setdefault(name, []).append(points)
            if not _is_still(file, marks):
                self._read_again(run)
                return
        finally:
            os.close(file)
        self._set_status(run)
        kinds = {name: total for name, total in _totals(run).items() if total != known.get(name)}
        self._tell(run, more, {"kinds": kinds} if kinds else {})

    def _read_again(self, run: Run) -> None:
        """Read a log that is not the one that it was."""
        if not run.opened:
            fresh = Run(run.id, run.path, used=run.used, notes=run.notes)
            self._glance(fresh)
            self.runs[run.id] = fresh
            self._add(fresh, {})
            return
        self.runs[run.id] = fresh = self._read_whole(run)
        cut = _first_difference(run, fresh)
        if cut is None:
            self._add(fresh, {"reload": True})
            return
        more = {}
        for name, series in fresh.series.items():
            later = series.step > cut
            if later.any():
                more[name] = [Points(series.phase, series.step[later], series.value[later], series.time[later])]
        if sum(len(points[0].step) for points in more.values()) > RING_POINTS // 2:
            self._add(fresh, {"reload": True})
        else:
            self._tell(fresh, more, {"cut": cut, "kinds": _totals(fresh)})

    def _read_whole(self, run: Run) -> Run:
        """The run, with its points, read from the beginning of its log."""
        self._openings.pop(run.id, None)
        return next(fresh for fresh in self._reading(run) if fresh is not None)

    def _reading(self, run: Run) -> Iterator[Run | None]:
        """Read a log from its beginning; None after each part, and at last the run, with its points."""
        file = self.folder.open(run.path)
        try:
            for _ in range(TRIES):
                fresh = Run(run.id, run.path, opened=True, used=run.used, whole=True, notes=run.notes)
                about = os.fstat(file)
                fresh.seen = about.st_ino, about.st_size, about.st_mtime_ns
                fresh.grown = _grown(about.st_mtime)
                marks = []
                for begin, data in pieces(file, 0, about.st_size):
                    self._take(fresh, begin, data)
                    marks.append((fresh.offset, fresh.check))
                    while _count(fresh) > self._most_points:
                        if not self._put_away(fresh) and not _thin(fresh):
                            break
                    run.read = fresh.offset / max(about.st_size, 1)
                    yield None
                if _is_still(file, marks):
                    break
            else:
                fresh.check = b"\0"  # it is none of the log's: to be read again
        finally:
            os.close(file)
        self._set_status(fresh)
        yield fresh

    def _put_away(self, run: Run) -> bool:
        """Move the points of a run to the temporary file; False if it has no room, or the run has no points."""
        known: dict[tuple[int, ...], Shelved] = {}
        if not any(series.held for series in run.series.values()):
            return False
        try:
            for series in run.series.values():
                series.put_away(self._shelf, known)
        except OSError:
            return False
        return True

    def _glance(self, run: Run) -> None:
        """Read a run's state from both ends of its log."""
        file = self.folder.open(run.path)
        try:
            about = os.fstat(file)
            run.seen = about.st_ino, about.st_size, about.st_mtime_ns
            run.grown = _grown(about.st_mtime)
            end = about.st_size
            begin = _last_lines(file, end)
            if begin:
                if not run.runs:
                    self._take(run, 0, _line_at(file, 0))
                run.end, known = None, len(run.runs)
            for at, data in pieces(file, begin, end):
                self._take(run, at, data)
            if begin and run.end is None and len(run.runs) == known:
                run.unsearched = begin
        finally:
            os.close(file)
        self._set_status(run)

    def _search(self) -> None:
        """Find where the last fits begin of logs of which only the ends were looked at, of some at a time."""
        room = SEARCHED_AT_ONCE
        for run in [run for run in self.runs.values() if run.unsearched]:
            if room <= 0:
                break
            room -= min(run.unsearched, SEARCHED)
            end, run.unsearched = run.unsearched, 0
            try:
                file = self.folder.open(run.path)
                try:
                    found = _last_begin(file, end)
                    line = _line_at(file, found) if found else b""
                finally:
                    os.close(file)
            except OSError:
                continue
            if line:
                self._take(run, found, line)
                self._set_status(run)
                self._add(run, {"new": True})

    def _take(self, run: Run, begin: int, data: bytes) -> Lines:
        """Add whole lines to a run."""
        phases = {name: series.phase for name, series in run.series.items()} if run.opened else None
        lines = parse(data, phases, most_names=MOST_NAMES)
        if begin + len(data) > run.offset:
            run.check = ((run.check if begin == run.offset else b"") + data[-CHECKED:])[-CHECKED:]
            run.offset = begin + len(data)
        run.foreign += lines.foreign
        for name, points in lines.points.items():
            if name not in run.last and not _has_room(run, name):
                run.foreign += len(points.step)
                continue
            run.last[name] = float(points.value[-1])
            if run.opened:
                run.series.setdefault(name, Series()).add(points)
                _widen(run.extents, name, points)
        if lines.points:
            run.step, run.epoch, run.updated = lines.step, lines.epoch, lines.time
        for start, length, said in lines.others:
            time, step, epoch = _number(said.get("time")), said.get("step"), said.get("epoch")
            run.updated = max(run.updated, time)
            if type(step) is int and run.step < step < 2**53:
                run.step = step
            if type(epoch) is int and run.epoch < epoch < 2**53:
                run.epoch = epoch
            if said["kind"] in ("run", "end") and length > LONGEST_HEADER:
                said = {"kind": said["kind"], "time": time}
            if said["kind"] in ("run", "end"):
                run.unsearched = 0
            if said["kind"] == "run":
                run.runs.append(said)
                run.end, run.late = None, 0
                run.started = run.started or time
            elif said["kind"] == "end":
                run.end = said
                run.epoch = max(run.epoch, _epoch_of(said))
            elif said["kind"] == "directions":
                _declare(run, said.get("modes"))
            elif run.opened:
                self._refer(run, said, begin + start, length)
        if run.opened:
            ends = run.counts_from_one
            _note_epochs(run.epochs, lines.ends if ends else lines.epochs, ends)
        return lines

    def _refer(self, run: Run, said: dict[str, Any], begin: int, length: int) -> None:
        """Remember where a line is."""
        name = said["name"]
        found = run.references.get(name)
        if found is None:
            if not _has_room(run, name):
                run.foreign += 1
                return
            found = run.references[name] = References(said["kind"])
        phase, step, file = said.get("phase"), said.get("step"), said.get("file")
        found.kind, found.phase = said["kind"], phase if isinstance(phase, str) else ""
        found.add(begin, length, step if type(step) is int and 0 <= step < 2**53 else 0)
        if isinstance(file, str) and len(run.files) < MOST_FILES:
            run.files.add(file)

    def _set_status(self, run: Run) -> str:
        """Set a run's status."""
        header = run.header
        quiet = time.monotonic() - run.grown > SILENT_SECONDS
        if run.end is not None:
            failed = run.end.get("error") is not None or run.end.get("reason") == "error"
            run.status = "crashed" if failed else "finished"
        elif header.get("host") == HOST and run.late < 2:
            found = processes.find(header.get("pid"), _number(header.get("time")))
            run.status = "live" if found is True or (found is None and not quiet) else "crashed"
        else:
            run.status = "silent" if quiet else "live"
        return run.status

    # --------------------------------------------------------------------------------------------------------- changes

    def _tell(self, run: Run, more: dict[str, list[Points]], about: dict[str, Any]) -> None:
        """Make changes of new points, of so many at a time."""
        if not run.opened or not more:
            self._add(run, about)
            return
        rows: dict[str, list[tuple[int, float, float]]] = {}
        room = CHANGE_POINTS
        for name, pieces in more.items():
            for points in pieces:
                left = list(zip(points.step.tolist(), points.value.tolist(), points.time.tolist(), strict=True))
                while left:
                    rows.setdefault(name, []).extend(left[:room])
                    left, room = left[room:], room - len(left[:room])
                    if not room:
                        self._add(run, {**about, "series": rows})
                        rows, room, about = {}, CHANGE_POINTS, {}
        if rows:
            self._add(run, {**about, "series": rows})

    def _add(self, run: Run, about: dict[str, Any]) -> None:
        self.last_id += 1
        run.changed = self.last_id
        data = {**run.summary(), **about}
        names = [*data["metrics"], *data.get("series", ()), *data.get("kinds", ())]
        points = sum(map(len, data.get("series", {}).values()))
        weight = 1 + points + len(names) + sum(map(len, names)) // 24
        self.changes.append(Change(self.last_id, data, weight))
        self._weight += weight
        while self._weight > RING_POINTS:
            self._weight -= self.changes.popleft().weight

    # ---------------------------------------------------------------------------------------------------------- memory

    def _bound(self) -> None:
        """Let points go until there are not too many."""
        opened = [run for run in self.runs.values() if run.opened]
        if sum(map(_count, opened)) <= self._most_points:
            return
        for run in sorted(opened, key=_count, reverse=True):
            if not self._put_away(run):
                break
            if sum(map(_count, opened)) <= self._most_points:
                return
        now = time.monotonic()
        for run in sorted(opened, key=lambda run: run.used):
            if now - run.used > IDLE_SECONDS and sum(map(_count, opened)) > self._most_points:
                run.opened = run.sampled = False
                run.series, run.references, run.files, run.epochs = {}, {}, set(), []
                run.last = {name: run.last[name] for name in list(run.last)[:GLANCED_NAMES]}
                self._add(run, {"reload": True})
        while sum(map(_count, opened)) > self._most_points:
            if not any(_thin(run) for run in sorted(opened, key=_count, reverse=True)):
                break  # all that is left are very many short series


def _has_room(run: Run, name: str) -> bool:
    """Whether another name is kept of a run."""
    most, characters = (MOST_NAMES, MOST_CHARACTERS) if run.opened else (GLANCED_NAMES, GLANCED_CHARACTERS)
    if len(run.last) + len(run.references) >= most or run.characters + len(name) > characters:
        return False
    run.characters += len(name)
    return True


def _place(name: str) -> tuple[bool, bool, int, str]:
    """The sort key of a run's metrics: in the page's head, of epochs, all others."""
    other = name.startswith(("run/", "resources/", "final/", "lr/", "grad_norm/", "update_ratio/"))
    return name not in HEAD, other, name.count("/"), name


def _note_epochs(known: list[tuple[int, int]], more: list[tuple[int, int]], growing: bool = False) -> None:
    """Add where epochs were complete, or end by now if they are ``growing``.

    Repeated steps replace the earlier ones.
    """
    for epoch, step in more:
        while known and known[-1][0] > epoch:
            known.pop()
        if known and known[-1][0] == epoch and known[-1][1] < step and growing:
            known[-1] = epoch, step
        if not known or known[-1][0] < epoch:
            known.append((epoch, step))
    while len(known) > MOST_EPOCHS:
        del known[1:-1:2]


def _totals(run: Run) -> dict[str, int]:
    return {name: found.total for name, found in run.references.items()}


def _count(run: Run) -> int:
    """Its points in memory."""
    return sum(series.held for series in run.series.values())


def _widen(extents: dict[str, list[float]], name: str, points: Points) -> None:
    """Extend a curve's extent by some points."""
    finite = np.isfinite(points.value)
    if finite.all():
        low, high = int(points.value.argmin()), int(points.value.argmax())
    elif finite.any():
        low = int(np.where(finite, points.value, np.inf).argmin())
        high = int(np.where(finite, points.value, -np.inf).argmax())
    else:
        return
    known = extents.get(name)
    if known is None:
        known = extents[name] = [np.inf, 0.0, -np.inf, 0.0]
    if points.value[low] < known[0]:
        known[:2] = float(points.value[low]), int(points.step[low])
    if points.value[high] > known[2]:
        known[2:] = float(points.value[high]), int(points.step[high])


def _epoch_of(end: Mapping[str, Any]) -> int:
    """The epoch in which an error ended a run, as the notes of the error name it; 0 without one."""
    notes = end.get("notes")
    found = (FAILED_IN.search(note) for note in (notes if isinstance(notes, list) else ()) if isinstance(note, str))
    return max((int(match[1]) for match in found if match), default=0)


def _declare(run: Run, modes: Any) -> None:
    """Keep the directions that a line declares."""
    if isinstance(modes, dict):
        for name, mode in modes.items():
            if mode in ("min", "max") and len(run.modes) < MOST_NAMES:
                run.modes[name] = mode


def _thin(run: Run) -> bool:
    """Forget half of the points of the longest series, or of all, where none is long; False if all are too short."""
    longest = max((series.held for series in run.series.values()), default=0)
    if longest <= FEWEST:
        return False
    for series in run.series.values():
        if series.held * 2 > longest:
            series.thin()
    return True


def _number(value: Any) -> float:
    """The value, if it is a number of seconds."""
    return float(value) if type(value) in (int, float) and 0 <= value < 2**53 else 0.0


def _grown(changed: float) -> float:
    """When a file was changed, by the monotonic clock; one of the future, now."""
    return time.monotonic() - max(time.time() - changed, 0.0)


def _is_still(file: int, marks: list[tuple[int, bytes]]) -> bool:
    """Whether a log that was being read has not been cut back meanwhile: the bytes before some places are the same."""
    return all(os.pread(file, len(check), offset - len(check)) == check for offset, check in marks)


def pieces(file: int, begin: int, end: int) -> Iterator[tuple[int, bytes]]:
    """The whole lines between two places, some at a time, and where they begin; too long ones are left out.

    The holes of a sparse file are passed over, as are the lines that they are in.
    """
    size = PIECE
    while begin < end:
        hole = min(_seek(file, begin, os.SEEK_HOLE), end)
        data = os.pread(file, min(size, hole - begin), begin)
        whole = data.rfind(b"\n") + 1
        if whole:
            yield begin, data[:whole]
            begin, size = begin + whole, PIECE
        elif len(data) < size and hole == end:
            return  # a line that is being written
        elif len(data) == size < LONGEST_LINE:
            size *= 2
        else:
            begin, size = _after_line(file, begin + len(data), end), PIECE


def _after_line(file: int, begin: int, end: int) -> int:
    """Where the next line begins; the end of the log, if that is too far."""
    left = LONGEST_SKIPPED
    while left > 0 and (begin := _seek(file, begin, os.SEEK_DATA)) < end:
        data = os.pread(file, min(PIECE, _seek(file, begin, os.SEEK_HOLE) - begin), begin)
        if not data:
            break
        if (found := data.find(b"\n")) >= 0:
            return begin + found + 1
        begin, left = begin + len(data), left - len(data)
    return end


def _seek(file: int, begin: int, what: int) -> int:
    """Where a file's next data, or its next hole, begin; far beyond its end, if there are none or this is unknown."""
    try:
        return os.lseek(file, begin, what)
    except OSError as error:
        return begin if what == os.SEEK_DATA and error.errno != errno.ENXIO else 2**63


def _last_lines(file: int, end: int) -> int:
    """Where those lines of a log begin that are whole in its last bytes; the last one, if it is longer."""
    size = GLANCE
    while (begin := end - size) > 0:
        text = os.pread(file, size, begin)
        first = text.find(b"\n")
        if first < text.rfind(b"\n") or size >= LONGEST_LINE:
            return begin + first + 1
        size *= 2
    return 0


def _line_at(file: int, begin: int) -> bytes:
    """The line that begins there, if it is not too long."""
    data = os.pread(file, FIRST_BYTES, begin)
    if b"\n" not in data:
        data = os.pread(file, PIECE, begin)
    return data[: data.find(b"\n") + 1]


def _last_begin(file: int, end: int) -> int:
    """Where the last line before a place is that begins a fit; 0 if none is found."""
    mark = b"\n" + RUN
    lowest = max(end - SEARCHED, 0)
    while end > lowest:
        begin = max(end - PIECE, lowest)
        found = os.pread(file, end - begin + len(mark), begin).rfind(mark)
        if found >= 0:
            return begin + found + 1
        end = begin
    return 0


def _first_difference(old: Run, new: Run) -> int | None:
    """The last step up to which two readings of a run are the same; None if this is no longer known."""
    cut = 2**53
    for name in old.series.keys() | new.series.keys():
        one, other = old.series.get(name, NOTHING), new.series.get(name, NOTHING)
        if one.total != len(one) or other.total != len(other):
            return None
        count = min(len(one), len(other))
        same = (one.step[:count] == other.step[:count]) & (one.time[:count] == other.time[:count])
        values = one.value[:count], other.value[:count]
        same &= (values[0] == values[1]) | (np.isnan(values[0]) & np.isnan(values[1]))
        if not same.all():
            count = int(same.argmin())
        for rest in (one.step[count:], other.step[count:]):
            if len(rest):
                cut = min(cut, int(rest.min()) - 1)
    return cut
