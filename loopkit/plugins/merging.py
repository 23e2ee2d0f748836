"""Merge the states that several processes have accumulated in a metric."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import accumulate
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from loopkit.base.batches import describe, map_parts, map_tensors
from loopkit.base.raw import raw, raw_bytes
from loopkit.errors import PluginError
from loopkit.metrics import Metric


def can_merge(metric: Any) -> bool:
    """Whether the metric, or torchmetrics, defines how its state is merged."""
    if not isinstance(metric, Metric):
        return _merges_itself(metric) or bool(_foreign(metric))
    classes = type(metric).__mro__
    made, merged = (next(cls for cls in classes if name in vars(cls)) for name in ("reset", "merge"))
    return classes.index(merged) <= classes.index(made)  # else it would merge another state than that of its reset


def accumulated(metric: Any) -> dict[str, Any]:
    """The state of a metric that can be merged: its ``state_dict``, or only the states of a torchmetrics object."""
    if isinstance(metric, Metric) or _merges_itself(metric):
        return dict(metric.state_dict())
    return {f"{path}{key}": value for path, each in _foreign(metric) for key, value in each.metric_state.items()}


def merge(metric: Any, states: Sequence[dict[str, Any]], *, goes_on: bool = False) -> None:
    """Let a metric hold what several have accumulated; a torchmetrics object is moved to the host.

    Args:
        metric: One of which `can_merge` is true.
        states: The results of `accumulated`, or their ``state_dict``, by rank and in the host's memory.
        goes_on: Whether it will be updated afterwards.

    Raises:
        PluginError: ``goes_on``, and a state of a torchmetrics object can only be merged for its last time.
    """
    if isinstance(metric, Metric) or _merges_itself(metric):
        metric.merge(states)
        return
    metric.to(torch.device("cpu"))
    apart(metric)
    for path, each in _foreign(metric):
        for key, reduction in each._reductions.items():
            values = [state[f"{path}{key}"] for state in states]
            if isinstance(values[0], Tensor) and reduction is None and goes_on:
                raise PluginError(
                    f"{type(each).__name__} keeps {key!r} ({describe(values[0])}) of each process apart, so it cannot "
                    f"resume in the middle of an epoch with another number of processes: use the same number "
                    f"({len(states)}), or leave the metric out"
                )
            setattr(each, key, _reduced(values, reduction))
        each._update_count = max(each._update_count, 1)  # or it warns that there was no update
        each._computed = None


def apart(metric: Any) -> None:
    """Let a torchmetrics object compute the value of its own state, without other processes."""
    for _, each in _foreign(metric):
        each.distributed_available_fn = _nobody


def ungrouped(metric: Any) -> Any:
    """The metric; a torchmetrics collection whose metrics differ in an option updates each of them by itself.

    By default a collection shares one state among metrics whose states are equal after the first batch, also if they
    have other thresholds.
    """
    torchmetrics = sys.modules.get("torchmetrics")
    if torchmetrics is None or type(metric) is not torchmetrics.MetricCollection:
        return metric
    if metric._enable_compute_groups is not True or not _differ([each for _, each in _foreign(metric)]):
        return metric
    members = dict(metric.items(keep_base=True, copy_state=False))
    return torchmetrics.MetricCollection(members, prefix=metric.prefix, postfix=metric.postfix, compute_groups=False)


def _differ(metrics: Sequence[Any]) -> bool:
    """Whether two of them have the same option with other values; how values are averaged at the end is none."""
    seen: dict[str, Any] = {}
    for each in metrics:
        for name, value in vars(each).items():
            if name.startswith("_") or name in (*each._defaults, "average"):
                continue
            if not isinstance(value, Real | str | None):
                continue
            if seen.setdefault(name, value) != value:
                return True
    return False


def _merges_itself(metric: Any) -> bool:
    return all(callable(getattr(metric, name, None)) for name in ("merge", "state_dict"))


def _foreign(metric: Any) -> list[tuple[str, Any]]:
    """The torchmetrics objects in this one, itself included, by the prefix of their states in its ``state_dict``."""
    named = metric.named_modules() if isinstance(metric, nn.Module) else ()
    return [(f"{path}." if path else "", each) for path, each in named if hasattr(each, "_reductions")]


def _reduced(values: list[Any], reduction: Any) -> Any:
    """As torchmetrics does, but lists that are only strung together stay lists, to which one can append."""
    if isinstance(values[0], Tensor):
        stacked = torch.stack(values)
        return stacked if reduction is None else reduction(stacked)
    together = [part for value in values for part in value]
    if not together or reduction is None or getattr(reduction, "__name__", "") == "dim_zero_cat":
        return together
    return reduction(together)


def _nobody() -> bool:
    """For ``distributed_available_fn``: a torchmetrics object that was merged here must not be reduced once more."""
    return False


def to_host(value: Any) -> Any:
    """A copy of nested data whose tensors are in the host's memory; all tensors of a device come in one transfer."""
    found: dict[torch.device, list[Tensor]] = {}

    def note(tensor: Tensor) -> Tensor:
        found.setdefault(tensor.device, []).append(tensor)
        return tensor

    map_tensors(value, note)
    copies = {device: iter(_copies(tensors)) for device, tensors in found.items()}
    return map_tensors(value, lambda tensor: next(copies[tensor.device]))


def _copies(tensors: list[Tensor]) -> list[Tensor]:
    parts = [raw(tensor) for tensor in tensors]
    host = torch.cat(parts).cpu()  # host sync: they are sent now
    ends = accumulate(part.numel() for part in parts)
    return [
        host[end - part.numel() : end].clone().view(tensor.dtype).reshape(tensor.shape)  # cloned: sent without the rest
        for part, end, tensor in zip(parts, ends, tensors, strict=True)
    ]


class _Packed:
    """A tensor's bytes: to pickle a tensor itself takes a hundred times as long."""

    def __init__(self, tensor: Tensor) -> None:
        self.dtype = tensor.dtype
        self.shape = tuple(tensor.shape)
        self.data = raw_bytes(tensor)

    def tensor(self) -> Tensor:
        if not self.data:
            return torch.empty(self.shape, dtype=self.dtype)
        return torch.frombuffer(bytearray(self.data), dtype=self.dtype).reshape(self.shape)


def packed(value: Any) -> Any:
    """A copy of nested data that is quick to pickle."""
    return map_tensors(to_host(value), _Packed)  # type: ignore[arg-type]  # what it returns is put in its place


def unpacked(value: Any) -> Any:
    """Undo `packed`; tensors are in the host's memory."""
    return value.tensor() if isinstance(value, _Packed) else map_parts(value, unpacked)
