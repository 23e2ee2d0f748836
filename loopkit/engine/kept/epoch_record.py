"""The saved form of an open epoch: its steps, the place of its data, its windows and stores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from loopkit.base import sharded
from loopkit.base.sparse import unpacked
from loopkit.engine.kept.data.content import content
from loopkit.engine.kept.data.data_places import DataPlaces
from loopkit.engine.kept.data.loader_positions import save_position
from loopkit.engine.kept.data.self_seeded import self_seeded
from loopkit.engine.kept.open_epoch import OpenEpoch
from loopkit.engine.kept.position import Position
from loopkit.errors import StateError


def record(epoch: OpenEpoch, position: Position | None, places: DataPlaces) -> dict[str, Any]:
    """Return the saved form of an open epoch, of a fit at this position."""
    if epoch.data is None:
        raise StateError(
            f"the epoch of phase {epoch.phase.name!r} has data that the learner does not know, so it could not resume "
            f"from here: give learner.epoch({epoch.phase.name!r}, data=loader), and take epoch.batches()"
        )
    windows = [window for window in epoch.windows if window.count]
    saved = {
        "phase": epoch.phase.name,
        "steps": epoch.steps,
        "data": _place_of_data(epoch, position),
        "windows": {window.name: window.state_dict() for window in windows},
        "stores": epoch.saved_stores(),
    }
    saved.update(_proof_of(epoch, places.unproved))
    if position is None or position.by_fit:
        whole = places.counts.whole(epoch)
        if whole is not None:
            saved["whole"] = whole
    else:
        made = content(epoch.data, epoch.steps)
        if made is not None:
            saved["content"] = made
    return saved


def _place_of_data(epoch: OpenEpoch, position: Position | None) -> dict[str, Any]:
    earlier = 0
    if position is not None and not epoch.made:
        earlier = position.epochs - position.validate
    place = save_position(
        epoch.data,
        epoch.steps,
        running=True,
        begun=epoch.begun,
        earlier_epochs=earlier,
        function=epoch.function,
    )
    place["made"] = epoch.made_with
    return place


def _proof_of(epoch: OpenEpoch, unproved: dict[str, str]) -> dict[str, Any]:
    """Return what a state holds to compare the data of an open epoch; note the reason by phase if it holds nothing."""
    name = epoch.phase.name
    if not epoch.steps:
        return {}
    if epoch.loop.seen_data.batch is None:  # no step since it was resumed
        loaded = epoch.saved or {}
        held = loaded.get("proof")
        return {} if held is None else {"proof": held}
    found, why = epoch.loop.seen_data.digest()
    if found is None:
        unproved[name] = f"data of phase {name!r}: unproved at a resume, as {why}"
        return {}
    unproved.pop(name, None)
    return {"proof": {"digest": found, "repeats": not self_seeded(epoch.data)}}


def restore_windows(epoch: OpenEpoch, saved: Mapping[str, Any]) -> None:
    """Reopen the accumulation windows of an epoch."""
    for name, values in saved.items():
        window = epoch.window(name)
        grads = [_like(unpacked(grad), p) for grad, p in zip(values["grads"], window.params, strict=True)]
        window.reopen(epoch.loop.last_step(), {**values, "grads": grads})


def _like(grad: Tensor | None, param: Tensor) -> Tensor | None:
    """A gradient as this process holds it; a sparse one is whole in each."""
    return grad if grad is None or grad.is_sparse else sharded.like(grad, param)
