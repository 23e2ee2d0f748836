"""Checkpoints of sharded models: each process writes its part, and any number of processes reads it."""

from loopkit_sharded.checkpoint import ShardedCheckpoint, load, save

__all__ = ["ShardedCheckpoint", "load", "save"]
