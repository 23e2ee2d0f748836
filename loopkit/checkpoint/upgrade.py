"""States in the form in which loopkit saved them before its parts had versions, in today's form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["upgrade"]


def upgrade(state: dict[str, Any]) -> dict[str, Any]:
    """A state that was read from a checkpoint, in today's form; one that has it already is returned as it is."""
    if "versions" in state or "passes" not in state:
        return state
    phases = [each["phase"] for each in state["passes"]]
    plugins, stores = _parted(state["plugins"], phases)
    made = {
        **{key: value for key, value in state.items() if key != "passes"},
        "versions": {},
        "plugins": plugins,
        "phases": {},
        "epochs": [{**each, "stores": kept} for each, kept in zip(state["passes"], stores, strict=True)],
        "nested": {},
    }
    if "ranks" in state:
        parted = [_parted(rank["plugins"], phases) for rank in state["ranks"]]
        made["ranks"] = [
            {**rank, "plugins": own, "phases": {}, "stores": kept}
            for rank, (own, kept) in zip(state["ranks"], parted, strict=True)
        ]
    return made


def _parted(saved: Mapping[str, Any], phases: Sequence[str]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The states of plugins without what belongs to open epochs, and that, for each epoch by the plugin's name."""
    own: dict[str, Any] = {}
    stores: list[dict[str, Any]] = [{} for _ in phases]
    for name, state in saved.items():
        throttled = isinstance(state, dict) and state.keys() == {"counts", "plugin"}
        rest, kept = _split(name, state["plugin"] if throttled else state, phases)
        if throttled:
            own[name] = {**state, "plugin": rest or {}}
        elif rest is not None:
            own[name] = rest
        for store, each in zip(stores, kept, strict=True):
            if each:
                store[name] = each
    return own, stores


def _split(name: str, state: Any, phases: Sequence[str]) -> tuple[Any, list[dict[str, Any]]]:
    """What a plugin's state is now (None: it has none any more), and what it keeps for each open epoch."""
    kept: list[dict[str, Any]] = [{} for _ in phases]
    if not isinstance(state, dict):
        return state, kept
    if name == "metrics" and all(isinstance(each, dict) and each.keys() == METRICS for each in state.values()):
        return None, [{"so_far": state[phase]} if phase in state else {} for phase in phases]
    return state, kept


METRICS = {"fed", "metrics"}
