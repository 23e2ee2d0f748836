"""The strategy that sends gradients while the one backward of a step makes them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import Tensor

from loopkit.base.notes import say
from loopkit.distributed.at_update import AtUpdate, gradients
from loopkit.distributed.buckets import Overlap
from loopkit.distributed.gradient_sync import GradientSync
from loopkit.errors import PhaseError

if TYPE_CHECKING:
    from loopkit.engine.step.step import Step
    from loopkit.learner import Learner
    from loopkit.phases import Phase


class InBackward(GradientSync):
    """Gradients are sent in the backward, once an update of the epoch was made of one backward in each process.

    Updates before that, and updates that differ, are averaged when they begin.

    Args:
        at_update: Averages the other updates.
    """

    def __init__(self, at_update: AtUpdate) -> None:
        self._at_update = at_update
        self._overlaps: dict[int, Overlap | None] = {}
        """The overlap that sends during a phase's backward, by phase; None: no overlap in this epoch."""
        self._now: Overlap | None = None
        """The overlap that sends during this step's backward, which ends with an update."""
        self._backwards = 0
        """The backwards of this step."""
        self._told: set[int] = set()
        """Phases with a line on why their backward does not send."""

    def begin_epoch(self) -> None:
        """Try again where the last epoch had no overlap."""
        self._overlaps = {key: overlap for key, overlap in self._overlaps.items() if overlap is not None}

    def reset(self) -> None:
        """Drop what belongs to the last step."""
        self._now = None
        self._backwards = 0

    def begin(self, learner: Learner, phase: Phase, step: Step, sends: bool) -> bool:
        """Send gradients in this step's backward, if the phase has come to that."""
        if not sends:
            return True
        overlap = self._overlaps.get(id(phase))
        if overlap is None or not overlap.serves or self._at_update.weighting.is_weighted(learner, phase, step):
            return True
        self._now = overlap
        overlap.begin(all(window.seed is not None for window in step.window_state))
        return True

    def cancel(self, phase: Phase) -> None:
        """Send what the other processes may have sent."""
        if self._now is not None:
            self._now.cancel()

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Keep the state of the running step, while a hook runs an epoch."""
        now = self._now
        backwards = self._backwards
        with self.paused():
            self._now = None
            try:
                yield
            finally:
                self._now = now
                self._backwards = backwards

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not send in a backward."""
        overlap = self._now
        if overlap is None or not overlap.listening:
            yield
            return
        overlap.listening = False
        try:
            yield
        finally:
            overlap.listening = True

    def backward_begin(self, learner: Learner, phase: Phase, step: Step) -> None:
        """Count the backward."""
        self._backwards += 1

    def backward_end(self, learner: Learner, phase: Phase, step: Step) -> None:
        """Send what the backward left."""
        if self._now is not None:
            self._now.complete()

    def update(self, learner: Learner, phase: Phase, step: Step) -> None:
        """Take the averages, if the backward has sent the gradients; else average them now."""
        ground = self._at_update
        params = ground.params(learner, phase, step)
        grads = gradients(params)
        weight = ground.weight(learner, phase, step)
        if self._sent(learner, phase, step, grads):
            return
        ground.average(learner, step, grads, weight)
        if grads and weight is None:
            self._try(learner, phase, step, params)

    def _try(self, learner: Learner, phase: Phase, step: Step, params: list[Tensor]) -> None:
        """Send gradients in the backward from the next update on, if each process made one backward in this one."""
        if id(phase) in self._overlaps:
            return
        odd = learner.world.gather("" if self._backwards == 1 else f"made {self._backwards} backwards")
        overlap = None
        if not any(odd):
            ground = self._at_update
            overlap = Overlap(params, learner.world.size, ground.bucket_bytes, ground.dtype)
        self._serve(learner, phase, step, overlap, odd)

    def _sent(self, learner: Learner, phase: Phase, step: Step, grads: list[Tensor]) -> bool:
        """Whether the backward of this step has sent the gradients; then they are averages from here on."""
        overlap = self._now
        if overlap is None or not overlap.sends:
            return False
        odd, marked = overlap.finish(grads)
        if marked is None and odd:
            raise PhaseError(
                f"DDP: phase {phase.name!r}, step {step.index}, {odd}, where gradients are sent in the backward. Give "
                f"DDP(overlap=False), which averages at update_begin"
            )
        if marked:
            said = learner.world.gather(odd)
            if any(said):
                overlap.remove()
                self._serve(learner, phase, step, None, said)
                return False
        overlap.take()
        return True

    def _serve(self, learner: Learner, phase: Phase, step: Step, overlap: Overlap | None, said: list[str]) -> None:
        """Let gradients be sent in the backward of a phase, or not for the rest of the epoch."""
        self._overlaps[id(phase)] = overlap
        if any(said) and learner.world.rank == 0 and id(phase) not in self._told:
            self._told.add(id(phase))
            which = next(f"step {step.index} of rank {rank} {odd}" for rank, odd in enumerate(said) if odd)
            say(f"phase {phase.name!r}: gradients are averaged after the backward for now: {which}")
