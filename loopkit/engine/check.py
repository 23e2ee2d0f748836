"""Whether a saved state is one, and fits a learner: all that can be told before anything is changed."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from loopkit.engine.positions import malformed
from loopkit.engine.resume import Position
from loopkit.errors import StateError
from loopkit.kinds import (
    ANY,
    COUNT,
    COUNTS,
    FLAG,
    LIST,
    MAPPING,
    NAMED,
    NUMBER,
    NUMBERS,
    SIZE,
    TEXT,
    Kind,
    is_number,
    shown,
    wrong,
)
from loopkit.progress import Progress
from loopkit.words import nearest

if TYPE_CHECKING:
    from loopkit.engine.core import Core

PARTS = "models", "optimizers", "progress", "metrics", "plugins", "phases", "epochs", "data", "fit", "generators"
VERSIONS = {**dict.fromkeys(PARTS, 1), "fit": 2, "made": 1}
"""The form of each part of a state. What reads a part knows all its forms up to this one."""


def check(core: Core, state: Mapping[str, Any], allow: Collection[str]) -> None:
    """Refuse a state that is malformed, or does not fit.

    Raises:
        StateError: Lists what is wrong, the first few of each kind.
    """
    if problems := _malformed(state):
        raise StateError(
            f"the state is malformed, and nothing was loaded: {'; '.join(_few(problems))}. Take another copy of it"
        )
    problems = [
        *_models(core.models, state),
        *_optimizers(core.models.optimizers, state),
        *_windows(core.models.optimizers, state),
        *_plugins(core.registry.plugins, state, allow),
    ]
    if problems:
        raise StateError("the state does not fit this learner, and nothing was loaded: " + "; ".join(problems))


def stateful(plugins: Mapping[str, Any]) -> dict[str, Any]:
    """The plugins that have a state."""
    return {name: plugin for name, plugin in plugins.items() if callable(getattr(plugin, "state_dict", None))}


def unsaved_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that ``model.state_dict()`` leaves out."""
    saved = model.state_dict()
    return {name: buffer for name, buffer in model.named_buffers() if name not in saved}


def _malformed(state: Mapping[str, Any]) -> list[str]:
    """What is not as `collect` makes it, whatever the learner."""
    parts = {
        "models": NAMED,
        "buffers": NAMED,
        "optimizers": NAMED,
        "progress": MAPPING,
        "metrics": NUMBERS,
        "plugins": MAPPING,
        "phases": MAPPING,
        "epochs": LIST,
        "data": MAPPING,
        "nested": MAPPING,
        "generators": MAPPING,
        **({"made": FACTS} if "made" in state else {}),
        **({"ranks": LIST} if "ranks" in state else {}),
    }
    optional: dict[str, Any] = {"phases": {}, "nested": {}}  # parts that older states lack
    if problems := wrong("", {**optional, **state}, parts):
        return problems
    newer = [part for part, version in state.get("versions", {}).items() if not version <= VERSIONS.get(part, 0)]
    if newer:
        return [f"{', '.join(newer)} were saved by a newer loopkit, in a form that this one does not know"]
    problems = wrong("progress", state["progress"], {counter.name: COUNT for counter in fields(Progress)}, more=False)
    if set(state["buffers"]) != set(state["models"]):
        problems.append(f"buffers are those of {list(state['buffers'])}, models are {list(state['models'])}")
    for name, saved in state["optimizers"].items():
        problems += _malformed_optimizer(f"optimizers.{name}", saved)
    for index, saved in enumerate(state["epochs"]):
        where = f"epochs[{index}]"
        kinds = {"phase": TEXT, "steps": COUNT, "data": ANY, "windows": NAMED, "stores": NAMED}
        problems += wrong(where, {"stores": {}, **saved} if isinstance(saved, Mapping) else saved, kinds)
        if isinstance(saved, Mapping):
            problems += [] if saved.get("data") is None else malformed(f"{where}.data", saved["data"])
            if NAMED[1](saved.get("windows")):
                for name, window in saved["windows"].items():
                    problems += wrong(f"{where}.windows.{name}", window, WINDOW)
    for part in ("data", "nested"):
        for key, saved in state.get(part, {}).items():
            problems += malformed(f"{part}.{key}", saved)
    for rank, saved in enumerate(state.get("ranks", ())):
        problems += wrong(
            f"ranks[{rank}]",
            saved,
            {"generators": MAPPING, "plugins": MAPPING, "phases": MAPPING, "stores": LIST},
            more=False,
        )
    if "fit" not in state:
        problems.append("fit is missing")
    elif state["fit"] is not None:
        defaults = asdict(Position(Progress()))
        del defaults["start"]
        problems += wrong(
            "fit", {**defaults, **state["fit"]} if isinstance(state["fit"], Mapping) else state["fit"], POSITION
        )
    return problems


