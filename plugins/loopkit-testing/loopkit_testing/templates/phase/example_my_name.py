"""Fit a line with the phase, and watch its penalty from a plugin."""

from __future__ import annotations

from typing import Any

import torch
from my_name import MyNamePhase
from torch import nn

from loopkit import Learner, data, hookimpl


class LastPenalty:
    """Keep the penalty of the last step."""

    @hookimpl(reads=("step.penalty",))
    def my_name_begin(self, step: Any) -> None:
        """Keep it on the device."""
        self.value = step.penalty.detach()


def main() -> None:
    """Train, and print what came of it."""
    torch.manual_seed(0)
    inputs = torch.randn(256, 4)
    targets = inputs.sum(1, keepdim=True)
    train = data.TensorLoader(inputs, targets, batch_size=32, shuffle=True)
    last = LastPenalty()
    learner = Learner(
        nn.Linear(4, 1),
        nn.MSELoss(),
        torch.optim.AdamW,
        phases=[MyNamePhase(weight=0.01)],
        plugins=[last],
        seed=0,
    )
    print(learner.explain("train"))
    print(learner.fit(train, epochs=3))
    print(f"penalty of the last step: {last.value.item():.4f}")


if __name__ == "__main__":
    main()
