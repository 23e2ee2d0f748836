"""The state of a learner: everything that decides how training goes on, collected and put back."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from loopkit.base import generators, sharded
from loopkit.base.kinds import NAMED
from loopkit.base.notes import add_note, locate
from loopkit.engine.kept.buffers import put_buffers, unsaved_buffers
from loopkit.engine.kept.check import VERSIONS, check, stateful
from loopkit.engine.kept.compiled import plain_names
from loopkit.engine.kept.modes import Modes
from loopkit.engine.kept.optimizers import OptimizerPart
from loopkit.engine.kept.positions import save_position
from loopkit.engine.kept.proof import STOP
from loopkit.engine.kept.resume import Mark, Position
from loopkit.errors import ReentrancyError, StateError
from loopkit.events import PhaseEnd

if TYPE_CHECKING:
    from loopkit.engine.life.core import Core
    from loopkit.engine.life.epoch import Epoch
    from loopkit.engine.life.models import Models

PHASE = ".phase"
"""The owner of what a phase keeps for an epoch; no plugin can be called so."""


def saved(core: Core, at: Mark | None = None, positions: bool = True, whole: bool = True) -> dict[str, Any]:
    """Return the result of ``Learner.state_dict``, if it can be made now."""
    if not positions:
        return collect(core, None, positions=False, whole=whole)
    if at is not None:
        epochs = core.open_epochs
        runs = epochs[-1:] == [at.epoch] and all(epoch.loop.between for epoch in epochs[:-1])
        if not runs or core.progress != at.progress:
            raise StateError(
                "state_dict(at=mark): there is no way back to the mark, since its epoch is not the one that is "
                "running, or steps were trained in it. Mark the epoch that is running, in its epoch_context"
            )
    elif not core.can_save:
        raise StateError(
            "state_dict in the middle of a step, or of an epoch that a hook runs: there is no way to go on from "
            "there. Call it at step_end or phase_end, when learner.current.can_save says so"
        )
    windows = [window for epoch in core.open_epochs for window in epoch.windows if window.count]
    if core.world.size > 1 and any(not sharded.is_sharded(p) for window in windows for p in window.params):
        raise StateError(
            "state_dict of several processes inside an accumulation window, which holds gradients of this process "
            "alone: call it after the window's update"
        )
    state = collect(core, at, whole=whole)
    if core.world.size > 1:
        state["ranks"] = _gathered(core, state)
    return state


def collect(core: Core, mark: Mark | None, positions: bool = True, whole: bool = True) -> dict[str, Any]:
    """The state; without positions there is nothing in it of open epochs and their data."""
    core.requests.settle()  # a plugin that puts a stop off keeps it in its state
    plugins, models = core.registry.plugins, core.models
    replaced = bool(models.weights.stack)
    kept = {} if mark is None else mark.plugins
    state: dict[str, Any] = {
        "versions": dict(VERSIONS),
        "models": {},
        "buffers": {},
        "optimizers": {},
        "progress": asdict(core.progress),
        "metrics": dict(core.metrics if mark is None else mark.metrics),
        "plugins": {},
    }
    with models.weights.in_training_form():
        core.witness.warn()
        state["plugins"] = {**_states({n: p for n, p in plugins.items() if n not in kept}), **kept}
    state.update(core.flags.collected())
    with models.weights.own():
        phases = core.phase_states.collect()
        state["phases"] = copy.deepcopy(phases) if replaced else phases
        state.update(_weights(models, whole, replaced))
        if positions:
            state.update(core.resume.parts(core, mark))
        else:
            state.update({"epochs": [], "data": {}, "nested": {}, "fit": None, "generators": generators.save()})
    if mark is not None:
        state["phases"].update(mark.phases)
    if measured := models.measured.saved():
        state["weights"] = measured
    for part in ("optimizers", "plugins", "epochs", *(["weights"] if measured else [])) if whole else ():
        state[part] = sharded.whole(state[part])
    return state


def _weights(models: Models, whole: bool, replaced: bool) -> dict[str, Any]:
    """Collect the own weights and the optimizers, copied if what stands in their place comes back before a save."""
    optimizers = {name: OptimizerPart(name, optimizer).saved() for name, optimizer in models.optimizers.items()}
    made: dict[str, Any] = {"models": {}, "buffers": {}, "optimizers": optimizers}
    for name, model in models.items():
        made["models"][name] = sharded.weights(model, sharded.whole if whole else dict)
        made["buffers"][name] = {key: tensor.detach() for key, tensor in unsaved_buffers(model).items()}
    made.update(models.extras.collected(sharded.whole if whole else dict))
    if models.modes.optimizers:
        made[Modes.name] = models.modes.saved()
    return copy.deepcopy(made) if replaced else made


def mark(core: Core, epoch: Epoch) -> Mark | None:
    """What `collect` needs for a state as of now, the begin of an epoch that does not train; None if there is none.

    It copies the states of plugins that the epoch's steps call, and states without tensors of plugins that only its
    begin and end call. The others are taken to stay as they are: an average of the weights is too large to be copied.
    """
    phase, resume = epoch.phase, core.resume
    if phase.name in resume.waiting:
        return None
    try:
        data = resume.positions({outer.phase.name for outer in core.open_epochs if outer is not epoch})
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
    plugins = core.registry.plugins
    states = _states({name: plugin for name, plugin in plugins.items() if name in called})
    states = {name: state for name, state in states.items() if called[name] or not _holds_tensors(state)}
    phases = {phase.name: phase.state_dict()} if phase.has_state else {}
    kept = copy.deepcopy((states, phases))
    random = resume.random_state() if epoch.made_with is None else epoch.made_with["generators"]
    numbers = replace(core.progress), dict(core.metrics)
    return Mark(epoch, data, nested, random, *numbers, *kept, copy.deepcopy(core.round.saved()))


def _holds_tensors(state: Any) -> bool:
    if isinstance(state, Mapping):
        return any(map(_holds_tensors, state.values()))
    return isinstance(state, Tensor) or (isinstance(state, (list, tuple)) and any(map(_holds_tensors, state)))


def _own_parts(state: Mapping[str, Any], plugins: Mapping[str, Any]) -> dict[str, Any]:
    """What differs from process to process in a state that was collected in one of them."""
    return {
        **({"round": state["round"]} if "round" in state else {}),
        "generators": state["generators"],
        "plugins": {name: value for name, value in state["plugins"].items() if hasattr(plugins.get(name), "reshard")},
        "phases": state["phases"],
        "stores": [
            {
                owner: store
                for owner, store in epoch["stores"].items()
                if owner == PHASE or hasattr(plugins.get(owner), "reshard_store")
            }
            for epoch in state["epochs"]
        ],
    }


def _gathered(core: Core, state: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Gather the parts that differ; this process's are the state's own objects, so that they are written once."""
    own = _own_parts(state, core.registry.plugins)
    ranks: list[dict[str, Any]] = core.world.gather(own)
    ranks[core.world.rank] = own
    return ranks


