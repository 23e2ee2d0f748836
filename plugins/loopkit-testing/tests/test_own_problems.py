"""Plugins that are for a problem of their own: what the checks say of them, and of mutants beside them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from loopkit import hookimpl
from loopkit.errors import PluginError
from loopkit_testing import ContractError, Problem, check_plugin, tiny_problem


def wide():
    """Points with six features, where the tiny problem has four."""
    made = tiny_problem()
    torch.manual_seed(0)
    train, val = ([(torch.cat([x, x[:, :2]], 1), y) for x, y in data] for data in (made.train, made.val))
    return Problem(nn.Linear(6, 3), nn.functional.cross_entropy, made.optimizer, train, val)


class OfWide:
    """Is for models with six features."""

    @hookimpl
    def epoch_begin(self, learner):
        if next(learner.model.parameters()).shape[1] != 6:
            raise PluginError("it is for six features")


class AsksForALoss(OfWide):
    @hookimpl(reads=("loss",))
    def step_end(self, step):
        float(step.loss)


def test_unknown_phases_run_on_the_own_problem():
    check_plugin(OfWide, problem=wide, checks=["unknown_phases"])


def test_unknown_phases_still_finds_what_a_phase_does_not_set():
    with pytest.raises(ContractError, match=r"under a phase without loss and backward.*getattr\(step"):
        check_plugin(AsksForALoss, problem=wide, checks=["unknown_phases"])


class Needy(torch.optim.SGD):
    """Updates only where its plugin has allowed it."""

    allowed = False

    def step(self, closure=None):
        assert self.allowed
        return super().step(closure)


def needy():
    made = tiny_problem()
    return Problem(made.model, made.loss_fn, lambda p: Needy(p, lr=0.1), made.train, made.val)


class Allows:
    @hookimpl(updates=("optimizer",))
    def fit_begin(self, learner):
        learner.optimizer.allowed = True


class AllowsAndKeeps(Allows):
    @hookimpl(reads=("loss",))
    def step_end(self, step):
        self.kept = step.loss


def test_no_graph_kept_takes_an_optimizer_that_needs_the_plugin():
    check_plugin(Allows, problem=needy, checks=["no_graph_kept"])


def test_no_graph_kept_still_finds_a_kept_graph_there():
    with pytest.raises(ContractError, match="it keeps the graph of step 0 alive"):
        check_plugin(AllowsAndKeeps, problem=needy, checks=["no_graph_kept"])


class Adds:
    @hookimpl(updates=("model", "trainable"))
    def setup_model(self, model):
        model.register_parameter("extra", nn.Parameter(torch.zeros(3)))
        return model


class AddsWithGradients(Adds):
    @hookimpl(updates=("model", "trainable"))
    def setup_model(self, model):
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        return model


class Clears:
    @hookimpl(reads=("grads",))
    def update_end(self, step):
        step.params[0].grad = None


def test_declared_access_takes_a_parameter_that_is_added():
    check_plugin(Adds, checks=["declared_access"])


@pytest.mark.parametrize("mutant", [AddsWithGradients, Clears])
def test_declared_access_still_finds_gradients_that_come_and_go(mutant):
    with pytest.raises(ContractError, match="changes 'grads'"):
        check_plugin(mutant, checks=["declared_access"])
