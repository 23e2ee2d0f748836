"""States in the form in which loopkit saved them before its parts had versions, in today's form."""

from __future__ import annotations

from typing import Any

__all__ = ["upgrade"]


def upgrade(state: dict[str, Any]) -> dict[str, Any]:
    """A state that was read from a checkpoint, in today's form; one that has it already is returned as it is."""
    if "versions" in state or "passes" not in state:
        return state
    plugins = dict(state["plugins"])
    epochs = [{**each, "stores": {}} for each in state["passes"]]
    made = {
        **{key: value for key, value in state.items() if key != "passes"},
        "versions": {},
        "plugins": plugins,
        "phases": {},
        "epochs": epochs,
        "nested": {},
    }
    if "ranks" in state:
        made["ranks"] = [{**rank, "phases": {}, "stores": [{} for _ in epochs]} for rank in state["ranks"]]
    return made