def _localized(core: Core, given: Mapping[str, Any]) -> dict[str, Any]:
    """The state with what is this process's own; with another number of processes than at the save, its share of it."""
    world, plugins = core.world, core.registry.plugins
    state = {**given, "plugins": dict(given["plugins"])}
    ranks = state.get("ranks") or [_own_parts(state, plugins)]
    own = ranks[min(world.rank, len(ranks) - 1)]
    # of a process that was not there, the generators are its own
    state["generators"] = own["generators"] if world.rank < len(ranks) else generators.save()
    state["phases"] = own["phases"]
    if "round" in own:
        state["round"] = core.round.share([rank["round"] for rank in ranks], world.rank, world.size)
    same = len(ranks) == world.size
    for name in ranks[0]["plugins"]:
        reshard = None if same else getattr(plugins.get(name), "reshard", None)
        saved = [rank["plugins"][name] for rank in ranks]
        state["plugins"][name] = own["plugins"][name] if reshard is None else reshard(saved, world.rank, world.size)
    state["epochs"] = [
        {**epoch, "stores": {**epoch["stores"], **_stores(core, [rank["stores"][i] for rank in ranks])}}
        for i, epoch in enumerate(state["epochs"])
    ]
    return state


def _stores(core: Core, saved: list[dict[str, Any]]) -> dict[str, Any]:
    """This process's share of what each process has kept for an epoch."""
    world, plugins, made = core.world, core.registry.plugins, {}
    for owner in dict.fromkeys(owner for each in saved for owner in each):
        reshard = None if len(saved) == world.size else getattr(plugins.get(owner), "reshard_store", None)
        if reshard is None:
            made[owner] = saved[min(world.rank, len(saved) - 1)].get(owner, {})
        else:
            made[owner] = reshard([each.get(owner, {}) for each in saved], world.rank, world.size)
    return made


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
    if core.epochs:
        raise ReentrancyError("load_state_dict: an epoch is running; load before it begins")
    state = {**state, **{part: plain_names(state[part]) for part in ("models", "buffers") if _is_named(state, part)}}
    check(core, state, allow)
    state = _localized(core, state if own else copy.deepcopy(dict(state)))
    undo: list[tuple[str, Callable[[], None]]] = []
    try:
        _load(core, state, undo)
    except BaseException as error:
        for what, put_back in reversed(undo):
            try:
                put_back()
            except Exception as second:
                add_note(error, f"{what} could not be put back as it was before the load: {second!r}")
        raise
    for counter, value in state["progress"].items():
        setattr(core.progress, counter, value)
    core.logbook.move_to(core.logbook.epoch)
    core.metrics.clear()
    core.metrics.update(state["metrics"])
    position = None if state["fit"] is None else Position.of(state["fit"])
    core.resume.load(state, position, replay, data)
    if core.fit is not None and position is not None:
        core.fit.go_on()


