"""OpenEpoch: the view of an epoch from which it is saved and resumed."""

from __future__ import annotations

from typing import Any, Protocol


class SavedPhase(Protocol):
    """A phase, whose state is saved under its name."""

    name: str

    @property
    def has_state(self) -> bool:
        """Whether it has a state."""

    def state_dict(self) -> dict[str, Any]:
        """Return its state."""


class GivenData(Protocol):
    """The data of a phase as they were given: batches, or a function that makes them."""

    given: Any
    made: bool

    @property
    def phase(self) -> SavedPhase:
        """The phase."""

    def epoch(self) -> tuple[Any, int | None]:
        """Return the data of the epoch that begins, and how many batches they are."""


class OpenEpoch(Protocol):
    """An epoch that is open, or begins."""

    alone: bool
    saved: dict[str, Any] | None
    data: Any
    length: int | None
    function: Any
    made: bool
    made_with: dict[str, Any] | None
    begun: Any
    times_asked: int

    @property
    def phase(self) -> Any:
        """The phase."""

    @property
    def loop(self) -> Any:
        """The loop of its steps."""

    @property
    def plan(self) -> Any:
        """The calls of plugins."""

    @property
    def windows(self) -> tuple[Any, ...]:
        """The accumulation windows."""

    @property
    def steps(self) -> int:
        """Steps begun so far."""

    @property
    def resumed(self) -> bool:
        """Whether it resumes from a saved state."""

    @property
    def first_process(self) -> bool:
        """Whether it runs in the process of rank 0."""

    def window(self, name: str) -> Any:
        """The window of an optimizer."""

    def agree_on(self, problem: str) -> str:
        """Return the problem of the first process that has one."""

    def stores(self) -> list[dict[str, Any]]:
        """Return the dicts that plugins keep for it."""

    def saved_stores(self) -> dict[str, Any]:
        """The saved form of the values that plugins keep for it."""
