"""The records of a phase's steps, one for each shape of batches."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from loopkit.author import say
from loopkit_whole_step.cells import SCALARS

if TYPE_CHECKING:
    from loopkit import Phase
    from loopkit_whole_step.record import Recording
    from loopkit_whole_step.replay import Replay
    from loopkit_whole_step.whole_step import WholeStep
    from loopkit_whole_step.worker import Build

COMES = 3
"""A shape is compiled when it has come so many times."""
COMPILED = 4
"""So many shapes are compiled at most."""
KNOWN, KEYS = 64, 4096
"""So many are counted at most, and so many forms of batches are found again at once."""
MISSES = 5
"""So many steps in a row that come out a little different are too many."""


class NoWindow(NamedTuple):
    """The window of a phase that does not train."""

    steps: int = 0
    size: int = 1
    due: bool = False
    seed: float = 1.0


UNTRAINED = (NoWindow(),)


def nothing() -> None:
    """A dead reference."""


@dataclass
class Shape:
    """The record of a phase's steps with one shape of batches."""

    name: str
    mode: str = "counted"
    """``"counted"``, ``"building"``, ``"compared"``, ``"timed"``, ``"graph"`` or ``"eager"``."""
    reason: str = ""
    """Why it is eager."""
    count: int = 0
    checks: int = 0
    changes: int = 0
    eager: list[float] = field(default_factory=list)
    """Seconds of steps."""
    graph: list[float] = field(default_factory=list)
    seconds: float = 0.0
    """The time of compiling."""
    recording: Recording | None = None
    plan: Callable[[], Any] = nothing
    """The plan that it was recorded with."""
    epoch: Callable[[], Any] = nothing
    """The epoch in which what it holds for constant was last looked at."""
    looks: int = 0
    """How often it was compared when an epoch began, in this process."""
    misses: int = 0
    """Steps in a row that came out a little different."""
    since: int = 0
    """Steps that were replayed since."""
    replay: Replay | None = None
    """Replays its steps in a row."""

    takes: int = 0
    """The graph takes over after so many steps of the shape."""
    known: bool = False
    """Whether its library was kept when the run began, so that the graph takes over at once."""
    by_clock: bool = False
    """Whether the graph took over as soon as it was ready."""
    build: Build | None = None
    """The graph that another process compiles."""
    looks_like: str = ""
    """The name of steps that look alike, known before they are recorded."""
    waited: float = 0.0
    """Seconds for which the training waited for it."""

    everywhere: bool = False
    """Whether the reason holds for all shapes."""
    left: float | None = None
    """The steps left in the fit, if they were too few to repay compiling; else None."""

    SAVED = (
        *("mode", "everywhere", "left", "reason", "count", "checks", "changes", "eager", "graph", "seconds"),
        *("takes", "by_clock", "known"),
    )

    @property
    def ratio(self) -> float | None:
        """The graph's time to the eager step's; None if they were not timed."""
        return statistics.median(self.graph) / statistics.median(self.eager) if self.graph and self.eager else None

    @property
    def short(self) -> str:
        """The step's name in messages."""
        phase, _, rest = self.name.partition(" ")
        return f"the step of {phase!r} for {rest.rpartition(' (')[0]}"

    def begin_anew(self, count: int) -> None:
        """Drop a decision; the shape has come so many times."""
        self.recording, self.looks_like, self.mode = None, "", "counted"
        self.count, self.checks = count, 0

    def compiled(self, recording: Recording) -> None:
        """Note that a recording has its graph."""
        self.seconds += recording.seconds
        if self.mode in ("counted", "building"):
            self.mode, self.eager = "compared", []

    def misses_again(self, gross: bool) -> bool:
        """Count a difference; returns whether it matters: a large one, or many in a row."""
        self.misses += 1
        return gross or self.misses >= MISSES

    def leave(self, goes_on: bool) -> None:
        """Leave a graph that is compiled, since the fit has ended; a later fit may continue it."""
        if self.mode == "building":
            self.recording = self.build = None
            if not goes_on:
                self.mode, self.takes = "counted", 0


