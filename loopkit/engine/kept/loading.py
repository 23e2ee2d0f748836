"""Loading: a state of a learner is put back, all or nothing."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from typing import Any, Protocol

from loopkit.base.kinds import NAMED
from loopkit.base.world import World
from loopkit.engine.kept.check import check
from loopkit.engine.kept.compiled import plain_names
from loopkit.engine.kept.data.data_check import STOP
from loopkit.engine.kept.left_out import LeftOut
from loopkit.engine.kept.parts import Parts
from loopkit.engine.kept.position import Position
from loopkit.engine.kept.ranks import localized
from loopkit.engine.kept.undo import Undos, undone_by
from loopkit.engine.kept.witness.witness import Witness
from loopkit.errors import ReentrancyError


class Run(Protocol):
    """The fit that is running, and the epochs that are open."""

    epochs: list[Any]
    fit: Any


class RunPlace(Protocol):
    """The place of the run that the next fit resumes."""

    def load(self, state: Mapping[str, Any], position: Position | None, replay: bool, data: str) -> None:
        """Take over what a state left open."""


class Loading:
    """Puts back the parts of a state, and the place of the run.

    Args:
        parts: All that a state holds of the learner.
        left_out: Frozen weights that a state leaves out.
        witness: Counts changes from the load on.
        resume: The place of the run.
        running: The fit and the epochs that run now.
    """

    def __init__(self, parts: Parts, left_out: LeftOut, witness: Witness, resume: RunPlace, running: Run) -> None:
        self._parts = parts
        self._left_out = left_out
        self._witness = witness
        self._resume = resume
        self._running = running

    def load(
        self,
        state: Mapping[str, Any],
        world: World,
        *,
        allow: Collection[str] = (),
        replay: bool = True,
        own: bool = False,
        data: str = STOP,
    ) -> None:
        """Load a state for ``Learner.load_state_dict``; with ``own`` its tensors may be taken over instead of copied.

        Raises:
            ReentrancyError: An epoch is running.
            StateError: The state is malformed, or does not fit.
        """
        if self._running.epochs:
            raise ReentrancyError("load_state_dict: an epoch is running; load before it begins")
        state = dict(state)
        for part in ("models", "buffers"):
            if _is_named(state, part):
                state[part] = plain_names(state[part])
        check(self._parts, self._left_out, self._left_out.filled(state), allow)
        if not own:
            state = copy.deepcopy(state)
        state = localized(self._parts, state, world.rank, world.size)
        self._load(state)
        position = None if state["fit"] is None else Position.of(state["fit"])
        self._resume.load(state, position, replay, data)
        if self._running.fit is not None and position is not None:
            self._running.fit.go_on()

    def _load(self, state: Mapping[str, Any]) -> None:
        """Load the parts; if one fails, all are as they were."""
        undos: Undos = []
        self._witness.begin()
        with undone_by(undos):
            for part in self._parts:
                part.prepare(state.get(part.name, {}))
            for part in self._parts:
                undo = part.load(state.get(part.name, {}))
                undos.append((part.what, undo))


def _is_named(state: Mapping[str, Any], part: str) -> bool:
    """Whether a part of a state is a mapping of mappings by names; else it is malformed."""
    return part in state and NAMED[1](state[part])
