"""restorer: undo what the code of a user's loop changes in a learner while it is run again after a resume."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from loopkit.engine.kept.rounds import alike


def restorer(
    modules: Iterable[Any], optimizers: Iterable[torch.optim.Optimizer], owners: Iterable[Any]
) -> Callable[[], None]:
    """Copy a learner's state; return a function that restores each part that has changed since.

    Code such as ``target.load_state_dict(model.state_dict())`` or ``group["lr"] *= 0.5`` between two runs has had its
    effect before the save: a second one would be one too many.

    Args:
        modules: Models and the loss; only modules count.
        optimizers: The learner's.
        owners: Plugins and phases; only objects with ``state_dict`` count.
    """
    found = [each for each in modules if isinstance(each, nn.Module)]
    undo: list[Callable[[], None]] = [partial(_put_module, each, _copied(_tensors(each))) for each in found]
    for optimizer in optimizers:
        groups = _copied([_options(group) for group in optimizer.param_groups])
        state = _copied(dict(optimizer.state))
        undo.append(partial(_put_optimizer, optimizer, groups, state))
    stateful = [each for each in owners if callable(getattr(each, "state_dict", None))]
    undo += [partial(_put_owner, each, _copied(each.state_dict())) for each in stateful]

    def put_back() -> None:
        with torch.no_grad():
            for put in undo:
                put()

    return put_back


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _put_module(module: nn.Module, kept: Mapping[str, Tensor]) -> None:
    now = _tensors(module)
    for name, value in kept.items():
        if name in now and not alike(now[name], value):
            now[name].copy_(value)


def _put_optimizer(optimizer: torch.optim.Optimizer, groups: list[Any], state: Mapping[Any, Any]) -> None:
    for group, kept in zip(optimizer.param_groups, groups, strict=False):
        for key, value in kept.items():
            if not alike(group.get(key), value):
                group[key] = value
    if not alike(dict(optimizer.state), state):
        optimizer.state.clear()
        optimizer.state.update(state)


def _put_owner(owner: Any, kept: Any) -> None:
    if not alike(owner.state_dict(), kept):
        owner.load_state_dict(kept)


def _copied(value: Any) -> Any:
    """Return a copy of a state, with its own tensors; keys and other objects are shared."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, Mapping):
        return {key: _copied(each) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_copied(each) for each in value)
    return value