def _malformed_optimizer(where: str, saved: Mapping[str, Any]) -> list[str]:
    if problems := wrong(where, saved, {"class": TEXT, "state": MAPPING, "param_groups": LIST}):
        return problems
    problems = [
        problem
        for index, group in enumerate(saved["param_groups"])
        for problem in wrong(f"{where}.param_groups[{index}]", group, {"params": COUNTS})
    ]
    if problems:
        return problems
    known = [index for group in saved["param_groups"] for index in group["params"]]
    if known != list(range(len(known))):
        problems.append(f"{where}.param_groups do not number the parameters from 0 on")
    for index, values in saved["state"].items():
        if type(index) is not int or not 0 <= index < len(known) or not isinstance(values, Mapping):
            problems.append(f"{where}.state[{shown(index)}] is {shown(values)}, not a mapping for a parameter")
    return problems


def _models(models: Mapping[str, nn.Module], state: Mapping[str, Any]) -> list[str]:
    problems = _names("models", state["models"], models)
    for name, model in models.items():
        saved = {**state["models"].get(name, {}), **state["buffers"].get(name, {})}
        own = {**model.state_dict(), **unsaved_buffers(model)}
        if name in state["models"]:
            problems += _names(f"tensors of model {name!r}", saved, own)
            if not problems and set(state["buffers"][name]) != set(unsaved_buffers(model)):
                problems.append(f"model {name!r}: tensors of the state stand in the wrong part, models or buffers")
        different = [
            f"{key}: {_looks(saved[key])} in the state, {_looks(value)} here"
            for key, value in own.items()
            if key in saved and isinstance(value, Tensor) and not is_lazy(value) and _looks(saved[key]) != _looks(value)
        ]
        problems += _first(f"tensors of model {name!r} that differ", different)
    return problems


def _optimizers(optimizers: Mapping[str, torch.optim.Optimizer], state: Mapping[str, Any]) -> list[str]:
    problems = _names("optimizers", state["optimizers"], optimizers)
    for name, optimizer in optimizers.items():
        if (saved := state["optimizers"].get(name)) is None:
            continue
        kinds = saved["class"], type(optimizer).__name__
        sizes = [_sizes(saved["param_groups"]), _sizes(optimizer.param_groups)]
        if kinds[0] != kinds[1]:
            problems.append(f"optimizer {name!r}: {kinds[0]} in the state, {kinds[1]} here")
        if sizes[0] != sizes[1]:
            problems.append(f"optimizer {name!r}: parameters per group {sizes[0]} in the state, {sizes[1]} here")
        elif kinds[0] == kinds[1]:
            problems += _first(f"entries of optimizer {name!r} that do not fit", _entries(optimizer, saved))
    return problems


