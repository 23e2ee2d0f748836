"""unsaved: parameters that an optimizer trains, and that no checkpoint would hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from loopkit.base import sharded
from loopkit.base.notes import shown
from loopkit.base.words import some
from loopkit.engine.kept.extras import Owner, in_words
from loopkit.engine.kept.witness.walk import walk
from loopkit.errors import PhaseError
from loopkit.groups import params_of

DEEP = 8
"""How deep an owner is searched for a parameter that was not found otherwise."""


def check_saved(
    optimizers: Mapping[str, torch.optim.Optimizer],
    models: Mapping[str, nn.Module],
    extras: Mapping[str, nn.Module],
    owners: Sequence[Owner],
) -> None:
    """Check that something saves each parameter that an optimizer trains.

    Args:
        optimizers: By name.
        models: The learner's models by name.
        extras: The modules of the loss function, of phases and of plugins, by their owners.
        owners: The loss function, phases and plugins.

    Raises:
        PhaseError: Nothing saves a parameter. The message shows the line to add.
    """
    saved = [p for module in (*models.values(), *extras.values()) for p in module.parameters()]
    known = {id(p) for p in saved}
    trains_no_model = known.isdisjoint(id(p) for each in optimizers.values() for p in params_of(each))
    for name, optimizer in optimizers.items():
        unknown = [p for p in params_of(optimizer) if id(p) not in known and not sharded.is_sharded(p)]
        if not unknown or type(optimizer).state_dict is not torch.optim.Optimizer.state_dict:
            continue  # an optimizer with a form of its own may hold copies of the parameters
        memory = {_memory(p) for p in saved} - {0}
        for p in unknown:
            if _memory(p) not in memory:
                _check_owners(name, p, trains_no_model, models, owners)


def _check_owners(
    name: str, param: Tensor, trains_no_model: bool, models: Mapping[str, nn.Module], owners: Sequence[Owner]
) -> None:
    """Raise, in words for the case, unless the first owner that holds a parameter saves its own state."""
    what = f"optimizer {name!r} trains a parameter of shape {tuple(param.shape)}"
    for owner in owners:
        path = _path(owner.object, param)
        if not path:
            continue
        if owner.saves is None:
            return  # its state_dict is the owner's own affair
        attribute = path.partition(".")[0].partition("[")[0]
        line = f", and write saved = ({attribute!r},)" if owner.name.startswith("phase ") else ""
        raise PhaseError(
            f"{what} that {in_words(owner.name)} ({type(owner.object).__name__}) holds as {path!r} and declares to "
            f"be a cache, so that no checkpoint would hold it: take it out of volatile{line}"
        )
    trainable = [path for model in models.values() for path, p in model.named_parameters() if p.requires_grad]
    if trains_no_model and trainable:
        raise PhaseError(
            f"{what} of no model: the optimizer covers 0 of {len(trainable)} trainable parameters "
            f"({some(trainable)}). It was made for another model, or before the parameters were replaced: give a "
            f"factory, optimizer=lambda params: ..."
        )
    given = ", ".join(f"{key!r}: {shown(type(model).__name__)[1:-1]}" for key, model in models.items())
    raise PhaseError(
        f"{what} that no model, loss function, phase or plugin holds, so that no checkpoint would hold it: give its "
        f"module as a further model, Learner({{{given}, 'other': module}}, ...), or keep it in an attribute of a phase "
        f"that names it, saved = ('other',)"
    )


def _path(owner: Any, param: Tensor) -> str:
    """Where an owner holds a parameter, be it in a module; empty if it does not."""
    for found in walk(owner, deep=DEEP, enter=lambda found: not isinstance(found.value, nn.Module)):
        if found.value is param:
            return found.path
        if isinstance(found.value, nn.Module) and any(p is param for p in found.value.parameters()):
            return found.path
    return ""


def _memory(tensor: Tensor) -> int:
    """The address of a tensor's memory, or 0 without one."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError, ValueError):  # a sparse, meta, wrapped or lazy one
        return 0
