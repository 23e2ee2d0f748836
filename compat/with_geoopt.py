"""geoopt: parameters on manifolds, and optimizers that keep them there."""

from __future__ import annotations

from typing import Any

import geoopt
import torch
from checks import Program, main
from torch import Tensor, nn

NEEDS = ["geoopt==0.5.1"]


class OnSphere(nn.Module):
    """A layer whose weight is on a sphere."""

    def __init__(self, manifold: geoopt.Manifold) -> None:
        super().__init__()
        weight = manifold.projx(torch.randn(8, 5))
        self.weight = geoopt.ManifoldParameter(weight, manifold=manifold)
        self.head = nn.Linear(8, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(torch.tanh(inputs @ self.weight.T))


class RiemannianAdam(Program):
    def model(self) -> nn.Module:
        return OnSphere(geoopt.Sphere())

    def optimizer(self, model: nn.Module) -> Any:
        return geoopt.optim.RiemannianAdam(model.parameters(), lr=0.01, stabilize=2)


class RiemannianSGD(RiemannianAdam):
    def model(self) -> nn.Module:
        return OnSphere(geoopt.PoincareBall())

    def optimizer(self, model: nn.Module) -> Any:
        return geoopt.optim.RiemannianSGD(model.parameters(), lr=0.01, momentum=0.9)


if __name__ == "__main__":
    main(NEEDS, [RiemannianAdam(), RiemannianSGD()])
