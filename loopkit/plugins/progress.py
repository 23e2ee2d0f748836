"""Show how the run goes on: a bar for each pass and a line for each epoch."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any, TextIO

from loopkit.hooks import hookimpl
from loopkit.plugins.late import LateValues

if TYPE_CHECKING:
    from loopkit.learner import Learner
    from loopkit.phases import Phase

__all__ = ["Progress"]

REDRAW_SECONDS = 0.1


class Progress:
    """A tqdm bar for each pass, and a row of metrics with time and time left for each epoch of a fit.

    Args:
        bar: Draw bars; by default if the output is a terminal or a notebook. Without bars there is one plain line
            per epoch.
        file: Where to write; standard output by default.

    The values on a bar are read from the device late, so that no step waits for them. If the output is closed, the
    display ends silently and the training goes on.
    """

    name = "progress"
    provides = "progress"

    def __init__(self, bar: bool | None = None, file: TextIO | None = None) -> None:
        self._wanted = bar
        self._file = file
        self._broken = False
        self._bars: list[Any] = []
        self._next = 0.0
        self._late = LateValues()
        self._row: dict[str, float] = {}
        self._columns: list[str] = []
        self._epoch = 0
        self._started = self._lap = 0.0
        self._done_before = 0

    @property
    def _out(self) -> TextIO:
        return self._file if self._file is not None else sys.stdout

    @property
    def _draws(self) -> bool:
        if self._broken:
            return False
        if self._wanted is not None:
            return self._wanted
        try:
            return self._out.isatty() or (self._file is None and "ipykernel" in sys.modules)
        except (AttributeError, ValueError):  # no such method, or closed
            return False

    @hookimpl
    def fit_begin(self, learner: Learner) -> None:
        """Start the clock."""
        self._started = self._lap = time.monotonic()
        self._done_before = learner.progress.epochs
        self._row, self._columns, self._epoch = {}, [], 0

    @hookimpl
    def fit_end(self, learner: Learner) -> None:
        """Write the last row; leave no bar behind."""
        while self._bars:
            self._close(self._bars.pop())
        self._write_row(learner)

    @hookimpl
    def epoch_begin(self, learner: Learner, phase: Phase) -> None:
        """Write the row of the epoch before, if this pass begins another one, and start a bar."""
        if phase.training:
            self._write_row(learner)
        self._next = 0.0
        self._bars.append(self._open(learner, phase) if self._draws else None)

    @hookimpl(reads=("metrics",))
    def step_end(self, learner: Learner, phase: Phase) -> None:
        """Redraw the bar, ten times a second at most."""
        if self._bars[-1] is not None:
            now = time.monotonic()
            if now >= self._next:
                self._next = now + REDRAW_SECONDS
                self._redraw(learner, phase)

    @hookimpl
    def epoch_end(self) -> None:
        """Take the bar away."""
        self._close(self._bars.pop())

    @hookimpl(reads=("metrics",))
    def phase_end(self, learner: Learner, phase: Phase) -> None:
        """Keep the metrics for the epoch's row."""
        if learner.fitting_now:
            prefix = f"{phase.name}/"
            self._row.update({n: v for n, v in learner.metrics.items() if n.startswith(prefix)})
            self._epoch = max(learner.progress.epochs - self._done_before, self._epoch)

    def _open(self, learner: Learner, phase: Phase) -> Any:
        from tqdm.auto import tqdm

        epoch = learner.running
        planned = learner.result.planned.epochs if learner.result is not None and learner.fitting_now else None
        number = f"epoch {learner.progress.epochs - self._done_before + (1 if phase.training else 0)}"
        title = f"{number}/{planned} {phase.name}" if planned else phase.name
        try:
            return tqdm(
                total=None if epoch is None else epoch.length,
                desc=title,
                leave=False,
                file=self._file if self._file is not None else sys.stdout,
                dynamic_ncols=True,
                unit="step",
                mininterval=0,
                position=len(self._bars),
            )
        except (OSError, ValueError):
            self._broken = True
            return None

    def _redraw(self, learner: Learner, phase: Phase) -> None:
        bar, epoch = self._bars[-1], learner.running
        try:
            bar.n = 0 if epoch is None else epoch.steps
            values = self._late.arrived()
            if values:
                bar.set_postfix_str(", ".join(f"{name} {value:.4g}" for name, value in values.items()), refresh=False)
            bar.refresh()
        except (OSError, ValueError):  # closed, or text that the output cannot encode
            self._broken = True
            self._bars[-1] = None
            return
        for plugin in learner.plugins.values():
            if getattr(plugin, "provides", "") == "metrics" and hasattr(plugin, "peek"):
                self._late.send(plugin.peek(phase.name))

    def _close(self, bar: Any) -> None:
        if bar is not None:
            try:
                bar.close()
            except (OSError, ValueError):
                self._broken = True

    def _write_row(self, learner: Learner) -> None:
        if not self._epoch and not self._row:
            return
        now = time.monotonic()
        planned = learner.result.planned.epochs if learner.result is not None else None
        left = (now - self._started) / max(self._epoch, 1) * (planned - self._epoch) if planned else None
        values = {name: f"{value:.4f}" for name, value in self._row.items()}
        times = {"time": duration(now - self._lap), "left": "" if left is None else duration(max(left, 0))}
        number = f"{self._epoch}/{planned}" if planned else str(self._epoch)
        self._lap = now
        if self._draws:
            cells = {"epoch": number, **values, **times}
            if list(cells) != self._columns:
                self._columns = list(cells)
                self._write("  ".join(f"{name:>{max(len(name), 8)}}" for name in cells))
            self._write("  ".join(f"{cell:>{max(len(name), 8)}}" for name, cell in cells.items()))
        else:
            shown = [f"epoch {number}", *(f"{name} {value}" for name, value in values.items())]
            self._write("  ".join([*shown, *(f"{name} {value}" for name, value in times.items() if value)]))
        self._row, self._epoch = {}, 0

    def _write(self, line: str) -> None:
        if not self._broken:
            try:
                self._out.write(line + "\n")
                self._out.flush()
            except (OSError, ValueError):
                self._broken = True


def duration(seconds: float) -> str:
    """``0.4 s``, ``12 s``, ``3:05``, ``2:03:05``."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    hours, rest = divmod(whole, 3600)
    minutes, rest = divmod(rest, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
