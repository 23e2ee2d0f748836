"""Many processes: how they start, how they are watched, and their messages beside the gradients.

It may import what is below the plugins: checkpoints, the learner, the engine, the ground.
"""

from loopkit.base.world import World, join

__all__ = ["World", "join"]
__dir__ = __all__.copy
