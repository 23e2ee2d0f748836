"""ModelWeights and LeftOutBuffers: the entries of a state for the learner's modules."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from loopkit.base import sharded
from loopkit.base.kinds import NAMED
from loopkit.base.notes import locate
from loopkit.engine.kept.buffers import put_buffers, strange_buffers, unsaved_buffers
from loopkit.engine.kept.differences import first, names
from loopkit.engine.kept.part import Part
from loopkit.engine.kept.undo import Undos, all_of, undone_by

Form = Callable[[], AbstractContextManager[Any]]


class _OfModules(Part):
    """A part that is read from the learner's modules.

    Args:
        models: The learner's, by name.
        in_training_form: A context in which they are in the form in which they are trained.
    """

    kind = NAMED

    def __init__(self, models: Mapping[str, nn.Module], in_training_form: Form) -> None:
        self._models = models
        self._in_training_form = in_training_form


class ModelWeights(_OfModules):
    """The weights: the ``state_dict`` of each module."""

    name = "models"
    what = "the models"

    def saved(self, whole: bool = True) -> dict[str, Any]:
        """Return the tensors by module and name; they are those in use."""
        gather = sharded.whole if whole else dict
        return {name: sharded.weights(model, gather) for name, model in self._models.items()}

    def problems(self, saved: Mapping[str, Any], allow: Collection[str] = ()) -> list[str]:
        """List modules and tensors that only one of the two has, and tensors of other shapes or types."""
        problems = names("models", saved, self._models)
        for name, model in self._models.items():
            if name in saved:
                problems += _differences(name, model, saved[name])
        return problems

    def prepare(self, saved: Mapping[str, Any]) -> None:
        """Give lazy parameters the shapes of the state, which an optimizer's state needs."""
        for name, model in self._models.items():
            if any(map(is_lazy, model.parameters())):
                model.load_state_dict(saved[name])

    def load(self, saved: Mapping[str, Any]) -> Callable[[], None]:
        """Write the tensors in place; the undo puts back what modules save beside tensors."""
        undos: Undos = []
        with undone_by(undos), torch.no_grad(), self._in_training_form():
            for name, model in self._models.items():
                own = model.state_dict()
                if any(not isinstance(value, Tensor) for value in own.values()):
                    put_back = partial(model.load_state_dict, copy.deepcopy(own))
                    undos.append((f"model {name!r}", put_back))
                try:
                    values = {key: sharded.like(value, own.get(key)) for key, value in saved[name].items()}
                    left_out = {} if values.keys() >= own.keys() else {"strict": False}
                    model.load_state_dict(values, **left_out)
                except Exception as error:
                    locate(error, f"in load_state_dict of model {name!r}")
                    raise
        return all_of(undos)


class LeftOutBuffers(_OfModules):
    """The buffers that a module's ``state_dict`` leaves out."""

    name = "buffers"
    what = "the buffers"

    def saved(self, whole: bool = True) -> dict[str, Any]:
        """Return them by module and name."""
        saved = {}
        for name, model in self._models.items():
            saved[name] = {key: tensor.detach() for key, tensor in unsaved_buffers(model).items()}
        return saved

    def problems(self, saved: Mapping[str, Any], allow: Collection[str] = ()) -> list[str]:
        """List buffers that the modules here have no place for."""
        problems: list[str] = []
        for name, model in self._models.items():
            strange = strange_buffers(model, saved.get(name, {}))
            problems += first(f"buffers of model {name!r} in the state that are not here", list(map(repr, strange)))
        return problems

    def load(self, saved: Mapping[str, Any]) -> Callable[[], None]:
        """Write them in place, or make them."""
        with torch.no_grad(), self._in_training_form():
            for name, model in self._models.items():
                put_buffers(model, saved[name])
        return lambda: None


def _differences(name: str, model: nn.Module, saved: Mapping[str, Any]) -> list[str]:
    own = model.state_dict()
    different = []
    for key, value in own.items():
        if key not in saved or not isinstance(value, Tensor) or is_lazy(value):
            continue
        before = _looks(saved[key])
        now = _looks(value)
        if before != now:
            different.append(f"{key}: {before} in the state, {now} here")
    return [
        *names(f"tensors of model {name!r}", saved, own),
        *first(f"tensors of model {name!r} that differ", different),
    ]


def _looks(value: Any) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"{value.dtype} {tuple(value.shape)}"
