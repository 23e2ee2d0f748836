"""pytorch_optimizer: every optimizer of it that can be made from parameters and a rate, or wraps one that can."""

from __future__ import annotations

import warnings
from typing import Any, ClassVar

import pytorch_optimizer
import torch
from checks import Program, main
from torch import nn

NEEDS = ["pytorch_optimizer==4.1.0"]

KNOWN = {
    "ScalableShampoo": {"resume": "an enum inside an object of its state comes back as its number, with the same value"}
}


class Swept(Program):
    kind: ClassVar[type]

    @property
    def name(self) -> str:
        return self.kind.__name__

    def optimizer(self, model: nn.Module) -> Any:
        return self.kind(model.parameters(), lr=1e-3)


def makes(kind: type) -> bool:
    """Whether it can be made, and needs no closure to update."""
    layer = nn.Linear(3, 2)
    try:
        optimizer = kind(layer.parameters(), lr=1e-3)
        optimizer.zero_grad()
        layer(torch.ones(4, 3)).square().mean().backward()
        optimizer.step()
    except Exception:
        return False
    return True


def programs() -> list[Program]:
    """One for each optimizer."""
    kinds = sorted(set(pytorch_optimizer.get_supported_optimizers()))
    found = [pytorch_optimizer.load_optimizer(kind) for kind in kinds]
    return [
        type(kind.__name__, (Swept,), {"kind": kind, "known": KNOWN.get(kind.__name__, {})})()
        for kind in dict.fromkeys(found)
        if makes(kind)
    ]


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(NEEDS, programs())
