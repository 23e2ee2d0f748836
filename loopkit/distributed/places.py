"""Places: where the processes of a machine are, in memory that they share and that outlives each of them.

It belongs to a file whose name is removed when all have opened it. There a process that was killed has left the step
that it was in.
"""

from __future__ import annotations

import mmap
import os
import secrets
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from loopkit.base.world import World
    from loopkit.engine.life.epoch import Epoch

SHARED = "/dev/shm"
"""Where a file is memory, on machines that have it."""
SLOT = 256
"""Bytes of a process: eight for the steps of its epoch, which the engine counts there, and the rest for words."""
BETWEEN = "between two epochs"


def lay_out(world: World) -> None:
    """Share the memory, once for all plugins that train with these processes; all of them call it.

    A process that cannot have it, such as on a full disk, continues without.
    """
    if world.size == 1 or world.places is not None:
        return
    size = world.size * SLOT
    begin = world.rank * SLOT
    path = Path(
        SHARED if os.access(SHARED, os.W_OK) else tempfile.gettempdir(), world.share(f"loopkit-{secrets.token_hex(8)}")
    )
    try:
        with open(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b", buffering=0) as file:
            file.write(bytes(size))  # a full disk says so here, where later it would kill the process
            world.places = mmap.mmap(file.fileno(), size)
    except (OSError, ValueError):
        world.places = bytearray(size)
    world.slot = memoryview(world.places)[begin : begin + SLOT].cast("q")
    try:
        world.highest(0.0)  # all have opened it
    finally:
        path.unlink(missing_ok=True)  # the first of the machine


def enter(world: World, epochs: Sequence[Epoch]) -> None:
    """Note that from now on this process is in the last of these epochs."""
    if world.places is not None:
        words = epochs[-1].where() if epochs else BETWEEN
        end = (world.rank + 1) * SLOT
        world.slot[0] = 0
        world.places[end - SLOT + 8 : end] = words.encode()[: SLOT - 8].ljust(SLOT - 8, b"\0")
        world.slot[0] = epochs[-1].steps if epochs and epochs[-1].current else 0


def last_place(world: World, rank: int) -> str:
    """Where a process was last; "" if that is not known here, as of one on another machine."""
    slot = b"" if world.places is None else bytes(world.places[rank * SLOT : (rank + 1) * SLOT])
    words = slot[8:].rstrip(b"\0").decode(errors="replace")
    steps = int.from_bytes(slot[:8], sys.byteorder)
    return f"{words}, step {steps - 1}" if steps else words
