"""A run in the terminal: a line for each epoch, and one that moves while it trains.

It runs in its own process, ``python -P -m loopkit_monitor.terminal RUN``, which ``loopkit watch`` becomes. It only
reads the log.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np
from numpy.typing import NDArray

from loopkit_monitor import arguments
from loopkit_monitor.store import Run, Store

if TYPE_CHECKING:
    from loopkit_monitor.overview import Overview

__all__ = [
    "Epoch",
    "Watch",
    "counted",
    "duration",
    "epochs",
    "figure",
    "is_of_epochs",
    "main",
    "printable",
    "sparkline",
]

POLL_SECONDS = 0.5
BLOCKS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
PLAIN_BLOCKS = "_.-~=+*#"
SPARKS = 16
"""Characters of a sparkline."""
MOST_METRICS = 8
"""In a line."""
Cell = tuple[int, str]
"""A part of a line, and how soon it is left out where the line is too long: the highest first, 0 never."""
ALWAYS, LEFT, TIME, METRIC, SPARK, RESOURCE = range(6)
ENDINGS = ("/step", "/running")
OTHERS = ("run/", "resources/", "lr/", "grad_norm/", "update_ratio/", "final/")
"""Names that are no metrics of an epoch begin with these."""
UNTRAINED = ("val/", "test/")
"""Names of phases that do not train begin with these."""
OTHER_NAMES = ("lr", "grad_norm", "update_ratio")
CLEAR = "\r\x1b[K"


@dataclass
class Columns:
    """The names of the metrics in lines of epochs, and the widths of their figures."""

    count: int
    """Characters of ``epoch 12/100``."""
    metrics: dict[str, int]
    """By name, in the order of a line."""

    @classmethod
    def of(cls, run: Run, rows: Sequence[Epoch]) -> Columns:
        """Measure rows."""
        known: dict[str, int] = {}
        for row in rows:
            for name, value in row.metrics.items():
                known[name] = max(known.get(name, 0), len(_metric(name, value)))
        count = max((len(counted(run, "epoch", row.number)) for row in rows), default=0)
        return cls(count, known).only(known)

    def only(self, names: Collection[str]) -> Columns:
        """These metrics only: training comes first, and the loss before others."""
        ordered = sorted(names, key=lambda name: (name.split("/")[0] != "train", name.split("/")[-1] != "loss"))
        return Columns(self.count, {name: self.metrics[name] for name in ordered})


@dataclass
class Epoch:
    """The results of a training epoch, and of the validations after it."""

    number: int
    """From 1."""
    step: int
    """Training steps by then."""
    metrics: dict[str, float] = field(default_factory=dict)
    begun: float = 0.0
    """When the one before ended, in seconds since 1970."""
    ended: float = 0.0
    whole: bool = True
    """False for a validation within an epoch."""


def epochs(run: Run) -> list[Epoch]:
    """The epochs of a run that have logged metrics, by the steps at which these came.

    A validation in the middle of an epoch has its own line, with the epoch's number. A name that is logged more often
    than once per epoch is no metric of epochs.
    """
    rows: dict[int, Epoch] = {}
    trained: set[int] = set()
    for name, series in run.series.items():
        if not is_of_epochs(name):
            continue
        trains = not name.startswith(UNTRAINED)
        if trains and series.total > run.epoch:
            continue
        for step, value, at in zip(series.step.tolist(), series.value.tolist(), series.time.tolist(), strict=True):
            row = rows.setdefault(step, Epoch(0, step, ended=at))
            row.metrics[name] = value
            row.ended = max(row.ended, at)
            if trains:
                trained.add(step)
    ordered = sorted(rows.values(), key=lambda row: row.step)
    whole = trained or set(rows)
    count, last = max(run.epoch - len(whole), 0), run.started  # a learner may have trained before it had a log
    for row in ordered:
        row.number = count + 1
        row.begun, last = last, row.ended
        row.whole = row.step in whole
        count += row.whole
    return ordered


def is_of_epochs(name: str) -> bool:
    """Return whether a name can be a metric of epochs, such as ``"val/loss"``."""
    return not (name.endswith(ENDINGS) or name.startswith(OTHERS) or name in OTHER_NAMES) and name.count("/") == 1


def sparkline(values: NDArray[np.float64], width: int = SPARKS, blocks: str = BLOCKS) -> str:
    """A curve in a line of characters, each the mean of as many numbers; empty for fewer than two.

    >>> sparkline(np.array([4.0, 2.0, 1.0, 0.0]), 4, "_.-~")
    '~-._'
    """
    values = values[np.isfinite(values)]
    if len(values) < 2:
        return ""
    means = np.array([part.mean() for part in np.array_split(values, min(width, len(values)))])
    low, high = means.min(), means.max()
    level = np.zeros(len(means)) if high == low else (means - low) / (high - low) * (len(blocks) - 1)
    return "".join(blocks[round(each)] for each in level)


class Watch:
    """Writes a run to a terminal, or to a file.

    Args:
        store: Has the run.
        id: The run's.
        out: Where to write. If it is a terminal, the last line moves; else there are only lines that stay.
    """

    def __init__(self, store: Store, id: str, out: TextIO) -> None:
        self._store, self._id, self._out = store, id, out
        self._moves = out.isatty()
        self._blocks = BLOCKS if _can_encode(out, BLOCKS) else PLAIN_BLOCKS
        self._written = 0
        """The step of the last line."""
        self._moving = False
        self._begun = False

    def write(self, once: bool = False) -> str:
        """Write what is new.

        Args:
            once: Write what is not complete yet, too.

        Returns:
            How the run is doing: ``"live"``, ``"finished"``, ``"crashed"`` or ``"silent"``.
        """
        self._store.poll()
        run = self._store.get(self._id)
        if not self._begun:
            self._begun = True
            self._line(self._head(run))
        over = run.status in ("finished", "crashed")
        found = epochs(run)
        if run.step < self._written:  # the log was cut back by a fit that went on from a checkpoint
            self._written = run.step
            self._line(f"resumed from step {run.step:,}")
        new = [row for row in found if row.step > self._written and (row.step < run.step or over or once)]
        columns = Columns.of(run, found if new else [])
        for row in new:
            self._written = row.step
            self._line(self._epoch(run, row, columns))
        if over:
            if not found and run.step:
                self._line(f"{counted(run, 'epoch', run.epoch)}  {counted(run, 'step', run.step)}")
            for line in _end(run):
                self._line(line)
        elif once:
            self._line(self._now(run))
        elif self._moves:
            text = _fit(self._now(run), shutil.get_terminal_size().columns - 1)
            self._moving = True  # before it is: an interrupt may come right after
            self._say(f"{CLEAR}{text}", end="")
        return run.status

    def close(self) -> None:
        """Leave the line that moves."""
        if self._moving:
            self._say("")
            self._moving = False

    def _head(self, run: Run) -> str:
        header = run.header
        versions = ", ".join(f"{name} {header[name]}" for name in ("loopkit", "torch") if name in header)
        where = f"process {header.get('pid')} on {header.get('host')}" if header else "no header"
        name = self._store.folder.root.name if run.id == "." else run.id
        return f"{name}: {run.status}, {where}{f', {versions}' if versions else ''}"

    def _epoch(self, run: Run, row: Epoch, columns: Columns) -> str:
        """The line of an epoch, whose figures stand below the figures of the other lines."""
        shown = columns if self._moves else columns.only(row.metrics)  # a file has the metrics that the row has
        cells = [(ALWAYS, counted(run, "epoch", row.number, shown.count))]
        for name, width in list(shown.metrics.items())[:MOST_METRICS]:
            rank = ALWAYS if name.endswith("/loss") else METRIC
            said = f"{name} {_metric(name, row.metrics[name]):>{width}}" if name in row.metrics else ""
            cells.append((rank, f"{said:<{len(name) + 1 + width}}"))
        cells.append((TIME, f"time {duration(row.ended - row.begun)}"))
        if not row.whole:
            cells.append((TIME, f"step {row.step:,}"))
        if (left := _left(run, row)) is not None:
            cells.append((LEFT, f"left {duration(left)}"))
        cells += self._spark(run, row.step)
        return self._joined([*cells, *_resources(run, row.ended)])

    def _now(self, run: Run) -> str:
        """The line on the run's current state."""
        cells = [(ALWAYS, run.status), (ALWAYS, counted(run, "step", run.step))]
        losses = [name for name in run.last if name.startswith("train/") and name.endswith("/step")]
        cells += [(METRIC, f"{name} {figure(run.last[name])}") for name in losses[:1]]
        cells += self._spark(run, None)
        if (rate := run.last.get("run/throughput/steps_per_second")) is not None:
            cells.append((TIME, f"{rate:,.1f} steps/s"))
        if (left := _left(run, None)) is not None:
            cells.append((LEFT, f"left {duration(left)}"))
        return self._joined([*cells, *_resources(run, math.inf)])

    def _joined(self, cells: list[Cell]) -> str:
        """In one line, in a terminal as far as that is wide."""
        while True:
            line = "  ".join(text for _, text in cells)
            last = max(rank for rank, _ in cells)
            if not self._moves or last == ALWAYS or len(line) < shutil.get_terminal_size().columns:
                return line
            del cells[max(at for at, (rank, _) in enumerate(cells) if rank == last)]

    def _spark(self, run: Run, step: int | None) -> list[Cell]:
        """The loss in training up to a step."""
        for name in ("train/loss/step", "train/loss/running", "train/loss"):
            if name in run.series and len(run.series[name]) > 1:
                series = run.series[name]
                end = len(series) if step is None else int(np.searchsorted(series.step, step, "right"))
                return [(SPARK, spark)] if (spark := sparkline(series.value[:end], SPARKS, self._blocks)) else []
        return []

    def _line(self, text: str) -> None:
        """A line that stays."""
        self._say((CLEAR if self._moving else "") + printable(text))
        self._moving = False

    def _say(self, text: str, end: str = "\n") -> None:
        encoding = self._out.encoding or "utf-8"
        self._out.write((text + end).encode(encoding, "replace").decode(encoding))
        self._out.flush()


