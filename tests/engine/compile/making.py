"""Learners and plugins that several tests of the wing share."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from loopkit import Event, Learner, Phase, hookimpl
from loopkit.errors import PluginError


def make(*plugins, **options):
    torch.manual_seed(0)
    return Learner(
        nn.Linear(4, 3),
        nn.CrossEntropyLoss(),
        lambda p: torch.optim.SGD(p, lr=0.1),
        standard=False,
        plugins=plugins,
        **options,
    )


def batches(count=2):
    rng = torch.Generator().manual_seed(0)
    return [(torch.randn(5, 4, generator=rng), torch.tensor([0, 1, 2, 0, 1])) for _ in range(count)]


def scheduler(factory, **options):
    return factory(torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1), **options)


def refused(*plugins, message, error=PluginError, **options):
    """Refused when the learner is built, and when they are added to one, which stays as it was."""
    with pytest.raises(error, match=message):
        make(*plugins, **options)
    learner = make(Listener())
    plan = learner.explain()
    if not options:
        with pytest.raises(error, match=message):
            learner.add(*plugins)
        assert list(learner.plugins) == ["listener"]
        assert learner.explain() == plan


class Listener:
    def __init__(self):
        self.steps = []

    @hookimpl
    def step_begin(self, step):
        self.steps.append(step.index)


class Verb:
    def __init__(self, name="verb"):
        self.name = name
        self.calls = 0

    @hookimpl
    def optimizer_step(self, default):
        self.calls += 1
        default()


class Quiet(Phase):
    name = "quiet"

    def step(self, learner, step):
        pass


class RainBegin(Event):
    """Of a phase that a learner may not know."""


class Rain(Phase):
    name = "rain"
    emits = (RainBegin,)

    def step(self, learner, step):
        step.emit(RainBegin)


class Scaled(nn.Module):
    def __init__(self, module, factor):
        super().__init__()
        self.module = module
        self.factor = factor
        self.calls = 0

    def forward(self, *inputs):
        self.calls += 1
        return self.module(*inputs) * self.factor


class Scale:
    def __init__(self, factor=2.0, name="scale"):
        self.factor = factor
        self.name = name
        self.wrappers = []

    @hookimpl
    def setup_model(self, model):
        self.wrappers.append(Scaled(model, self.factor))
        return self.wrappers[-1]


class Broken:
    name = "zz"

    @hookimpl
    def setup_model(self):
        raise RuntimeError("broken")


class Clip:
    provides = "clip"

    @hookimpl(updates=("grads",))
    def update_begin(self, step):
        pass


class Norms:
    @hookimpl
    def fit_begin(self):
        pass

    @hookimpl
    def fit_end(self):
        pass

    @hookimpl(reads=("grads", "params"), writes=("metrics.*/norm",), before=("clip",))
    def update_begin(self, step):
        pass


class Files:
    @hookimpl(before=("norms",))
    def fit_begin(self):
        pass

    @hookimpl
    def fit_end(self):
        pass

    @hookimpl(reads=("*",))
    def step_end(self, step):
        pass
