"""Measured: what stood in the weights' place when a metric was measured, saved beside the models' own weights."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from loopkit.base import sharded

if TYPE_CHECKING:
    from torch import nn


class Measured:
    """The weights with which the metrics of a phase were measured, where these are not the models' own.

    It has the form of a `loopkit.engine.kept.part.Part`: a state holds it as ``weights.<phase>``.

    Args:
        models: The learner's modules, by name.
    """

    name = "weights"
    version = 1

    def __init__(self, models: Mapping[str, nn.Module]) -> None:
        self._models = models
        self._taken: dict[str, dict[str, dict[str, Any]]] = {}
        """By phase and model: a copy of its ``state_dict``."""

    def take(self, phase: str) -> None:
        """Copy what stands in the weights' place now, which a phase has measured."""
        self._taken[phase] = {name: _copied(dict(model.state_dict())) for name, model in self._models.items()}

    def differs(self, phase: str) -> bool:
        """Whether what a phase has measured is not what the models hold now; it waits for the device."""
        taken = self._taken.get(phase, {})
        return not all(_alike(values, self._models[name].state_dict()) for name, values in taken.items())

    def drop(self, phase: str) -> None:
        """Forget what a phase has measured."""
        self._taken.pop(phase, None)

    # As a part

    def begin(self, saved: Any | None) -> None:
        """Start with a fit, which measures anew."""
        self._taken = {}

    def end(self, error: BaseException | None) -> None:
        """Forget what was measured."""
        self._taken = {}

    def saved(self) -> dict[str, Any]:
        """Return what was taken, by phase, model and tensor."""
        return {phase: dict(models) for phase, models in self._taken.items()}

    def problems(self, saved: Any) -> list[str]:
        """A learner that loads the state measures anew, so nothing has to fit."""
        return []

    def load(self, saved: Any) -> Callable[[], None]:
        """Take nothing over: `loopkit.checkpoint.load_best` and `load_weights` read it from the file."""
        return lambda: None

    def share(self, saved: list[Any], rank: int, size: int) -> Any:
        """Return what the first process saved: it is the same in all."""
        return saved[0]


def _copied(state: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a model's state, in which tied tensors are the same one again."""
    made: dict[object, Tensor] = {}
    copies: dict[str, Any] = {}
    for name, value in state.items():
        if not isinstance(value, Tensor):
            copies[name] = copy.deepcopy(value)
            continue
        tie = _tie_of(value)
        if tie not in made:
            made[tie] = value.detach().clone()
        copies[name] = made[tie]
    return copies


def _tie_of(tensor: Tensor) -> object:
    """A key that is equal for tensors that are the same memory, seen in the same way."""
    if sharded.is_sharded(tensor) or tensor.layout != torch.strided or not tensor.numel():
        return id(tensor)
    return tensor.device, tensor.dtype, tensor.data_ptr(), tuple(tensor.shape), tensor.stride()


@torch.no_grad()
def _alike(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether the tensors of two states of a model have the same values; it waits for the device."""
    pairs = [(value, other[name]) for name, value in one.items() if isinstance(value, Tensor)]
    return all(torch.equal(sharded.part(a), sharded.part(b)) for a, b in pairs)  # host sync: before a save
