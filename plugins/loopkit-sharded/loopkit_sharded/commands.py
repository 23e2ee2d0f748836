"""The subcommands of this distribution: checkpoints in parts, and in one piece."""

from __future__ import annotations

import argparse
from pathlib import Path

from loopkit.commands import argument, existing, plain, say, standalone

__all__ = ["sharded"]


@standalone(
    "sharded",
    argument("act", choices=("export", "import"), help="export: write it in one piece; import: write it in parts"),
    argument(
        "path", metavar="PATH", type=Path, help="a checkpoint, or a directory of them, of which the newest is taken"
    ),
    argument("directory", metavar="DIR", type=Path, help="the directory below which the new one is written"),
    argument("--parts", metavar="N", type=int, default=2, help="of import: for how many processes (default: 2)"),
)
def sharded(options: argparse.Namespace) -> int:
    """Write a checkpoint of several processes in one piece, or one that is in one piece in parts.

    The result holds the same bits. In one piece it has the format of `Checkpoint`: its weights are one .safetensors
    file, and loopkit checkpoint inspect and diff read it. One in parts lets each process read only its part.

    Example: loopkit sharded export runs/a exported

    Exit code: 0, or 2 if a checkpoint cannot be read or written.
    """
    from loopkit.author import bundle, disk, in_bytes
    from loopkit_sharded.convert import join, split

    manifest = bundle.find(existing(options.path).absolute())
    directory = disk.resolved(options.directory)
    made = join(manifest, directory) if options.act == "export" else split(manifest, directory, options.parts)
    say(f"{plain(str(made.path), 1000)}: {len(made.files)} files, {in_bytes(made.size)}")
    return 0
