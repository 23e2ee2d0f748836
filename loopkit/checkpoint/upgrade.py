"""States in the form in which loopkit saved them before its parts had versions, in today's form."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any


def upgrade(state: dict[str, Any]) -> dict[str, Any]:
    """A state that was read from a checkpoint, in today's form; one that has it already is returned as it is."""
    if "versions" in state or "passes" not in state:
        return state if state.get("versions", {}).get("fit") != 1 else {**state, "fit": _fit(state, "epochs")}
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
    inner = phases[1:] if fit["validating"] else phases if fit["validate"] else []
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
        phases: Those of the open epochs, the outermost first.
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
    """What a plugin's state is now (None: it has none any more), and what it keeps for each open epoch."""
    kept: list[dict[str, Any]] = [{} for _ in phases]
    if not isinstance(state, dict):
        return state, kept
    if name == "metrics" and all(isinstance(each, dict) and each.keys() == METRICS for each in state.values()):
        return None, [{"so_far": state[phase]} if phase in state else {} for phase in phases]
    if state.keys() == HISTORY:
        running = {each["phase"]: {k: v for k, v in each.items() if k != "phase"} for each in state["running"]}
        first = sum(row["steps"] <= start for row in state["rows"])
        own = {"rows": state["rows"], "step_rows": state["step_rows"], "first": first}
        return own, [{"running": running[phase]} if phase in running else {} for phase in phases]
    if state.keys() == GRAD_NORM:
        sums = {key: (total, state["counts"][key]) for key, total in state["sums"].items()}
        return None, [sums, *kept[1:]] if kept else []
    for keys, key in TRAINING:
        if state.keys() == keys:
            part = {} if state[key] is None else {key: state[key]}
            return {k: v for k, v in state.items() if k != key}, [part, *kept[1:]] if kept else []
    if state.keys() == PREDICTIONS:
        return {"done": state["done"]}, [{"kept": state["kept"][p]} if p in state["kept"] else {} for p in phases]
    return state, kept


# Which state is whose is told by its keys, since plugins can have other names than their own.
METRICS = {"fed", "metrics"}
HISTORY = {"rows", "step_rows", "running"}
GRAD_NORM = {"sums", "counts"}
PREDICTIONS = {"done", "kept"}
TRAINING = [  # and the part that belongs to the training epoch, which is around the others
    ({"skips", "rollbacks", "buffers", "snapshot"}, "buffers"),  # StopOnNonFinite
    ({"scaler", "skipped", "found"}, "found"),  # MixedPrecision
]
