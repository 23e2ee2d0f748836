"""Small problems to fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from loopkit.learner import Learner


@dataclass
class Problem:
    """A model, a loss, an optimizer and data: the arguments of a learner and its fit."""

    model: nn.Module | Mapping[str, nn.Module]
    loss_fn: Callable[..., Tensor] | None
    optimizer: Any
    """A factory, or a mapping of them, as for ``Learner``."""
    train: list[Any]
    val: list[Any] | None = None
    load: Callable[[list[Any]], Any] | None = None
    """Makes the loader of a list of batches, for plugins that need one; by default the list is the loader."""

    def learner(self, **options: Any) -> Learner:
        """``Learner(model, loss_fn, optimizer, **options)``."""
        return Learner(self.model, self.loss_fn, self.optimizer, **options)


def tiny_problem(seed: int = 0, samples: int = 20, batch_size: int = 6) -> Problem:
    """A classification of random points that is fitted in milliseconds.

    Inputs are float32 of shape ``(batch, 4)``, targets int64 classes 0 to 2 of shape ``(batch,)``. The model has
    parameters, buffers (batch norm) and dropout, the optimizer is SGD with momentum. The same seed gives the same
    problem; torch's generator is left as it was.

    Args:
        seed: For the data and the first weights.
        samples: For training, and half as many for validation.
        batch_size: In samples; with the defaults there are 4 batches, of 6, 6, 6 and 2 samples.

    Example::

        problem = tiny_problem()
        problem.learner(standard=False).fit(problem.train, problem.val, epochs=2)
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 3))
        train, val = (
            list(zip(torch.split(x, batch_size), torch.split(y, batch_size), strict=True))
            for count in (samples, (samples + 1) // 2)
            for x, y in [(torch.randn(count, 4), torch.randint(3, (count,)))]
        )

    def optimizer(params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.1, momentum=0.9)

    return Problem(model, nn.functional.cross_entropy, optimizer, train, val)


def adversarial_problem(train: list[Any]) -> Problem:
    """Two models and optimizers, for a phase with two backwards and updates."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        models = {"critic": nn.Linear(4, 1), "generator": nn.Linear(4, 4)}

    def optimizer(params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.01)

    return Problem(models, None, dict.fromkeys(models, optimizer), train)
