"""Plugins that decide by a metric decide alike in all processes, also where each process wrote a value of its own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from distributed.processes import run
from loopkit import Learner, hookimpl
from loopkit.data import TensorLoader
from loopkit.plugins import DDP, EarlyStopping, Plateau

WORSE = {0: [3.0, 2.0, 1.0, 0.5, 0.25, 0.1], 1: [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]}
"""The values of each process: the first improves in each epoch, the second in none."""


class Writes:
    """Writes another value in each process."""

    def __init__(self, rank):
        self.values = iter(WORSE[rank])

    @hookimpl(writes=("metrics.*/score",))
    def epoch_end(self, learner, phase):
        learner.metrics[f"{phase.name}/score"] = next(self.values)


DECIDE = {
    "plateau": lambda: Plateau("train/score", mode="min", factor=0.5, patience=0),
    "maximum": lambda: Plateau("train/score", mode="max", factor=0.5, patience=0),
    "early_stopping": lambda: EarlyStopping("train/score", mode="min", patience=2),
}


def decided(rank, kind):
    torch.manual_seed(0)
    learner = Learner(
        nn.Linear(3, 1),
        nn.MSELoss(),
        lambda params: torch.optim.SGD(params, lr=0.1),
        plugins=[DDP(), Writes(rank), DECIDE[kind]()],
        standard=False,
    )
    inputs = torch.randn(16, 3)
    result = learner.fit(TensorLoader(inputs, inputs.sum(1, keepdim=True), batch_size=4), epochs=6)
    return learner.optimizer.param_groups[0]["lr"], result.epochs, learner.model.weight.tolist()


@pytest.mark.parametrize("kind", DECIDE)
def test_processes_with_other_values_decide_alike(kind):
    first, second = run(decided, 2, kind)
    assert first == second
    assert first[0] == (0.1 / 2**5 if kind == "maximum" else 0.1)
    assert first[1] == 6
