"""torchao: optimizers with states of 8 and 4 bits."""

from __future__ import annotations

from typing import Any

import torch
from checks import Program, main
from torch import nn
from torchao.optim import AdamW4bit, AdamW8bit, AdamWFp8

NEEDS = ["torchao==0.18.0"]


class Wide(Program):
    """Large enough for states of fewer bits: torchao keeps small tensors in float32."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(5, 1024), nn.Tanh(), nn.Linear(1024, 8), nn.Tanh(), nn.Linear(8, 2))


class Adam8(Wide):
    def optimizer(self, model: nn.Module) -> Any:
        return AdamW8bit(model.parameters(), lr=1e-3)


class Adam4(Wide):
    def optimizer(self, model: nn.Module) -> Any:
        return AdamW4bit(model.parameters(), lr=1e-3)


class AdamFp8(Wide):
    def optimizer(self, model: nn.Module) -> Any:
        return AdamWFp8(model.parameters(), lr=1e-3)


if __name__ == "__main__":
    torch.compiler.set_stance("force_eager")
    main(NEEDS, [Adam8(), Adam4(), AdamFp8()])
