"""A small problem with images."""

import torch
from loopkit_testing import Problem, tiny_problem
from torch import nn

CLASSES = 3


def images() -> Problem:
    """That of the kit, with inputs ``(batch, 1, 2, 2)``."""
    problem = tiny_problem()
    problem.model = nn.Sequential(nn.Flatten(), problem.model)
    problem.train, problem.val = (
        [(x.reshape(-1, 1, 2, 2), y) for x, y in data] for data in (problem.train, problem.val)
    )
    return problem


def batches(count=4, size=6):
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(size, 2, 8, 8, generator=generator), torch.randint(CLASSES, (size,), generator=generator))
        for _ in range(count)
    ]
