"""Numbers on their way from the device to the host, read when they have arrived."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from loopkit.base import devices

EVERY = 1.0
"""Seconds, at least, before values are read from a device that does not report their arrival."""


def _stack(values: Collection[Tensor | float]) -> Tensor:
    """Scalars in one tensor, on the device of the first that is not on the CPU."""
    device = next((each.device for each in values if isinstance(each, Tensor) and not each.is_cpu), devices.HOST)
    dtype = devices.exact(device)
    return torch.stack([devices.scalar(value, device, dtype).detach().reshape(()) for value in values])


def read(values: Mapping[str, Tensor | float]) -> dict[str, float]:
    """Read scalars: in one transfer, unless all are on the host."""
    if all(each.__class__ is Tensor and each.is_cpu for each in values.values() if isinstance(each, Tensor)):
        return {name: float(each.item() if isinstance(each, Tensor) else each) for name, each in values.items()}
    return dict(zip(values, _stack(values.values()).tolist(), strict=True))  # host sync: the values are wanted now


class LateValues:
    """One transfer of scalars at a time, which on CUDA no step waits for.

    Another accelerator does not report their arrival. There the host waits for them, at most once a second.
    """

    def __init__(self) -> None:
        self._names: list[str] = []
        self._sent: Tensor | None = None
        self._arrival = devices.Arrival(())
        self._since = 0.0

    def send(self, values: Mapping[str, Tensor | float]) -> None:
        """Start the transfer of scalars; one that is under way is forgotten."""
        self._names = list(values)
        self._sent = None
        if not values:
            return
        stacked = _stack(values.values())
        self._sent = devices.to_host(stacked) if devices.reads_late(stacked.device) else stacked
        self._arrival = devices.Arrival([stacked.device])
        self._since = time.monotonic()

    def arrived(self) -> dict[str, float]:
        """The values if they are there, once; else an empty dict. Does not wait, except as above."""
        if self._sent is None or not self._arrival.here:
            return {}
        if self._sent.device.type != "cpu" and time.monotonic() < self._since + EVERY:
            return {}
        return self._read()

    def wait(self) -> dict[str, float]:
        """The values, waiting for them."""
        self._arrival.wait()  # host sync: the values are wanted now
        return self._read()

    def _read(self) -> dict[str, float]:
        sent = self._sent
        self._sent = None
        return {} if sent is None else dict(zip(self._names, sent.tolist(), strict=True))  # host sync: at most as said
