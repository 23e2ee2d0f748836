"""snntorch: spiking neurons, whose hidden state stays from one batch to the next."""

from __future__ import annotations

from typing import Any

import snntorch
from checks import Program, main
from snntorch import utils
from torch import Tensor, nn

NEEDS = ["snntorch==1.0.0"]


class Spiking(nn.Module):
    """Leaky neurons over some time steps."""

    def __init__(self) -> None:
        super().__init__()
        hidden = snntorch.Leaky(beta=0.9, init_hidden=True, learn_beta=True)
        out = snntorch.Leaky(beta=0.9, init_hidden=True, output=True)
        self.layers = nn.Sequential(nn.Linear(5, 8), hidden, nn.Linear(8, 2), out)

    def forward(self, inputs: Tensor) -> Tensor:
        utils.reset(self.layers)
        total = 0.0
        for _ in range(4):
            _, membrane = self.layers(inputs)
            total = total + membrane
        return total


class Leaky(Program):
    def model(self) -> nn.Module:
        return Spiking()

    def samples(self, batch: Any) -> int:
        return len(batch[0])


if __name__ == "__main__":
    main(NEEDS, [Leaky()])
