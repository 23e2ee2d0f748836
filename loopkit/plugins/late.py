"""Numbers on their way from the device to the host, read when they have arrived."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

__all__ = ["LateValues", "read"]


def _stack(values: Mapping[str, Tensor | float]) -> Tensor:
    device = next((value.device for value in values.values() if isinstance(value, Tensor)), torch.device("cpu"))
    dtype = torch.float32 if device.type == "mps" else torch.float64
    tensors = [
        value.detach().to(device, dtype).reshape(())
        if isinstance(value, Tensor)
        else torch.full((), value, dtype=dtype)
        for value in values.values()
    ]
    return torch.stack([tensor.to(device) for tensor in tensors])


def read(values: Mapping[str, Tensor | float]) -> dict[str, float]:
    """Read scalars in one transfer."""
    if not values:
        return {}
    stacked = _stack(values)
    if stacked.device.type == "cuda":
        late = LateValues()
        late.send(values)
        return late.wait()
    return dict(zip(values, stacked.tolist(), strict=True))  # host sync: the values are wanted now


class LateValues:
    """One transfer at a time, which on CUDA no step waits for."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._host: Tensor | None = None
        self._event: torch.cuda.Event | None = None

    def send(self, values: Mapping[str, Tensor | float]) -> None:
        """Start the transfer of scalars; one that is under way is forgotten."""
        stacked = _stack(values)
        self._names = list(values)
        self._event = None
        if stacked.device.type == "cuda":
            self._host = torch.empty(stacked.shape, dtype=stacked.dtype, pin_memory=True)
            self._host.copy_(stacked, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()
        else:
            self._host = stacked.cpu()

    def arrived(self) -> dict[str, float]:
        """The values if they are there, once; else nothing. Does not wait."""
        if self._host is None or (self._event is not None and not self._event.query()):  # type: ignore[no-untyped-call]
            return {}
        values = dict(zip(self._names, self._host.tolist(), strict=True))
        self._host = None
        return values

    def wait(self) -> dict[str, float]:
        """The values, waiting for them."""
        if self._event is not None:
            self._event.synchronize()  # host sync: the values are wanted now
        return self.arrived()
