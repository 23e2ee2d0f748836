"""opacus: private training, whose optimizer wraps another one and clips the gradient of each sample."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from checks import Program, main
from opacus import GradSampleModule
from opacus.optimizers import DPOptimizer
from torch import nn

NEEDS = ["opacus==1.6.0"]


class Private(Program):
    def model(self) -> nn.Module:
        return GradSampleModule(nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2)))

    def optimizer(self, model: nn.Module) -> Any:
        inner = torch.optim.SGD(model.parameters(), lr=0.05)
        generator = torch.Generator().manual_seed(5)
        return DPOptimizer(inner, noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=4, generator=generator)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(NEEDS, [Private()])
