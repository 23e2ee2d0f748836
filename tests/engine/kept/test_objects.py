"""Plain objects in the state of an optimizer: saved by their attributes, and made again without any code of theirs."""

from __future__ import annotations

import sys
from collections import deque
from types import SimpleNamespace

import pytest
import torch
from helpers import batches
from torch import nn

from loopkit import Learner
from loopkit.engine.kept import objects
from loopkit.errors import StateError
from loopkit.plugins import Checkpoint

PACKAGE = __name__.partition(".")[0]


class Projector:
    """Is plain; its ``__init__`` may not run at a load."""

    def __init__(self, rank):
        if rank is None:
            raise AssertionError("made by a load")
        self.rank, self.basis, self.past = rank, torch.ones(3, dtype=torch.float64), [1, (2, 3)]


class Holder(Projector):
    def __init__(self):
        super().__init__(1)
        self.inner = {"a": Projector(2), "b": deque([Projector(3)], 4)}


class Slotted:
    __slots__ = ("rank",)


class Reducing(Projector):
    def __reduce__(self):
        return Projector, (None,)


class Setting(Projector):
    def __setstate__(self, state):
        raise AssertionError("run by a load")


class Keyed(dict):
    pass


class Using(torch.optim.SGD):
    """Scales its rate by a number that an object counts."""

    make = staticmethod(lambda: Projector(1))

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            held = self.state[p].setdefault("held", self.make())
            held.rank += 1
            held.basis.mul_(0.9)
            p.sub_(p.grad, alpha=0.1 * held.basis.mean().item() / held.rank)


def using(make):
    return type("Using", (Using,), {"make": staticmethod(make), "__module__": __name__})


def fit(directory, epochs, kind=Using):
    torch.manual_seed(0)
    run = Checkpoint(directory, resume="auto")
    learner = Learner(nn.Linear(3, 1), nn.MSELoss(), lambda p: kind(p, lr=0.1), plugins=[run], standard=False)
    learner.fit(batches(3), epochs=epochs)
    return learner


@pytest.mark.parametrize("make", [lambda: Projector(1), Holder], ids=["plain", "nested"])
def test_a_run_with_objects_goes_on_bitwise(tmp_path, make):
    kind = using(make)
    whole = fit(tmp_path / "whole", 4, kind)
    fit(tmp_path / "parts", 2, kind)
    resumed = fit(tmp_path / "parts", 4, kind)
    assert torch.equal(whole.model.weight, resumed.model.weight)
    held = resumed.optimizer.state[resumed.model.weight]["held"]
    assert type(held) is type(make())
    assert held.basis.dtype == torch.float64
    assert held.past == [1, (2, 3)]
    if make is Holder:
        assert type(held.inner["b"][0]) is Projector
        assert held.inner["b"].maxlen == 4


@pytest.mark.parametrize(
    "value",
    [Slotted(), Reducing(1), Setting(1), Keyed(), SimpleNamespace(a=1), Projector, print],
    ids=["slots", "reduce", "setstate", "dict", "another package", "class", "function"],
)
def test_what_is_no_plain_object_stays_as_it_is(value):
    assert objects.taken_apart({"a": [value]}, PACKAGE)["a"][0] is value


def test_classes_in_functions_and_of_other_packages_stay_as_they_are():
    class Local:
        pass

    for value, package in ((Local(), PACKAGE), (Projector(1), "torch"), (nn.Linear(1, 1), "torch")):
        assert objects.taken_apart([value], package)[0] is value


@pytest.mark.parametrize("name", ["os:system", "builtins:eval", ":Slotted", ":Setting", ":missing", ".never:X", None])
def test_a_file_names_no_other_class(name):
    before = set(sys.modules)
    name = f"{__name__}{name}" if name and name[0] in ":." else name
    saved = {objects.OBJECT: name, objects.ATTRIBUTES: {"rank": 1}}
    assert len(objects.problems({"a": saved}, PACKAGE)) == 1
    with pytest.raises(StateError, match="it holds an object of class"):
        objects.put_together({"a": saved}, PACKAGE)
    assert set(sys.modules) == before


def test_a_class_that_is_gone_is_refused_before_anything_is_loaded():
    learner = Learner(nn.Linear(3, 1), nn.MSELoss(), lambda p: Using(p, lr=0.1), standard=False)
    learner.fit(batches(2), epochs=1)
    state = learner.state_dict()
    state["optimizers"]["optimizer"]["state"][0]["held"][objects.OBJECT] = f"{__name__}:Gone"
    before = learner.model.weight.clone()
    with pytest.raises(StateError, match=r"optimizer 'optimizer': it holds an object of class .*Gone"):
        learner.load_state_dict(state)
    assert torch.equal(learner.model.weight, before)


def test_a_cycle_is_refused(tmp_path):
    def around():
        made = Projector(1)
        made.me = made
        return made

    with pytest.raises(StateError, match=r"nested more than 100 deep"):
        fit(tmp_path, 1, using(around))


def test_what_cannot_be_saved_names_the_way_out(tmp_path):
    with pytest.raises(StateError, match=r"held'\]: .*Reducing cannot be saved.*Checkpoint\(weights_only=True\)"):
        fit(tmp_path, 1, using(lambda: Reducing(1)))
