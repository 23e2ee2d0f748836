"""The state of a learner: everything that decides how training goes on, collected and put back."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from loopkit import generators
from loopkit.dispatch import add_note, locate
from loopkit.distributed import sharded
from loopkit.errors import ReentrancyError, StateError
from loopkit.positions import begin, load_position, needs_replay, pass_length, resume, save_position
from loopkit.progress import Progress
from loopkit.state_check import check, stateful, unsaved_buffers

if TYPE_CHECKING:
    from loopkit.epoch import Epoch
    from loopkit.learner import Learner

__all__ = ["Pending", "Position", "apply", "collect", "forget_open", "of_rank"]


@dataclass
class Position:
    """Where a fit is: what it has done, and which pass comes next or is under way."""

    start: Progress
    """The counters when the fit began."""
    number: int = 1
    """Which of the learner's fits it is, from 1."""
    by_fit: bool = False
    """Whether ``fit`` runs the loop, so that it is known which pass comes next."""
    epochs: int = 0
    """Training passes that have ended."""
    validate: bool = False
    """The next pass, or the one under way, is the validation that follows a training pass."""
    validating: bool = False
    """A validation in the middle of a training pass is due or under way."""
    validated: int = 0
    """Updates when the last validation in the middle of a training pass began."""
    seconds: float = 0.0
    """How long the fit had run when it was saved; those since then are not in it."""
    stop: tuple[str, str] | None = None
    """The request for an end that was there when it was saved, before that came: its reason, and by whom."""

    @classmethod
    def of(cls, saved: Mapping[str, Any]) -> Position:
        """The position that ``asdict`` was made of."""
        return cls(**{**saved, "start": Progress(**saved["start"])})


@dataclass
class Pending:
    """What a loaded state holds for passes and loaders that have not begun again yet."""

    passes: list[dict[str, Any]] = field(default_factory=list)
    """The passes that were open, the outermost first."""
    data: dict[str, Any] = field(default_factory=dict)
    """Positions of loaders without an open pass, by phase."""
    generators: Any = None
    replay: bool = False


def collect(learner: Learner, positions: bool = True) -> dict[str, Any]:
    """What ``Learner.state_dict`` returns; without positions there is nothing in it of open passes and their data."""
    state: dict[str, Any] = {
        "models": {},
        "buffers": {},
        "optimizers": {
            name: {"class": type(optimizer).__name__, **optimizer.state_dict()}
            for name, optimizer in learner.optimizers.items()
        },
        "progress": asdict(learner.progress),
        "metrics": dict(learner.metrics),
        "plugins": {name: _state_of(name, plugin) for name, plugin in stateful(learner).items()},
    }
    with raw_weights(learner):
        for name, model in learner.models.items():
            state["models"][name] = sharded.weights(model)
            state["buffers"][name] = {key: tensor.detach() for key, tensor in unsaved_buffers(model).items()}
        passes = learner.open_passes if positions else []
        pending = learner._pending
        waiting = pending.passes if pending is not None and positions else []  # loaded, and not open again yet
        state["passes"] = [*(_pass(epoch) for epoch in passes), *waiting]
    opened = {epoch.phase.name for epoch in passes} | {saved["phase"] for saved in waiting}
    state["data"] = {} if pending is None else dict(pending.data)
    for phase, data in learner._loaders.items() if positions else ():
        if phase not in opened and phase not in state["data"]:  # else not restored yet
            state["data"][phase] = save_position(data, 0, running=False)
    position = learner.position
    state["fit"] = None
    if position is None and learner._resumed is not None:  # loaded, and its fit has not begun again yet
        state["fit"] = asdict(learner._resumed)
    elif position is not None:
        asked = learner._stop if learner.result is not None and learner.result.reason == "running" else None
        state["fit"] = {**asdict(position), "seconds": learner._seconds(), "stop": asked}
    loaded = None if pending is None else pending.generators
    state["generators"] = generators.save() if loaded is None else loaded
    for part in ("optimizers", "plugins", "passes"):
        state[part] = sharded.whole(state[part])
    return state