def _is_named(state: Mapping[str, Any], part: str) -> bool:
    """Whether a part of a state is a mapping of mappings by names; else it is malformed."""
    return part in state and NAMED[1](state[part])


def _load(core: Core, state: Mapping[str, Any], undo: list[tuple[str, Callable[[], None]]]) -> None:
    """Load what may refuse; ``undo`` collects how to put back what has changed."""
    for name, plugin in stateful(core.registry.plugins).items():
        if name in state["plugins"]:
            undo.append((f"plugin {name!r}", _undo_owner(plugin)))
            try:
                plugin.load_state_dict(state["plugins"][name])
            except Exception as error:
                locate(error, f"in load_state_dict of plugin {name!r}, whose saved state may be of another version")
                raise
    undo += [(f"phase {phase.name!r}", _undo_owner(phase)) for phase in core.phase_states.known]
    core.phase_states.load(state["phases"])
    core.witness.begin()
    undo.append(
        ("the modules of the loss function, phases and plugins", core.models.extras.load(state.get("extras", {})))
    )
    undo.append(("which parameters are trained", core.flags.load(state.get("flags", {}))))
    _materialize(core.models, state["models"])
    for name, optimizer in core.models.optimizers.items():
        try:
            undo.append((f"optimizer {name!r}", OptimizerPart(name, optimizer).load(state["optimizers"][name])))
        except Exception as error:
            locate(error, f"in load_state_dict of optimizer {name!r}")
            raise
    undo.append(("the modes of optimizers", core.models.modes.load(state.get(Modes.name, {}))))
    before = generators.save()
    undo.append(("the random generators", lambda: generators.restore(before)))
    generators.restore(state["generators"])
    with torch.no_grad(), core.models.module_modes.in_training_form():
        for name, model in core.models.items():
            if any(not isinstance(value, Tensor) for value in model.state_dict().values()):
                undo.append((f"model {name!r}", partial(model.load_state_dict, copy.deepcopy(model.state_dict()))))
            try:
                own, saved = model.state_dict(), state["models"][name]
                model.load_state_dict({key: sharded.like(value, own.get(key)) for key, value in saved.items()})
            except Exception as error:
                locate(error, f"in load_state_dict of model {name!r}")
                raise
            put_buffers(model, state["buffers"][name])


def _materialize(models: Models, saved: Mapping[str, Any]) -> None:
    """Give lazy parameters the shapes of the state, which an optimizer's state needs."""
    for name, model in models.items():
        if any(map(is_lazy, model.parameters())):
            model.load_state_dict(saved[name])


def _undo_owner(owner: Any) -> Callable[[], None]:
    """Return a function that puts a plugin or phase back into its state of now."""
    attributes = _undo_attributes(owner)
    try:
        before = copy.deepcopy(owner.state_dict())
    except Exception:  # it has none before the first fit
        return attributes

    def undo() -> None:
        try:
            owner.load_state_dict(before)  # what its parts hold
        finally:
            attributes()

    return undo


def _undo_attributes(owner: Any) -> Callable[[], None]:
    """Return a function that gives an object its attributes of now."""
    attributes = getattr(owner, "__dict__", {})
    before = dict(attributes)

    def undo() -> None:
        attributes.clear()
        attributes.update(before)

    return undo


def _states(plugins: Mapping[str, Any]) -> dict[str, Any]:
    """The states of those plugins that have one."""
    states = {}
    for name, plugin in stateful(plugins).items():
        try:
            states[name] = plugin.state_dict()
        except Exception as error:
            locate(error, f"in state_dict of plugin {name!r}")
            raise
    return states
