"""States in the form in which loopkit saved them before its parts had versions, in today's form."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any


def upgrade(state: dict[str, Any]) -> dict[str, Any]:
    """A state that was read from a checkpoint, in today's form; one that has it already is returned as it is."""
    if "versions" in state or "passes" not in state:
        first_form = state.get("versions", {}).get("fit") == 1
        return {**state, "fit": _fit(state, "epochs")} if first_form else state
    phases = [each["phase"] for each in state["passes"]]
    start = math.inf if state["fit"] is None else state["fit"]["start"]["steps"]
    plugins, stores = _parted(state["plugins"], phases, start)
    made = {
        **{key: value for key, value in state.items() if key != "passes"},
        "versions": {},
        "fit": _fit(state, "passes"),
        "plugins": plugins,
        "phases": {},
        "epochs": [{**each, "stores": kept} for each, kept in zip(state["passes"], stores, strict=True)],
        "nested": {},
    }
    if "ranks" in state:
        parted = [_parted(rank["plugins"], phases, start) for rank in state["ranks"]]
        made["ranks"] = [
            {**rank, "plugins": own, "phases": {}, "stores": kept}
            for rank, (own, kept) in zip(state["ranks"], parted, strict=True)
        ]
    return made


def _fit(state: Mapping[str, Any], opened: str) -> Any:
    """Where the fit is: its one validation is of the phase that was open, or that has data and does not train."""
    fit = state["fit"]
    if not isinstance(fit, dict) or not {"validate", "validating", "validated"} <= fit.keys():
        return fit
    at = {key: value for key, value in fit.items() if key not in ("validate", "validating", "validated")}
    phases = [each["phase"] for each in state[opened]]
    inner: list[str] = []
    if fit["validating"]:
        inner = phases[1:]
    elif fit["validate"]:
        inner = phases
    phase = next(iter([*inner, *(name for name in state["data"] if name not in (*phases, "train"))]), "val")
    due = [phase] if fit["validate"] or fit["validating"] else []
    counted = bool(fit.get("by_fit", True)) or "done" in fit
    return {
        **at,
        "counted": counted,
        "due": due,
        "mid_epoch": fit["validating"],
        "validated": {phase: fit["validated"]},
    }


def _parted(
    saved: Mapping[str, Any], phases: Sequence[str], start: float
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The states of plugins without what belongs to open epochs, and that, for each epoch by the plugin's name.

    Args:
        saved: The states by name.
        phases: The phases of the open epochs, the outermost first.
        start: The step with which the fit began.
    """
    own: dict[str, Any] = {}
    stores: list[dict[str, Any]] = [{} for _ in phases]
    for name, state in saved.items():
        throttled = isinstance(state, dict) and state.keys() == {"counts", "plugin"}
        rest, kept = _split(name, state["plugin"] if throttled else state, phases, start)
        if throttled:
            own[name] = {**state, "plugin": rest or {}}
        elif rest is not None:
            own[name] = rest
        for store, each in zip(stores, kept, strict=True):
            if each:
                store[name] = each
    return own, stores


def _split(name: str, state: Any, phases: Sequence[str], start: float) -> tuple[Any, list[dict[str, Any]]]:
    """Split a plugin's state into its own (None: it has none any more) and the part of each open epoch."""
    unsplit: list[dict[str, Any]] = [{} for _ in phases]
    if not isinstance(state, dict):
        return state, unsplit
    if name == "metrics" and all(isinstance(each, dict) and each.keys() == METRICS for each in state.values()):
        return None, _by_phase("so_far", state, phases)
    if state.keys() == HISTORY:
        return _history(state, start), _by_phase("running", _running_rows(state), phases)
    if state.keys() == PREDICTIONS:
        return {"done": state["done"]}, _by_phase("kept", state["kept"], phases)
    if state.keys() == GRAD_NORM:
        sums = {key: (total, state["counts"][key]) for key, total in state["sums"].items()}
        return None, _in_outermost(sums, phases)
    moved = TRAINING.get(frozenset(state))
    if moved is None:
        return state, unsplit
    own = {key: value for key, value in state.items() if key != moved}
    part = {} if state[moved] is None else {moved: state[moved]}
    return own, _in_outermost(part, phases)


def _by_phase(key: str, values: Mapping[str, Any], phases: Sequence[str]) -> list[dict[str, Any]]:
    """The part of each open epoch, from values by phase."""
    return [{key: values[phase]} if phase in values else {} for phase in phases]


def _in_outermost(part: dict[str, Any], phases: Sequence[str]) -> list[dict[str, Any]]:
    """The part of each open epoch, where only the outermost has one: the training epoch."""
    return [part if depth == 0 else {} for depth, _ in enumerate(phases)]


def _history(state: Mapping[str, Any], start: float) -> dict[str, Any]:
    first = sum(row["steps"] <= start for row in state["rows"])
    return {"rows": state["rows"], "step_rows": state["step_rows"], "first": first}


def _running_rows(state: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The open rows of a history by phase, without the phase."""
    return {row["phase"]: {key: value for key, value in row.items() if key != "phase"} for row in state["running"]}


# A state is recognized by its keys, since plugins can have other names than their own.
METRICS = {"fed", "metrics"}
HISTORY = {"rows", "step_rows", "running"}
GRAD_NORM = {"sums", "counts"}
PREDICTIONS = {"done", "kept"}
TRAINING = {
    frozenset({"skips", "rollbacks", "buffers", "snapshot"}): "buffers",  # StopOnNonFinite
    frozenset({"scaler", "skipped", "found"}): "found",  # MixedPrecision
}
"""The key that belongs to the training epoch, by the keys of the state."""
