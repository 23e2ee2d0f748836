"""Weighted averages of tensors over processes, made now or in the background."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from loopkit.author import buckets, devices

if TYPE_CHECKING:
    from loopkit.learner import Learner

__all__ = ["Average", "Parts", "distance", "parts_of", "to_devices", "to_host", "weighted_mean"]

BUCKET_BYTES = 64 << 20


@dataclass
class Parts:
    """The tensors to average, by how they are averaged."""

    params: list[Tensor] = field(default_factory=list)
    """Averaged; training in the meantime is kept."""
    others: dict[tuple[Any, ...], Tensor] = field(default_factory=dict)
    """Floating buffers and moments, averaged if all processes have them."""
    counts: list[Tensor] = field(default_factory=list)
    """Other dtypes than floating ones: rank 0's values are taken."""
    arrival: devices.Arrival = field(default_factory=lambda: devices.Arrival(()))
    """Before it, they are not to be read."""

    def tensors(self) -> list[Tensor]:
        """All of them, in a fixed order."""
        return [*self.params, *self.others.values(), *self.counts]

    def snapshot(self, host: bool) -> Parts:
        """A copy, in the host's memory or where they are, without waiting where possible."""
        tensors = self.tensors()
        copies = iter(to_host(tensors) if host else [tensor.detach().clone() for tensor in tensors])
        params = [next(copies) for _ in self.params]
        others = {key: next(copies) for key in self.others}
        return Parts(params, others, list(copies), devices.Arrival(tensor.device for tensor in tensors))


def parts_of(learner: Learner, *, moments: bool) -> Parts:
    """The parameters of a learner's optimizers, and the buffers of its models.

    Args:
        learner: The learner.
        moments: Also the tensors of the optimizers' states that have their parameter's shape.
    """
    params: dict[int, Tensor] = {}
    others: dict[tuple[Any, ...], Tensor] = {}
    for name, optimizer in learner.optimizers.items():
        owned = [p for group in optimizer.param_groups for p in group["params"]]
        for index, p in enumerate(owned):
            params.setdefault(id(p), p)
            state = optimizer.state.get(p, {}) if moments else {}
            others.update({(name, index, key): value for key, value in state.items() if _is_moment(value, p)})
    found: dict[int, tuple[tuple[str, str], Tensor]] = {}
    for name, model in learner.models.with_extras().items():
        for path, buffer in model.named_buffers():
            found.setdefault(id(buffer), ((name, path), buffer))
    floating = {key: buffer for key, buffer in found.values() if _is_floating(buffer)}
    counts = [buffer for _, buffer in found.values() if not _is_floating(buffer)]
    return Parts([p.detach() for p in params.values()], {**floating, **others}, counts)


def _is_moment(value: Any, param: Tensor) -> bool:
    if not isinstance(value, Tensor) or not value.ndim:
        return False
    return value.shape == param.shape and _is_floating(value)


