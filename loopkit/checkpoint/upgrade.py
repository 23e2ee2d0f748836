"""States in the form in which loopkit saved them before its parts had versions, in today's form."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any


def upgrade(state: dict[str, Any]) -> dict[str, Any]:
    """A state that was read from a checkpoint, in today's form; one that has it already is returned as it is."""
    if "versions" in state or "passes" not in state:
        return _second_form(state)

    passes = state["passes"]
    phases = [each["phase"] for each in passes]
    start = math.inf
    if state["fit"] is not None:
        start = state["fit"]["start"]["steps"]
    plugins, stores = _parted(state["plugins"], phases, start)

    made = dict(state)
    del made["passes"]
    made["versions"] = {}
    made["fit"] = _fit(state, "passes")
    made["plugins"] = plugins
    made["phases"] = {}
    made["epochs"] = [{**each, "stores": store} for each, store in zip(passes, stores, strict=True)]
    made["nested"] = {}
    if "ranks" in state:
        made["ranks"] = [_rank(each, phases, start) for each in state["ranks"]]
    return made


def _second_form(state: dict[str, Any]) -> dict[str, Any]:
    """A state whose parts have versions; in the first of them, a fit had one validation."""
    if state.get("versions", {}).get("fit") != 1:
        return state
    return {**state, "fit": _fit(state, "epochs")}


def _rank(saved: Mapping[str, Any], phases: Sequence[str], start: float) -> dict[str, Any]:
    """The own parts of one process of several."""
    plugins, stores = _parted(saved["plugins"], phases, start)
    return {**saved, "plugins": plugins, "phases": {}, "stores": stores}


def _fit(state: Mapping[str, Any], opened: str) -> Any:
    """Where the fit is, its one validation by phase.

    Args:
        state: The whole state.
        opened: The name of its list of open epochs.
    """
    fit = state["fit"]
    if not isinstance(fit, dict) or not ONE_VALIDATION.issubset(fit):
        return fit
    phase = _validated_phase(state, opened)
    made = {key: value for key, value in fit.items() if key not in ONE_VALIDATION}
    made["counted"] = bool(fit.get("by_fit", True)) or "done" in fit
    made["due"] = [phase] if fit["validate"] or fit["validating"] else []
    made["mid_epoch"] = fit["validating"]
    made["validated"] = {phase: fit["validated"]}
    return made


def _validated_phase(state: Mapping[str, Any], opened: str) -> str:
    """The phase of a fit's validation: one that was open, or else one that has data and does not train."""
    fit = state["fit"]
    phases = [each["phase"] for each in state[opened]]
    candidates: list[str] = []
    if fit["validating"]:
        candidates += phases[1:]
    elif fit["validate"]:
        candidates += phases
    candidates += [name for name in state["data"] if name != "train" and name not in phases]
    return candidates[0] if candidates else "val"


def _parted(
    saved: Mapping[str, Any], phases: Sequence[str], start: float
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The states of plugins without what belongs to open epochs, and that, for each epoch by the plugin's name.

    Args:
        saved: The states by name.
        phases: The phases of the open epochs, the outermost first.
        start: The step with which the fit began.
    """
    plugins: dict[str, Any] = {}
    stores: list[dict[str, Any]] = [{} for _ in phases]
    for name, state in saved.items():
        own, parts = _without_throttle(name, state, phases, start)
        if own is not None:
            plugins[name] = own
        for store, part in zip(stores, parts, strict=True):
            if part:
                store[name] = part
    return plugins, stores


def _without_throttle(name: str, state: Any, phases: Sequence[str], start: float) -> tuple[Any, list[dict[str, Any]]]:
    """Split a plugin's state, or the one inside the state of a throttle around the plugin."""
    if not isinstance(state, dict) or state.keys() != THROTTLE:
        return _split(name, state, phases, start)
    own, parts = _split(name, state["plugin"], phases, start)
    return {**state, "plugin": own or {}}, parts


def _split(name: str, state: Any, phases: Sequence[str], start: float) -> tuple[Any, list[dict[str, Any]]]:
    """Split a plugin's state into its own (None: it has none any more) and the part of each open epoch."""
    if not isinstance(state, dict):
        return state, [{} for _ in phases]
    if name == "metrics" and _are_metrics(state):
        return None, _by_phase("so_far", state, phases)

    keys = state.keys()
    if keys == HISTORY:
        return _history(state, start), _by_phase("running", _running_rows(state), phases)
    if keys == PREDICTIONS:
        return {"done": state["done"]}, _by_phase("kept", state["kept"], phases)
    if keys == GRAD_NORM:
        counts = state["counts"]
        sums = {key: (total, counts[key]) for key, total in state["sums"].items()}
        return None, _in_outermost(sums, phases)
    moved = TRAINING.get(frozenset(keys))
    if moved is None:
        return state, [{} for _ in phases]
    own = dict(state)
    part = own.pop(moved)
    return own, _in_outermost({} if part is None else {moved: part}, phases)


def _are_metrics(state: Mapping[str, Any]) -> bool:
    """Whether every phase's entry is one of the metrics' plugin."""
    return all(isinstance(each, dict) and each.keys() == METRICS for each in state.values())


def _by_phase(key: str, values: Mapping[str, Any], phases: Sequence[str]) -> list[dict[str, Any]]:
    """The part of each open epoch, from values by phase."""
    return [{key: values[phase]} if phase in values else {} for phase in phases]


def _in_outermost(part: dict[str, Any], phases: Sequence[str]) -> list[dict[str, Any]]:
    """The part of each open epoch, where only the outermost has one: the training epoch."""
    return [part if depth == 0 else {} for depth, _ in enumerate(phases)]


def _history(state: Mapping[str, Any], start: float) -> dict[str, Any]:
    """A history's own state, with the number of rows from before the fit."""
    rows = state["rows"]
    first = sum(row["steps"] <= start for row in rows)
    return {"rows": rows, "step_rows": state["step_rows"], "first": first}


def _running_rows(state: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The open rows of a history by phase, without the phase."""
    rows = {}
    for row in state["running"]:
        values = dict(row)
        phase = values.pop("phase")
        rows[phase] = values
    return rows


ONE_VALIDATION = {"validate", "validating", "validated"}
"""The keys of a fit that has one validation."""

# A state is recognized by its keys, since plugins can have other names than their own.
THROTTLE = {"counts", "plugin"}
METRICS = {"fed", "metrics"}
HISTORY = {"rows", "step_rows", "running"}
GRAD_NORM = {"sums", "counts"}
PREDICTIONS = {"done", "kept"}
TRAINING = {
    frozenset({"skips", "rollbacks", "buffers", "snapshot"}): "buffers",  # StopOnNonFinite
    frozenset({"scaler", "skipped", "found"}): "found",  # MixedPrecision
}
"""The key that belongs to the training epoch, by the keys of the state."""
