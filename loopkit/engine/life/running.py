"""Running: the fit, the epochs and the hooks of a learner that run now."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from loopkit.base.notes import add_note, shown
from loopkit.progress import Progress

if TYPE_CHECKING:
    from loopkit.engine.compile.plan import Numbered
    from loopkit.engine.kept.position import Position
    from loopkit.engine.life.epoch import Epoch
    from loopkit.engine.life.sources import Source
    from loopkit.phases import Phase
    from loopkit.result import FitResult


class OpenFit(Protocol):
    """The fit that is running, as the parts below it see it."""

    position: Position
    result: FitResult
    depth: int
    """How many epochs were open around it when it began."""
    timeout: float | None

    def saved(self) -> dict[str, Any]:
        """Return its saved form."""

    def go_on(self) -> None:
        """Resume from the position that was loaded."""

    def turn(self, phase: Phase, source: Source | None, length: int | None) -> Epoch:
        """Return an epoch of it."""

    def count_skip(self, reason: str) -> None:
        """An update was skipped."""


class Running:
    """The fit that is running, the epochs that are open, and how deep in hooks the run is.

    Args:
        progress: The learner's counters.
    """

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.epochs: list[Epoch] = []
        """The epochs that are open, the outermost first."""
        self.fit: OpenFit | None = None
        self.result: FitResult | None = None
        """The result of the running or last fit."""
        self.hooks = 0
        """How many hooks run that belong to no open epoch; an epoch that begins then is one of theirs."""

    @property
    def number(self) -> int:
        """The training epoch that runs, or after which something else does, as people count: from 1.

        Logs and states count the epochs that are complete, `Progress.epochs`.
        """
        return self.progress.epochs + any(epoch.trains for epoch in self.open_epochs)

    def where(self, phase: Phase, step: Numbered | None) -> str:
        """Phase, epoch and step, for messages."""
        return f"phase {phase.name!r}, epoch {self.number}" + ("" if step is None else f", step {step.index}")

    @property
    def open_epochs(self) -> list[Epoch]:
        """The epochs that are open, the outermost first, except epochs that were open when the fit began."""
        return self.epochs if self.fit is None else self.epochs[self.fit.depth :]

    @property
    def window_open(self) -> bool:
        """Whether any open epoch of the fit has gradients that wait for their update."""
        return any(epoch.window_open for epoch in self.open_epochs)

    @property
    def can_save(self) -> bool:
        """Whether the state can be saved now: no step is under way, nor an epoch that a hook has begun.

        Nor is a window open whose gradients an optimizer keeps itself.
        """
        epochs = self.open_epochs
        if any(epoch.keeps_aside for epoch in epochs):
            return False
        if self.hooks:
            return self.hooks == 1 and all(epoch.loop.between for epoch in epochs)
        return all(epoch.loop.between for epoch in epochs[:-1]) and all(epoch.loop.at_edge for epoch in epochs[-1:])

    def enter(self, fit: OpenFit) -> None:
        """A fit begins."""
        self.fit = fit
        self.result = fit.result

    def leave(self, hooks: int) -> None:
        """The fit is over, with so many hooks running around it."""
        self.fit = None
        self.hooks = hooks

    def close_epochs(self, error: BaseException) -> None:
        """Leave the epochs of the fit that are open although it ends: an interrupt came while they were left."""
        for epoch in reversed(self.open_epochs):
            try:
                epoch.abandon(error)
            except BaseException as late:
                if late is not error:
                    add_note(error, f"loopkit: leaving {epoch!r} failed too: {shown(late)}")

    @contextmanager
    def hook(self) -> Iterator[None]:
        """Inside, hooks run that belong to no open epoch: ``fit_begin``, ``phase_end`` or ``fit_end``."""
        self.hooks += 1
        try:
            yield
        finally:
            self.hooks -= 1

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Inside, epochs are none of the fit's, as if a hook of a hook ran them: they are not saved."""
        with self.hook(), self.hook():
            yield
