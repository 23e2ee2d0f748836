"""gpytorch: Gaussian processes, exact ones that keep caches in eval(), and variational ones with two optimizers."""

from __future__ import annotations

from typing import Any

import gpytorch
import torch
from checks import Program, main
from torch import Tensor, nn

NEEDS = ["gpytorch==1.15.2"]


class Variational(gpytorch.models.ApproximateGP):
    """A sparse process."""

    def __init__(self) -> None:
        points = torch.randn(6, 5)
        distribution = gpytorch.variational.CholeskyVariationalDistribution(6)
        super().__init__(gpytorch.variational.VariationalStrategy(self, points, distribution))
        self.mean = gpytorch.means.ConstantMean()
        self.kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())
        self.likelihood = gpytorch.likelihoods.GaussianLikelihood()

    def forward(self, inputs: Tensor) -> Any:
        return gpytorch.distributions.MultivariateNormal(self.mean(inputs), self.kernel(inputs))


class Sparse(Program):
    def model(self) -> nn.Module:
        return Variational()

    def unpack(self, batch: Any) -> tuple[Any, Any]:
        return batch[0], batch[1][:, 0]

    def forward(self, model: nn.Module, inputs: Any) -> Any:
        bound = gpytorch.mlls.VariationalELBO(model.likelihood, model, num_data=27)
        return bound, model(inputs)

    def loss(self, outputs: Any, targets: Any) -> Tensor:
        bound, distribution = outputs
        return -bound(distribution, targets)


class Exact(gpytorch.models.ExactGP):
    """A process that holds its data."""

    def __init__(self, inputs: Tensor, targets: Tensor) -> None:
        super().__init__(inputs, targets, gpytorch.likelihoods.GaussianLikelihood())
        self.mean = gpytorch.means.ConstantMean()
        self.kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

    def forward(self, inputs: Tensor) -> Any:
        return gpytorch.distributions.MultivariateNormal(self.mean(inputs), self.kernel(inputs))


class WholeData(Program):
    def data(self, seed: int) -> list[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(seed)
        inputs = torch.randn(10, 2, generator=generator)
        return [(inputs, inputs.sum(1).sin())]

    def model(self) -> nn.Module:
        return Exact(*self.data(2)[0])

    def train(self) -> Any:
        return self.data(2) * 5

    def val(self) -> Any:
        return self.data(9)

    def forward(self, model: nn.Module, inputs: Any) -> Any:
        return model, model(inputs)

    def loss(self, outputs: Any, targets: Any) -> Tensor:
        model, distribution = outputs
        if model.training:
            return -gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)(distribution, targets)
        return (distribution.mean - targets).square().mean()


if __name__ == "__main__":
    main(NEEDS, [Sparse(), WholeData()])
