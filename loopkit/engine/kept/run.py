"""Run: the fit and the epochs that run now, as far as what is saved needs them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from loopkit.engine.kept.position import Position
from loopkit.progress import Progress

if TYPE_CHECKING:
    from loopkit.engine.life.epoch import Epoch


class RunningFit(Protocol):
    """The fit that is running."""

    position: Position

    def saved(self) -> dict[str, Any]:
        """Return its saved form."""

    def go_on(self) -> None:
        """Resume from the position that was loaded."""


class Run(Protocol):
    """The fit that is running, and the epochs that are open."""

    progress: Progress
    epochs: list[Epoch]

    @property
    def fit(self) -> RunningFit | None:
        """The fit; None if none is running."""

    @property
    def open_epochs(self) -> list[Epoch]:
        """The epochs of the fit that are open, the outermost first."""

    @property
    def can_save(self) -> bool:
        """Whether the state can be saved now."""
