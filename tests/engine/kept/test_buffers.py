"""Buffers that a model makes in its forward, and states that modules add, over a resume."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers import batches, on
from torch import nn

from loopkit import Learner
from loopkit.checkpoint.encoding import decode, encode
from loopkit.errors import StateError
from loopkit.plugins import EarlyStopping, Metrics, StopOnNonFinite


class Makes(nn.Linear):
    """Makes a buffer that is not persistent in its first forward."""

    def __init__(self):
        super().__init__(3, 1)

    def forward(self, inputs):
        if not hasattr(self, "mean"):
            self.register_buffer("mean", torch.zeros(3), persistent=False)
        if self.training:
            self.mean.lerp_(inputs.mean(0), 0.5)
        return super().forward(inputs - self.mean)


class Fills(Makes):
    """Has a place for the buffer, which is None at first."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", None, persistent=False)

    def forward(self, inputs):
        if self.mean is None:
            self.mean = torch.zeros(3)
        return super().forward(inputs)


class Grows(nn.Linear):
    """Lets a buffer grow."""

    def __init__(self):
        super().__init__(3, 1)
        self.register_buffer("seen", torch.zeros(0), persistent=False)

    def forward(self, inputs):
        if self.training:
            self.seen = torch.cat([self.seen, inputs.detach().mean().reshape(1)])
        return super().forward(inputs) + self.seen.mean()


def build(kind, seed=0, inside=False, loss=None, **options):
    torch.manual_seed(seed)
    model = nn.Sequential(kind()) if inside else kind()
    return Learner(
        model,
        loss or nn.MSELoss(),
        lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        standard=False,
        **options,
    )


def tensors(learner):
    return {**dict(learner.model.named_parameters()), **dict(learner.model.named_buffers())}


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("kind", [Makes, Fills, Grows])
def test_buffer_that_is_made_in_forward_resumes_with_the_same_bits(kind, inside):
    whole = build(kind, inside=inside)
    whole.fit(batches(3), epochs=2)
    first = build(kind, inside=inside)
    first.fit(batches(3), epochs=1)
    again = build(kind, seed=5, inside=inside)
    again.load_state_dict(decode(*encode(first.state_dict())))
    again.fit(batches(3), epochs=1)
    assert tensors(whole).keys() == tensors(again).keys()
    for name, tensor in tensors(whole).items():
        assert torch.equal(tensor, tensors(again)[name])


def test_buffer_of_a_module_that_is_not_there_does_not_fit():
    first = build(Makes, inside=True)
    first.fit(batches(1), epochs=1)
    state = copy.deepcopy(first.state_dict())
    state["buffers"]["model"]["1.mean"] = state["buffers"]["model"].pop("0.mean")
    with pytest.raises(StateError, match=r"buffers of model 'model' in the state that are not here: '1.mean'"):
        build(Makes, inside=True).load_state_dict(state)


class Counts(nn.Linear):
    """Counts its steps in an extra state, and goes by them."""

    def __init__(self):
        super().__init__(3, 1)
        self.steps = 0

    def forward(self, inputs):
        self.steps += self.training
        return super().forward(inputs) * self.steps

    def get_extra_state(self):
        return {"steps": self.steps}

    def set_extra_state(self, state):
        self.steps = state["steps"]


class CountsTensor(Counts):
    def get_extra_state(self):
        return torch.tensor(self.steps)

    def set_extra_state(self, state):
        self.steps = int(state)


class CountsInside(nn.Sequential):
    def __init__(self):
        super().__init__(Counts())


@pytest.mark.parametrize("kind", [Counts, CountsTensor, CountsInside])
def test_best_extra_state_is_restored(kind):
    learner = build(kind, plugins=[Metrics(), EarlyStopping("val/loss", patience=9, mode="min", restore_best=True)])
    learner.fit(batches(3), batches(1, seed=3), epochs=5)
    best = learner.plugins["early_stopping"].best
    assert learner.evaluate(batches(1, seed=3))["val/loss"] == best


@pytest.mark.parametrize("kind", [Counts, CountsTensor, CountsInside])
def test_extra_state_is_rolled_back(kind):
    learner = build(kind, plugins=[StopOnNonFinite("rollback")])
    given = [*batches(1), (torch.full((4, 3), torch.nan), torch.zeros(4, 1))]
    seen = []
    module = learner.model[0] if kind is CountsInside else learner.model
    learner.add(on("epoch_end", lambda: seen.append(module.steps)))
    with pytest.warns(UserWarning, match="back to the state after 0 updates"):
        learner.fit(given, epochs=1)
    assert seen == [0]
