"""Votes: where all processes must decide alike."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from loopkit.learner import Learner


def must_agree(learner: Learner) -> bool:
    """Whether processes make the same steps from the same parameters, so that a step is cancelled in all or none.

    Not for a process alone, nor where each trains by itself between two averages.
    """
    return learner.world.size > 1 and all(getattr(each, "agrees_in_steps", True) for each in learner.plugins.values())
