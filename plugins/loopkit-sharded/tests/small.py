"""A small model, its data, and learners of it."""

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from loopkit import Learner
from loopkit.data import TensorLoader
from loopkit_sharded import FSDP, ShardedCheckpoint

LIMIT = 60.0


def net(seed=1):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3), nn.Tanh(), nn.Linear(3, 1))


def adam(params):
    return torch.optim.AdamW(params, lr=0.05)


def loader(processes=1):
    """Global batches of 8 samples."""
    generator = torch.Generator().manual_seed(3)
    x, y = torch.randn(40, 5, generator=generator), torch.randn(40, 1, generator=generator)
    return TensorLoader(x, y, batch_size=8 // processes, shuffle=True, seed=5)


def make(*plugins, directory=None, model=None, fsdp=None, optimizer=adam, **options):
    """A learner that is sharded over all processes, and saves."""
    saver = [] if directory is None else [ShardedCheckpoint(directory, **options)]
    sync = FSDP(**{"wrap": nn.Linear, "timeout": LIMIT, **(fsdp or {})})
    model = net() if model is None else model
    return Learner(model, nn.MSELoss(), optimizer, plugins=[sync, *plugins, *saver], standard=False)


def whole(learner):
    """All tensors of a learner's parameters and moments, whole, by name."""
    found = {f"model {name}": p for name, p in learner.model.named_parameters()}
    for index, p in enumerate(learner.model.parameters()):
        found.update({f"{index} {key}": value for key, value in learner.optimizer.state.get(p, {}).items()})
    return gathered(found)


def gathered(tensors):
    """Copies of tensors by name, whole."""
    return {
        name: value.detach().full_tensor().clone() if isinstance(value, DTensor) else value.detach().clone()
        for name, value in tensors.items()
    }


def differing(one, other):
    """The names of what is not the same in every bit."""
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]
