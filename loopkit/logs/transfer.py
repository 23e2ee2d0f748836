"""Scalars of many records on their way to the host, together."""

from __future__ import annotations

import torch
from torch import Tensor

from loopkit.base import devices
from loopkit.logs.record import Group, Records


class Transfer:
    """Starts to read the scalar tensors of records, in one transfer for each device.

    Args:
        records: They are changed: where there was a tensor there will be a float.
    """

    def __init__(self, records: Records) -> None:
        self._records = records
        self._sent: list[tuple[list[tuple[Group, str]], Tensor]] = []
        found: dict[torch.device, dict[torch.dtype, list[tuple[Group, str]]]] = {}
        for group in records.groups:
            if any(issubclass(kind, Tensor) for kind in group.kinds):
                for name, value in group.values.items():
                    if isinstance(value, Tensor):
                        found.setdefault(value.device, {}).setdefault(value.dtype, []).append((group, name))
        for device, kinds in found.items():
            stacked = [torch.stack([group.values[name].reshape(()) for group, name in kind]) for kind in kinds.values()]
            values = torch.cat([each.to(devices.exact(device)) for each in stacked])
            self._sent.append(([place for kind in kinds.values() for place in kind], devices.to_host(values)))
        self._arrival = devices.Arrival(found)

    @property
    def arrived(self) -> bool:
        """Whether `records` would not wait."""
        return self._arrival.here

    def records(self) -> Records:
        """The records, with floats; waits for them."""
        self._arrival.wait()  # host sync: the values are wanted now
        for places, values in self._sent:
            for (group, name), value in zip(places, values.tolist(), strict=True):
                group.values[name] = value
        if self._sent:
            for group in self._records.groups:
                group.find_kinds()
        return self._records
