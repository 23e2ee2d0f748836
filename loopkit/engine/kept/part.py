"""Part: one thing that a state holds, with its check and its way back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol


class Part(Protocol):
    """Something that is kept over a fit or an epoch: its living form, its saved form, and the way between them.

    A part that is made for a fit or an epoch gets its saved form in `begin`; one of the learner, which exists already,
    in `load`. No part uses both.
    """

    name: str
    """Where a state holds it."""
    version: int
    """The form of `saved`; `problems` and `load` know all forms up to this one."""

    def begin(self, saved: Any | None) -> None:
        """Start with the fit or epoch, from what a state holds of it; None if it is new."""

    def end(self, error: BaseException | None) -> None:
        """End with the fit or epoch, which `error` ended early if it is given."""

    def saved(self) -> Any:
        """Return its saved form: None, booleans, numbers, strings, lists, tuples, dicts and tensors."""

    def problems(self, saved: Any) -> list[str]:
        """Compare a saved form with the learner, and return the differences in words, before anything is changed."""

    def load(self, saved: Any) -> Callable[[], None]:
        """Put a saved form back into what exists already, and return the undo."""

    def share(self, saved: list[Any], rank: int, size: int) -> Any:
        """Return the share of process `rank` of `size`, from the saved forms of all processes that saved."""
