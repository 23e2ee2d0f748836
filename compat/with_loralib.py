"""loralib: layers that merge their adapter into the weight in eval(), and take it out again in train()."""

from __future__ import annotations

from typing import Any

import loralib
import torch
from checks import Program, main
from torch import nn

NEEDS = ["loralib==0.1.2"]


class Adapters(Program):
    switches = True

    def model(self) -> nn.Module:
        layers = (
            loralib.Linear(5, 8, r=2),
            nn.Tanh(),
            nn.Dropout(0.2),
            loralib.MergedLinear(8, 6, r=2, enable_lora=[True, False]),
        )
        model = nn.Sequential(*layers, nn.Linear(6, 2))
        loralib.mark_only_lora_as_trainable(model)
        return model

    def optimizer(self, model: nn.Module) -> Any:
        return torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.05)


class Convolutions(Adapters):
    def model(self) -> nn.Module:
        layers = (
            nn.Unflatten(1, (1, 1, 5)),
            loralib.Conv2d(1, 4, 3, r=2, padding=1),
            nn.Flatten(),
            loralib.Linear(20, 2, r=2),
        )
        model = nn.Sequential(*layers)
        loralib.mark_only_lora_as_trainable(model, bias="lora_only")
        return model


if __name__ == "__main__":
    main(NEEDS, [Adapters(), Convolutions()])
