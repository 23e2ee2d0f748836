"""Whether a saved state is one, and fits a learner: all that can be told before anything is changed."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from loopkit.base.kinds import (
    ANY,
    COUNT,
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
    wrong,
)
from loopkit.engine.kept.buffers import strange_buffers
from loopkit.engine.kept.differences import first, names
from loopkit.engine.kept.extras import Extras
from loopkit.engine.kept.extras import malformed as malformed_extras
from loopkit.engine.kept.flags import Flags
from loopkit.engine.kept.flags import malformed as malformed_flags
from loopkit.engine.kept.measured import Measured
from loopkit.engine.kept.modes import Modes
from loopkit.engine.kept.optimizers import OptimizerPart
from loopkit.engine.kept.optimizers import malformed as malformed_optimizer
from loopkit.engine.kept.positions import malformed
from loopkit.engine.kept.resume import Position
from loopkit.engine.kept.rounds import Round
from loopkit.errors import StateError
from loopkit.groups import params_of
from loopkit.progress import Progress

if TYPE_CHECKING:
    from loopkit.engine.life.core import Core

PARTS = "models", "optimizers", "progress", "metrics", "plugins", "phases", "epochs", "data", "fit", "generators"
VERSIONS = {
    **dict.fromkeys(PARTS, 1),
    "fit": 2,
    "made": 1,
    "parts": 1,
    "round": 1,
    Extras.name: Extras.version,
    Flags.name: Flags.version,
    Measured.name: Measured.version,
    Modes.name: Modes.version,
}
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
        *names("optimizers", state["optimizers"], core.models.optimizers),
        *_optimizers(core.models.optimizers, state["optimizers"]),
        *_windows(core.models.optimizers, state),
        *core.models.extras.problems(state.get("extras", {}), allow),
        *core.models.modes.problems(state.get(Modes.name, {})),
        *_plugins(core.registry.plugins, state, allow),
    ]
    if problems:
        raise StateError("the state does not fit this learner, and nothing was loaded: " + "; ".join(problems))


def stateful(plugins: Mapping[str, Any]) -> dict[str, Any]:
    """The plugins that have a state."""
    return {name: plugin for name, plugin in plugins.items() if callable(getattr(plugin, "state_dict", None))}


def _malformed(state: Mapping[str, Any]) -> list[str]:
    """List differences from the form that `collect` makes, whatever the learner."""
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
        **{part: NAMED for part in (Measured.name, Modes.name) if part in state},
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
        problems += malformed_optimizer(f"optimizers.{name}", saved)
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
    problems += _malformed_rounds(state)
    problems += malformed_flags(state["flags"]) if "flags" in state else []
    problems += malformed_extras(state.get("extras", {}))
    if "fit" not in state:
        problems.append("fit is missing")
    elif state["fit"] is not None:
        defaults = asdict(Position(Progress()))
        del defaults["start"]
        problems += wrong(
            "fit", {**defaults, **state["fit"]} if isinstance(state["fit"], Mapping) else state["fit"], POSITION
        )
    return problems


def _malformed_rounds(state: Mapping[str, Any]) -> list[str]:
    """List the faults in the round of a user's loop, and in the parts that each process has of its own."""
    problems = Round.problems(state["round"]) if "round" in state else []
    kinds = {"generators": MAPPING, "plugins": MAPPING, "phases": MAPPING, "stores": LIST}
    for rank, saved in enumerate(state.get("ranks", ())):
        in_a_round = {"round": MAPPING} if isinstance(saved, Mapping) and "round" in saved else {}
        problems += wrong(f"ranks[{rank}]", saved, {**kinds, **in_a_round}, more=False)
    return problems


def _models(models: Mapping[str, nn.Module], state: Mapping[str, Any]) -> list[str]:
    problems = names("models", state["models"], models)
    for name, model in models.items():
        saved = state["models"].get(name, {})
        own = model.state_dict()
        if name in state["models"]:
            problems += names(f"tensors of model {name!r}", saved, own)
            strange = strange_buffers(model, state["buffers"].get(name, {}))
            problems += first(f"buffers of model {name!r} in the state that are not here", list(map(repr, strange)))
        different = [
            f"{key}: {_looks(saved[key])} in the state, {_looks(value)} here"
            for key, value in own.items()
            if key in saved and isinstance(value, Tensor) and not is_lazy(value) and _looks(saved[key]) != _looks(value)
        ]
        problems += first(f"tensors of model {name!r} that differ", different)
    return problems


def _optimizers(optimizers: Mapping[str, torch.optim.Optimizer], saved: Mapping[str, Any]) -> list[str]:
    problems = []
    for name, optimizer in optimizers.items():
        if name in saved:
            problems += OptimizerPart(name, optimizer).problems(saved[name])
    return problems


def _windows(optimizers: Mapping[str, torch.optim.Optimizer], state: Mapping[str, Any]) -> list[str]:
    windows = [(name, window) for saved in state["epochs"] for name, window in saved["windows"].items()]
    problems: list[str] = []
    for name, window in windows:
        if (optimizer := optimizers.get(name)) is None:
            problems += names("windows of optimizers", [name], optimizers)
            continue
        params = params_of(optimizer)
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
    problems = names("plugins", saved, own)
    listed = ", ".join(repr(name) for name in sorted({*saved} ^ {*own}))
    hint = [
        f"to load without, give Checkpoint(options=SaveOptions(allow=({listed},))), or load_state_dict(allow=...): "
        f"what the state lacks begins anew"
    ]
    return problems + (hint if problems else [])


def _few(problems: list[str], most: int = 5) -> list[str]:
    return problems[:most] + ([f"and {len(problems) - most} more"] if len(problems) > most else [])


FACTS: Kind = (
    "facts by name",
    lambda v: NAMED[1](v) and all("" in made and {*map(type, (*made, *made.values()))} == {str} for made in v.values()),
)
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
    "counted": FLAG,
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
