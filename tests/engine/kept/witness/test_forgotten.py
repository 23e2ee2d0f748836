"""A ``state_dict`` that leaves out what moves in training: it is named once at the first save."""

import random

import pytest
import torch

from engine.kept.witnessed import named_in
from engine.life.runs import make, train
from loopkit import TrainingPhase, hookimpl


def add(owner):
    owner.n += 2


def put(owner):
    owner.n[0] += 1


def other_tensor(owner):
    owner.n = owner.n + 1


KINDS = {
    "number": (lambda: 0, add),
    "tensor": (lambda: torch.zeros(3), lambda owner: owner.n.add_(1)),
    "other tensor": (lambda: torch.zeros(3), other_tensor),
    "list": (lambda: [0, 1, 2], put),
    "generator": (lambda: torch.Generator(), lambda owner: torch.rand(1, generator=owner.n)),
    "generator of python": (lambda: random.Random(0), lambda owner: owner.n.random()),
    "learner": (lambda: make(), lambda owner: owner.n.run("train", train())),
}


class Keeps:
    """Saves how many steps there were, and nothing else."""

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]


class Plugin(Keeps):
    name = "keeps"

    def __init__(self, value, act, **held):
        self.steps, self.n, self.act = 0, value, act
        vars(self).update(held)

    @hookimpl
    def step_end(self):
        self.steps += 1
        self.act(self)


class Own(Keeps, TrainingPhase):
    def __init__(self, value, act):
        super().__init__()
        self.steps, self.n, self.act = 0, value, act

    def step(self, learner, step):
        self.steps += 1
        self.act(self)
        super().step(learner, step)


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_plugin_leaves_out_of_its_state_is_named_once(kind, tmp_path):
    value, act = KINDS[kind]
    [message] = named_in(tmp_path, plugins=[Plugin(value(), act)])
    assert message.startswith("plugin 'keeps' (Plugin) has changed its 'n")
    assert "its state_dict leaves out that" in message
    assert "for a display or a cache, volatile = ('n',)" in message


@pytest.mark.parametrize("kind", ["number", "tensor", "generator"])
def test_what_a_phase_leaves_out_of_its_state_is_named_once(kind, tmp_path):
    value, act = KINDS[kind]
    [message] = named_in(tmp_path, phases=[Own(value(), act)])
    assert message.startswith("phase 'train' (Own) has changed its 'n' since the fit began, and its state_dict")


class Declares(Plugin):
    volatile = ("n",)


class OtherNames(Plugin):
    def state_dict(self):
        return {"steps": self.steps, "count": self.n}


class Similar(Plugin):
    def state_dict(self):
        return {"steps": self.steps, "n_of_all": 10 * self.n, "n": None}


class InTensor(Plugin):
    def state_dict(self):
        return {"steps": self.steps, "all": torch.tensor([self.n])}


class OfRandom(Plugin):
    def state_dict(self):
        return {"steps": self.steps, "drawn": self.n.get_state()}


class OfLearner(Plugin):
    def state_dict(self):
        return {"steps": self.steps, "inner": self.n.state_dict()}


QUIET = {
    "declared": (Declares, "number"),
    "another name": (OtherNames, "number"),
    "a similar name": (Similar, "number"),
    "in a tensor": (InTensor, "number"),
    "state of a generator": (OfRandom, "generator"),
    "state of a learner": (OfLearner, "learner"),
    "tensor under another name": (OtherNames, "tensor"),
    "list under another name": (OtherNames, "list"),
}


@pytest.mark.parametrize("kind", QUIET)
def test_what_a_state_holds_in_another_form_is_not_named(kind, tmp_path):
    cls, of = QUIET[kind]
    value, act = KINDS[of]
    assert named_in(tmp_path, plugins=[cls(value(), act)]) == []


def test_what_does_not_move_is_not_named(tmp_path):
    assert named_in(tmp_path, plugins=[Plugin(3, lambda owner: None)]) == []