def of_rank(state: Mapping[str, Any], learner: Learner) -> dict[str, Any]:
    """What differs from process to process in a state that was collected in one of them."""
    shared = {name for name, plugin in learner.plugins.items() if not hasattr(plugin, "reshard")}
    plugins = {name: value for name, value in state["plugins"].items() if name not in shared}
    return {"generators": state["generators"], "plugins": plugins}


def _localized(learner: Learner, given: Mapping[str, Any]) -> dict[str, Any]:
    """The state with what is this process's own; with another number of processes than at the save, its share of it."""
    world = learner.world
    state = {**given, "plugins": dict(given["plugins"])}
    ranks = state.get("ranks") or [of_rank(state, learner)]
    if world.rank < len(ranks):
        state["generators"] = ranks[world.rank]["generators"]
    else:
        state["generators"] = generators.save()  # of a process that was not there
    for name in ranks[0]["plugins"]:
        saved = [rank["plugins"][name] for rank in ranks]
        plugin = learner.plugins.get(name)
        if len(ranks) == world.size or plugin is None or not hasattr(plugin, "reshard"):
            state["plugins"][name] = saved[min(world.rank, len(ranks) - 1)]
        else:
            state["plugins"][name] = plugin.reshard(saved, world.rank, world.size)
    return state


def apply(
    learner: Learner, state: Mapping[str, Any], *, allow: Collection[str] = (), replay: bool = True, own: bool = False
) -> None:
    """What ``Learner.load_state_dict`` does; with ``own`` the state's tensors may be taken over instead of copied."""
    if learner._epochs:
        raise ReentrancyError("load_state_dict: a pass is running; load before it begins")
    check(learner, state, allow)
    state = _localized(learner, state if own else copy.deepcopy(dict(state)))
    undo: list[tuple[str, Callable[[], None]]] = []
    try:
        _load(learner, state, undo)
    except BaseException as error:
        for what, put_back in reversed(undo):
            try:
                put_back()
            except Exception as second:
                add_note(error, f"{what} could not be put back as it was before the load: {second!r}")
        raise
    for counter, value in state["progress"].items():
        setattr(learner.progress, counter, value)
    learner._logged_at = None
    learner.metrics.clear()
    learner.metrics.update(state["metrics"])
    if state["fit"] is not None:
        learner._restore_position(Position.of(state["fit"]))
    learner._pending = Pending(list(state["passes"]), dict(state["data"]), state["generators"], replay)


def forget_open(learner: Learner) -> None:
    """Forget what a loaded state left open and has not gone on with: passes, loaders' places and generators."""
    learner._pending = None


def _load(learner: Learner, state: Mapping[str, Any], undo: list[tuple[str, Callable[[], None]]]) -> None:
    """Load what may refuse; ``undo`` collects how to put back what has changed."""
    for name, plugin in stateful(learner).items():
        if name in state["plugins"]:
            undo.append((f"plugin {name!r}", _undo_plugin(plugin)))
            try:
                plugin.load_state_dict(state["plugins"][name])
            except Exception as error:
                locate(error, f"in load_state_dict of plugin {name!r}, whose saved state may be of another version")
                raise
    for name, optimizer in learner.optimizers.items():
        undo.append((f"optimizer {name!r}", _undo_attributes(optimizer)))
        try:
            _load_optimizer(optimizer, state["optimizers"][name])
        except Exception as error:
            locate(error, f"in load_state_dict of optimizer {name!r}")
            raise
    before = generators.save()
    undo.append(("the random generators", lambda: generators.restore(before)))
    generators.restore(state["generators"])
    with torch.no_grad():
        for name, model in learner.models.items():
            if any(not isinstance(value, Tensor) for value in model.state_dict().values()):
                undo.append((f"model {name!r}", partial(model.load_state_dict, copy.deepcopy(model.state_dict()))))
            try:
                model.load_state_dict(_alike(state["models"][name], model.state_dict()))
            except Exception as error:
                locate(error, f"in load_state_dict of model {name!r}")
                raise
            for key, buffer in unsaved_buffers(model).items():
                buffer.copy_(state["buffers"][name][key])


def _undo_plugin(plugin: Any) -> Callable[[], None]:
    """What puts a plugin back into the state that it has now."""
    attributes = _undo_attributes(plugin)
    try:
        before = copy.deepcopy(plugin.state_dict())
    except Exception:  # it has none before the first fit
        return attributes

    def undo() -> None:
        try:
            plugin.load_state_dict(before)  # what its parts hold
        finally:
            attributes()

    return undo


