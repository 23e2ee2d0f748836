"""Whether a step is recorded, and when its graph takes over."""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import ref

from loopkit_whole_step.cells import Cells
from loopkit_whole_step.compiling import Compiling, steps_left
from loopkit_whole_step.given import Given
from loopkit_whole_step.hooked import RecordedHooks, Unliftable
from loopkit_whole_step.record import Recording
from loopkit_whole_step.sealed import Refused
from loopkit_whole_step.shapes import COMES, COMPILED, Shapes

if TYPE_CHECKING:
    from loopkit import Epoch, Learner, Phase, Step
    from loopkit_whole_step.shapes import Shape

CHANGES = 4
"""So many times a shape is compiled anew, since a constant of it has changed."""
BY_CLOCK = "the graph took over as it came, so the run cannot be repeated bit for bit"


class Recorder:
    """Record the steps of shapes, and give them their graphs.

    Args:
        shapes: All shapes.
        hooks: The hooks that are recorded.
        compiling: The compiler.
    """

    def __init__(self, shapes: Shapes, hooks: RecordedHooks, compiling: Compiling) -> None:
        self._shapes = shapes
        self._hooks = hooks
        self._compiling = compiling

    def decide_anew(self, learner: Learner, phase: Phase, epoch: Epoch) -> None:
        """Count the eager shapes whose reason is gone, such as a plugin, as new ones: an epoch begins."""
        eager = [each for each in self._shapes.of(phase) if each.mode == "eager"]
        hindered = any(each.everywhere for each in eager) and bool(self._hindrance(learner, phase, epoch))
        left = steps_left(learner, epoch)
        for shape in eager:
            if self._compiling.are_more(shape, left) or (shape.everywhere and not hindered):
                shape.reason, shape.everywhere, shape.left = "", False, None
                shape.begin_anew(max(shape.count, COMES + 1))

    def _hindrance(self, learner: Learner, phase: Phase, epoch: Epoch) -> str:
        """Why no step of a phase can be recorded; empty if no reason is known."""
        try:
            if learner.world.size > 1:
                raise Refused("several processes train together")
            if phase.grad_mode != "no_grad" and not phase.training:
                raise Refused(f"its grad_mode is {phase.grad_mode!r}")
            Cells.of(learner, phase, self._hooks.of(learner, phase, epoch).owners)
        except Refused as refused:
            return str(refused)
        return ""

    def look_again(self, shape: Shape, recording: Recording, learner: Learner, phase: Phase, epoch: Epoch) -> None:
        """Drop a recording that no longer holds."""
        try:
            changed = self._changed(shape, recording, learner, phase, epoch)
        except Refused as refused:
            self._shapes.refuse(shape, str(refused))
            return
        if changed:
            shape.begin_anew(0)
            shape.changes += 1
            if shape.changes > CHANGES:
                self._shapes.refuse(shape, f"{changed} changes from time to time")

    @staticmethod
    def _changed(shape: Shape, recording: Recording, learner: Learner, phase: Phase, epoch: Epoch) -> str:
        """Describe a change since a step was recorded; an empty string without one."""
        if shape.plan() is not epoch.plan:
            return "the list of plugins"
        cells = Cells.of(learner, phase, recording.given.owners)
        if name := recording.constants.changed(cells):
            return name
        if not recording.inputs.fit(recording.inputs.now(epoch, recording.given.batch[0], cells.tensors())):
            return "the dtype, shape, strides or device of a tensor"
        return "" if shape.epoch() is epoch else recording.constants.changed_outside()

    def record(self, shape: Shape, learner: Learner, phase: Phase, epoch: Epoch, step: Step) -> None:
        """Record and compile a shape, or give the reason."""
        if reason := self._hindrance(learner, phase, epoch):
            shape.everywhere = True
            self._shapes.refuse(shape, reason)
            return
        if self._shapes.are_enough(shape):
            self._shapes.refuse(shape, f"{COMPILED} other shapes are compiled already")
            return
        try:
            made = self._recorded(shape, learner, phase, epoch, step)
            has_graph = self._compiling.start(shape, made, learner, epoch)
        except Refused as refused:
            self._shapes.refuse(shape, str(refused))
            return
        finally:
            self._compiling.rest(self._shapes.by_name.values())
        shape.recording, shape.plan = made, ref(epoch.plan)
        if shape.mode not in ("building", "compared"):
            self._shapes.say(f"{shape.short}: compiled again in {made.seconds:.1f} s")
        elif not has_graph and (more := shape.takes - shape.count) > 0:
            beside = "is compiled beside the training, and takes over after"
            self._shapes.say(f"{shape.short} {beside} {more} more steps")

    def _recorded(self, shape: Shape, learner: Learner, phase: Phase, epoch: Epoch, step: Step) -> Recording:
        """A recording, with as many hooks as can be recorded.

        Raises:
            Refused: The step cannot be recorded, or is not worth compiling.
        """
        while True:
            hooks = self._hooks.of(learner, phase, epoch)
            if reason := self._worth(shape, learner, epoch, 0):
                raise Refused(reason)
            given = Given(learner, phase, hooks, step)
            self._compiling.expect(shape, learner)
            try:
                return Recording(given, epoch, lambda nodes: self._worth(shape, learner, epoch, nodes))
            except Unliftable as hook:
                if hook.plugin in self._hooks.after:
                    raise
                self._hooks.leave_out(hook.plugin)

    def _worth(self, shape: Shape, learner: Learner, epoch: Epoch, nodes: int) -> str:
        seen = sum(each.count for each in self._shapes.of(epoch.phase))
        return self._compiling.worth(shape, learner, steps_left(learner, epoch) * shape.count / max(seen, 1), nodes)

    def take_over(self, shape: Shape, recording: Recording) -> None:
        """Give a shape its compiled graph, which is compared before it takes over."""
        try:
            self._compiling.wait_for(shape, recording)
        except Refused as refused:
            self._shapes.refuse(shape, str(refused))
            return
        self._compiling.rest(self._shapes.by_name.values())
        if shape.by_clock:
            self._shapes.say(f"{shape.short}: {BY_CLOCK}")
