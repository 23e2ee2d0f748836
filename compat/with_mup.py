"""mup: rates by the width of each layer, from attributes of the parameters."""

from __future__ import annotations

from typing import Any

import mup
import torch
from checks import Program, main, seed
from torch import nn

NEEDS = ["mup==1.0.0"]


def sized(width: int) -> nn.Module:
    """The model of a width."""
    return nn.Sequential(nn.Linear(5, width), nn.Tanh(), mup.MuReadout(width, 2))


class Widths(Program):
    def model(self) -> nn.Module:
        model = sized(16)
        mup.set_base_shapes(model, sized(4), delta=sized(8))
        return model

    def optimizer(self, model: nn.Module) -> Any:
        return mup.MuAdamW(model.parameters(), lr=0.01)

    def copy_of(self, model: nn.Module) -> nn.Module:
        """Made anew: a copy of a parameter has no base shape."""
        with torch.random.fork_rng():
            seed()
            made = self.model()
        made.load_state_dict(model.state_dict())
        return made


if __name__ == "__main__":
    main(NEEDS, [Widths()])
