"""A small learner with momentum, and its data."""

import torch
from torch import nn

from loopkit import Learner
from loopkit.data import TensorLoader

INPUTS = torch.randn(44, 3, generator=torch.Generator().manual_seed(0))
TARGETS = INPUTS.sum(1, keepdim=True)


def data():
    return TensorLoader(INPUTS, TARGETS, batch_size=2)


def bits(learner):
    """Parameters and momentum."""
    momentum = [state["momentum_buffer"] for state in learner.optimizer.state.values()]
    return [tensor.tolist() for tensor in (*learner.model.parameters(), *momentum)], learner.progress.updates


def made(*plugins, accumulate=1):
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    learner = Learner(model, nn.functional.mse_loss, optimizer, plugins=plugins, accumulate=accumulate)
    learner.remove("progress")
    return learner
