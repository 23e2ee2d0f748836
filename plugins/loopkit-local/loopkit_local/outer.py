"""The outer optimizer: a step from the last average of the parameters towards the new one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["MakeOptimizer", "OuterOptimizer"]

MakeOptimizer = Callable[[Iterable[Tensor]], torch.optim.Optimizer]


class OuterOptimizer:
    """An optimizer over copies of the averaged parameters.

    Args:
        make: Makes the optimizer for the copies.
        params: The parameters that all processes start from.
        host: Keep the copies in the host's memory.
    """

    def __init__(self, make: MakeOptimizer, params: Sequence[Tensor], *, host: bool) -> None:
        cpu = torch.device("cpu") if host else None
        self._params = [
            nn.Parameter(p.to(cpu or p.device, torch.promote_types(p.dtype, torch.float32), copy=True)) for p in params
        ]
        self._optimizer = make(self._params)

    def step(self, means: list[Tensor]) -> list[Tensor]:
        """Take the difference to the new averages as the gradient, and return the values after the step."""
        for p, mean in zip(self._params, means, strict=True):
            p.grad = p.detach() - mean
        self._optimizer.step()
        self._optimizer.zero_grad()
        return [p.detach().clone() for p in self._params]

    def state_dict(self) -> dict[str, Any]:
        """Copies of the parameters, and the optimizer's state."""
        return {
            "params": [p.detach().clone() for p in self._params],
            "optimizer": copy.deepcopy(self._optimizer.state_dict()),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the return value of `state_dict`."""
        with torch.no_grad():
            for p, saved in zip(self._params, state["params"], strict=True):
                p.copy_(saved)
        self._optimizer.load_state_dict(state["optimizer"])
