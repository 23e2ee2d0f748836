"""schedulefree: its optimizers have two forms of the weights, and are switched by train() and eval()."""

from __future__ import annotations

from typing import Any

import schedulefree
import torch
from checks import Program, main
from torch import nn

from loopkit import Learner
from loopkit.plugins import WeightAverage

NEEDS = ["schedulefree==1.4.1"]


class Switched(Program):
    """By hand, the optimizer is switched together with the model."""

    switches = True

    def to_train(self, model: nn.Module, optimizer: Any) -> None:
        model.train()
        optimizer.train()

    def to_eval(self, model: nn.Module, optimizer: Any) -> None:
        model.eval()
        optimizer.eval()

    def learner(self, model: nn.Module, optimizer: Any, *plugins: Any, **options: Any) -> Learner:
        if any(isinstance(plugin, WeightAverage) for plugin in plugins):
            optimizer.train()  # an average owns the weights: then nothing is switched
        return super().learner(model, optimizer, *plugins, **options)


class AdamWScheduleFree(Switched):
    def optimizer(self, model: nn.Module) -> Any:
        return schedulefree.AdamWScheduleFree(model.parameters(), lr=0.01, warmup_steps=3)


class SGDScheduleFree(Switched):
    def optimizer(self, model: nn.Module) -> Any:
        return schedulefree.SGDScheduleFree(model.parameters(), lr=0.05, momentum=0.9)


class RAdamScheduleFree(Switched):
    def optimizer(self, model: nn.Module) -> Any:
        return schedulefree.RAdamScheduleFree(model.parameters(), lr=0.01)


class ScheduleFreeWrapper(Switched):
    def optimizer(self, model: nn.Module) -> Any:
        inner = torch.optim.SGD(model.parameters(), lr=0.05)
        return schedulefree.ScheduleFreeWrapper(inner, momentum=0.9, weight_decay_at_y=0.1)


if __name__ == "__main__":
    main(NEEDS, [AdamWScheduleFree(), SGDScheduleFree(), RAdamScheduleFree(), ScheduleFreeWrapper()])
