"""What the distribution adds to the command ``loopkit``."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from loopkit.cli import JSON, argument, plain, say, standalone, table

__all__ = ["monitor", "report", "runs", "watch"]

OTHER = re.compile(r"^(run|resources)/|/(step|running)$")
"""Names that are no metrics of an epoch."""
MOST_METRICS = 4
"""Of a run in a line."""


def monitor(words: Sequence[str]) -> int:
    """Show runs in a page; it does not return.

    The server takes the place of this process, which has loaded torch, with one that has not: that leaves it a quarter
    of the memory.
    """
    _become("loopkit_monitor.server", words)


def watch(words: Sequence[str]) -> int:
    """Show a run in the terminal; it does not return, for the same reason."""
    _become("loopkit_monitor.terminal", words)


def report(words: Sequence[str]) -> int:
    """Write what a run has logged into files; returns 0, or 2 if that cannot be done."""
    from loopkit_monitor.report import write_csv, write_html, write_png
    from loopkit_monitor.store import Store

    parser = argparse.ArgumentParser(
        prog="loopkit report", description="Write what a run has logged into one file that any browser opens."
    )
    parser.add_argument("run", type=Path, help="the folder of a run, or of several, or a log")
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="the page (default: report.html, if nothing else is asked for)",
    )
    parser.add_argument("--csv", type=Path, metavar="FILE", help="a table with every scalar")
    parser.add_argument("--png", type=Path, metavar="DIR", help="a picture of each chart; needs matplotlib")
    given = parser.parse_args(list(words))
    output = given.output or (None if given.csv or given.png else Path("report.html"))
    try:
        store = Store(given.run)
        store.poll()
        if not store.runs:
            raise FileNotFoundError(f"{given.run} holds no log: name the folder that a LogTo or a Monitor writes to")
        if output is not None:
            write_html(store, output)
            print(f"{output}: {output.stat().st_size / 1e6:.1f} MB")
        if given.csv is not None:
            print(f"{given.csv}: {write_csv(store, given.csv):,} rows")
        if given.png is not None:
            print(f"{given.png}: {len(write_png(store, given.png)):,} pictures")
    except ImportError as error:
        print(f"loopkit report: error: {error}: pip install 'loopkit-monitor[png]'", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"loopkit report: error: {error}", file=sys.stderr)
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
    os.execv(sys.executable, [sys.executable, "-P", "-m", module, *words])
