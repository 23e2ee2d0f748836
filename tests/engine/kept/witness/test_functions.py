"""Modules, tensors and numbers that a loss function holds without being a module, and containers of modules."""

from __future__ import annotations

import functools
import random
import warnings

import numpy
import pytest
import torch
from helpers import batches
from torch import nn

from loopkit import Learner, TrainingPhase, hookimpl
from loopkit.checkpoint.encoding import decode, encode


class Scaled(nn.Module):
    """A loss with a parameter and a buffer, which can be given an option."""

    def __init__(self):
        super().__init__()
        self.log_scale = nn.Parameter(torch.zeros(()))
        self.norm = nn.BatchNorm1d(1)

    def forward(self, outputs, targets, factor=1.0):
        return factor * (self.norm(outputs) - targets).square().mean() * self.log_scale.exp() - self.log_scale


in_module = Scaled()


def by_name(outputs, targets):
    return calls_it(outputs, targets)


def calls_it(outputs, targets):
    return in_module(outputs, targets)


def first_of(modules, outputs, targets):
    return modules[0](outputs, targets)


class Sums:
    """Holds losses in a list and a mapping."""

    def __init__(self, *modules):
        self.parts = [modules[0], {"b": modules[1]}]

    def __call__(self, outputs, targets):
        return self.parts[0](outputs, targets) + self.parts[1]["b"](outputs, targets)


def sgd(params):
    return torch.optim.SGD(params, lr=0.1)


def made(kind):
    """A loss function, and the modules that it holds."""
    scaled = Scaled()
    if kind == "name of its module":
        global in_module
        in_module = scaled
        return by_name, [scaled]
    if kind == "items":
        other = Scaled()
        return Sums(scaled, other), [scaled, other]
    losses = {
        "closure": lambda outputs, targets: scaled(outputs, targets),
        "default": lambda outputs, targets, scaled=scaled: scaled(outputs, targets),
        "partial of it": functools.partial(scaled, factor=2.0),
        "partial with it": functools.partial(first_of, [scaled]),
        "method": Sums(scaled, scaled).__call__,
    }
    return losses[kind], [scaled]


def learner_of(kind, seed=0):
    torch.manual_seed(seed)
    loss_fn, modules = made(kind)
    own = [p for module in modules for p in module.parameters()]
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD([*model.parameters(), *own], lr=0.1, momentum=0.9)
    learner = Learner(model, loss_fn, optimizer, standard=False)
    return learner, nn.ModuleList([model, *modules])


@pytest.mark.parametrize(
    "kind", ["closure", "default", "partial of it", "partial with it", "method", "items", "name of its module"]
)
def test_modules_of_a_loss_that_is_none_resume_with_the_same_bits(kind):
    whole, whole_modules = learner_of(kind)
    whole.fit(batches(5), epochs=3)
    expected = {name: value.clone() for name, value in whole_modules.state_dict().items()}
    first, _ = learner_of(kind)
    first.fit(batches(5), epochs=2)
    state = decode(*encode(first.state_dict()))
    again, modules = learner_of(kind, seed=7)
    again.load_state_dict(state)
    again.fit(batches(5), epochs=1)
    assert all(torch.equal(value, expected[name]) for name, value in modules.state_dict().items())


class Teachers(TrainingPhase):
    """Trains towards averages of the model that it holds in a container."""

    def __init__(self, teachers):
        super().__init__()
        self.teachers = teachers

    def loss(self, learner, outputs, targets):
        teacher = next(iter(self.teachers.values() if isinstance(self.teachers, dict) else self.teachers))
        teacher = teacher[0] if isinstance(teacher, list) else teacher
        teacher = teacher if isinstance(teacher, nn.Module) else teacher()
        with torch.no_grad():
            teacher.weight.lerp_(learner.model.weight, 0.5)
        return (outputs - targets).square().mean() + (outputs - teacher.weight.sum()).square().mean()


