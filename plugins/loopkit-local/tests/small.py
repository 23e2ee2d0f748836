"""A small problem, and a learner that averages its parameters."""

import torch
from torch import nn
from torch.nn.functional import mse_loss

from loopkit import Learner
from loopkit.data import TensorLoader

torch.set_num_threads(1)


def make_data(samples=48, batch_size=4, **options):
    generator = torch.Generator().manual_seed(3)
    x, y = (torch.randn(samples, width, generator=generator) for width in (3, 2))
    return TensorLoader(x, y, batch_size=batch_size, **options)


def make_model(seed=1, norm=False):
    torch.manual_seed(seed)
    layers = [nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)]
    return nn.Sequential(*[layer for layer in layers if norm or not isinstance(layer, nn.BatchNorm1d)])


def sgd(params):
    return torch.optim.SGD(params, lr=0.1)


def values(model):
    return [p.detach().clone() for p in model.parameters()]


def same(one, other):
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def learner_of(plugin, *plugins, optimizer=sgd, model=None, **options):
    model = make_model() if model is None else model
    return Learner(model, mse_loss, optimizer, plugins=[plugin, *plugins], standard=False, **options)
