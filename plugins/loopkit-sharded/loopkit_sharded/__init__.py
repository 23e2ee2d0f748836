"""Models of which each process holds a part: `FSDP`, and checkpoints that any number of processes reads."""

from loopkit_sharded import _core as _core
from loopkit_sharded.checkpoint import ShardedCheckpoint, load, save
from loopkit_sharded.fsdp import FSDP

__all__ = ["FSDP", "ShardedCheckpoint", "load", "save"]
