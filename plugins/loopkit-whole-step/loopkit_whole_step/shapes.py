"""The record of a phase's steps with one shape of batches."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from loopkit_whole_step.record import Recording
    from loopkit_whole_step.replay import Replay
    from loopkit_whole_step.worker import Build


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
