"""came-pytorch: an optimizer with factored moments."""

from __future__ import annotations

from typing import Any

from came_pytorch import CAME
from checks import Program, main
from torch import nn

NEEDS = ["came-pytorch==0.1.3"]


class Factored(Program):
    def optimizer(self, model: nn.Module) -> Any:
        return CAME(model.parameters(), lr=2e-3, weight_decay=0.01)


if __name__ == "__main__":
    main(NEEDS, [Factored()])
