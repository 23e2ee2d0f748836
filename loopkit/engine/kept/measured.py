"""Measured: the weights with which a metric was measured, saved beside the models' own weights."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from loopkit.base import sharded
from loopkit.base.kinds import NAMED
from loopkit.engine.kept.part import Part

if TYPE_CHECKING:
    from torch import nn


class Measured(Part):
    """The weights with which the metrics of a phase were measured, where these are not the models' own.

    A state holds it as ``weights.<phase>``.

    Args:
        models: The learner's modules, by name.
    """

    name = "weights"
    what = "what was measured"
    kind = NAMED
    in_use = False
    optional = True

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

    def holds(self, phase: str) -> bool:
        """Whether something was taken for a phase."""
        return phase in self._taken

    def drop(self, phase: str) -> None:
        """Forget what a phase has measured."""
        self._taken.pop(phase, None)

    def saved(self, whole: bool = True) -> dict[str, Any] | None:
        """Return what was taken, by phase, model and tensor; `load_best` and `load_weights` read it from the file."""
        taken = {phase: dict(models) for phase, models in self._taken.items()}
        return (sharded.whole(taken) if whole else taken) or None


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
