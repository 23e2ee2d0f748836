"""Show the progress of a run: a bar for each epoch of a phase, and a line for each training epoch."""

from __future__ import annotations

import functools
import os
import select
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TextIO

from torch import Tensor

from loopkit.base.options import Shown
from loopkit.base.words import is_count
from loopkit.criteria.directions import declared, is_better
from loopkit.errors import PluginError
from loopkit.every import Every
from loopkit.hooks import hookimpl
from loopkit.plugin import provided
from loopkit.plugins.late import LateValues, read
from loopkit.plugins.live_chart import LiveChart

if TYPE_CHECKING:
    from loopkit import Epoch, Step
    from loopkit.learner import Learner
    from loopkit.phases import Phase

REDRAW_SECONDS = 0.1
NARROWEST = 10
"""Characters of a bar beside its numbers."""
BEST = "\x1b[1;32m"
PLAIN = "\x1b[0m"
"""Styles of a line in a terminal: of the best row, and of all others."""


class Progress(Shown):
    """A tqdm bar for each epoch, and a row of metrics after each training epoch.

    In a terminal, the best epoch so far has a ``*``, if a plugin declares which way a metric is better: the one that a
    plugin monitors, else the validation's first. Rows have colors there, unless ``NO_COLOR`` is set.

    The row ends with the time that the epoch took, and the time left. A terminal that is too narrow for all columns
    shows the losses first, and a line lists the others.

    Args:
        bar: Draw bars; by default if the output is a terminal or a notebook. Without bars there is one plain line
            per epoch.
        every: Also write a line after so many updates, as in ``every(updates=100)`` or 100, with the metrics of the
            epoch so far.
        file: Where to write; standard output by default.
        chart: In a notebook, also draw a chart of each metric, which grows while it trains. It has what a ``History``
            keeps. If drawing it raises an error, one warning names the error and the training continues.

    A bar is drawn ten times a second at most; of epochs that are shorter than that, ten a second have one.

    The values on a bar are read from the device late, so that no step waits for them. If the output is closed, the
    display ends silently and the training continues; a character that the output cannot encode becomes a ``?``.

    Of several processes only the first shows anything. Its rows have the metrics of all of them; a bar counts its own
    steps, which are as many as the others', and shows the metrics of its own batches so far.
    """

    name = "progress"
    provides = "progress"
    volatile = ("_*",)

    def __init__(
        self,
        bar: bool | None = None,
        file: TextIO | None = None,
        every: int | Every | None = None,
        *,
        chart: bool = False,
    ) -> None:
        self.bar = bar
        self.chart = chart
        self._chart: LiveChart | None = None
        """The chart of the fit that is running, in a notebook."""
        self.every = _updates(every)
        self._due_updates = 0
        """The updates after which the next line is written."""
        self._best: float | None = None
        self._earlier: list[Mapping[str, Any]] = []
        """The rows of the fit's epochs in an earlier process."""
        self._file = file
        self._output: _Output | None = None
        self._row: dict[str, float] = {}
        self._columns: list[str] = []
        self._epoch = 0
        """The epochs of this fit that were complete at the last row to write; 0 if there is none."""
        self._started = self._lap = self._drawn = 0.0
        """When the fit began, the last row was written, and a bar was last drawn for the first time."""
        self._due = 0.0
        """When a bar is drawn again; one at a time is, where epochs are nested."""
        self._done_before = 0

    @property
    def _out(self) -> _Output:
        stream = self._file if self._file is not None else sys.stdout
        if self._output is None or self._output.stream is not stream:
            self._output = _Output(stream)
        return self._output

    @property
    def _draws(self) -> bool:
        if self._out.broken or self.bar is not None:
            return bool(self.bar) and not self._out.broken
        return self._out.isatty() or (self._file is None and "ipykernel" in sys.modules)

    @hookimpl(after=("checkpoint",))  # which may load the state of a fit that goes on
    def fit_begin(self, learner: Learner) -> None:
        """Start the clock."""
        self._row = {}
        self._columns = []
        self._epoch = 0
        self._earlier = []
        self._best = None
        self._chart = LiveChart() if self.chart and learner.world.rank == 0 and "ipykernel" in sys.modules else None
        self._due_updates = learner.progress.updates + (self.every or 0)
        self._started = self._lap = time.monotonic()
        self._done_before = learner.progress.epochs
        if learner.current is not None:
            at = learner.current.position  # of a fit that was saved, and goes on
            self._started -= at.seconds
            self._done_before = at.start.epochs
            self._earlier = [row for row in _history(learner) if row.get("epoch", 0) > at.start.epochs]
            if at.validate:  # between training and validation, whose metrics go into one row
                self._row = dict(learner.metrics)
                self._epoch = learner.progress.epochs - self._done_before

    @hookimpl
    def fit_end(self, learner: Learner) -> None:
        """Write the last row."""
        self._write_row(learner)
        if self._chart is not None:
            self._chart.draw(_history(learner), at_once=True)
            self._chart = None

    @hookimpl
    def epoch_context(self, learner: Learner, phase: Phase, epoch: Epoch) -> closing[_Bar] | None:
        """Write the row of the training epoch before, if another one begins; show a bar during the epoch.

        One that begins too soon after another bar has none until the first step that ends after that.
        """
        if phase.training:
            self._write_row(learner)
        if learner.world.rank > 0 or not self._draws:
            return None
        bar = epoch.keep(self)["bar"] = _Bar(time.monotonic())
        if bar.begun >= self._drawn + REDRAW_SECONDS:
            self._draw(bar, learner, epoch)
        return closing(bar)

    @hookimpl(reads=("metrics",), after=("metrics",))
    def step_end(self, learner: Learner, step: Step) -> None:
        """Redraw the bar, ten times a second at most."""
        if self.every is not None and learner.progress.updates >= self._due_updates and step.epoch.phase.training:
            self._write_running(learner, step.epoch)
        if time.monotonic() >= self._due and (bar := step.epoch.keep(self).get("bar")) is not None:
            self._redraw(bar, learner, step.epoch)

    @hookimpl(reads=("metrics", "progress"))
    def phase_end(self, learner: Learner, phase: Phase, epoch: Epoch) -> None:
        """Keep the metrics for the epoch's row; write a validation's metrics inside a training epoch."""
        if learner.current is not None:
            prefix = f"{phase.name}/"
            own = {n: v for n, v in learner.metrics.items() if n.startswith(prefix)}
            if epoch.number > learner.progress.epochs and own:
                self._write_inside(learner, epoch, own)
            self._row = {**own, **self._row, **own} if phase.training else {**self._row, **own}
            if phase.training:
                self._epoch = learner.progress.epochs - self._done_before
            if self._chart is not None:
                self._chart.draw(_history(learner))

    def _title(self, learner: Learner, epoch: Epoch) -> str:
        planned = None if (fit := learner.current) is None else fit.result.planned.epochs
        if fit is None or not planned:
            return epoch.name
        return f"epoch {epoch.number - self._done_before}/{planned} {epoch.name}"

    def _draw(self, bar: _Bar, learner: Learner, epoch: Epoch) -> None:
        bar.drawn = _bar_class()(
            bar.begun,
            total=epoch.length,
            desc=self._out.encodable(self._title(learner, epoch)),
            leave=False,
            file=self._out,
            dynamic_ncols=True,
            unit="step",
            mininterval=0,
            position=epoch.depth,
        )
        self._drawn = time.monotonic()
        self._due = self._drawn + REDRAW_SECONDS

    def _redraw(self, bar: _Bar, learner: Learner, epoch: Epoch) -> None:
        if bar.drawn is None:  # the epoch began too soon after another one
            self._draw(bar, learner, epoch)
        self._due = time.monotonic() + REDRAW_SECONDS
        bar.drawn.n = epoch.steps
        values = bar.late.arrived()
        if values:
            bar.drawn.set_postfix_str(self._out.encodable(self._beside(bar, values)), refresh=False)
        bar.drawn.refresh()
        for plugin in learner.plugins.values():
            if provided(plugin) == "metrics" and hasattr(plugin, "peek"):
                bar.late.send(plugin.peek(epoch.name))

    def _write_inside(self, learner: Learner, epoch: Epoch, values: Mapping[str, float]) -> None:
        """Write a line of values in the middle of a training epoch."""
        if learner.world.rank != 0:
            return
        planned = None if (fit := learner.current) is None else fit.result.planned.epochs
        at = f"{epoch.number - self._done_before}/{planned}" if planned else str(epoch.number - self._done_before)
        parts = [f"epoch {at}, update {learner.progress.updates:,}"]
        parts += [f"{name} {number(value)}" for name, value in values.items()]
        self._out.line("  ".join([*parts, f"time {duration(time.monotonic() - self._lap)}"]))

    def _write_running(self, learner: Learner, epoch: Epoch) -> None:
        """Write the metrics of the epoch so far; the line waits for the device."""
        assert self.every is not None
        self._due_updates = learner.progress.updates + self.every
        values: dict[str, Tensor | float] = {}
        for plugin in learner.plugins.values():
            if provided(plugin) == "metrics" and hasattr(plugin, "peek"):
                values |= plugin.peek(epoch.name)
        self._write_inside(learner, epoch, {f"{epoch.name}/{name}": value for name, value in read(values).items()})

    def _is_best(self, learner: Learner) -> bool:
        """Whether the row is better than all before it, by the metric that counts; False where none is declared."""
        plugins = list(learner.plugins.values())
        monitors = [name for name in (getattr(plugin, "monitor", None) for plugin in plugins) if name in self._row]
        names = [*monitors, *(name for name in self._row if not name.startswith("train/"))]
        name = next((name for name in names if declared(name, plugins) is not None), None)
        mode = None if name is None else declared(name, plugins)
        if name is None or mode is None:
            return False
        for value in [row[name] for row in self._earlier if name in row]:
            self._best = value if is_better(value, self._best, mode) else self._best
        self._earlier = []
        if not is_better(self._row[name], self._best, mode):
            return False
        first = self._best is None
        self._best = self._row[name]
        return not first

    def _beside(self, bar: _Bar, values: Mapping[str, float]) -> str:
        """The numbers beside a bar: as many as leave room for it, and none is cut."""
        cells = [f"{name} {value:.4g}" for name, value in values.items()]
        columns = self._out.columns()
        if columns is None:
            return ", ".join(cells)
        total = f"{bar.drawn.total or ''}"
        room = columns - len(f"{bar.drawn.desc}: 100%||{total}/{total} [00:00<00:00, 1000.00step/s]") - NARROWEST
        while cells and len(", ".join(cells)) + 2 > room:
            cells.pop()
        return ", ".join(cells)

    def _draw_row(self, cells: dict[str, str], best: bool) -> None:
        """Print a row of the table, and the names of its columns before if they are others now."""
        shown = fitting(cells, self._out.columns())
        if [*cells, *shown] != self._columns:
            self._columns = [*cells, *shown]
            if left_out := [name for name in cells if name not in shown]:
                self._out.line(f"too narrow for {', '.join(left_out)}")
            self._out.line("  ".join(f"{name:>{wide(name)}}" for name in shown))
        if best:
            cells["epoch"] = f"*{cells['epoch']}"
        self._out.line("  ".join(f"{cells[name]:>{wide(name)}}" for name in shown), BEST if best else "")

    def _write_row(self, learner: Learner) -> None:
        if not self._epoch or learner.world.rank != 0:
            return
        now = time.monotonic()
        planned = learner.result.planned.epochs if learner.result is not None else None
        values = {name: number(value) for name, value in self._row.items()}
        times = {"time": duration(now - self._lap)}
        if planned:
            left = (now - self._started) / self._epoch * (planned - self._epoch)
            times["left"] = duration(max(left, 0.0))
        epoch = f"{self._epoch}/{planned}" if planned else str(self._epoch)
        if self._draws:
            self._draw_row({"epoch": epoch, **values, **times}, self._is_best(learner))
        else:
            parts = (f"{name} {value}" for name, value in {**values, **times}.items())
            self._out.line("  ".join([f"epoch {epoch}", *parts]))
        self._lap = now
        self._row = {}
        self._epoch = 0


