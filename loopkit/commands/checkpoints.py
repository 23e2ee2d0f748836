"""``loopkit checkpoint``: the contents of saved checkpoints."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from loopkit.commands.cli import JSON, argument, command, existing, plain, say, say_json, table
from loopkit.errors import CheckpointError

if TYPE_CHECKING:
    from loopkit.checkpoint.manifest import Manifest


@command("checkpoint list", argument("directory", metavar="DIR", type=Path, help="a directory of checkpoints"), JSON)
def list_checkpoints(options: argparse.Namespace) -> int:
    """List the checkpoints of a directory, the newest first, and mark the best.

    Manifests and sizes are looked at; `loopkit checkpoint verify` compares contents. Exit code: 0, or 1 if there is
    no whole checkpoint.
    """
    from loopkit.checkpoint.bundle import best, monitored
    from loopkit.checkpoint.manifest import HEADINGS
    from loopkit.checkpoint.storage import listing

    directory = existing(options.directory)
    found = listing(directory)
    if options.json:
        say_json(
            {
                "checkpoints": [
                    {"path": each.path, "number": each.number, "bytes": each.size, **each.about} for each in found
                ],
                "best": best(directory).path if any(map(monitored, found)) else None,
                "damaged": {str(path): str(error) for path, error in found.problems.items()},
            }
        )
        return 0 if found else 1
    if found:
        for line in table([HEADINGS, *(manifest.row() for manifest in found)]):
            say(line)
    if any(map(monitored, found)):
        top = best(directory)
        said = monitored(top)
        say(f"best: {plain(top.path.name)}" + (f", {plain(said[0])} {said[2]:.6g}" if said else ""))
    for path, error in found.problems.items():
        say(f"damaged: {plain(path.name)}: {plain(str(error), 1000)}")
    if not found:
        say(f"{plain(str(directory), 1000)} holds no {'whole ' if found.problems else ''}checkpoint")
    return 0 if found else 1


@command(
    "checkpoint inspect",
    argument("path", metavar="PATH", type=Path, help="a checkpoint, a directory of them, or a .safetensors file"),
)
def inspect_checkpoint(options: argparse.Namespace) -> int:
    """Show the contents of a checkpoint, of the newest one of a directory, or of a .safetensors file.

    Exit code: 0.
    """
    from loopkit.checkpoint.inspection import inspect

    say(str(inspect(existing(options.path))))
    return 0


@command("checkpoint verify", argument("path", metavar="PATH", type=Path, help="a checkpoint, or a directory of them"))
def verify_checkpoint(options: argparse.Namespace) -> int:
    """Read every byte of a checkpoint, or of all in a directory, and compare it with its digest.

    Exit code: 0 if all is as it was written, 1 if something is damaged or there is no checkpoint.
    """
    from loopkit.checkpoint.manifest import MANIFEST
    from loopkit.checkpoint.storage import listing, verify

    path = existing(options.path)
    found = None if os.path.lexists(path / MANIFEST) else listing(path)
    paths = [path] if found is None else sorted([*(m.path for m in found), *found.problems], reverse=True)
    whole = bool(paths)
    for each in paths:
        try:
            if found is not None and each in found.problems:
                raise found.problems[each]
            manifest = verify(each)
        except CheckpointError as error:
            say(f"{plain(str(each), 1000)}: DAMAGED: {plain(str(error), 1000)}")
            whole = False
        else:
            say(f"{plain(str(each), 1000)}: whole, {len(manifest.files)} files, {_size(manifest)}")
    if not paths:
        say(f"{plain(str(path), 1000)} is no checkpoint, and holds none")
    return 0 if whole else 1


def _size(manifest: Manifest) -> str:
    from loopkit.checkpoint.manifest import in_bytes

    return in_bytes(manifest.size)
