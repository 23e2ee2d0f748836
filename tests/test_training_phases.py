"""What a training phase must do, and what it must leave to the engine."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from loopkit import Learner, TrainingPhase
from loopkit.errors import PhaseError


def make_batches(count=6):
    generator = torch.Generator().manual_seed(2)
    return [(torch.randn(4, 3, generator=generator), torch.randn(4, 2, generator=generator)) for _ in range(count)]


def make_learner(phase, accumulate=1, **options):
    torch.manual_seed(0)
    options = {"standard": False, **options}
    optimizer = options.pop("optimizer", lambda params: torch.optim.SGD(params, lr=0.1))
    return Learner(nn.Linear(3, 2), mse_loss, optimizer, phases=[phase], accumulate=accumulate, **options)


# A zero_grad that was left in a phase


class Clearing(TrainingPhase):
    """As a loop by hand, which clears the gradients itself."""

    def __init__(self, first, to_none):
        super().__init__()
        self.first, self.to_none = first, to_none

    def step(self, learner, step):
        if self.first:
            learner.optimizer.zero_grad(set_to_none=self.to_none)
        super().step(learner, step)
        if not self.first:
            learner.optimizer.zero_grad(set_to_none=self.to_none)


@pytest.mark.parametrize("to_none", [True, False], ids=["to none", "in place"])
@pytest.mark.parametrize("first", [True, False], ids=["first in the step", "last in the step"])
@pytest.mark.parametrize("accumulate", [2, 3])
def test_zero_grad_that_throws_gradients_of_a_window_away_is_refused(first, to_none, accumulate):
    learner = make_learner(Clearing(first, to_none), accumulate)
    with pytest.raises(PhaseError) as raised:
        learner.fit(make_batches(), epochs=1)
    message = str(raised.value)
    assert message.startswith("phase 'train', step 1: the gradients of the 1 step before it are gone")
    assert f"an update that takes {accumulate}" in message
    assert "delete line " in message
    assert "'learner.optimizer.zero_grad(set_to_none=self.to_none)'; the engine clears" in message


@pytest.mark.parametrize("to_none", [True, False])
def test_zero_grad_where_each_step_is_an_update_does_no_harm(to_none):
    learners = [make_learner(phase) for phase in (Clearing(True, to_none), TrainingPhase())]
    for learner in learners:
        learner.fit(make_batches(), epochs=2)
    assert torch.equal(*(learner.model.weight for learner in learners))


class Twice(TrainingPhase):
    """Clears the gradients between the two backwards of a step."""

    def step(self, learner, step):
        inputs, targets = step.batch
        for _ in range(2):
            learner.optimizer.zero_grad()
            step.backward(learner.loss_fn(learner.model(inputs), targets))
        step.update()


def test_zero_grad_between_two_backwards_of_a_step_is_refused_within_a_window_alone():
    make_learner(Twice()).fit(make_batches(), epochs=1)
    with pytest.raises(PhaseError, match="gradients of the 1 step before it are gone"):
        make_learner(Twice(), 2).fit(make_batches(), epochs=1)


class Silent(TrainingPhase):
    """A loss whose gradients are 0."""

    def loss(self, learner, outputs, targets):
        return super().loss(learner, outputs, targets) * 0.0


def test_gradients_that_are_zero_are_none_that_were_thrown_away():
    learner = make_learner(Silent(), 3)
    learner.fit(make_batches(), epochs=2)
    assert learner.progress.updates == 4