class Shapes:
    """The records of all shapes, by phase and form of the batch.

    Args:
        options: The plugin whose option decides whether lines are printed.
    """

    def __init__(self, options: WholeStep) -> None:
        self._options = options
        self.by_name: dict[str, Shape] = {}
        self.by_key: dict[Any, Shape] = {}
        """The records of forms that have come in this process."""

    def of(self, phase: Phase) -> list[Shape]:
        """The shapes of a phase."""
        return [each for each in self.by_name.values() if each.name.startswith(f"{phase.name} ")]

    def is_compiled(self, phase: Phase) -> bool:
        """Whether a step of a phase is compiled, or about to be."""
        return any(each.mode in ("building", "compared", "timed", "graph") for each in self.of(phase))

    def are_enough(self, shape: Shape) -> bool:
        """Whether as many others are compiled as may be."""
        others = [each for each in self.by_name.values() if each is not shape]
        return sum(each.mode not in ("counted", "eager") for each in others) >= COMPILED

    def new(self, phase: Phase, key: Any, windows: Sequence[Any], leaves: Sequence[Any]) -> Shape:
        """The shape of a form that has not come before in this process."""
        looks = [
            (tuple(leaf.shape), str(leaf.dtype), *(() if leaf.is_contiguous() else leaf.stride()))
            if isinstance(leaf, Tensor)
            else leaf
            for leaf in leaves
        ]
        shape = self._named(f"{phase.name} {looks} {key[1:5]}", phase)
        if len(self.by_key) < KEYS:
            self.by_key[key] = shape
        if shape.mode != "eager":
            self._look_at(shape, windows, leaves)
        return shape

    def _named(self, name: str, phase: Phase) -> Shape:
        """The shape of a name, or the one of all that came after many others."""
        if name not in self.by_name and len(self.by_name) >= KNOWN:
            name = f"{phase.name} others"
            if name not in self.by_name:
                self.by_name[name] = Shape(name)
                self.refuse(self.by_name[name], f"{KNOWN} other shapes came before it")
        return self.by_name.setdefault(name, Shape(name))

    def _look_at(self, shape: Shape, windows: Sequence[Any], leaves: Sequence[Any]) -> None:
        """Refuse a shape whose windows or batch no graph can take."""
        window, *others = windows
        if any((each.steps, each.due, each.seed) != (window.steps, window.due, window.seed) for each in others):
            self.refuse(shape, "its optimizers are at different steps of their updates")
        elif window.seed is None:
            self.refuse(shape, "the weights of a window's steps differ, so that its gradients are rescaled", quiet=True)
        elif not all(isinstance(leaf, (Tensor, *SCALARS)) for leaf in leaves):
            self.refuse(shape, "its batch holds more than tensors and numbers")
        elif any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves):
            self.refuse(shape, "its batch requires grad")

    def refuse(self, shape: Shape, reason: str, quiet: bool = False) -> None:
        """Leave a shape's steps eager; the first one of a reason is told."""
        shape.mode, shape.reason, shape.recording = "eager", reason, None
        if not quiet and sum(each.reason == reason for each in self.by_name.values()) == 1:
            self.say(f"{shape.short} stays eager, because {reason}")

    def say(self, text: str) -> None:
        """Print a line."""
        if self._options.show:
            say(f"whole_step: {text}")

    def saved(self) -> dict[str, dict[str, Any]]:
        """The decisions."""
        return {
            name: {key: copy.copy(getattr(shape, key)) for key in Shape.SAVED} for name, shape in self.by_name.items()
        }

    def load(self, saved: dict[str, dict[str, Any]], version: str) -> None:
        """Restore the decisions of a version of torch."""
        self.by_name = {name: Shape(name, **copy.deepcopy(values)) for name, values in saved.items()}
        self.by_key = {}
        if version == str(torch.__version__):
            return
        for shape in self.by_name.values():
            if shape.mode in ("timed", "graph"):  # what another torch compiles is compared anew
                shape.mode, shape.checks = "compared", 0
