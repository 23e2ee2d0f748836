"""LeftOpen: the epochs that were open in a loaded state, until they are open again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from loopkit.base import generators
from loopkit.engine.kept.data.content import content
from loopkit.errors import StateError


class LeftOpen:
    """The epochs that a loaded state left open, and where the random generators are when these are open again."""

    def __init__(self) -> None:
        self.waiting: list[str] = []
        """The phases whose epoch was open in a loaded state and has not begun again yet, the outermost first."""
        self.left = False
        """Whether there is any, or random generators that are to be put back when there is none any more."""
        self.epochs: list[dict[str, Any]] = []
        """The saved states of the epochs in `waiting`."""
        self._generators: Any = None

    def load(self, state: Mapping[str, Any]) -> None:
        """Take over what a state left open."""
        self.epochs = list(state["epochs"])
        self._generators = state["generators"]
        self.waiting = [saved["phase"] for saved in self.epochs]
        self.left = bool(self.epochs) or self._generators is not None

    def forget(self) -> None:
        """Forget what was left open."""
        self.epochs = []
        self._generators = None
        self.waiting = []
        self.left = False

    def take(self, phase: str, training: bool) -> dict[str, Any] | None:
        """Return the loaded record of the epoch of a phase that begins now, or None if it was not open at the save."""
        if not self.waiting:
            self.restore_generators()
        elif self.waiting[0] == phase:
            del self.waiting[0]
            return self.epochs.pop(0)
        elif training:
            raise StateError(
                f"the state that was loaded was saved in an epoch of phase {self.waiting[0]!r}, and this is one of "
                f"{phase!r}: run the same phases in the same order as when it was saved"
            )
        return None

    def check_given(self, phase: str, data: Any) -> None:
        """Raise for an open epoch of the user's loop that is given other data than before the save.

        Raises:
            StateError: It is.
        """
        if self.waiting[:1] != [phase]:
            return
        saved = self.epochs[0]
        before = saved.get("content")
        now = content(data, saved["steps"])
        if before is not None and now is not None and before != now:
            raise StateError(
                f"the epoch of phase {phase!r} was open when the state was saved, after {saved['steps']} "
                f"steps, and it is given other data now ({type(data).__name__}): the code between two runs is "
                f"run again after a resume, and made something else. Keep what it makes with "
                f"rounds.once('data', lambda: ...), which is saved"
            )

    def restore_generators(self) -> None:
        """Put the random generators where they were, when what was open is open again."""
        if not self.waiting:
            if self._generators is not None:
                generators.restore(self._generators)
            self._generators = None
            self.left = False

    def leave_generators(self) -> None:
        """Leave the random generators as they are, if nothing is open any more: they have come to their place."""
        if not self.waiting:
            self._generators = None
            self.left = False

    def random_state(self) -> Any:
        """Where the random generators are, or will be when what was open is open again."""
        return generators.save() if self._generators is None else self._generators
