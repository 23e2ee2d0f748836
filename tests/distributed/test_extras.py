"""DDP with trained modules beside the model: of the loss function, a phase or a plugin."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from distributed.processes import run
from loopkit import Learner, TrainingPhase, hookimpl
from loopkit.data import TensorLoader
from loopkit.plugins import DDP


class Weighted(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(()))

    def forward(self, outputs, targets):
        return (outputs - targets).square().mean() * (-self.scale).exp() + self.scale


class Headed(TrainingPhase):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(1, 1)

    def forward(self, learner, inputs):
        return self.head(learner.model(inputs))


class Adds:
    name = "adds"

    def __init__(self):
        self.head = nn.Linear(1, 1)

    @hookimpl(updates=("outputs",))
    def loss_begin(self, step):
        step.outputs = self.head(step.outputs)


OWNERS = {"loss": Weighted, "phase": Headed, "plugin": Adds}


def data(size):
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(24, 3, generator=generator)
    return TensorLoader(inputs, inputs.sum(1, keepdim=True), batch_size=size)


def trained(rank, owner, size=4):
    torch.manual_seed(rank)
    made = OWNERS[owner]()
    own = list(made.parameters() if owner == "loss" else made.head.parameters())
    learner = Learner(
        nn.Linear(3, 1),
        made if owner == "loss" else nn.MSELoss(),
        lambda params: torch.optim.SGD([*params, *own], lr=0.1),
        phases=[made] if owner == "phase" else [],
        plugins=[DDP(), *([made] if owner == "plugin" else [])],
        standard=False,
    )
    learner.fit(data(size), epochs=2)
    return [p.detach().tolist() for p in (*learner.model.parameters(), *own)]


@pytest.mark.parametrize("owner", OWNERS)
def test_extra_is_the_same_in_all_processes(owner):
    one, other = run(trained, 2, owner)
    assert one == other


@pytest.mark.parametrize("owner", OWNERS)
def test_extra_is_trained_on_the_global_batch(owner):
    alone = trained(0, owner, 8)
    together = run(trained, 2, owner)[0]
    for one, other in zip(alone, together, strict=True):
        torch.testing.assert_close(torch.tensor(one), torch.tensor(other))
