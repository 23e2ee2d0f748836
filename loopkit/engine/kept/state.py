"""The state of a learner: everything that decides how training goes on, collected and put back."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from loopkit.base import generators, sharded
from loopkit.base.kinds import NAMED
from loopkit.engine.kept.check import check
from loopkit.engine.kept.compiled import plain_names
from loopkit.engine.kept.data_check import STOP
from loopkit.engine.kept.loader_positions import save_position
from loopkit.engine.kept.ranks import gathered, localized
from loopkit.engine.kept.resume import EpochStart, Position
from loopkit.engine.kept.undo import Undos, undone_by
from loopkit.errors import ReentrancyError, StateError
from loopkit.events import PhaseEnd

if TYPE_CHECKING:
    from loopkit.engine.life.core import Core
    from loopkit.engine.life.epoch import Epoch


def saved(core: Core, at: EpochStart | None = None, positions: bool = True, whole: bool = True) -> dict[str, Any]:
    """Return the result of ``Learner.state_dict``, if it can be made now."""
    if not positions:
        return collect(core, None, positions=False, whole=whole)
    if at is not None:
        epochs = core.running.open_epochs
        runs = epochs[-1:] == [at.epoch] and all(epoch.loop.between for epoch in epochs[:-1])
        if not runs or core.progress != at.progress:
            raise StateError(
                "state_dict(at=mark): there is no way back to the mark, since its epoch is not the one that is "
                "running, or steps were trained in it. Mark the epoch that is running, in its epoch_context"
            )
    elif not core.running.can_save:
        raise StateError(
            "state_dict in the middle of a step, or of an epoch that a hook runs: there is no way to go on from "
            "there. Call it at step_end or phase_end, when learner.current.can_save says so"
        )
    windows = [window for epoch in core.running.open_epochs for window in epoch.windows if window.count]
    if core.requests.world.size > 1 and any(not sharded.is_sharded(p) for window in windows for p in window.params):
        raise StateError(
            "state_dict of several processes inside an accumulation window, which holds gradients of this process "
            "alone: call it after the window's update"
        )
    state = collect(core, at, whole=whole)
    if core.requests.world.size > 1:
        state["ranks"] = gathered(core.parts, state, core.requests.world.gather, core.requests.world.rank)
    return state


def collect(core: Core, mark: EpochStart | None, positions: bool = True, whole: bool = True) -> dict[str, Any]:
    """The state; without positions there is nothing in it of open epochs and their data."""
    core.requests.settle()  # a plugin that puts a stop off keeps it in its state
    parts = core.parts
    weights = core.models.weights
    replaced = bool(weights.stack)
    kept = {} if mark is None else mark.plugins
    kept = sharded.whole(kept) if whole else kept
    state: dict[str, Any] = {"versions": parts.versions()}
    with weights.in_training_form():
        core.witness.warn()
        state[parts.plugins.name] = {**parts.plugins.saved(whole, without=kept), **kept}
    with weights.own():
        for part in parts:
            if part is not parts.plugins and (found := part.saved(whole)) is not None:
                state[part.name] = copy.deepcopy(found) if replaced and part.in_use else found
        if positions:
            state.update(core.resume.parts(core, mark))
        else:
            state.update({"epochs": [], "data": {}, "nested": {}, "fit": None, "generators": generators.save()})
    if mark is not None:
        state["metrics"] = dict(mark.metrics)
        state["phases"].update(mark.phases)
    if whole:
        state["epochs"] = sharded.whole(state["epochs"])
    return core.left_out.taken(
        {
            "versions": state["versions"],
            **{part.name: state[part.name] for part in parts.told() if part.name in state},
            **state,
        }
    )


def mark(core: Core, epoch: Epoch) -> EpochStart | None:
    """Return the data for a state as of now, the begin of an epoch that does not train; None without one.

    It copies the states of plugins that the epoch's steps call, and states without tensors of plugins that only its
    begin and end call. The others are taken to stay as they are: an average of the weights is too large to be copied.
    """
    phase, resume = epoch.phase, core.resume
    if phase.name in resume.waiting:
        return None
    try:
        data = resume.positions({outer.phase.name for outer in core.running.open_epochs if outer is not epoch})
        if phase.name not in data and epoch.made_with is not None:
            function = save_position(epoch.function, 0, running=False)
            data[phase.name] = {**function, "parts": epoch.made_with["parts"]}
        elif phase.name not in data:
            data[phase.name] = save_position(epoch.data, 0, running=False)
        nested = resume.inner_positions()
    except StateError:
        return None  # such data have no position
    called: dict[str, bool] = {}
    for event in phase.events():
        if event is not PhaseEnd:
            for placed in epoch.plan.order[event.hook]:
                called[placed.entry.plugin] = called.get(placed.entry.plugin, False) or "step" in event.arguments
    others = [name for name in core.registry.plugins if name not in called]
    states = core.parts.plugins.saved(whole=False, without=others)
    states = {name: state for name, state in states.items() if called[name] or not _holds_tensors(state)}
    phases = {phase.name: phase.state_dict()} if phase.has_state else {}
    kept = copy.deepcopy((states, phases))
    random = resume.random_state() if epoch.made_with is None else epoch.made_with["generators"]
    numbers = replace(core.progress), dict(core.metrics)
    return EpochStart(epoch, data, nested, random, *numbers, *kept, copy.deepcopy(core.round.saved()))


def _holds_tensors(state: Any) -> bool:
    if isinstance(state, Mapping):
        return any(map(_holds_tensors, state.values()))
    return isinstance(state, Tensor) or (isinstance(state, (list, tuple)) and any(map(_holds_tensors, state)))


def apply(
    core: Core,
    state: Mapping[str, Any],
    *,
    allow: Collection[str] = (),
    replay: bool = True,
    own: bool = False,
    data: str = STOP,
) -> None:
    """Load a state for ``Learner.load_state_dict``; with ``own`` its tensors may be taken over instead of copied."""
    if core.running.epochs:
        raise ReentrancyError("load_state_dict: an epoch is running; load before it begins")
    state = {**state, **{part: plain_names(state[part]) for part in ("models", "buffers") if _is_named(state, part)}}
    check(core, core.left_out.filled(state), allow)
    state = localized(
        core.parts,
        core.round,
        state if own else copy.deepcopy(dict(state)),
        core.requests.world.rank,
        core.requests.world.size,
    )
    _load(core, state)
    core.logbook.move_to(core.logbook.epoch)
    position = None if state["fit"] is None else Position.of(state["fit"])
    core.resume.load(state, position, replay, data)
    if core.running.fit is not None and position is not None:
        core.running.fit.go_on()


def _is_named(state: Mapping[str, Any], part: str) -> bool:
    """Whether a part of a state is a mapping of mappings by names; else it is malformed."""
    return part in state and NAMED[1](state[part])


def _load(core: Core, state: Mapping[str, Any]) -> None:
    """Load the parts; if one fails, all are as they were."""
    undos: Undos = []
    core.witness.begin()
    with undone_by(undos):
        for part in core.parts:
            part.prepare(state.get(part.name, {}))
        for part in core.parts:
            undos.append((part.what, part.load(state.get(part.name, {}))))