def _undo_attributes(owner: Any) -> Callable[[], None]:
    """What gives an object the attributes that it has now."""
    attributes = getattr(owner, "__dict__", {})
    before = dict(attributes)

    def undo() -> None:
        attributes.clear()
        attributes.update(before)

    return undo


@contextmanager
def raw_weights(learner: Learner) -> Iterator[None]:
    """Inside, the models hold their own weights, whatever a plugin has put in their place."""
    with ExitStack() as stack:
        for plugin in learner.plugins.values():
            if (raw := getattr(plugin, "raw_weights", None)) is not None:
                stack.enter_context(raw(learner))
        yield


def restore_windows(epoch: Epoch, saved: Mapping[str, Any]) -> None:
    """Reopen the accumulation windows of a pass."""
    for name, values in saved.items():
        window = epoch.window(name)
        grads = [g if g is None else sharded.like(g, p) for g, p in zip(values["grads"], window.params, strict=True)]
        window.reopen(epoch.last_step(), {**values, "grads": grads})


def place(pending: Pending | None, phase: str, data: Any) -> None:
    """Put data without an open pass where it was."""
    if pending is not None and phase in pending.data and hasattr(data, "__iter__"):
        load_position(data, pending.data.pop(phase), replay=pending.replay)


def resume_data(epoch: Epoch, pending: Pending | None) -> Any:
    """Put the data of a pass that is about to begin where it was; returns what to iterate over."""
    data = epoch.data
    if epoch.saved is None and not epoch.alone:
        place(pending, epoch.phase.name, data)
    saved = None if epoch.saved is None else epoch.saved["data"]
    if saved is None:
        epoch.begun = begin(data, generators.save()) if needs_replay(data) else None
        return data
    assert pending is not None
    passed = load_position(data, saved, replay=pending.replay)
    epoch.begun = saved.get("begun")
    if not epoch.steps and needs_replay(data):
        epoch.learner._restore_generators()
        epoch.begun = begin(data, generators.save())
    if passed and epoch.begun is not None:
        generators.restore(epoch.begun["generators"])
    epoch.set_length(pass_length(data, saved))
    return resume(data, saved, passed)


def _pass(epoch: Epoch) -> dict[str, Any]:
    if epoch.data is None:
        raise StateError(
            f"the pass of phase {epoch.phase.name!r} has data that the learner does not know, so it could not go on "
            f"from here: give learner.epoch({epoch.phase.name!r}, data=loader), and take epoch.batches()"
        )
    position = epoch.learner.position
    earlier = 0 if position is None or epoch.made else position.epochs - position.validate
    data = save_position(epoch.data, epoch.steps, running=True, begun=epoch.begun, earlier_passes=earlier)
    windows = {window.name: window.state_dict() for window in epoch.windows if window.count}
    return {"phase": epoch.phase.name, "steps": epoch.steps, "data": data, "windows": windows}


def _state_of(name: str, plugin: Any) -> Any:
    try:
        return plugin.state_dict()
    except Exception as error:
        locate(error, f"in state_dict of plugin {name!r}")
        raise


def _load_optimizer(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """Load the state with the dtypes that it was saved with, where torch would cast to those of the parameters."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    state = {
        index: {key: sharded.like(value, params[index]) if _is_of(value, params[index]) else value
                for key, value in values.items()}
        for index, values in saved["state"].items()
    }  # fmt: skip
    optimizer.load_state_dict({"state": state, "param_groups": saved["param_groups"]})
    for index, values in state.items():
        now = optimizer.state[params[index]]
        for key, value in values.items():
            if isinstance(value, Tensor) and value.dtype != now[key].dtype:
                now[key] = value.to(now[key].device)


def _is_of(value: Any, param: Tensor) -> bool:
    """Whether a value in an optimizer's state has a number for each of its parameter's."""
    return isinstance(value, Tensor) and value.shape == param.shape


def _alike(saved: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Saved weights, sharded where the model's own are."""
    return {
        key: sharded.like(value, own[key]) if isinstance(own.get(key), Tensor) else value
        for key, value in saved.items()
    }
