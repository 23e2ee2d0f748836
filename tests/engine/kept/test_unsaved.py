"""A parameter that an optimizer trains and that no checkpoint would hold is an error when the learner is built."""

from __future__ import annotations

import pytest
import torch
from helpers import batches
from torch import nn

from loopkit import Learner, TrainingPhase
from loopkit.errors import PhaseError


def sgd(*params, kind=torch.optim.SGD):
    return kind(params, lr=0.1)


class Hides(TrainingPhase):
    """Declares what it trains to need no saving."""

    volatile = ("head",)

    def __init__(self, head):
        super().__init__()
        self.head = head


class HidesCache(TrainingPhase):
    def __init__(self, head):
        super().__init__()
        self.head_cache = head


class SavesItself(TrainingPhase):
    """Has a state of its own."""

    def __init__(self, head):
        super().__init__()
        self.closed = {"a": {"b": {"c": {"d": {"e": head}}}}}

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


def build(model, optimizer, loss_fn=None, **options):
    return Learner(model, loss_fn or nn.MSELoss(), optimizer, standard=False, **options)


@pytest.mark.parametrize(
    "make",
    [
        lambda model, stray: build(model, sgd(*model.parameters(), stray)),
        lambda model, stray: build(model, lambda params: sgd(*params, stray)),
        lambda model, stray: build({"a": model}, {"a": sgd(*model.parameters()), "b": sgd(stray)}),
        lambda model, stray: build(model, sgd(*model.parameters())).set_optimizer(sgd(*model.parameters(), stray)),
    ],
    ids=["optimizer", "factory", "second optimizer", "set_optimizer"],
)
def test_parameter_that_nothing_holds_is_an_error(make):
    with pytest.raises(PhaseError, match=r"shape \(7,\) that no model.* give its module as a further model, Learner"):
        make(nn.Linear(3, 1), nn.Parameter(torch.ones(7)))


@pytest.mark.parametrize(("kind", "name"), [(Hides, "head"), (HidesCache, "head_cache")])
def test_parameter_that_its_holder_does_not_save_is_an_error_with_the_line(kind, name):
    model, head = nn.Linear(3, 1), nn.Linear(1, 1)
    with pytest.raises(PhaseError, match=rf"phase 'train' \({kind.__name__}\) .*saved = \('{name}',\)"):
        build(model, sgd(*model.parameters(), *head.parameters()), phases=[kind(head)])


@pytest.mark.parametrize("made_for", [lambda: nn.Linear(3, 1), lambda: nn.Linear(2, 2)])
def test_optimizer_of_another_model_is_an_error(made_for):
    other = sgd(*made_for().parameters())
    with pytest.raises(PhaseError, match=r"covers 0 of 2 trainable parameters \(weight, bias\).* give a factory"):
        build(nn.Linear(3, 1), other)


def test_phase_with_a_state_dict_saves_what_it_trains_itself():
    model, head = nn.Linear(3, 1), nn.Linear(1, 1)
    learner = build(model, sgd(*model.parameters(), *head.parameters()), phases=[SavesItself(head)])
    assert learner.fit(batches(2), epochs=1).updates == 2


def test_parameter_that_shares_the_memory_of_a_model_is_saved_with_it():
    model = nn.Linear(3, 1)
    flat = nn.Parameter(model.weight.detach().view(-1))
    assert build(model, sgd(flat, model.bias)).fit(batches(2), epochs=1).updates == 2


def test_optimizer_with_a_form_of_its_own_may_hold_copies():
    class Masters(torch.optim.SGD):
        def state_dict(self):
            return {**super().state_dict(), "masters": [p.detach() for p in self.param_groups[0]["params"]]}

    model = nn.Linear(3, 1)
    copies = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
    build(model, sgd(*copies, kind=Masters))
