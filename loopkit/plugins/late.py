"""Numbers on their way from the device to the host, read when they have arrived."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor


def _stack(values: Iterable[Tensor | float]) -> Tensor:
    """Scalars in one tensor, on the device of the first that is not on the CPU."""
    values = list(values)
    devices = [value.device for value in values if isinstance(value, Tensor)]
    device = next((each for each in devices if each.type != "cpu"), torch.device("cpu"))
    dtype = torch.float32 if device.type == "mps" else torch.float64
    return torch.stack(
        [
            value.detach().to(device, dtype, non_blocking=True).reshape(())
            if isinstance(value, Tensor)
            else torch.full((), value, dtype=dtype, device=device)
            for value in values
        ]
    )


def read(values: Mapping[str, Tensor | float]) -> dict[str, float]:
    """Read scalars in one transfer."""
    if not values:
        return {}
    stacked = _stack(values.values())
    return dict(zip(values, stacked.tolist(), strict=True))  # host sync: the values are wanted now


class LateValues:
    """One transfer of scalars at a time, which on CUDA no step waits for."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._host: Tensor | None = None
        self._event: torch.cuda.Event | None = None

    def send(self, values: Mapping[str, Tensor | float]) -> None:
        """Start the transfer of scalars; one that is under way is forgotten."""
        self._names, self._host, self._event = list(values), None, None
        if not values:
            return
        stacked = _stack(values.values())
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
