"""adan-pytorch: Adan, also with restarts, which read the gradients."""

from __future__ import annotations

from typing import Any, ClassVar

import adan_pytorch
from checks import Program, main
from torch import nn

NEEDS = ["adan-pytorch==0.1.0"]


class Adan(Program):
    def optimizer(self, model: nn.Module) -> Any:
        return adan_pytorch.Adan(model.parameters(), lr=1e-2, weight_decay=0.02)


REASON = "`restart_cond` is a function in the groups, and a state holds no code; save with `weights_only=True`"


class AdanRestarts(Program):
    known: ClassVar[dict[str, str]] = {"resume": REASON, "best": REASON}

    def optimizer(self, model: nn.Module) -> Any:
        return adan_pytorch.Adan(model.parameters(), lr=1e-2, restart_cond=lambda state: state["step"] % 5 == 0)


if __name__ == "__main__":
    main(NEEDS, [Adan(), AdanRestarts()])
