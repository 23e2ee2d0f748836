"""lion-pytorch: Lion, with and without decoupled weight decay."""

from __future__ import annotations

from typing import Any

import lion_pytorch
from checks import Program, main
from torch import nn

NEEDS = ["lion-pytorch==0.2.5"]


class Lion(Program):
    def optimizer(self, model: nn.Module) -> Any:
        return lion_pytorch.Lion(model.parameters(), lr=1e-3, weight_decay=1e-2)


class LionDecoupled(Program):
    def optimizer(self, model: nn.Module) -> Any:
        return lion_pytorch.Lion(model.parameters(), lr=1e-3, weight_decay=1e-2, decoupled_weight_decay=True)


if __name__ == "__main__":
    main(NEEDS, [Lion(), LionDecoupled()])
