"""nflows: normalizing flows, with layers that set themselves up on their first batch."""

from __future__ import annotations

from typing import Any

from checks import Program, main
from nflows.distributions.normal import StandardNormal
from nflows.flows import MaskedAutoregressiveFlow
from nflows.flows.base import Flow
from nflows.transforms import ActNorm, CompositeTransform, MaskedAffineAutoregressiveTransform, ReversePermutation
from torch import Tensor, nn

NEEDS = ["nflows==0.14"]


class Masked(Program):
    def model(self) -> nn.Module:
        return MaskedAutoregressiveFlow(5, 8, 2, 1, batch_norm_between_layers=True)

    def forward(self, model: nn.Module, inputs: Any) -> Any:
        return model.log_prob(inputs)

    def loss(self, outputs: Any, targets: Any) -> Tensor:
        return -outputs.mean()


class SetUpByData(Masked):
    def model(self) -> nn.Module:
        layers = [ActNorm(5), MaskedAffineAutoregressiveTransform(5, 8), ReversePermutation(5), ActNorm(5)]
        return Flow(CompositeTransform(layers), StandardNormal([5]))


if __name__ == "__main__":
    main(NEEDS, [Masked(), SetUpByData()])