def _is_floating(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


class Average:
    """One average over all processes, each of which makes one at the same point of its program.

    First the processes exchange some numbers, the first of which is the weight. Who comes early waits there; the
    rest then takes the time of the tensors, whoever was late. If all weights are 0 there is no average.

    Args:
        parts: The tensors to average; not to be changed until it is over.
        numbers: This process's; the first one is its weight.
        group: For the tensors.
        control: For the numbers; a Gloo group only for this.
        after: Called with the averaged parameters; its result takes their place.
        measure: Measure the divergence.
        background: Do it in a thread.
    """

    def __init__(
        self,
        parts: Parts,
        numbers: Sequence[float],
        *,
        group: Any = None,
        control: Any = None,
        after: Callable[[list[Tensor]], list[Tensor]] | None = None,
        measure: bool = False,
        background: bool = False,
    ) -> None:
        self.parts = parts
        self.background = background
        """Whether it is made in the background."""
        self.result: Parts | None = None
        """The averages, in single precision at least; None if all weights were 0."""
        self.table: list[list[float]] = []
        """The numbers of each process."""
        self.exchange_ms = 0.0
        """The time of the exchange of the numbers, with the wait for the slowest process."""
        self.reduce_ms = 0.0
        """The time of the average itself, after the exchange."""
        self.divergence: float | None = None
        """``||parameters - average|| / ||average||`` of this process, if it was to be measured."""
        self._numbers = list(numbers)
        self._group = group
        self._control = control
        self._after = after
        self._measure = measure
        self._error: BaseException | None = None
        self._exchanged = threading.Event()
        self._thread: threading.Thread | None = None
        self._lane = _lane(parts) if background else None
        if not self._numbers:
            self._exchanged.set()  # made of a saved one
        elif background:
            self._thread = threading.Thread(target=self._run_quietly, daemon=True, name="loopkit-average")
            self._thread.start()
        else:
            self._run()

    def state_dict(self) -> dict[str, Any]:
        """The state for `of`; the average must be done."""
        result = self.result
        return {
            "snapshot": [tensor.clone() for tensor in self.parts.params],
            "params": None if result is None else [tensor.clone() for tensor in result.params],
            "others": [] if result is None else [[list(key), tensor.clone()] for key, tensor in result.others.items()],
            "counts": [] if result is None else [tensor.clone() for tensor in result.counts],
            "table": [list(row) for row in self.table],
            "divergence": self.divergence,
        }

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Average:
        """One that is over, made from the result of `state_dict`."""
        average = cls(Parts([tensor.clone() for tensor in state["snapshot"]]), (), background=True)
        if state["params"] is not None:
            others = {tuple(key): tensor.clone() for key, tensor in state["others"]}
            params, counts = ([tensor.clone() for tensor in state[name]] for name in ("params", "counts"))
            average.result = Parts(params, others, counts)
        average.table = [list(row) for row in state["table"]]
        average.divergence = state["divergence"]
        return average

    def numbers(self) -> list[list[float]]:
        """The numbers of each process, as soon as all have come."""
        self._exchanged.wait()
        if self._error is not None:
            raise self._error
        return self.table

    def wait(self) -> None:
        """Wait until it is over; raises what failed."""
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error

    def _run_quietly(self) -> None:
        try:
            if self._lane is None:
                self._run()
            else:
                with self._lane.stream:
                    self._run()
                self._lane.wait()
        except BaseException as error:
            self._error = error
        finally:
            self._exchanged.set()

    @torch.no_grad()
    def _run(self) -> None:
        begin = time.perf_counter()
        own = torch.tensor(self._numbers, dtype=torch.float64)
        rows = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(rows, own, group=self._control)
        self.table = [row.tolist() for row in rows]
        exchanged = time.perf_counter()
        self.exchange_ms = 1e3 * (exchanged - begin)
        self._exchanged.set()
        self.parts.arrival.wait()
        total = sum(row[0] for row in self.table)
        if total > 0:
            self.result = self._averaged(self._numbers[0] / total)
        self.reduce_ms = 1e3 * (time.perf_counter() - exchanged)

    def _averaged(self, share: float) -> Parts:
        parts = self.parts
        keys = list(parts.others)
        if keys:
            held: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(held, keys, group=self._control)
            keys = [key for key in held[0] if all(key in theirs for theirs in held)]
        tensors = [*parts.params, *(parts.others[key] for key in keys)]
        means = weighted_mean(tensors, share, self._group)
        params, others = means[: len(parts.params)], means[len(parts.params) :]
        counts = [tensor.clone() for tensor in parts.counts]
        for tensor in counts:
            dist.broadcast(tensor, src=0, group=self._group)
        if self._measure and params:
            self.divergence = distance(parts.params, params)
        if self._after is not None:
            params = self._after(params)
        return Parts(params, dict(zip(keys, others, strict=True)), counts)


def weighted_mean(tensors: Sequence[Tensor], share: float, group: Any = None) -> list[Tensor]:
    """``sum_r share_r * tensor_r`` over the processes, as new tensors; equal, bitwise, in all of them.

    Half precision is summed, and returned, in single precision. One collective for each 64 MiB, dtype and device.

    Args:
        tensors: Floating or complex, of the same shapes in all processes.
        share: This process's; all shares add up to 1. With 0 the values are not read.
        group: Of ``torch.distributed``.
    """
    means: list[Tensor] = [torch.empty(0)] * len(tensors)
    for bucket in buckets.bucketed(tensors, BUCKET_BYTES):
        flat = torch.cat([_flat(tensors[i]) for i in bucket])
        if share:
            flat.mul_(share)
        else:
            flat.zero_()
        dist.all_reduce(flat, group=group)
        parts = torch.split(flat, [_flat(tensors[i]).numel() for i in bucket])
        for i, part in zip(bucket, parts, strict=True):
            if tensors[i].is_complex():
                part = torch.view_as_complex(part.view(-1, 2))
            means[i] = part.view(tensors[i].shape)
    return means


def to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies in the host's memory: one for each 64 MiB, dtype and device; a `devices.Arrival` waits until they are
    there.

    Args:
        tensors: They may be on the host already.
    """
    made = list(tensors)
    for bucket in buckets.bucketed(tensors, BUCKET_BYTES):
        parts = [tensors[i].detach().reshape(-1) for i in bucket]
        flat = parts[0] if len(parts) == 1 else torch.cat(parts)
        if len(parts) == 1 or flat.device != devices.HOST:
            flat = devices.to_host(flat)
        _put(flat, made, bucket)
    return made


def to_devices(values: Sequence[Tensor], targets: Sequence[Tensor]) -> list[Tensor]:
    """Values where targets are, in their dtypes; one copy for each 64 MiB, dtype and device, without waiting.

    Args:
        values: All on the host, or each where its target is.
        targets: As many, of the same shapes.
    """
    made = [value.to(target.dtype) for value, target in zip(values, targets, strict=True)]
    for bucket in buckets.bucketed(targets, BUCKET_BYTES):
        device = targets[bucket[0]].device
        if made[bucket[0]].device != device:
            flat = torch.cat([made[i].reshape(-1) for i in bucket])
            flat = devices.pinned(flat) if devices.reads_late(device) else flat
            _put(devices.to_device(flat, device), made, bucket)
    return made


def _put(flat: Tensor, tensors: list[Tensor], bucket: Sequence[int]) -> None:
    """Let tensors be the parts of a flat one."""
    parts = torch.split(flat, [tensors[i].numel() for i in bucket])
    for i, part in zip(bucket, parts, strict=True):
        tensors[i] = part.view(tensors[i].shape)


def distance(before: Sequence[Tensor], after: Sequence[Tensor]) -> float:
    """``||before - after|| / ||after||`` over all tensors together; infinite if ``after`` is 0 and they differ."""
    differences = torch._foreach_sub([b.to(a.dtype) for b, a in zip(before, after, strict=True)], list(after))
    device = after[0].device
    exact = devices.exact(device)
    norms = [
        torch.linalg.vector_norm(torch.stack([each.to(device, exact) for each in torch._foreach_norm(tensors)]))
        for tensors in (differences, list(after))
    ]
    moved, norm = torch.stack(norms).tolist()  # host sync: the plan of the next round depends on it
    return moved / norm if norm else (float("inf") if moved else 0.0)


def _flat(tensor: Tensor) -> Tensor:
    flat = torch.view_as_real(tensor).reshape(-1) if tensor.is_complex() else tensor.detach().reshape(-1)
    return flat.float() if flat.element_size() < 4 else flat


def _lane(parts: Parts) -> devices.Lane | None:
    """A side stream on the tensors' device, behind what is queued there now; None on a CPU."""
    device = next((tensor.device for tensor in parts.params if tensor.device.type != "cpu"), None)
    if device is None:
        return None
    lane = devices.Lane(device)
    lane.follow()
    return lane
