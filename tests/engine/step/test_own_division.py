"""Optimizers that keep the gradients of a window's steps apart and divide by their number, as in private training."""

from __future__ import annotations

import pytest
import torch
from helpers import on
from torch import nn

from loopkit import Learner, every
from loopkit.errors import StateError
from loopkit.plugins import Checkpoint

GENERATOR = torch.Generator().manual_seed(0)
X, Y = torch.randn(30, 3, generator=GENERATOR), torch.randn(30, 1, generator=GENERATOR)


class Apart(torch.optim.SGD):
    """Keeps one gradient for each backward beside a parameter, cuts it, and updates with their mean."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, lr=lr)
        for p in self.every:
            p.grad_sample = []
            p.register_post_accumulate_grad_hook(self.keep)

    @property
    def every(self):
        return [p for group in self.param_groups for p in group["params"]]

    @property
    def accumulated_iterations(self):
        return len(self.every[0].grad_sample)

    @staticmethod
    def keep(p):
        p.grad_sample.append(p.grad.clamp(-0.5, 0.5))
        p.grad = None

    def zero_grad(self, set_to_none=True):
        super().zero_grad(set_to_none)
        for p in self.every:
            p.grad_sample = []

    def step(self, closure=None):
        for p in self.every:
            p.grad = torch.stack(p.grad_sample).mean(0)
        return super().step(closure)


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))


def batches(size):
    return list(zip(X.split(size), Y.split(size), strict=True))


def by_hand(data, steps, epochs=2):
    net = model()
    optimizer = Apart(net.parameters())
    for _ in range(epochs):
        for start in range(0, len(data), steps):
            optimizer.zero_grad()
            for x, y in data[start : start + steps]:
                nn.functional.mse_loss(net(x), y).backward()
            optimizer.step()
    return list(net.parameters())


def make(*plugins, steps=2, **options):
    return Learner(model(), nn.MSELoss(), Apart, plugins=plugins, accumulate=steps, standard=False, **options)


@pytest.mark.parametrize("steps", [1, 2, 4])
@pytest.mark.parametrize("size", [5, 7], ids=["equal batches", "a smaller last batch"])
def test_optimizer_that_divides_itself_gets_whole_gradients(size, steps):
    learner = make(steps=steps)
    learner.fit(batches(size), epochs=2)
    assert all(map(torch.equal, learner.model.parameters(), by_hand(batches(size), steps)))


def test_state_inside_a_window_whose_gradients_no_state_has_raises():
    said = []

    def save(learner, **_):
        said.append(learner.current.can_save)
        if not said[-1]:
            with pytest.raises(StateError, match="whose gradients the optimizer keeps itself"):
                learner.state_dict()

    make(on("step_end", save)).fit(batches(5), epochs=1)
    assert said == [False, True] * 3


@pytest.mark.parametrize("at", [3, 4, 5])
def test_pause_and_interval_wait_for_the_end_of_the_window(at, tmp_path):
    def pause(learner, **_):
        if learner.progress.steps == at:
            learner.pause("enough")

    def saver():
        return Checkpoint(tmp_path, save=every(updates=2), resume="auto")

    first = make(saver(), on("step_end", pause))
    first.fit(batches(5), epochs=2, on_interrupt="return")
    assert first.progress.steps == at + at % 2
    again = make(saver())
    again.fit(batches(5), epochs=2)
    assert all(map(torch.equal, again.model.parameters(), by_hand(batches(5), 2)))
