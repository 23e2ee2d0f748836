"""ranks: the entries of a state that differ from process to process, gathered at a save and shared out at a load."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from loopkit.engine.kept.parts import Parts
from loopkit.engine.kept.rounds import Round


def gathered(
    parts: Parts, state: Mapping[str, Any], gather: Callable[[Any], list[Any]], rank: int
) -> list[dict[str, Any]]:
    """Gather the parts that differ; this process's are the state's own objects, so that they are written once."""
    own = _apart(parts, state)
    ranks = gather(own)
    ranks[rank] = own
    return ranks


def localized(parts: Parts, given: Mapping[str, Any], rank: int, size: int) -> dict[str, Any]:
    """The state with this process's own entries; with another number of processes than at the save, its share of it."""
    state = dict(given)
    ranks = state.get("ranks") or [_apart(parts, state)]
    own = ranks[min(rank, len(ranks) - 1)]
    if "round" in own:
        rounds = [each["round"] for each in ranks]
        state["round"] = Round.share(rounds, rank, size)
    for part in parts:
        if part.name in own:
            saved = [each[part.name] for each in ranks]
            state[part.name] = part.share(state[part.name], saved, rank, size)
    epochs = []
    for index, epoch in enumerate(state["epochs"]):
        saved = [each["stores"][index] for each in ranks]
        shared = parts.plugins.share_stores(saved, rank, size)
        stores = {**epoch["stores"], **shared}
        epochs.append({**epoch, "stores": stores})
    state["epochs"] = epochs
    return state


def _apart(parts: Parts, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return what differs from process to process in a state that was collected in one of them."""
    apart: dict[str, Any] = {}
    if "round" in state:
        apart["round"] = state["round"]
    for part in parts:
        if part.name not in state:
            continue
        own = part.apart(state[part.name])
        if own is not None:
            apart[part.name] = own
    apart["stores"] = [parts.plugins.stores_apart(epoch["stores"]) for epoch in state["epochs"]]
    return apart
