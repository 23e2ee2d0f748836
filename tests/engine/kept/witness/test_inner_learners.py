"""Learners that are trained inside of another one's fit: what nothing saves is named once at the first save."""

import pytest
import torch

from engine.kept.witnessed import named_in
from engine.life.runs import make, same, train
from loopkit import Learner, TrainingPhase, hookimpl


def trained(learner):
    learner.run("train", train())


def fitted(learner):
    learner.fit(train(), epochs=1)


class InAttribute:
    name = "inner"

    def __init__(self, other, act):
        self.other, self.act = other, act

    @hookimpl
    def phase_end(self):
        self.act(self.other)


class InList(InAttribute):
    @hookimpl
    def phase_end(self):
        self.act(self.other[0])


def in_closure(other, act):
    class Plugin:
        name = "inner"

        @hookimpl
        def phase_end(self):
            act(other)

    return Plugin()


HOLDERS = {
    "attribute": InAttribute,
    "list": lambda other, act: InList([other], act),
    "closure": in_closure,
}


@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize("act", [trained, fitted])
def test_learner_that_a_plugin_trains_is_named_once(holder, act, tmp_path):
    [message] = named_in(tmp_path, plugins=[HOLDERS[holder](make(), act)])
    assert message.startswith("plugin 'inner' (")
    assert "other" in message.partition(" since the fit began, and no checkpoint holds that")[0]


class Distils(TrainingPhase):
    def __init__(self, other):
        super().__init__()
        self.other = other

    def step(self, learner, step):
        self.other.run("train", [step.batch])
        super().step(learner, step)


class Saves(Distils):
    saved = ("other",)


def test_learner_that_a_phase_trains_is_named_once(tmp_path):
    [message] = named_in(tmp_path, phases=[Distils(make())])
    assert "phase 'train' (Distils) has changed its 'other' since the fit began" in message


def test_learner_in_saved_of_a_phase_is_saved_and_put_back(tmp_path):
    first = Saves(make())
    assert named_in(tmp_path, phases=[first]) == []
    learner = make(phases=[Saves(make(seed=5))])
    learner.load_state_dict(make_state(first))
    other = learner.phases["train"].other
    assert other.progress == first.other.progress
    same(other.state_dict()["optimizers"], first.other.state_dict()["optimizers"])
    same(other.state_dict()["models"], first.other.state_dict()["models"])


def make_state(phase):
    return make(phases=[phase]).state_dict()


def evaluated(learner):
    learner.evaluate(train())


def test_learner_that_only_evaluates_is_not_named(tmp_path):
    assert named_in(tmp_path, plugins=[InAttribute(make(), evaluated)]) == []


def test_the_learner_itself_is_not_named(tmp_path):
    class Holds:
        name = "holds"

        @hookimpl
        def fit_begin(self, learner):
            self.learner = learner

    assert named_in(tmp_path, plugins=[Holds()]) == []


def test_learner_that_a_hook_makes_and_throws_away_is_not_named(tmp_path):
    class Probes:
        name = "probes"

        @hookimpl
        def phase_end(self):
            self.probe = make()
            trained(self.probe)

    assert named_in(tmp_path, plugins=[Probes()]) == []


def test_learner_of_a_class_of_its_own_is_named(tmp_path):
    class Own(Learner):
        pass

    other = Own(make().model, make().loss_fn, lambda params: torch.optim.SGD(params, lr=0.1), standard=False)
    [message] = named_in(tmp_path, plugins=[InAttribute(other, trained)])
    assert "has changed its 'other'" in message