def printable(text: str) -> str:
    """Text from a log without what would command a terminal.

    >>> printable("a\\x1b[2J")
    'a\\\\x1b[2J'
    """
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def _fit(text: str, width: int) -> str:
    text = printable(text)
    return text if len(text) <= width else text[: max(width, 0)]


def _can_encode(out: TextIO, text: str) -> bool:
    try:
        text.encode(out.encoding or "utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _end(run: Run) -> list[str]:
    """How the run ended."""
    end = run.end
    if end is None:
        return [f"{run.status}: the process is gone, without a record of its end"]
    who, why = end.get("by"), end.get("message")
    lines = [f"{run.status}: {end.get('reason')}" + (f" by {who}" if who else "") + (f": {why}" if why else "")]
    notes = end.get("notes")
    said = [end.get("error"), *(notes if isinstance(notes, list) else [])]
    return lines + [f"  {line}" for each in said if each for line in str(each).splitlines()]


def counted(run: Run, what: str, number: int, width: int = 0) -> str:
    """How many epochs or steps there were, and are to be, if that is known; ``width`` is of the whole text."""
    planned = run.header.get("planned")
    last = planned.get(f"{what}s") if isinstance(planned, dict) else None
    counts = f"{number:,}" + (f"/{_begin(run, what) + last:,}" if type(last) is int else "")
    return f"{what} {counts:>{max(width - len(what) - 1, 0)}}"


def _begin(run: Run, what: str) -> int:
    """The ``"epoch"`` or ``"step"`` at which the last fit began, before it was resumed from any checkpoint."""
    first = next((each for each in run.runs if each.get("fit") == run.header.get("fit")), run.header)
    return int(_number(first.get(what)))


def _left(run: Run, row: Epoch | None) -> float | None:
    """Seconds until the end, estimated from the log; at the end of an epoch, by the epochs so far."""
    if row is None:
        said = run.last.get("run/time_left")
        return said if said is not None and run.status == "live" else None
    total = run.total_steps
    begun, before = _number(run.header.get("time")), int(_number(run.header.get("step")))
    if total is None or row.step <= before or row.ended < begun:
        return None
    return max(_begin(run, "step") + total - row.step, 0) * (row.ended - begun) / (row.step - before)


def _resources(run: Run, at: float) -> list[Cell]:
    """The use of the machine at a time, as last known then."""
    cells = []
    for name, label, unit in (
        ("resources/process_cpu", "cpu", "%"),
        ("resources/process_memory", "mem", "B"),
        ("resources/gpu0", "gpu0", "%"),
        ("resources/gpu0_memory", "gpu0 mem", "B"),
    ):
        series = run.series.get(name)
        if series is None or not len(series):
            continue
        index = int(np.searchsorted(series.time, at, "right")) - 1
        if index >= 0:
            value = float(series.value[index])
            cells.append((RESOURCE, f"{label} {value:.0f}%" if unit == "%" else f"{label} {value / 2**30:.2f} GiB"))
    return cells


def _number(value: Any) -> float:
    return float(value) if type(value) in (int, float) and math.isfinite(value) else 0.0


def _metric(name: str, value: float) -> str:
    """With its unit, if it is memory."""
    if name.rpartition("/")[2] == "peak_memory" and math.isfinite(value):
        return f"{value / 2**20:,.1f} MiB"
    return figure(value)


def figure(value: float) -> str:
    """Three or more digits; whole numbers from 1,000 as they are."""
    if 1e3 <= abs(value) < 1e7 and value == int(value):
        return f"{value:,.0f}"
    return f"{value:.4f}" if value == 0 or 1e-3 <= abs(value) < 1e3 else f"{value:.2e}"


def duration(seconds: float) -> str:
    """``0.4 s``, ``12 s``, ``3:05``, ``2:03:05``."""
    if not math.isfinite(seconds) or seconds < 0:
        return "?"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    hours, rest = divmod(whole, 3600)
    minutes, rest = divmod(rest, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


# --------------------------------------------------------------------------------------------------------- the process


def choose(store: Store) -> str:
    """The run that was written to last.

    Raises:
        FileNotFoundError: There is none.
    """
    store.poll()
    if not store.runs:
        raise FileNotFoundError(f"{store.folder.root} has no log: name the folder that a LogTo or a Monitor writes to")
    return max(store.runs.values(), key=lambda run: (run.updated, run.started, run.id)).id


def _watch(given: argparse.Namespace, out: TextIO) -> Watch | Overview:
    """Make the view of the run, or of all runs."""
    store = Store(given.run)
    chosen = choose(store)
    if not given.all:
        return Watch(store, chosen, out)
    from loopkit_monitor.overview import Overview

    return Overview(store, out)


def main(words: Sequence[str] | None = None, out: TextIO | None = None, prog: str = "loopkit watch") -> int:
    """Show a run until it has ended.

    Returns:
        0 if it has finished, or is running; 1 if it has crashed; 2 if there is none.
    """
    given = arguments.watch(argparse.ArgumentParser(prog=prog)).parse_args(words)
    if out is None:
        out = sys.stdout if sys.stdout is not None else open(os.devnull, "w")  # noqa: SIM115 - until the process ends
    try:
        arguments.heed_ctrl_c()
        watch = _watch(given, out)
        try:
            while (status := watch.write(given.once)) not in ("finished", "crashed") and not given.once:
                time.sleep(POLL_SECONDS)
        finally:
            watch.close()
    except KeyboardInterrupt:
        return 0
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains when it ends
        return 0
    except KeyError as error:
        print(f"{prog}: error: the log of {error} is gone, or cannot be read", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"{prog}: error: {error}", file=sys.stderr)
        return 2
    return int(status == "crashed")


if __name__ == "__main__":
    raise SystemExit(main())
