"""The subcommands that the distribution adds to ``loopkit``."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from loopkit_monitor import _core as _core  # isort: split

from loopkit.commands import JSON, Parser, argument, plain, say, standalone, table
from loopkit_monitor import arguments

__all__ = ["monitor", "report", "runs", "watch"]

OTHER = re.compile(r"^(run|resources)/|/(step|running)$")
"""Names that are no metrics of an epoch."""
MOST_METRICS = 4
"""The most metrics of a run in a line."""


def monitor(words: Sequence[str]) -> int:
    """Show runs in a web page.

    It does not return: the server takes the place of this process, which has loaded torch, with one that has not. That
    leaves it a quarter of the memory.
    """
    arguments.monitor(Parser(prog="loopkit monitor")).parse_args(words)
    _become("loopkit_monitor.server", words)


def watch(words: Sequence[str]) -> int:
    """Show runs in the terminal, until they end.

    It does not return, for the same reason.
    """
    arguments.watch(Parser(prog="loopkit watch")).parse_args(words)
    _become("loopkit_monitor.terminal", words)


@standalone(
    "report",
    argument("run", type=Path, help="the folder of a run, or of several, or a log"),
    argument(
        "-o", "--output", type=Path, metavar="FILE", help="the page (default: report.html, if no other is asked for)"
    ),
    argument("--csv", type=Path, metavar="FILE", help="a table with every scalar"),
    argument("--png", type=Path, metavar="DIR", help="a picture of each chart; needs matplotlib"),
)
def report(options: argparse.Namespace) -> int:
    """Write what a run has logged into one file that any browser opens, a table or pictures.

    Example: loopkit report runs/a -o report.html

    Exit code: 0, or 2 if that cannot be done.
    """
    from loopkit_monitor.report import write_csv, write_html, write_png
    from loopkit_monitor.store import Store

    output = options.output or (None if options.csv or options.png else Path("report.html"))
    try:
        store = Store(options.run)
        store.poll()
        if not store.runs:
            raise FileNotFoundError(f"{options.run} holds no log: name the folder that a LogTo or a Monitor writes to")
        if output is not None:
            write_html(store, output)
            say(f"{output}: {output.stat().st_size / 1e6:.1f} MB")
        if options.csv is not None:
            say(f"{options.csv}: {write_csv(store, options.csv):,} rows")
        if options.png is not None:
            say(f"{options.png}: {len(write_png(store, options.png)):,} pictures")
    except ImportError as error:
        say(f"loopkit report: error: {error}: pip install 'loopkit-monitor[png]'", sys.stderr)
        return 2
    except OSError as error:
        say(f"loopkit report: error: {error}", sys.stderr)
        return 2
    return 0


@standalone(
    "runs", argument("folder", metavar="DIR", type=Path, nargs="?", default=Path("runs"), help="runs by default"), JSON
)
def runs(options: argparse.Namespace) -> int:
    """List the runs below a folder, the latest first: how each is doing, how far it is, and its last metrics.

    Example: loopkit runs runs --json

    Exit code: 0, or 1 if there is no run.
    """
    from loopkit_monitor import views
    from loopkit_monitor.store import Store

    store = Store(options.folder)
    store.poll()
    found = views.runs(store)["runs"]
    if options.json:
        say(views.encode({"runs": found}).decode())
    elif found:
        rows = [("run", "state", "epoch", "step", "metrics")]
        for run in found:
            names = [name for name in run["metrics"] if not OTHER.search(name)]
            names.sort(key=lambda name: not name.startswith("val/"))
            said = " ".join(f"{plain(name)} {run['metrics'][name]:.4g}" for name in names[:MOST_METRICS])
            rows.append((plain(run["id"]), run["status"], str(run["epoch"]), str(run["step"]), said))
        for line in table(rows):
            say(line)
    else:
        say(f"{plain(str(options.folder), 1000)} holds no log: name the folder that a LogTo or a Monitor writes to")
    return 0 if found else 1


def _become(module: str, words: Sequence[str]) -> NoReturn:
    if sys.stdout is not None:  # closed by whoever started this
        sys.stdout.flush()
    arguments.await_ctrl_c()  # until the other program has begun
    os.execv(sys.executable, [sys.executable, "-P", "-m", module, *words])
