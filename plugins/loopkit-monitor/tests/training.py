"""Small learners."""

import torch
from torch import nn

from loopkit import Learner, hookimpl


def batches(count, size=4):
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(size, 3, generator=generator), torch.randn(size, 1, generator=generator)) for _ in range(count)
    ]


def make_learner(*plugins, lr=0.1, **options):
    torch.manual_seed(0)
    model = options.pop("model", None) or nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    optimizer = options.pop("optimizer", None) or torch.optim.SGD(model.parameters(), lr=lr)
    return Learner(model, nn.MSELoss(), optimizer, plugins=plugins, **{"standard": False, **options})


class On:
    """Calls a function with the learner in one hook."""

    def __init__(self, hook, function, name="on", **options):
        self.name = name
        setattr(self, hook, hookimpl(**options)(lambda learner: function(learner)))
