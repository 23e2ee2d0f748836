"""fingerprint: a short name of a tensor's values, for weights that checkpoints leave out."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from loopkit.base.digest import digest
from loopkit.base.words import some


def fingerprint(tensor: Tensor) -> str | None:
    """Return 32 hexadecimal digits that stand for dtype, shape and bits of a tensor; None if it has none.

    Dense tensors have one, and classes of tensors that are made of several, such as quantized weights.
    """
    held = tensor.detach()
    if hasattr(held, "__tensor_flatten__"):
        names, _ = held.__tensor_flatten__()
        parts = [fingerprint(getattr(held, name)) for name in names]
        if None in parts:
            return None
        return digest([type(held).__name__, *parts])
    if held.layout is not torch.strided:
        return None
    return digest(held)


def told(names: Collection[str]) -> str:
    """A sentence on weights that were left out and that are others here."""
    return (
        f"the frozen weights of {some(list(names), 3)} are not in the checkpoint, which left them out, and have "
        f"changed since the save: give the model the weights that it was made with then, such as pretrained ones"
    )


def without_same(models: Mapping[str, Mapping[str, Any]], left: Mapping[str, Mapping[str, str]]) -> dict[str, Any]:
    """The weights of models, except unchanged ones that were left out."""
    same: dict[str, list[str]] = {}
    for name, values in models.items():
        made = left.get(name, {})
        same[name] = [key for key in made if key in values and fingerprint(values[key]) == made[key]]
    return without(models, same)


def without(models: Mapping[str, Mapping[str, Any]], left: Mapping[str, Collection[str]]) -> dict[str, Any]:
    """The values of models without some names."""
    kept = {}
    for name, values in models.items():
        gone = left.get(name, ())
        kept[name] = {key: value for key, value in values.items() if key not in gone}
    return kept