class Norms:
    """A plugin with modules in a list."""

    name = "norms"

    def __init__(self, teachers):
        self.norms = list(teachers)

    @hookimpl(updates=("outputs",))
    def loss_begin(self, step):
        step.outputs = self.norms[0](step.outputs)


CONTAIN = [lambda m: [m], lambda m: (m,), lambda m: {"a": m}, lambda m: {"a": [m]}, lambda m: [lambda: m]]


@pytest.mark.parametrize("contain", CONTAIN, ids=["list", "tuple", "dict", "dict of lists", "closure"])
def test_modules_that_a_phase_holds_in_containers_are_saved(contain):
    def run(epochs, state=None):
        torch.manual_seed(0 if state is None else 7)
        teacher = nn.Linear(3, 1)
        learner = Learner(
            nn.Linear(3, 1),
            None,
            sgd,
            phases=[Teachers(contain(teacher))],
            standard=False,
        )
        if state is not None:
            learner.load_state_dict(state)
        learner.fit(batches(5), epochs=epochs)
        return learner, teacher

    _, whole = run(3)
    first, _ = run(2)
    _, teacher = run(1, first.state_dict())
    assert torch.equal(teacher.weight, whole.weight)


def test_modules_that_a_plugin_holds_in_a_list_are_saved():
    norm, other = nn.BatchNorm1d(1), nn.BatchNorm1d(1)

    def learner_with(module):
        return Learner(nn.Linear(3, 1), nn.MSELoss(), sgd, plugins=[Norms([module])], standard=False)

    first = learner_with(norm)
    first.fit(batches(5), epochs=1)
    again = learner_with(other)
    again.load_state_dict(first.state_dict())
    assert torch.equal(other.running_mean, norm.running_mean)
    assert other.num_batches_tracked == 5


def counting():
    count = 0

    def loss_fn(outputs, targets):
        nonlocal count
        count += 1
        return (outputs - targets).square().mean() * count

    return loss_fn


def drawing(rng, draw):
    return lambda outputs, targets: (outputs - targets + draw(rng)).square().mean()


def averaging(mean, at=()):
    def loss_fn(outputs, targets):
        loss = (outputs - targets).square().mean()
        (mean[0] if isinstance(mean, list) else mean).mul_(0.9).add_(0.1 * loss.detach())
        return loss * (1 + (mean[0] if isinstance(mean, list) else mean))

    return loss_fn


MOVE = {
    "count": counting,
    "rng": lambda: drawing(numpy.random.default_rng(0), lambda rng: rng.normal()),
    "rng of Python": lambda: drawing(random.Random(0), lambda rng: rng.random()),
    "generator": lambda: drawing(torch.Generator(), lambda rng: torch.rand(1, generator=rng)),
    "mean": lambda: averaging(torch.zeros(())),
    "mean[0]": lambda: averaging([torch.zeros(())]),
}


@pytest.mark.parametrize("what", MOVE)
def test_what_a_loss_function_moves_in_its_closure_is_named_once(what):
    learner = Learner(nn.Linear(3, 1), MOVE[what](), sgd, standard=False)
    learner.fit(batches(3), epochs=1)
    name = what if what.startswith("mean") or what == "count" else "rng"
    with pytest.warns(UserWarning, match="the loss function .function. has changed its") as caught:
        learner.state_dict()
    assert repr(name) in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        learner.state_dict()


def test_a_loss_function_that_notes_and_measures_is_not_named():
    notes, model, weights, mse = [], nn.Linear(3, 1), torch.ones(1), nn.MSELoss()

    def loss_fn(outputs, targets):
        loss = mse(outputs, targets) * weights
        notes.append(loss.item())
        return loss.squeeze() + 0.1 * model.weight.square().sum()

    learner = Learner(model, loss_fn, sgd, standard=False)
    learner.fit(batches(3), epochs=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "extras" not in learner.state_dict()
