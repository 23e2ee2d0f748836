"""Modules that a phase, a plugin or a loss replaces or makes while a fit runs."""

from __future__ import annotations

import copy
import warnings
from types import SimpleNamespace

import pytest
import torch
from helpers import batches, on
from torch import nn

from loopkit import Learner, TrainingPhase, hookimpl


def sgd(params):
    return torch.optim.SGD(params, lr=0.1)


class Distils(TrainingPhase):
    """Trains towards a copy of the model, which a hook replaces."""

    def __init__(self, contain):
        super().__init__()
        self.held = contain(nn.Linear(3, 1).requires_grad_(False))

    def teacher(self):
        return self.held[0] if isinstance(self.held, list) else self.held

    def replace(self, model):
        made = copy.deepcopy(model).requires_grad_(False)
        if isinstance(self.held, list):
            self.held[0] = made
        else:
            self.held = made

    def forward(self, learner, inputs):
        outputs = learner.model(inputs)
        return outputs + 0.5 * self.teacher()(inputs)


class Replaces:
    """A plugin that holds the copy."""

    name = "replaces"

    def __init__(self, contain):
        self.phase = Distils(contain)

    @hookimpl(updates=("outputs",))
    def loss_begin(self, step):
        step.outputs = step.outputs + 0.5 * self.phase.teacher()(step.inputs)


class Loss:
    def __init__(self, contain):
        self.phase = Distils(contain)

    def __call__(self, outputs, targets):
        return (outputs - targets - self.phase.teacher().weight.sum()).square().mean()


def learner_with(holder, contain):
    phase = Distils(contain)
    options = {"plugins": [], "phases": []}
    loss_fn = nn.MSELoss()
    if holder == "phase":
        options["phases"] = [phase]
    elif holder == "plugin":
        options["plugins"] = [made := Replaces(contain)]
        phase = made.phase
    else:
        loss_fn = Loss(contain)
        phase = loss_fn.phase
    learner = Learner(nn.Linear(3, 1), loss_fn, sgd, standard=False, **options)
    learner.add(on("phase_end", lambda learner: phase.replace(learner.model), "replacing"))
    return learner, phase


@pytest.mark.parametrize("holder", ["phase", "plugin", "loss"])
@pytest.mark.parametrize("contain", [lambda m: m, lambda m: [m]], ids=["attribute", "item"])
def test_module_that_is_replaced_in_a_fit_is_saved_as_it_is_now(holder, contain):
    torch.manual_seed(0)
    whole, _ = learner_with(holder, contain)
    whole.fit(batches(3), epochs=3)
    torch.manual_seed(0)
    first, _ = learner_with(holder, contain)
    first.fit(batches(3), epochs=2)
    torch.manual_seed(7)
    again, phase = learner_with(holder, contain)
    again.load_state_dict(first.state_dict())
    assert torch.equal(phase.teacher().weight, first.model.weight)
    again.fit(batches(3), epochs=1)
    assert torch.equal(again.model.weight, whole.model.weight)


def test_state_is_loaded_into_the_module_that_stands_there_now():
    learner, phase = learner_with("phase", lambda m: m)
    state = copy.deepcopy(learner.state_dict())
    before = phase.teacher().weight.clone()
    learner.fit(batches(3), epochs=1)
    learner.load_state_dict(state)
    assert torch.equal(phase.teacher().weight, before)


class Late(TrainingPhase):
    """Makes a copy of the model in its first step."""

    def __init__(self):
        super().__init__()
        self.teacher = None
        self.made = SimpleNamespace(first=None)

    def forward(self, learner, inputs):
        if self.teacher is None:
            self.make(copy.deepcopy(learner.model))
        return learner.model(inputs) + self.teacher(inputs)

    def make(self, module):
        self.teacher = module


class LateItem(Late):
    def make(self, module):
        self.made.first = module
        self.teacher = lambda inputs: self.made.first(inputs)


class LateCache(Late):
    volatile = ("teacher",)


@pytest.mark.parametrize(("kind", "path"), [(Late, "teacher"), (LateItem, "made.first")])
def test_module_that_is_made_in_a_fit_is_named_once(kind, path):
    learner = Learner(nn.Linear(3, 1), nn.MSELoss(), sgd, phases=[kind()], standard=False)
    learner.fit(batches(3), epochs=1)
    with pytest.warns(UserWarning, match=rf"phase 'train' .* has made its .{path}. since the fit began, and no"):
        learner.state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        learner.state_dict()


def test_module_that_a_loss_makes_in_a_fit_is_named():
    class Makes:
        norm = None

        def __call__(self, outputs, targets):
            self.norm = self.norm or nn.BatchNorm1d(1)
            return (self.norm(outputs) - targets).square().mean()

    learner = Learner(nn.Linear(3, 1), Makes(), sgd, standard=False)
    learner.fit(batches(3), epochs=1)
    with pytest.warns(UserWarning, match=r"the loss function .Makes. has made its 'norm' since"):
        learner.state_dict()


def test_cache_and_a_module_around_the_model_are_not_named():
    phase = LateCache()
    learner = Learner(nn.Linear(3, 1), nn.MSELoss(), sgd, phases=[phase], standard=False)
    learner.add(on("fit_begin", lambda learner: setattr(phase, "wrapper", nn.Sequential(learner.model)), "wrapping"))
    learner.fit(batches(3), epochs=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "extras" not in learner.state_dict()
