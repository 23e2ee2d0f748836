"""How many steps make an update, by the updates so far."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from loopkit.author import Shown
from loopkit.errors import PluginError
from loopkit.hooks import hookimpl
from loopkit.phases import Phase

if TYPE_CHECKING:
    from torch import nn

    from loopkit.learner import Learner


class Accumulate(Shown):
    """Set ``learner.accumulate``, the steps of an update, by a schedule.

    ``{0: 1, 1000: 4}`` makes an update of four steps from update 1000 on.

    Args:
        schedule: Steps per update, by the number of updates from which on; it begins with 0.
        name: The plugin's name.

    A schedule over a whole fit without its own ``updates`` uses the steps per update at its start: give it
    the number of updates.

    Raises:
        PluginError: A number is no count, or none is given for update 0.

    Example::

        Accumulate({0: 1, 1000: 4, 5000: 16})
    """

    provides = "accumulate"
    owns = ("accumulate",)

    def __init__(self, schedule: Mapping[int, int], name: str = "accumulate") -> None:
        self.schedule = dict(sorted(schedule.items()))
        numbers = [(update, 0) for update in schedule] + [(steps, 1) for steps in schedule.values()]
        if any(isinstance(n, bool) or not isinstance(n, int) or n < least for n, least in numbers):
            raise PluginError(f"Accumulate({schedule!r}): it maps updates, from 0, to steps per update, from 1")
        if 0 not in schedule:
            raise PluginError(f"Accumulate({schedule!r}): give the steps per update from update 0 on, {{0: 1, ...}}")
        self.name = name
        self._learner: weakref.ref[Learner] | None = None
        self._given: int | None = None
        """The learner's own number of steps, which it has again when the plugin is removed."""

    def leave(self, learner: Learner) -> None:
        """Put the learner's own number of steps back."""
        if self._given is not None:
            learner.accumulate = self._given

    def steps(self, updates: int) -> int:
        """Steps of the update that comes after so many."""
        return [steps for update, steps in self.schedule.items() if update <= updates][-1]

    @hookimpl
    def setup_model(self, learner: Learner, model: nn.Module) -> nn.Module:
        """Set it for the first window."""
        if self._learner is None or self._learner() is not learner:
            self._given = learner.accumulate
        self._learner = weakref.ref(learner)
        self._set(learner)
        return model

    @hookimpl
    def step_end(self, learner: Learner, phase: Phase) -> None:
        """Set it for the next window."""
        if phase.training:
            self._set(learner)

    def _set(self, learner: Learner) -> None:
        if learner.accumulate != (steps := self.steps(learner.progress.updates)):
            learner.accumulate = steps

    def state_dict(self) -> dict[str, Any]:
        """How many steps an update takes now, for a window that is open."""
        learner = None if self._learner is None else self._learner()
        return {"steps": self.schedule[0] if learner is None else learner.accumulate}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the size of the window."""
        learner = None if self._learner is None else self._learner()
        if learner is not None:
            learner.accumulate = state["steps"]
