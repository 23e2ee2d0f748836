"""e3nn: equivariant layers, which are compiled modules with generated code."""

from __future__ import annotations

from typing import ClassVar

from checks import Program, main
from e3nn import nn as equivariant
from e3nn import o3
from torch import Tensor, nn

NEEDS = ["e3nn==0.6.0"]


class Equivariant(nn.Module):
    """A tensor product, a gate and batch norm over vectors."""

    def __init__(self) -> None:
        super().__init__()
        features = o3.Irreps("2x0e + 1x1o")
        self.product = o3.FullyConnectedTensorProduct(features, features, "4x0e + 2x1o")
        self.norm = equivariant.BatchNorm("4x0e + 2x1o")
        self.head = o3.Linear("4x0e + 2x1o", "2x0e")

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.norm(self.product(inputs, inputs)))


class TensorProduct(Program):
    skipped: ClassVar[dict[str, str]] = {"bf16": "its own batch norm and gates do not run under autocast"}

    def model(self) -> nn.Module:
        return Equivariant()


if __name__ == "__main__":
    main(NEEDS, [TensorProduct()])
