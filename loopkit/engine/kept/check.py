"""Whether a saved state is one, and fits a learner: all that can be told before anything is changed."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

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
from loopkit.base.sparse import is_packed, unpacked
from loopkit.engine.kept.counts import COUNTERS
from loopkit.engine.kept.data.loader_positions import malformed
from loopkit.engine.kept.differences import names
from loopkit.engine.kept.left_out import LeftOut
from loopkit.engine.kept.left_out import malformed as malformed_left_out
from loopkit.engine.kept.position import Position
from loopkit.engine.kept.rounds import Round
from loopkit.errors import StateError
from loopkit.groups import params_of
from loopkit.progress import Progress

if TYPE_CHECKING:
    from loopkit.engine.kept.parts import Parts


def check(parts: Parts, left_out: LeftOut, state: Mapping[str, Any], allow: Collection[str]) -> None:
    """Refuse a state that is malformed, or does not fit.

    Raises:
        StateError: Lists what is wrong, the first few of each kind.
    """
    if problems := _malformed(parts, state):
        raise StateError(
            f"the state is malformed, and nothing was loaded: {'; '.join(_few(problems))}. Take another copy of it"
        )
    allow = (*allow, *_left_out(parts.plugins.now(), state))
    problems = [problem for part in parts.told() for problem in part.problems(state.get(part.name, {}), allow)]
    problems += left_out.problems(state)
    problems += _windows(parts.optimizers, state)
    if problems:
        raise StateError("the state does not fit this learner, and nothing was loaded: " + "; ".join(problems))


def _left_out(plugins: Collection[str], state: Mapping[str, Any]) -> list[str]:
    """List the plugins of the state that are not here, and by what it says cannot change training."""
    made = state.get("made")
    return [name for name in state["plugins"] if name not in plugins and made and f"plugin {name!r}" not in made]


def _malformed(parts: Parts, state: Mapping[str, Any]) -> list[str]:
    """List differences from the form that `collect` makes, whatever the learner."""
    kinds = {
        **{part.name: part.kind for part in parts if part.name in state or not part.optional},
        "epochs": LIST,
        "data": MAPPING,
        "nested": MAPPING,
        **({"made": FACTS} if "made" in state else {}),
        **({"ranks": LIST} if "ranks" in state else {}),
    }
    if problems := wrong("", {"nested": {}, **state}, kinds):  # which older states lack
        return problems
    known = parts.versions()
    newer = [name for name, version in state.get("versions", {}).items() if not version <= known.get(name, 0)]
    if newer:
        return [f"{', '.join(newer)} were saved by a newer loopkit, in a form that this one does not know"]
    problems = [problem for part in parts if part.name in state for problem in part.malformed(state[part.name])]
    problems += malformed_left_out(state.get(LeftOut.name, {}))
    if set(state["buffers"]) != set(state["models"]):
        problems.append(f"buffers belong to {list(state['buffers'])}, and models are {list(state['models'])}")
    for index, saved in enumerate(state["epochs"]):
        problems += _malformed_epoch(f"epochs[{index}]", saved)
    for name in ("data", "nested"):
        for key, saved in state.get(name, {}).items():
            problems += malformed(f"{name}.{key}", saved)
    return [*problems, *_malformed_rounds(parts, state), *_malformed_fit(state)]


def _malformed_epoch(where: str, saved: Any) -> list[str]:
    """List the faults in what is saved of an open epoch."""
    kinds = {"phase": TEXT, "steps": COUNT, "data": ANY, "windows": NAMED, "stores": NAMED}
    if not isinstance(saved, Mapping):
        return wrong(where, saved, kinds)
    problems = wrong(where, {"stores": {}, **saved}, kinds)
    if saved.get("data") is not None:
        problems += malformed(f"{where}.data", saved["data"])
    if NAMED[1](saved.get("windows")):
        for name, window in saved["windows"].items():
            problems += wrong(f"{where}.windows.{name}", window, WINDOW)
    return problems


def _malformed_fit(state: Mapping[str, Any]) -> list[str]:
    """List the faults in where the fit is."""
    if "fit" not in state:
        return ["fit is missing"]
    fit = state["fit"]
    if fit is None:
        return []
    defaults = asdict(Position(Progress()))
    del defaults["start"]
    return wrong("fit", {**defaults, **fit} if isinstance(fit, Mapping) else fit, POSITION)


def _malformed_rounds(parts: Parts, state: Mapping[str, Any]) -> list[str]:
    """List the faults in the round of a user's loop, and in the parts that each process has of its own."""
    problems = Round.problems(state["round"]) if "round" in state else []
    apart = [part.name for part in parts if part.name in state and part.apart(state[part.name]) is not None]
    kinds = {"stores": LIST, **dict.fromkeys(apart, MAPPING)}
    for rank, saved in enumerate(state.get("ranks", ())):
        in_a_round = {"round": MAPPING} if isinstance(saved, Mapping) and "round" in saved else {}
        problems += wrong(f"ranks[{rank}]", saved, {**kinds, **in_a_round}, more=False)
    return problems


def _windows(optimizers: Mapping[str, torch.optim.Optimizer], state: Mapping[str, Any]) -> list[str]:
    windows = [(name, window) for saved in state["epochs"] for name, window in saved["windows"].items()]
    problems: list[str] = []
    for name, window in windows:
        if (optimizer := optimizers.get(name)) is None:
            problems += names("windows of optimizers", [name], optimizers)
            continue
        params = params_of(optimizer)
        grads = [unpacked(grad) for grad in window["grads"]]
        if len(grads) != len(params):
            problems.append(f"window of {name!r}: {len(grads)} gradients in the state, {len(params)} parameters here")
        elif any(g is not None and g.shape != p.shape for g, p in zip(grads, params, strict=True)):
            problems.append(f"window of {name!r}: gradients of other shapes than the parameters here")
    return problems


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
    "grads": ("a list of gradients", lambda v: type(v) is list and all(map(is_packed, v))),
}
COUNTED: Kind = (
    "counts by name",
    lambda v: isinstance(v, Mapping) and all(COUNT[1](each) for each in v.values()),
)
POSITION: dict[str, Kind] = {
    "start": (
        "counters",
        lambda v: not wrong("", v, COUNTERS, more=False),
    ),
    "number": SIZE,
    "by_fit": FLAG,
    "counted": FLAG,
    "cycle": FLAG,
    "epochs": COUNT,
    "done": COUNT,
    "due": ("a list of phases", lambda v: type(v) is list and all(type(name) is str for name in v)),
    "mid_epoch": FLAG,
    "validated": COUNTED,
    "parts": COUNTED,
    "clock": NUMBERS,
    "ended": TEXT,
    "limits": MAPPING,
    "seconds": ("a duration", lambda v: is_number(v) and 0 <= v < math.inf),
    "stop": (
        "a reason and its author",
        lambda v: v is None or (type(v) is tuple and len(v) == 2 and all(type(part) is str for part in v)),
    ),
}
