"""The subcommands of this distribution: train a run in a file, or look at its plan."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from loopkit.commands import JSON, argument, say, standalone
from loopkit.commands import reporting as plainly
from loopkit_files.document import load
from loopkit_files.errors import ConfigError

__all__ = ["CONFIG", "SET", "explain", "reporting", "run"]

CONFIG = argument("config", metavar="CONFIG.toml", type=Path, help="the file")
SET = argument(
    "--set",
    metavar="KEY=VALUE",
    dest="overrides",
    action="append",
    default=[],
    help="replace a value of the file, as in fit.epochs=3; text that is no TOML is a string (may be repeated)",
)


FULL = argument("--full", action="store_true", help="every hook of every phase, and why")


@standalone("run", CONFIG, SET)
def run(options: argparse.Namespace) -> int:
    """Train what a configuration describes, and print the result.

    A file is a program: the names in `call` are imported and called. Run only files of people you trust.

    Modules are found in the working directory, as by `python -m`, and among what is installed. The file is checked as
    a whole before anything is made; `loopkit explain` does that, too.

    Exit code: 0; 2 after an error; 143 after SIGTERM and 130 after Ctrl-C, between two steps.
    """

    def train() -> str:
        built = load(options.config, options.overrides).build()
        result = built.run()
        return str(result) if built.learner.world.rank == 0 else ""

    return reporting(train)


@standalone(
    "explain", CONFIG, argument("--phase", metavar="NAME", help="only one phase, such as train"), FULL, JSON, SET
)
def explain(options: argparse.Namespace) -> int:
    """Print which plugin does what when in the run that a configuration describes, and why in this order.

    The model and the plugins are made, but the data are not, and no step is run.

    Exit code: 0; 2 after an error.
    """

    def told() -> str:
        plan = load(options.config, options.overrides).learner().explain(options.phase, full=options.full)
        return json.dumps([asdict(row) for row in plan.rows], indent=2) if options.json else str(plan)

    return reporting(told)


def reporting(make: Callable[[], str], put: Callable[[str], object] = say) -> int:
    """`loopkit.commands.cli.reporting`; problems of the file are written a line each."""
    try:
        return plainly(make, put)
    except ConfigError as error:
        lines = str(error).splitlines()
        say(f"loopkit: error: {lines[0]}", sys.stderr)
        for line in (*lines[1:], *getattr(error, "__notes__", ())):
            say(line.strip(), sys.stderr)
        return 2
