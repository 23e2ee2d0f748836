"""Scalars of many records on their way to the host, together."""

from __future__ import annotations

import torch
from torch import Tensor

from loopkit.logs.record import Group, Records


class Transfer:
    """Starts to read the scalar tensors of records, in one transfer for each device and dtype.

    Args:
        records: They are changed: where there was a tensor there will be a float.
    """

    def __init__(self, records: Records) -> None:
        self._records = records
        self._sent: list[tuple[list[tuple[Group, str]], Tensor]] = []
        self._events: list[torch.cuda.Event] = []
        found: dict[tuple[torch.device, torch.dtype], list[tuple[Group, str]]] = {}
        for group in records.groups:
            if any(issubclass(kind, Tensor) for kind in group.kinds):
                for name, value in group.values.items():
                    if isinstance(value, Tensor):
                        found.setdefault((value.device, value.dtype), []).append((group, name))
        for (device, _), places in found.items():
            values = torch.stack([group.values[name].reshape(()) for group, name in places])
            values = values.to(torch.float32 if device.type == "mps" else torch.float64)
            if device.type == "cuda":
                host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
                host.copy_(values, non_blocking=True)
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                event.record(torch.cuda.current_stream(device))
                self._events.append(event)
                values = host
            self._sent.append((places, values))

    @property
    def arrived(self) -> bool:
        """Whether `records` would not wait."""
        return all(event.query() for event in self._events)  # type: ignore[no-untyped-call]

    def records(self) -> Records:
        """The records, with floats; waits for them."""
        for event in self._events:
            event.synchronize()  # host sync: the values are wanted now
        for places, values in self._sent:
            for (group, name), value in zip(places, values.tolist(), strict=True):
                group.values[name] = value
        if self._sent:
            for group in self._records.groups:
                group.find_kinds()
        return self._records
