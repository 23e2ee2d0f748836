"""torch-optimi: its optimizers, in float32 and with Kahan summation for weights in bfloat16."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from checks import Program, main
from optimi import AdamW, Adan, Lion
from torch import nn

NEEDS = ["torch-optimi==0.3.3"]


class DecoupledAdamW(Program):
    def optimizer(self, model: nn.Module) -> Any:
        return AdamW(model.parameters(), lr=self.lr, weight_decay=1e-3, decouple_lr=True)


class Adans(Program):
    def optimizer(self, model: nn.Module) -> Any:
        return Adan(model.parameters(), lr=self.lr)


class Lions(Program):
    def optimizer(self, model: nn.Module) -> Any:
        return Lion(model.parameters(), lr=1e-3)


class Kahan(Program):
    """Weights in bfloat16, with the rest of each sum in the optimizer's state."""

    known: ClassVar[dict[str, str]] = {
        "bf16": "weights in bfloat16 need no autocast, and `MixedPrecision` raises: leave it out beside Kahan summation"
    }

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2)).bfloat16()

    def forward(self, model: nn.Module, inputs: Any) -> Any:
        return model(inputs.bfloat16())

    def loss(self, outputs: Any, targets: Any) -> torch.Tensor:
        return super().loss(outputs.float(), targets)

    def optimizer(self, model: nn.Module) -> Any:
        return AdamW(model.parameters(), lr=self.lr, kahan_sum=True)


if __name__ == "__main__":
    main(NEEDS, [DecoupledAdamW(), Adans(), Lions(), Kahan()])
