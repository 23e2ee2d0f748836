"""dadaptation: optimizers that find their rate; the estimate is in the groups."""

from __future__ import annotations

from typing import Any

import dadaptation
from checks import Program, main
from torch import nn

NEEDS = ["dadaptation==3.2"]


class DAdaptAdam(Program):
    def optimizer(self, model: nn.Module) -> Any:
        return dadaptation.DAdaptAdam(model.parameters(), lr=1.0)


class DAdaptSGD(Program):
    def optimizer(self, model: nn.Module) -> Any:
        return dadaptation.DAdaptSGD(model.parameters(), lr=1.0, momentum=0.9)


class DAdaptLion(Program):
    def optimizer(self, model: nn.Module) -> Any:
        return dadaptation.DAdaptLion(model.parameters(), lr=1.0)


if __name__ == "__main__":
    main(NEEDS, [DAdaptAdam(), DAdaptSGD(), DAdaptLion()])
