"""zuko: a flow, whose outputs are a distribution."""

from __future__ import annotations

from typing import Any

import zuko
from checks import Program, main
from torch import Tensor, nn

NEEDS = ["zuko==1.6.0"]


class Splines(Program):
    def model(self) -> nn.Module:
        return zuko.flows.NSF(2, 5, transforms=2, hidden_features=(8, 8))

    def loss(self, outputs: Any, targets: Any) -> Tensor:
        return -outputs.log_prob(targets).mean()


if __name__ == "__main__":
    main(NEEDS, [Splines()])
