"""prodigyopt: an optimizer that estimates its own rate, and keeps the estimate in its groups."""

from __future__ import annotations

from typing import Any

import prodigyopt
from checks import Program, main
from torch import nn

NEEDS = ["prodigyopt==1.1.2"]


class Prodigy(Program):
    def optimizer(self, model: nn.Module) -> Any:
        return prodigyopt.Prodigy(model.parameters(), lr=1.0)


class ProdigyDecoupled(Program):
    def optimizer(self, model: nn.Module) -> Any:
        return prodigyopt.Prodigy(model.parameters(), weight_decay=0.1, use_bias_correction=True, safeguard_warmup=True)


if __name__ == "__main__":
    main(NEEDS, [Prodigy(), ProdigyDecoupled()])
