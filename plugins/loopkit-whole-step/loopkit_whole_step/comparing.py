"""Trust in a graph: it is compared with eager steps and timed before it is kept, and looked at now and then."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any
from weakref import ref

from loopkit_whole_step.hooked import RecordedHooks
from loopkit_whole_step.shapes import COMES, Shapes, nothing
from loopkit_whole_step.verify import Comparison

if TYPE_CHECKING:
    from loopkit import Epoch, Learner, Step
    from loopkit_whole_step.record import Recording
    from loopkit_whole_step.shapes import Shape
    from loopkit_whole_step.whole_step import WholeStep

CHECKS = 2
"""So many steps in a row are compared first."""
LOOKS, APART = 3, 1000
"""One more is compared when an epoch begins: the first times in any case, then so many steps after the last."""
TURNS = 10
"""So many steps of either kind are timed."""
KEPT = 0.97
"""A graph is kept that takes at most so much of the eager step's time."""


class Comparing:
    """Compare the steps of graphs with eager ones, and decide whether the graphs are kept.

    Args:
        options: The plugin whose option decides whether a slower graph is kept.
        shapes: All shapes.
        hooks: The hooks that are recorded.
    """

    def __init__(self, options: WholeStep, shapes: Shapes, hooks: RecordedHooks) -> None:
        self._options = options
        self._shapes = shapes
        self._hooks = hooks
        self._last: Comparison | None = None
        """The comparison of the running step, until its metrics are compared."""

    @property
    def is_open(self) -> bool:
        """Whether a step's metrics have to be compared."""
        return self._last is not None

    def compare(
        self,
        shape: Shape,
        recording: Recording,
        learner: Learner,
        step: Step,
        default: Callable[[], None],
        leaves: Sequence[Any],
    ) -> None:
        """An eager step, and the graph on copies."""
        epoch = step.frame.epoch
        comparison = Comparison(recording, epoch, leaves)
        before = learner.progress.updates
        with comparison.watching():
            default()
        if recording.votes and not comparison.kept:
            return  # a plugin had something to say: nothing to compare
        updated = learner.progress.updates != before
        if difference := comparison.difference(step, updated):
            if shape.misses_again(comparison.gross):
                self._shapes.refuse(shape, f"compared, it is not the same: {difference}")
            return
        shape.misses = 0
        self._last = comparison
        shape.checks += 1
        if shape.checks >= CHECKS:
            self._accept(shape, epoch)

    def _accept(self, shape: Shape, epoch: Epoch) -> None:
        """Enough steps were the same."""
        is_wanted = self._options.when == "always"
        shape.mode = "graph" if is_wanted else "timed"
        shape.epoch, shape.eager, shape.graph = ref(epoch), [], []
        if is_wanted:
            self._shapes.say(f"{shape.short}: compiled in {shape.seconds:.1f} s")

    def is_due(self, shape: Shape, epoch: Epoch) -> bool:
        """Whether a compiled step is compared again: an epoch begins, or resumes."""
        return shape.epoch() is not epoch and (shape.looks < LOOKS or shape.since >= APART)

    def check(
        self, shape: Shape, recording: Recording, step: Step, default: Callable[[], None], leaves: Sequence[Any]
    ) -> None:
        """A compiled step, and the same as it is on copies."""
        epoch = step.frame.epoch
        shape.epoch, shape.looks, shape.since = ref(epoch), shape.looks + 1, 0
        comparison = Comparison(recording, epoch, leaves, live=True)
        if recording.votes and not comparison.kept:
            comparison.draw_again()
            default()
            return
        if difference := comparison.difference_from_plain(epoch):
            if comparison.gross:
                comparison.take_plain()
            if shape.misses_again(comparison.gross):
                reason = f"compared at the begin of an epoch, it is not the same any more: {difference}"
                self._shapes.refuse(shape, reason)
            else:
                shape.epoch = nothing  # the next step is compared, too
        else:
            shape.misses = 0
        recording.result.hand_over(step, comparison.outputs, leaves)

    def compare_metrics(self, plugin: str) -> None:
        """Compare the metrics that a plugin's hook has fed after an eager step."""
        comparison = self._last
        assert comparison is not None
        if plugin not in comparison.recording.inputs.fed:
            return
        self._last = None
        if not (difference := comparison.difference_of_metrics()):
            return
        self._hooks.leave_out(plugin)
        for shape in self._shapes.by_name.values():
            if shape.recording is comparison.recording:
                shape.begin_anew(COMES)
        self._shapes.say(f"{plugin} is updated after the compiled step: {difference}")

    def timed(self, shape: Shape, seconds: float) -> None:
        """Note the time of a compiled step; after enough of them the faster kind is kept."""
        shape.graph.append(seconds)
        if len(shape.graph) < TURNS:
            return
        ratio = shape.ratio
        assert ratio is not None
        if ratio > KEPT:
            self._shapes.refuse(shape, f"compiled it takes {ratio:.2f} of the time")
        else:
            shape.mode = "graph"
            self._shapes.say(f"{shape.short}: compiled in {shape.seconds:.1f} s, takes {ratio:.2f} of the time")
