"""The same tiny problem for loopkit, for Lightning's Trainer and for Ignite's Engine."""

import torch
from torch import nn

from loopkit import Learner, hookimpl
from loopkit.plugins import Metrics

STEPS = 4


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def batches(count, size, seed):
    """So many batches: inputs (size, 3), targets (size, 1)."""
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randn(size, 4, generator=generator) for _ in range(count)]
    return [(each[:, :3], each[:, 3:]) for each in drawn]


TRAIN, VAL = batches(STEPS, 5, 1), batches(1, 8, 8)  # one batch of a power of two: its mean is its loss, bit by bit
"""The loss of validation is lowest after the fifth epoch."""


class Record:
    """Keeps what is logged, as (name, value, update)."""

    def __init__(self):
        self.lines = []

    @hookimpl
    def log_value(self, record):
        self.lines.append((record.name, record.value, record.update))


def make_learner(*plugins, make_optimizer=None, model=None, **options):
    """A quiet learner with the mean loss of each phase as its metric."""
    model = make_model() if model is None else model
    optimizer = make_optimizer(model.parameters()) if make_optimizer else torch.optim.SGD(model.parameters(), lr=0.1)
    given = [Metrics(), *plugins]
    return Learner(model, nn.functional.mse_loss, optimizer, plugins=given, standard=False, **options)


def weights(model):
    return [p.detach().clone() for p in model.parameters()]


def equal(one, other):
    return all(torch.equal(a, b) for a, b in zip(weights(one), weights(other), strict=True))
