"""Epochs whose steps stay eager, which the phase then runs by itself."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import ref

from loopkit_whole_step.compiling import Compiling, steps_left
from loopkit_whole_step.replay import Same
from loopkit_whole_step.shapes import Shapes, nothing

if TYPE_CHECKING:
    from loopkit import Epoch, Learner, Step
    from loopkit_whole_step.shapes import Shape


class Resting:
    """Leave the eager steps of an epoch to its phase.

    Args:
        shapes: All shapes.
        compiling: It knows whether compiling could be repaid.
    """

    def __init__(self, shapes: Shapes, compiling: Compiling) -> None:
        self._shapes = shapes
        self._compiling = compiling
        self._looked: dict[str, Callable[[], Any]] = {}
        """By phase, the epoch in which it was last looked whether the rest of it stays eager."""
        self.epochs: dict[str, Callable[[], Any]] = {}
        """By phase, the epoch whose remaining steps stay eager."""

    def begins(self, epoch: Epoch) -> bool:
        """Whether this is the first eager step of an epoch."""
        name = epoch.phase.name
        if self._looked.get(name, nothing)() is epoch:
            return False
        self._looked[name] = ref(epoch)
        self.epochs.pop(name, None)
        return True

    def leave(self, shape: Shape, learner: Learner, step: Step) -> Same | None:
        """Leave the rest of an epoch to its phase after an eager step; otherwise the form of like steps is returned."""
        epoch: Epoch = step.frame.epoch
        phase = epoch.phase
        if phase.name not in self.epochs:
            self.epochs[phase.name] = ref(epoch) if self._may_rest(shape, learner, epoch) else nothing
        if self.epochs[phase.name]() is epoch:
            step.frame.leave_steps()
            return None
        if phase.training:
            return None
        return Same(epoch, step, not self._shapes.is_compiled(phase))

    def _may_rest(self, shape: Shape, learner: Learner, epoch: Epoch) -> bool:
        """Whether no step of this epoch will be compiled, judged by an eager shape."""
        if self._shapes.is_compiled(epoch.phase):
            return False
        mine = self._shapes.of(epoch.phase)
        slowest = max((min(each.eager) for each in mine if each.eager), default=math.inf)
        return shape.everywhere or self._compiling.too_few(steps_left(learner, epoch), slowest)