def _entries(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> list[str]:
    """What in the groups and the state of an optimizer it could not go on with."""
    problems = []
    for index, (own, group) in enumerate(zip(optimizer.param_groups, saved["param_groups"], strict=True)):
        for key, value in own.items():
            if key not in group:
                if value is not None and value is not False:  # else a newer torch added it, and defaults to that
                    problems.append(f"param_groups[{index}] lacks {key!r}")
            elif key != "params" and not _alike(key, value, group[key]):
                problems.append(f"param_groups[{index}][{key!r}] is {shown(group[key])}, {shown(value)} here")
    kind = type(optimizer)
    if kind.__module__.startswith("torch.optim.") and kind.__name__ != "LBFGS":
        params = [p for group in optimizer.param_groups for p in group["params"]]
        for index, values in saved["state"].items():
            problems += _state_entries(index, values, params[index], shaped=kind.__name__ != "Adafactor")
    return problems


def _state_entries(index: int, values: Mapping[str, Any], param: Tensor, shaped: bool) -> list[str]:
    """What torch's optimizers could not go on with, in the state of a parameter."""
    problems = []
    for key, value in values.items():
        where = f"state[{index}][{key!r}]"
        if not isinstance(value, Tensor):
            if not is_number(value) and not (key == "momentum_buffer" and value is None):
                problems.append(f"{where} is {shown(value)}, not a tensor or a number")
        elif value.numel() == 1 != param.numel():
            continue
        elif shaped and value.numel() != 1 and value.shape != param.shape:
            problems.append(f"{where} has shape {tuple(value.shape)}, the parameter {tuple(param.shape)}")
        elif value.is_floating_point() != param.is_floating_point() or value.is_complex() != param.is_complex():
            problems.append(f"{where} is of {value.dtype}, the parameter of {param.dtype}")
    return problems


def _alike(key: str, own: Any, saved: Any) -> bool:
    """Whether a saved option of an optimizer is of the kind of its own; None may stand for any but the flags."""
    if key in FLAGS or isinstance(own, bool):
        return saved is None or isinstance(saved, bool)
    if isinstance(own, (tuple, list)) and isinstance(saved, (tuple, list)):
        return len(own) == len(saved) and all(_alike(key, *each) for each in zip(own, saved, strict=True))
    if own is None or saved is None:
        return not isinstance(saved, (Mapping, list))
    return is_number(saved) if is_number(own) else isinstance(saved, type(own))


def _windows(optimizers: Mapping[str, torch.optim.Optimizer], state: Mapping[str, Any]) -> list[str]:
    windows = [(name, window) for saved in state["epochs"] for name, window in saved["windows"].items()]
    problems: list[str] = []
    for name, window in windows:
        if (optimizer := optimizers.get(name)) is None:
            problems += _names("windows of optimizers", [name], optimizers)
            continue
        params = [p for group in optimizer.param_groups for p in group["params"]]
        grads = window["grads"]
        if len(grads) != len(params):
            problems.append(f"window of {name!r}: {len(grads)} gradients in the state, {len(params)} parameters here")
        elif any(g is not None and g.shape != p.shape for g, p in zip(grads, params, strict=True)):
            problems.append(f"window of {name!r}: gradients of other shapes than the parameters here")
    return problems


def _plugins(plugins: Mapping[str, Any], state: Mapping[str, Any], allow: Collection[str]) -> list[str]:
    made = state.get("made")  # whose plugins are those that may change training
    left = [name for name in state["plugins"] if name not in plugins and made and f"plugin {name!r}" not in made]
    saved = [name for name in state["plugins"] if name not in (*allow, *left)]
    own = [name for name in stateful(plugins) if name not in allow]
    problems = _names("plugins", saved, own)
    names = ", ".join(repr(name) for name in sorted({*saved} ^ {*own}))
    hint = [
        f"to load without, give Checkpoint(options=SaveOptions(allow=({names},))), or load_state_dict(allow=...): "
        f"what the state lacks begins anew"
    ]
    return problems + (hint if problems else [])


def _names(what: str, saved: Collection[str], own: Collection[str]) -> list[str]:
    missing = [f"{name!r}{nearest(name, own)}" for name in saved if name not in own]
    extra = [repr(name) for name in own if name not in saved]
    return _first(f"{what} in the state that are not here", missing) + _first(
        f"{what} here that are not in the state", extra
    )


def _sizes(groups: list[dict[str, Any]]) -> list[int]:
    return [len(group["params"]) for group in groups]


def _first(what: str, items: list[str], most: int = 5) -> list[str]:
    if not items:
        return []
    rest = f" and {len(items) - most} more" if len(items) > most else ""
    return [f"{len(items)} {what}: {', '.join(items[:most])}{rest}"]


def _few(problems: list[str], most: int = 5) -> list[str]:
    return problems[:most] + ([f"and {len(problems) - most} more"] if len(problems) > most else [])


FACTS: Kind = (
    "facts by name",
    lambda v: NAMED[1](v) and all("" in made and {*map(type, (*made, *made.values()))} == {str} for made in v.values()),
)
FLAGS = ("foreach", "fused", "capturable", "differentiable", "maximize")
"""Options of torch's optimizers that are true, false or None."""
WINDOW: dict[str, Kind] = {
    "size": SIZE,
    "count": SIZE,
    "first": NUMBER,
    "total": NUMBER,
    "weight": NUMBER,
    "even": FLAG,
    "grads": ("a list of gradients", lambda v: type(v) is list and all(g is None or isinstance(g, Tensor) for g in v)),
}
POSITION: dict[str, Kind] = {
    "start": (
        "counters",
        lambda v: not wrong("", v, {counter.name: COUNT for counter in fields(Progress)}, more=False),
    ),
    "number": SIZE,
    "by_fit": FLAG,
    "epochs": COUNT,
    "done": COUNT,
    "due": ("a list of phases", lambda v: type(v) is list and all(type(name) is str for name in v)),
    "mid_epoch": FLAG,
    "validated": ("counts by name", lambda v: isinstance(v, Mapping) and all(COUNT[1](each) for each in v.values())),
    "clock": NUMBERS,
    "ended": TEXT,
    "limits": MAPPING,
    "seconds": ("a duration", lambda v: is_number(v) and 0 <= v < math.inf),
    "stop": (
        "a reason and its author",
        lambda v: v is None or (type(v) is tuple and len(v) == 2 and all(type(part) is str for part in v)),
    ),
}


def _looks(value: Any) -> str:
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
