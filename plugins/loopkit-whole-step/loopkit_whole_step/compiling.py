"""Who compiles a recorded step, whether that is repaid, and when its graph takes over."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from loopkit_whole_step import estimate, private, worker
from loopkit_whole_step.handover import NotHandedOver, Written
from loopkit_whole_step.sealed import Refused

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from loopkit import Epoch, Learner
    from loopkit_whole_step.record import Recording
    from loopkit_whole_step.shapes import Shape
    from loopkit_whole_step.whole_step import WholeStep

SAVES = 0.3
"""The share of a step that compiling in this process is taken to save, before it is known."""
SECONDS, SECONDS_A_NODE = 4.0, 0.02
"""How long compiling in this process is taken to last, before it is known."""
BESIDE = 0.05
"""The share of the compiler's time that the training is taken to lose, while it works beside it."""
COMPARED = 30
"""So many eager steps are lost by comparing and timing."""
LEAST = 0.97
"""Compiling is worth it if the fit is taken to last at most so much of the time."""
SHARE = 2
"""A graph takes over at this part of the steps that are left, or earlier."""


class Compiling:
    """Compile recordings in another process, or in this one.

    Args:
        options: The plugin whose options decide.
    """

    def __init__(self, options: WholeStep) -> None:
        self._options = options
        self.worker = worker.Worker()
        self.began = time.time()
        """When the run began; libraries that were kept later are as if they were not there."""

    @property
    def is_beside(self) -> bool:
        """Whether another process compiles."""
        return self._options.backend == "inductor"

    @property
    def is_estimated(self) -> bool:
        """Whether the step at which a graph takes over is estimated, and earlier if its library was kept."""
        options = self._options
        return options.eager_steps is None and options.when != "always" and options.wait

    def expect(self, shape: Shape, learner: Learner) -> None:
        """Let the process that compiles import the compiler while the step is recorded."""
        shape.looks_like = shape.looks_like or looks(shape, learner)
        shape.known = shape.known or worker.is_known(shape.looks_like, self.began)
        if self.is_beside and not worker.is_known(shape.looks_like, time.time()):
            with suppress(NotHandedOver, OSError):
                self.worker.begin()

    def start(self, shape: Shape, made: Recording, learner: Learner, epoch: Epoch) -> bool:
        """Compile a recording, or let it be compiled beside the training; returns whether it has its graph.

        Raises:
            Refused: It cannot be compiled.
        """
        try:
            if not self.is_beside:
                raise NotHandedOver("the backend is another")
            written, constants = Written.of(*made.graph.traced)
            shape.build = self.worker.start(written)
        except (NotHandedOver, OSError):
            made.seconds += made.graph.compile(self._here)
            shape.compiled(made)
            return True
        shape.build.constants = constants
        if shape.mode not in ("counted", "building"):  # decided before a resume: the graph is that of before
            self.wait_for(shape, made)
            return True
        if shape.mode == "counted":
            shape.mode, shape.takes = (
                "building",
                shape.count + self._steps_beside(shape, steps_left(learner, epoch), made),
            )
        return False

    def _here(self, graph: torch.fx.GraphModule, inputs: Sequence[Tensor]) -> Callable[..., Any]:
        """Compile a graph in this process."""
        backend = self._options.backend
        if callable(backend):
            return backend(graph, inputs)
        return graph if backend == "none" else private.inductor(graph, inputs)

    def _steps_beside(self, shape: Shape, left: float, made: Recording) -> int:
        """After how many more steps a graph takes over, which no clock decides."""
        if not self.is_estimated or shape.known:
            return self._options.eager_steps or 0
        by_size = estimate.steps_beside(made.graph.traced[0].graph)
        return by_size if left == math.inf else min(by_size, int(left) // SHARE)

    def is_due(self, shape: Shape) -> bool:
        """Whether a graph takes over at the step that comes."""
        if shape.count < shape.takes:
            return False
        return self._options.wait or (shape.build is not None and self.worker.ready(shape.build))

    def wait_for(self, shape: Shape, made: Recording) -> None:
        """Give a recording its library.

        Raises:
            Refused: There is none.
        """
        build, shape.build = shape.build, None
        assert build is not None
        shape.by_clock = shape.by_clock or not self._options.wait
        started = time.perf_counter()
        try:
            made.graph.called_by(self.worker.take(build), build.constants)
            made.seconds += build.seconds
        except NotHandedOver:
            made.seconds += made.graph.compile(self._here)
        except worker.Failed as failed:
            raise Refused(str(failed)) from None
        shape.waited += time.perf_counter() - started
        worker.remember(shape.looks_like)
        shape.compiled(made)

    def rest(self, shapes: Iterable[Shape]) -> None:
        """End the process that compiles, if none of these is left for it."""
        if not any(each.mode == "building" for each in shapes):
            self.worker.close()

    # Whether it is repaid

    def worth(self, shape: Shape, learner: Learner, left: float, nodes: int) -> str:
        """The reason why compiling would not be repaid; empty if it may be, or if that was decided before a resume.

        Args:
            shape: The shape.
            learner: The learner.
            left: The steps that it is taken to come yet.
            nodes: Operations of the recorded graph; 0 before it is recorded.
        """
        if shape.mode != "counted" or not shape.eager or self._options.when == "always":
            return ""
        eager = min(shape.eager)
        parameters = sum(len(list(model.parameters())) for model in learner.models.values())
        nodes = nodes or (estimate.nodes_of(parameters) if self.is_beside else 0)
        if not self.is_beside:
            seconds = SECONDS + SECONDS_A_NODE * nodes
            repaid = left * eager * SAVES >= seconds
        else:
            shape.looks_like = shape.looks_like or looks(shape, learner)
            is_known = shape.known or worker.is_known(shape.looks_like, self.began)
            seconds = estimate.record_seconds(nodes) + (0.0 if is_known else estimate.build_seconds(nodes))
            after = self._seconds_with(left * eager, estimate.part_left(parameters, eager), nodes, is_known)
            repaid = after + COMPARED * eager < LEAST * left * eager
        if repaid:
            return ""
        shape.left = left
        return f"{left:.0f} steps are too few to repay {seconds:.0f} s of compiling"

    def _seconds_with(self, eager: float, part_left: float, nodes: int, is_known: bool) -> float:
        """The seconds that a fit is taken to last if its step is compiled.

        Args:
            eager: The seconds that it lasts without.
            part_left: The part of them that compiled steps take.
            nodes: Operations of the graph.
            is_known: Whether its library is kept.
        """
        if eager == math.inf:
            return 0.0
        build = 0.0 if is_known else estimate.build_seconds(nodes)
        beside = min(build, eager / SHARE) if self._options.wait else build
        return estimate.record_seconds(nodes) + (1 + BESIDE) * build + part_left * (eager - beside)

    def are_more(self, shape: Shape, left: float) -> bool:
        """Whether more steps are left than were too few for a shape."""
        return shape.left is not None and (self._options.when == "always" or left > shape.left)

    def too_few(self, steps: float, seconds: float) -> bool:
        """Whether so many steps of so many seconds repay nothing, however good the graph is."""
        least = estimate.RECORD if self.is_beside else SECONDS
        saves = 1 - estimate.CALLED if self.is_beside else SAVES
        return self._options.when != "always" and steps * seconds * saves < least


def steps_left(learner: Learner, epoch: Epoch) -> float:
    """Steps of an epoch's phase that the fit still plans, or the epoch by itself if it does not train in one."""
    fit = learner.current
    length = epoch.length or 0
    here = max(length - epoch.steps, 0)
    if fit is None:
        return math.inf if epoch.trains else here
    done = learner.progress.steps - fit.position.start.steps
    planned = fit.result.planned.steps
    left = math.inf if planned is None else max(planned - done, 0)
    if epoch.trains:
        return left
    return here + length * left / max(done, 1) if length else here  # no length times no end is no number


def looks(shape: Shape, learner: Learner) -> str:
    """A name that a step probably shares only with steps of the same graph, known before it is recorded."""
    parts = [shape.name, *map(str, learner.models.values()), str(learner.loss_fn)]
    parts += [f"{type(each)} {[group.keys() for group in each.param_groups]}" for each in learner.optimizers.values()]
    return hashlib.sha256(repr((parts, list(learner.plugins))).encode()).hexdigest()[:40]
