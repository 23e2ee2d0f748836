"""peft: LoRA and its kin around a model, of which the adapters are trained."""

from __future__ import annotations

from typing import Any

import peft
import torch
from checks import Program, main
from torch import nn

NEEDS = ["peft==0.21.2"]


class Lora(Program):
    config = peft.LoraConfig(r=2, target_modules=["0", "4"], lora_dropout=0.1)

    def model(self) -> nn.Module:
        layers = nn.Linear(5, 8), nn.LayerNorm(8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 2)
        return peft.get_peft_model(nn.Sequential(*layers), self.config)

    def optimizer(self, model: nn.Module) -> Any:
        return torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.05)


class DoraWithHead(Lora):
    config = peft.LoraConfig(r=2, use_dora=True, target_modules=["0"], modules_to_save=["4"])


class IA3(Lora):
    config = peft.IA3Config(target_modules=["0", "4"], feedforward_modules=["4"])


class Oft(Lora):
    config = peft.OFTConfig(oft_block_size=0, r=1, target_modules=["0", "4"])


if __name__ == "__main__":
    main(NEEDS, [Lora(), DoraWithHead(), IA3(), Oft()])
