"""All runs of a folder in the terminal: a line for each, which moves while it trains."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from typing import TextIO

from loopkit_monitor.store import Run, Store
from loopkit_monitor.terminal import counted, duration, figure, is_of_epochs, printable

__all__ = ["Overview"]

MOST_METRICS = 4
LONGEST_NAME = 32
"""Characters of a run's name; of a longer one, the end is shown."""
FIXED = 4
"""Columns that are always shown."""


class Overview:
    """Writes a table of runs to a terminal, or to a file.

    Args:
        store: Has the runs.
        out: Where to write. In a terminal, each table takes the place of the one before; a file gets the last one.
    """

    def __init__(self, store: Store, out: TextIO) -> None:
        self._store, self._out = store, out
        self._moves = out.isatty()
        self._written = 0
        """Lines of the table that is there."""

    def write(self, once: bool = False) -> str:
        """Write the table of now, if it is seen.

        Returns:
            ``"live"`` if any run is; ``"crashed"`` if none is and any has crashed; else ``"finished"``.
        """
        self._store.poll()
        kept = [run for run in self._store.runs.values() if not run.notes.archived]
        runs = sorted(kept, key=lambda run: (run.status == "live", run.updated), reverse=True)
        states = {run.status for run in runs}
        status = next((each for each in ("live", "crashed") if each in states), "finished")
        if self._moves or once or status != "live":
            self._show(runs)
        return status

    def close(self) -> None:
        """Leave the table as it is."""

    def _show(self, runs: Sequence[Run]) -> None:
        width, height = shutil.get_terminal_size() if self._moves else (10**6, 10**6)
        room = max(height - 3, 1)
        lines = table(runs[:room], width - 1)
        if len(runs) > room:
            lines.append(f"and {len(runs) - room:,} more")
        back = f"\x1b[{self._written}F\x1b[J" if self._written else ""
        encoding = self._out.encoding or "utf-8"
        text = back + "".join(f"{line}\n" for line in lines)
        self._out.write(text.encode(encoding, "replace").decode(encoding))
        self._out.flush()
        self._written = len(lines)


def table(runs: Sequence[Run], width: int) -> list[str]:
    """A line for each run below a line of names; columns that have no room are left out, the last first."""
    names = _metrics(runs)
    rows = [["run", "state", "epoch", "step", *names, "left"], *(_row(run, names) for run in runs)]
    while True:
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        if sum(widths) + 2 * len(widths) - 2 <= width or len(widths) <= FIXED:
            break
        rows = [row[:-1] for row in rows]
    return [
        "  ".join(_cell(at, cell, widths[at]) for at, cell in enumerate(row)).rstrip()[: max(width, 0)] for row in rows
    ]


def _cell(at: int, text: str, width: int) -> str:
    """Words are at the left, numbers at the right."""
    return f"{text:<{width}}" if at < 2 else f"{text:>{width}}"


def _row(run: Run, names: Iterable[str]) -> list[str]:
    name = printable(run.notes.name or run.name)
    left = run.last.get("run/time_left") if run.status == "live" else None
    return [
        name if len(name) <= LONGEST_NAME else f"...{name[3 - LONGEST_NAME :]}",
        run.status,
        counted(run, "epoch", run.epoch).removeprefix("epoch "),
        f"{run.step:,}",
        *(figure(run.last[each]) if each in run.last else "" for each in names),
        "" if left is None else duration(left),
    ]


def _metrics(runs: Iterable[Run]) -> list[str]:
    """The metrics of epochs that the runs have: the validation's first, losses first among them."""
    known = dict.fromkeys(name for run in runs for name in run.last if is_of_epochs(name))
    shown = sorted(known, key=lambda name: (not name.startswith("val/"), not name.endswith("/loss")))
    return [printable(name) for name in shown if printable(name) == name][:MOST_METRICS]
