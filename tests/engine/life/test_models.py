"""Models that are wrapped."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from engine.compile.making import Scale, batches, make, refused
from loopkit import Learner, hookimpl


def test_wrapped_model_stays_the_users_module():
    model = nn.Linear(4, 3)
    learner = Learner(model, plugins=[Scale()], standard=False)
    assert learner.model is model
    assert isinstance(model, nn.Linear)
    assert repr(model) == "Linear(in_features=4, out_features=3, bias=True)"


def test_wrapped_model_is_called_through_the_wrapper_once():
    scale = Scale()
    learner = make(scale)
    x = torch.ones(2, 4)
    assert learner.model(x).equal(nn.functional.linear(x, learner.model.weight, learner.model.bias) * 2)
    assert scale.wrappers[0].calls == 1


def test_wrapped_model_is_called_through_the_wrapper_by_phases():
    scale = Scale()
    learner = make(scale)
    learner.fit(batches(), batches(1), epochs=1)
    assert scale.wrappers[0].calls == 3


def test_wrapped_model_is_called_through_wrappers_in_the_plans_order():
    class Shift:
        @hookimpl(after=("scale",))
        def setup_model(self, model):
            return nn.Sequential(model, nn.Hardtanh())

    learner = make(Shift(), Scale(100.0))
    assert learner.model(torch.ones(2, 4)).abs().max() == 1


def test_wrapped_models_forward_hooks_run_once():
    learner = make(Scale())
    runs = []
    learner.model.register_forward_pre_hook(lambda module, inputs: runs.append("before"))
    learner.model.register_forward_hook(lambda module, inputs, output: runs.append("after"))
    learner.model(torch.ones(2, 4))
    assert runs == ["before", "after"]


def test_wrapped_models_state_keeps_its_names():
    learner = make(Scale())
    assert list(learner.model.state_dict()) == ["weight", "bias"]
    assert [name for name, _ in learner.model.named_parameters()] == ["weight", "bias"]


def test_wrapped_models_copy_is_not_wrapped():
    scale = Scale()
    learner = make(scale)
    other = copy.deepcopy(learner.model)
    x = torch.ones(2, 4)
    assert (other(x) * 2).equal(learner.model(x))
    assert type(other) is nn.Linear
    assert scale.wrappers[0].calls == 1


def test_wrapped_models_class_makes_modules_that_are_not_wrapped():
    scale = Scale()
    type(make(scale).model)(4, 3)(torch.ones(2, 4))
    assert scale.wrappers[0].calls == 0


def test_wrapped_model_can_be_pickled():
    learner = make(Scale())
    other = pickle.loads(pickle.dumps(learner.model))
    assert type(other) is nn.Linear
    assert other.weight.equal(learner.model.weight)


def test_wrapped_model_can_be_called_after_its_wrapper_raised():
    learner = make(Scale())
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        learner.model(torch.ones(2, 5))
    x = torch.ones(2, 4)
    assert learner.model(x).equal(nn.functional.linear(x, learner.model.weight, learner.model.bias) * 2)


def test_wrapper_of_a_plugin_added_later_takes_part():
    learner = make()
    before = learner.model(torch.ones(2, 4))
    learner.add(Scale())
    assert learner.model(torch.ones(2, 4)).equal(before * 2)


def test_setup_model_sees_every_model_with_its_name():
    seen = []

    class Plugin:
        @hookimpl
        def setup_model(self, learner, name, model):
            seen.append((name, model is learner.models[name]))
            return model

    Learner({"actor": nn.Linear(2, 2), "critic": nn.Linear(2, 1)}, plugins=[Plugin()], standard=False)
    assert seen == [("actor", True), ("critic", True)]


def test_setup_model_that_returns_no_module_is_refused():
    class Plugin:
        @hookimpl
        def setup_model(self, model):
            pass

    refused(Plugin(), message="plugin 'plugin': setup_model returned NoneType, not a module")
