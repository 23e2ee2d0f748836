"""The compiled graph of a step."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from loopkit.author import devices
from loopkit_whole_step.sealed import Refused, autocast_off

Backend = Callable[[torch.fx.GraphModule, Sequence[Tensor]], Callable[..., Any]]


class Graph:
    """The graph of a step, recorded, then compiled.

    Args:
        module: The recorded graph.
        inputs: The inputs that it was recorded with.
    """

    def __init__(self, module: torch.fx.GraphModule, inputs: list[Tensor]) -> None:
        self.traced = module, inputs
        """The recorded graph and its inputs, until it is compiled."""
        self.call: Callable[..., Any]
        """The compiled graph."""
        self._without_grad = torch.no_grad()
        """One for all replays, which are never nested."""
        self._devices = devices.types()

    def compile(self, backend: Backend) -> float:
        """Compile the recorded graph in this process; returns for how many seconds.

        Raises:
            Refused: It cannot be compiled.
        """
        started = time.perf_counter()
        module, inputs = self.traced
        with torch.no_grad(), autocast_off(), torch.random.fork_rng(devices=[]):
            try:
                self.call = backend(module, inputs)
                self.call(*map(copied, inputs))  # what is compiled late is compiled now
            except Exception as error:
                raise Refused(f"it cannot be compiled ({first_line(error)})") from None
        del self.traced
        return time.perf_counter() - started

    def called_by(self, call: Callable[..., Any], constants: Sequence[Tensor]) -> None:
        """Take over a library of the graph, which takes constants after the inputs."""
        self.call = (lambda *inputs: call(*inputs, *constants)) if constants else call
        del self.traced

    def is_cast(self) -> bool:
        """Whether autocast is on."""
        return any(map(torch.is_autocast_enabled, self._devices))

    def run(self, inputs: Sequence[Tensor]) -> Sequence[Any]:
        """Replay the graph."""
        if self.is_cast():
            with self._without_grad, autocast_off():
                return self.call(*inputs)  # type: ignore[no-any-return]
        with self._without_grad:
            return self.call(*inputs)  # type: ignore[no-any-return]


def copied(value: Tensor) -> Tensor:
    """A copy with the same strides."""
    copy = value.detach().clone()
    if copy.stride() != value.stride():
        copy = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device).copy_(copy)
    return copy


def first_line(error: Exception) -> str:
    """An error's type and the first line of its message."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:200]}"
