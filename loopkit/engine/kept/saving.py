"""Saving: the state of a learner, everything that decides how training goes on, is collected."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from loopkit.base import generators, sharded
from loopkit.engine.kept.left_out import LeftOut
from loopkit.engine.kept.open_epoch import OpenEpoch
from loopkit.engine.kept.parts import Parts
from loopkit.engine.kept.ranks import gathered
from loopkit.engine.kept.resume import EpochStart, Resume, Run
from loopkit.engine.kept.witness.witness import Witness
from loopkit.errors import StateError

if TYPE_CHECKING:
    from loopkit.base.world import World


class Mailbox(Protocol):
    """The requests of a run, which are answered before it is saved."""

    world: World

    def settle(self) -> None:
        """Answer the stops that were asked for."""


class WeightsPlace(Protocol):
    """The place of the models' own weights, in which others may stand."""

    stack: list[Any]

    def in_training_form(self) -> AbstractContextManager[None]:
        """Inside, the replacements have the form in which modules are trained."""

    def own(self) -> AbstractContextManager[None]:
        """Inside, the models hold their own weights."""


class Saving:
    """Collects the parts of a state, and the place of the run.

    Args:
        parts: All that a state holds of the learner.
        place: The replacements of the models' own weights.
        left_out: Frozen weights that a state leaves out.
        witness: Names what moves and is in no state.
        resume: The place of the run.
        running: The fit and the epochs that run now.
        requests: The mailbox.
    """

    def __init__(
        self,
        parts: Parts,
        place: WeightsPlace,
        left_out: LeftOut,
        witness: Witness,
        resume: Resume,
        running: Run,
        requests: Mailbox,
    ) -> None:
        self._parts = parts
        self._place = place
        self._left_out = left_out
        self._witness = witness
        self._resume = resume
        self._running = running
        self._requests = requests

    def saved(self, at: EpochStart | None = None, positions: bool = True, whole: bool = True) -> dict[str, Any]:
        """Return the result of ``Learner.state_dict``, if it can be made now."""
        if not positions:
            return self._collect(None, positions=False, whole=whole)
        self._check_place(at)
        world = self._requests.world
        if world.size > 1:
            self._check_windows()
        state = self._collect(at, whole=whole)
        if world.size > 1:
            state["ranks"] = gathered(self._parts, state, world.gather, world.rank)
        return state

    def _check_place(self, at: EpochStart | None) -> None:
        """Raise where there is no way to go on from."""
        running = self._running
        if at is not None:
            epochs = running.open_epochs
            runs = epochs[-1:] == [at.epoch] and all(epoch.loop.between for epoch in epochs[:-1])
            if not runs or running.progress != at.progress:
                raise StateError(
                    "state_dict(at=mark): there is no way back to the mark, since its epoch is not the one that is "
                    "running, or steps were trained in it. Mark the epoch that is running, in its epoch_context"
                )
        elif any(window.count and window.keeps_aside for epoch in running.open_epochs for window in epoch.windows):
            raise StateError(
                "state_dict inside an accumulation window whose gradients the optimizer keeps itself, as in private "
                "training: call it after the window's update, when learner.current.can_save says so"
            )
        elif not running.can_save:
            raise StateError(
                "state_dict in the middle of a step, or of an epoch that a hook runs: no run could resume from "
                "there. Call it at step_end or phase_end, when learner.current.can_save says so"
            )

    def _check_windows(self) -> None:
        """Raise where a window holds gradients of this process alone."""
        windows = [window for epoch in self._running.open_epochs for window in epoch.windows if window.count]
        if any(not sharded.is_sharded(p) for window in windows for p in window.params):
            raise StateError(
                "state_dict of several processes inside an accumulation window, which holds only this process's "
                "gradients: call it after the window's update"
            )

    def _collect(self, mark: EpochStart | None, positions: bool = True, whole: bool = True) -> dict[str, Any]:
        """The state; without positions there is nothing in it of open epochs and their data."""
        self._requests.settle()  # a plugin that puts a stop off keeps it in its state
        parts = self._parts
        state: dict[str, Any] = {"versions": parts.versions()}
        with self._place.in_training_form():
            self._witness.warn()
            state[parts.plugins.name] = self._plugins(mark, whole)
        replaced = bool(self._place.stack)
        with self._place.own():
            for part in parts:
                if part is parts.plugins:
                    continue
                found = part.saved(whole)
                if found is None:
                    continue
                if replaced and part.in_use:
                    found = copy.deepcopy(found)
                state[part.name] = found
            if positions:
                state.update(self._resume.saved(mark))
            else:
                state.update({"epochs": [], "data": {}, "nested": {}, "fit": None, "generators": generators.save()})
        if mark is None:
            self._witness.warn_of_forgotten(state)
        else:
            state["metrics"] = dict(mark.metrics)
            state["phases"].update(mark.phases)
        if whole:
            state["epochs"] = sharded.whole(state["epochs"])
        told = {part.name: state[part.name] for part in parts.told() if part.name in state}
        return self._left_out.taken({"versions": state["versions"], **told, **state})

    def _plugins(self, mark: EpochStart | None, whole: bool) -> dict[str, Any]:
        """The states of plugins; in a mark, as of then."""
        kept = {} if mark is None else mark.plugins
        kept = sharded.whole(kept) if whole else kept
        return {**self._parts.plugins.saved(whole, without=kept), **kept}

    def mark(self, epoch: OpenEpoch) -> EpochStart | None:
        """Return the data for a state as of now, the begin of an epoch that does not train; None without one.

        It copies the states of plugins that the epoch's steps call, and states without tensors of plugins that only
        its begin and end call. The others are taken to stay as they are: an average of the weights is too large to be
        copied.
        """
        place = self._resume.mark(epoch)
        if place is None:
            return None
        plugins = self._parts.plugins
        called = epoch.plan.called(epoch.phase)
        not_called = [name for name in plugins.now() if name not in called]
        states = plugins.saved(whole=False, without=not_called)
        states = {name: state for name, state in states.items() if called[name] or not _holds_tensors(state)}
        phases = {epoch.phase.name: epoch.phase.state_dict()} if epoch.phase.has_state else {}
        return EpochStart(
            epoch,
            place["data"],
            place["nested"],
            place["generators"],
            replace(self._running.progress),
            self._parts.metrics.saved(),
            *copy.deepcopy((states, phases)),
            copy.deepcopy(place["round"]),
        )


def _holds_tensors(state: Any) -> bool:
    if isinstance(state, Mapping):
        return any(map(_holds_tensors, state.values()))
    if isinstance(state, (list, tuple)):
        return any(map(_holds_tensors, state))
    return isinstance(state, Tensor)
