"""Whether a saved state is one, and fits a learner: all that can be told before anything is changed."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

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
    problems = _malformed(parts, state)
    if problems:
        found = "; ".join(_few(problems))
        raise StateError(f"the state is malformed, and nothing was loaded: {found}. Take another copy of it")
    allow = (*allow, *_left_out(parts.plugins.now(), state))
    for part in parts.told():
        saved = state.get(part.name, {})
        problems += part.problems(saved, allow)
    problems += left_out.problems(state)
    problems += _windows(parts.optimizers, state)
    if problems:
        raise StateError("the state does not fit this learner, and nothing was loaded: " + "; ".join(problems))


def _left_out(plugins: Collection[str], state: Mapping[str, Any]) -> list[str]:
    """List the plugins of the state that are not here, and that, by their entries, cannot change training."""
    made = state.get("made")
    if not made:
        return []
    gone = [name for name in state["plugins"] if name not in plugins]
    return [name for name in gone if f"plugin {name!r}" not in made]


def _malformed(parts: Parts, state: Mapping[str, Any]) -> list[str]:
    """List differences from the form that `collect` makes, whatever the learner."""
    older = {"nested": {}, **state}  # older states lack it
    problems = wrong("", older, _kinds_of_entries(parts, state))
    if problems:
        return problems
    newer = _newer(parts.versions(), state)
    if newer:
        return [f"{', '.join(newer)} were saved by a newer loopkit, in a form that this one does not know"]
    for part in parts:
        if part.name in state:
            problems += part.malformed(state[part.name])
    problems += malformed_left_out(state.get(LeftOut.name, {}))
    buffers = state["buffers"]
    models = state["models"]
    if set(buffers) != set(models):
        problems.append(f"buffers belong to {list(buffers)}, and models are {list(models)}")
    for index, saved in enumerate(state["epochs"]):
        problems += _malformed_epoch(f"epochs[{index}]", saved)
    for name in ("data", "nested"):
        for key, saved in state.get(name, {}).items():
            problems += malformed(f"{name}.{key}", saved)
    problems += _malformed_rounds(parts, state)
    problems += _malformed_fit(state)
    return problems


def _kinds_of_entries(parts: Parts, state: Mapping[str, Any]) -> dict[str, Kind]:
    """Return the kind of each entry of a state; entries that may be missing are checked if they are there."""
    kinds: dict[str, Kind] = {"epochs": LIST, "data": MAPPING, "nested": MAPPING}
    for part in parts:
        if part.name in state or not part.optional:
            kinds[part.name] = part.kind
    if "made" in state:
        kinds["made"] = FACTS
    if "ranks" in state:
        kinds["ranks"] = LIST
    return kinds


def _newer(known: Mapping[str, int], state: Mapping[str, Any]) -> list[str]:
    """List the parts whose saved form is newer than the one that is known here."""
    versions = state.get("versions", {})
    return [name for name, version in versions.items() if not version <= known.get(name, 0)]


def _malformed_epoch(where: str, saved: Any) -> list[str]:
    """List the faults in the saved form of an open epoch."""
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
    if not isinstance(fit, Mapping):
        return wrong("fit", fit, POSITION)
    defaults = asdict(Position(Progress()))
    del defaults["start"]
    return wrong("fit", {**defaults, **fit}, POSITION)


def _malformed_rounds(parts: Parts, state: Mapping[str, Any]) -> list[str]:
    """List the faults in the round of a user's loop, and in the parts that each process has of its own."""
    problems: list[str] = []
    if "round" in state:
        problems += Round.problems(state["round"])
    kinds: dict[str, Kind] = {"stores": LIST}
    for part in parts:
        if part.name in state and part.apart(state[part.name]) is not None:
            kinds[part.name] = MAPPING
    with_round = {**kinds, "round": MAPPING}
    for rank, saved in enumerate(state.get("ranks", ())):
        has_round = isinstance(saved, Mapping) and "round" in saved
        problems += wrong(f"ranks[{rank}]", saved, with_round if has_round else kinds, more=False)
    return problems


def _windows(optimizers: Mapping[str, Optimizer], state: Mapping[str, Any]) -> list[str]:
    """List the saved windows that do not fit the parameters of their optimizers."""
    problems: list[str] = []
    for epoch in state["epochs"]:
        for name, window in epoch["windows"].items():
            if name in optimizers:
                problems += _window(name, window, optimizers[name])
            else:
                problems += names("windows of optimizers", [name], optimizers)
    return problems


def _window(name: str, window: Mapping[str, Any], optimizer: Optimizer) -> list[str]:
    params = params_of(optimizer)
    grads = [unpacked(grad) for grad in window["grads"]]
    if len(grads) != len(params):
        return [f"window of {name!r}: {len(grads)} gradients in the state, {len(params)} parameters here"]
    for grad, param in zip(grads, params, strict=True):
        if grad is not None and grad.shape != param.shape:
            return [f"window of {name!r}: gradients of other shapes than the parameters here"]
    return []


def _few(problems: list[str], most: int = 5) -> list[str]:
    more = len(problems) - most
    if more <= 0:
        return problems
    return [*problems[:most], f"and {more} more"]


def _are_facts(value: Any) -> bool:
    return NAMED[1](value) and all(map(_are_facts_of_one, value.values()))


def _are_facts_of_one(made: Mapping[Any, Any]) -> bool:
    """Whether these are texts by name, with the class under the empty name."""
    return "" in made and {type(each) for each in (*made.keys(), *made.values())} == {str}


def _are_gradients(value: Any) -> bool:
    return type(value) is list and all(map(is_packed, value))


def _are_names(value: Any) -> bool:
    return type(value) is list and all(type(name) is str for name in value)


def _are_counts(value: Any) -> bool:
    return isinstance(value, Mapping) and all(map(COUNT[1], value.values()))


def _are_counters(value: Any) -> bool:
    return not wrong("", value, COUNTERS, more=False)


def _is_duration(value: Any) -> bool:
    return is_number(value) and 0 <= value < math.inf


def _is_stop(value: Any) -> bool:
    if value is None:
        return True
    return type(value) is tuple and len(value) == 2 and all(type(part) is str for part in value)


FACTS: Kind = ("facts by name", _are_facts)
WINDOW: dict[str, Kind] = {
    "size": SIZE,
    "count": SIZE,
    "first": NUMBER,
    "total": NUMBER,
    "weight": NUMBER,
    "even": FLAG,
    "grads": ("a list of gradients", _are_gradients),
}
COUNTED: Kind = ("counts by name", _are_counts)
POSITION: dict[str, Kind] = {
    "start": ("counters", _are_counters),
    "number": SIZE,
    "by_fit": FLAG,
    "counted": FLAG,
    "cycle": FLAG,
    "epochs": COUNT,
    "done": COUNT,
    "due": ("a list of phases", _are_names),
    "mid_epoch": FLAG,
    "validated": COUNTED,
    "parts": COUNTED,
    "clock": NUMBERS,
    "ended": TEXT,
    "limits": MAPPING,
    "seconds": ("a duration", _is_duration),
    "stop": ("a reason and its author", _is_stop),
}
