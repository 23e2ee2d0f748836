"""adam-atan2-pytorch: its optimizers."""

from __future__ import annotations

from typing import Any

from adam_atan2_pytorch import AdamAtan2
from adam_atan2_pytorch.adopt import Adopt
from checks import Program, main
from torch import nn

NEEDS = ["adam-atan2-pytorch==0.4.1"]


class Atan2(Program):
    def optimizer(self, model: nn.Module) -> Any:
        return AdamAtan2(model.parameters(), lr=0.01, regen_reg_rate=0.01)


class Adopts(Program):
    def optimizer(self, model: nn.Module) -> Any:
        return Adopt(model.parameters(), lr=0.01)


if __name__ == "__main__":
    main(NEEDS, [Atan2(), Adopts()])
