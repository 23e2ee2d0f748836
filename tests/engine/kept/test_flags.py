"""Which parameters are trained, and how many steps make an update: put back where a run has changed them."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers import batches, on
from torch import nn

from loopkit import Learner
from loopkit.plugins import Freeze


class Changes:
    """Freezes, thaws or accumulates in a hook of the second epoch."""

    name = "changes"

    def __init__(self, act):
        self.act = act

    def plugin(self):
        def begin(learner, phase):
            if phase.training and learner.progress.epochs == 1:
                self.act(learner)

        return on("epoch_begin", begin, name="changes")


def freeze(learner):
    learner.model[0].requires_grad_(False)


def thaw(learner):
    learner.model[1].requires_grad_(True)


def accumulate(learner):
    learner.accumulate = 2


ACTS = {"freeze": freeze, "thaw": thaw, "accumulate": accumulate}


def build(act=None, *plugins, start=lambda learner: None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 1))
    model[1].requires_grad_(False)
    acting = [] if act is None else [Changes(ACTS[act]).plugin()]
    learner = Learner(
        model,
        nn.MSELoss(),
        lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        plugins=[*acting, *plugins],
        standard=False,
    )
    start(learner)
    return learner


def flags(learner):
    return [p.requires_grad for p in learner.model.parameters()], learner.accumulate


@pytest.mark.parametrize("act", ACTS)
def test_change_in_a_hook_is_put_back(act, capsys):
    whole = build(act)
    whole.fit(batches(4), epochs=3)
    first = build(act)
    first.fit(batches(4), epochs=2)
    again = build()
    again.load_state_dict(copy.deepcopy(first.state_dict()))
    assert flags(again) == flags(whole)
    again.fit(batches(4), epochs=1)
    for one, other in zip(again.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(one, other)
    twice = build()
    twice.load_state_dict(copy.deepcopy(again.state_dict()))
    assert flags(twice) == flags(whole)
    assert "begins otherwise" not in capsys.readouterr().err


@pytest.mark.parametrize("act", ACTS)
def test_script_that_begins_otherwise_holds_where_the_run_changed_nothing(act, capsys):
    first = build()
    first.fit(batches(4), epochs=1)
    again = build(start=ACTS[act])
    here = flags(again)
    again.load_state_dict(first.state_dict())
    assert flags(again) == here
    assert capsys.readouterr().err.count("never changed it: the script's holds") == 1


@pytest.mark.parametrize("act", ACTS)
def test_run_holds_where_it_changed_what_the_script_begins_with(act, capsys):
    first = build(act)
    first.fit(batches(4), epochs=2)
    again = build(start=ACTS[act])
    if act == "accumulate":
        again.accumulate = 3
    again.load_state_dict(first.state_dict())
    assert flags(again) == flags(first)
    assert capsys.readouterr().err.count("has changed it since: the run's holds") == 1


def test_parameters_that_a_plugin_freezes_are_left_to_it(capsys):
    first = build(None, Freeze("0", thaw_at=1))
    first.fit(batches(4), epochs=2)
    again = build(None, Freeze("0", thaw_at=1))
    again.load_state_dict(copy.deepcopy(first.state_dict()))
    assert flags(again) == flags(first)
    assert "begins otherwise" not in capsys.readouterr().err


def test_state_without_flags_loads():
    first = build()
    first.fit(batches(2), epochs=1)
    state = dict(first.state_dict())
    del state["flags"]
    build().load_state_dict(state)


@pytest.mark.parametrize("many", [1, 2])
def test_groups_that_are_added_in_a_fit_are_named_at_the_save(many):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)

    def add(learner):
        for p in list(model[0].parameters())[:many]:
            learner.optimizer.add_param_group({"params": [p]})

    learner = Learner(model, nn.MSELoss(), optimizer, plugins=[on("epoch_end", add)], standard=False)
    learner.fit(batches(2), epochs=1)
    with pytest.warns(UserWarning, match=f"has {1 + many} parameter groups, and had 1 when the fit began"):
        learner.state_dict()
    learner.state_dict()
