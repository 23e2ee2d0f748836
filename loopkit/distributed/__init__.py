"""Many processes: who they are, how they start, and what they say to each other beside the gradients."""

from loopkit.world import World, join

__all__ = ["World", "join"]


def __dir__() -> list[str]:
    return __all__