@functools.cache
def _bar_class() -> Any:
    """tqdm, imported when the first bar is drawn, with a clock that cannot jump."""
    from tqdm.auto import tqdm

    class Bar(tqdm):  # type: ignore[type-arg]  # generic in its stub only
        monitor_interval = 0  # no thread to watch bars that never lag

        def __init__(self, begun: float, **options: Any) -> None:
            self.begun = begun
            super().__init__(**options)

        @property
        def format_dict(self) -> Any:
            return {**super().format_dict, "elapsed": time.monotonic() - self.begun}

    return Bar


@dataclass
class _Bar:
    """A bar of tqdm, and the values on their way to it."""

    begun: float
    """When its epoch began."""
    drawn: Any = None
    late: LateValues = field(default_factory=LateValues)

    def close(self) -> None:
        if self.drawn is not None:
            self.drawn.close()


class _Output:
    """A stream that falls silent when it can no longer be written to."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self.encoding = getattr(stream, "encoding", None)
        self.broken = stream is None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)  # fileno, which tqdm asks for the terminal's width

    def isatty(self) -> bool:
        try:
            return bool(self.stream.isatty())
        except (AttributeError, OSError, ValueError):  # no such method, or closed
            return False

    def has_colors(self) -> bool:
        """Whether it is a terminal that shows colors, and NO_COLOR is not set."""
        return self.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM", "dumb") != "dumb"

    def columns(self) -> int | None:
        """The characters in a line of the terminal; None if that is not known."""
        try:
            return os.get_terminal_size(self.stream.fileno()).columns or None
        except (AttributeError, OSError, ValueError):  # no terminal
            return None

    def write(self, text: str) -> None:
        if not self.broken:
            try:
                if _reader_is_gone(self.stream):  # what is in a buffer then would fail the interpreter's exit
                    self.broken = True
                    return
                self.stream.write(text)
            except (OSError, ValueError):
                self.broken = True

    def flush(self) -> None:
        if not self.broken:
            try:
                self.stream.flush()
            except (AttributeError, OSError, ValueError):
                self.broken = True

    def encodable(self, text: str) -> str:
        encoding = self.encoding or "utf-8"
        return text.encode(encoding, "replace").decode(encoding)

    def line(self, text: str, style: str = "") -> None:
        text = self.encodable(text)
        self.write(f"{style}{text}{PLAIN}\n" if style and self.has_colors() else f"{text}\n")
        self.flush()


def _reader_is_gone(stream: Any) -> bool:
    """Whether a stream is a pipe without a reader."""
    try:
        poll = select.poll()
        poll.register(stream.fileno(), 0)
    except (AttributeError, TypeError, OSError, ValueError):  # no pipe, or no poll on this system
        return False
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _history(learner: Learner) -> list[Mapping[str, Any]]:
    """The rows of the plugin that keeps a history."""
    for plugin in learner.plugins.values():
        if provided(plugin) == "history":
            return [row for row in getattr(plugin, "rows", None) or () if isinstance(row, Mapping)]
    return []


def _updates(every: int | Every | None) -> int | None:
    """The updates from one line to the next.

    Raises:
        PluginError: It is no number of updates.
    """
    count = every.updates if isinstance(every, Every) else every
    if every is not None and not is_count(count):
        raise PluginError(f"Progress: every is {every!r}: give a number of updates, such as every(updates=100)")
    return count


def wide(name: str) -> int:
    """The characters of a column."""
    return max(len(name), 8)


def fitting(names: Iterable[str], columns: int | None) -> list[str]:
    """The columns that fit beside each other, in their order: the first one and losses come before the others.

    >>> fitting(["epoch", "train/loss", "train/accuracy", "val/loss", "time"], 40)
    ['epoch', 'train/loss', 'val/loss', 'time']
    """
    names = list(names)
    kept = set[str]()
    used = 0
    for name in sorted(names, key=lambda name: name != names[0] and not name.endswith("/loss")):
        if columns is None or not kept or used + 2 + wide(name) <= columns:
            used += wide(name) + 2 * bool(kept)
            kept.add(name)
    return [name for name in names if name in kept]


def number(value: float) -> str:
    """Four decimals, or three digits and a power of ten where these show little."""
    return f"{value:.4f}" if value == 0 or 1e-3 <= abs(value) < 1e5 else f"{value:.2e}"


def duration(seconds: float) -> str:
    """``0.4 s``, ``12 s``, ``3:05``, ``2:03:05``."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    hours, rest = divmod(whole, 3600)
    minutes, rest = divmod(rest, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
