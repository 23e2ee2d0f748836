"""muon-optimizer: Muon for matrices beside AdamW for the rest, in one optimizer."""

from __future__ import annotations

from typing import Any

from checks import Program, main
from muon import SingleDeviceMuonWithAuxAdam
from torch import nn

NEEDS = ["muon-optimizer==0.1.0"]


class MuonWithAdam(Program):
    def optimizer(self, model: nn.Module) -> Any:
        matrices = [each for each in model.parameters() if each.ndim >= 2]
        others = [each for each in model.parameters() if each.ndim < 2]
        return SingleDeviceMuonWithAuxAdam(
            [{"params": matrices, "lr": 0.02, "use_muon": True}, {"params": others, "lr": 1e-3, "use_muon": False}]
        )


if __name__ == "__main__":
    main(NEEDS, [MuonWithAdam()])
