"""schedulefree: its optimizers have two forms of the weights, and are switched by train() and eval()."""

from __future__ import annotations

from typing import Any

import schedulefree
import torch
from checks import Program, main
from torch import nn

NEEDS = ["schedulefree==1.4.1"]


class AdamWScheduleFree(Program):
    def optimizer(self, model: nn.Module) -> Any:
        return schedulefree.AdamWScheduleFree(model.parameters(), lr=0.01, warmup_steps=3)


class SGDScheduleFree(Program):
    def optimizer(self, model: nn.Module) -> Any:
        return schedulefree.SGDScheduleFree(model.parameters(), lr=0.05, momentum=0.9)


class RAdamScheduleFree(Program):
    def optimizer(self, model: nn.Module) -> Any:
        return schedulefree.RAdamScheduleFree(model.parameters(), lr=0.01)


class ScheduleFreeWrapper(Program):
    def optimizer(self, model: nn.Module) -> Any:
        inner = torch.optim.SGD(model.parameters(), lr=0.05)
        return schedulefree.ScheduleFreeWrapper(inner, momentum=0.9, weight_decay_at_y=0.1)


if __name__ == "__main__":
    main(NEEDS, [AdamWScheduleFree(), SGDScheduleFree(), RAdamScheduleFree(), ScheduleFreeWrapper()])
