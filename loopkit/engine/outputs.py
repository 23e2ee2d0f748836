"""Outputs: what a phase that predicts makes of data: all of it at once, or batch by batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from loopkit.batches import move
from loopkit.engine.fit import next_epoch
from loopkit.engine.sources import Source
from loopkit.errors import EmptyDataError, PhaseError

if TYPE_CHECKING:
    from loopkit.engine.core import Core
    from loopkit.engine.epoch import Epoch
    from loopkit.phases import Phase


def predict(core: Core, phase: Phase, data: Any, place: torch.device | None, everywhere: bool) -> Any:
    """Run the phase over the data and return its outputs; see `Learner.predict`."""
    source = Source(core.registry, phase, [data] if isinstance(data, Tensor) else data)
    if source.made:
        source = Source(core.registry, phase, source.given())
    outputs: list[Any] = []
    with _aside(core), next_epoch(core, phase, source) as epoch:
        epoch.loop.run(_collecting(epoch, outputs, place))
        epoch.check_count(True)
    if core.world.size > 1 and source.epoch()[0] is not source.given:
        from loopkit.shards import gather

        outputs = gather(core.world, source.given, outputs, everywhere)
        if core.world.rank > 0 and not everywhere:
            return None
    return _concatenate(outputs)


def predict_batches(core: Core, source: Source) -> Iterator[Any]:
    """Run the phase over the data and yield its outputs by batch; see `Learner.predict_batches`."""
    with _aside(core), next_epoch(core, source.phase, source) as epoch:
        for batch in epoch.batches():
            step = epoch.step(batch)
            if "outputs" in vars(step):
                epoch.contexts.restore_modes()
                yield step.outputs
                epoch.contexts.set_modes()
        epoch.check_count(True)


def _aside(core: Core) -> AbstractContextManager[None]:
    """In a loop of the user's, a prediction is no epoch of a round, which a resume would skip: it is made again."""
    in_rounds = core.fit is not None and not core.fit.position.by_fit
    return core.aside() if in_rounds else nullcontext()


def _collecting(epoch: Epoch, outputs: list[Any], place: torch.device | None) -> Iterator[Any]:
    """The batches of an epoch; when the next one is asked for, the outputs of the last step are kept, at ``place``."""
    loop, on_cpu = epoch.loop, place == torch.device("cpu")
    for batch in epoch.batches():
        yield batch
        if (made := vars(loop.current).get("outputs", outputs)) is not outputs:
            stays = on_cpu and made.__class__ is Tensor and made.is_cpu
            outputs.append(made if place is None or stays else move(made, place))  # host sync: wanted there


def _concatenate(outputs: list[Any]) -> Any:
    """Join outputs of batches: tensors along the first dimension, tuples and mappings part by part."""
    if not outputs:
        raise EmptyDataError("predict: the phase set no step.outputs")
    first = outputs[0]
    if isinstance(first, Tensor):
        return torch.cat(outputs) if first.ndim else torch.stack(outputs)
    if isinstance(first, Mapping):
        return {key: _concatenate([output[key] for output in outputs]) for key in first}
    if isinstance(first, (tuple, list)):
        joined = [_concatenate(list(part)) for part in zip(*outputs, strict=True)]
        return type(first)(*joined) if hasattr(first, "_fields") else type(first)(joined)
    raise PhaseError(f"predict cannot concatenate outputs of type {type(first).__name__}: use predict_batches")
