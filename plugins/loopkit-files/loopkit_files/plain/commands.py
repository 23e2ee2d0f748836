"""The subcommands of this distribution: write the run of a configuration out."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from loopkit.commands import argument, say, standalone
from loopkit_files.commands import CONFIG, SET, reporting
from loopkit_files.document import load
from loopkit_files.plain import EjectError, eject_config

__all__ = ["eject"]


@standalone(
    "eject",
    CONFIG,
    argument("-o", "--output", metavar="SCRIPT.py", type=Path, help="where to write (default: standard output)"),
    SET,
    argument("--save", metavar="FILE", help="let the script save the weights here at its end"),
    argument("--partial", action="store_true", help="write the rest if a part has no written form"),
    argument("--force", action="store_true", help="write over a file that is there"),
)
def eject(options: argparse.Namespace) -> int:
    """Write the run of a configuration as one plain PyTorch script, which trains the same bits.

    The script imports what the configuration names, and nothing of loopkit where a piece has a plain form. Plugins
    without influence on the training, such as progress and checkpoints, are left out. If a part has no written form,
    the command lists it with the reason and stops; with --partial the list is in comments at the top of the script.

    Modules are found in this directory, as by loopkit run.

    Exit code: 0 if a script was written, 2 if not.
    """
    output = options.output
    if output is not None and os.path.lexists(output) and not options.force:
        raise EjectError(f"{output} is there already: give another name, or --force to write over it")

    def make() -> str:
        return eject_config(load(options.config, options.overrides), partial=options.partial, save=options.save)

    def put(source: str) -> None:
        if output is None:
            say(source, end="")
        else:
            output.write_text(source, encoding="utf-8")

    return reporting(make, put)
