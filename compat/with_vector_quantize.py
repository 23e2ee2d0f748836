"""vector-quantize-pytorch: a codebook that is made from the first batch, and moved in each forward pass."""

from __future__ import annotations

from typing import Any

from checks import Program, main
from torch import Tensor, nn
from vector_quantize_pytorch import VectorQuantize

NEEDS = ["vector-quantize-pytorch==1.32.0"]


class Quantized(nn.Module):
    """Codes between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(5, 8), nn.Linear(8, 2)
        self.codes = VectorQuantize(dim=8, codebook_size=6, kmeans_init=True, threshold_ema_dead_code=1, decay=0.8)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Any]:
        quantized, _, commitment = self.codes(self.before(inputs)[:, None])
        return self.after(quantized[:, 0]), commitment.sum()


class Codebook(Program):
    def model(self) -> nn.Module:
        return Quantized()

    def loss(self, outputs: Any, targets: Any) -> Tensor:
        values, commitment = outputs
        return super().loss(values, targets) + commitment


if __name__ == "__main__":
    main(NEEDS, [Codebook()])
