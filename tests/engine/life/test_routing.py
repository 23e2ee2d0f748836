"""The class of a model that a plugin has wrapped."""

from __future__ import annotations

import copy
import pickle
from typing import Any, ClassVar

import pytest
import torch
from helpers import make_learner
from torch import nn

from loopkit import hookimpl


class Wraps:
    @hookimpl(updates=("model",))
    def setup_model(self, model):
        return nn.Sequential(model)


class Registers(nn.Linear):
    known: ClassVar[list[type]] = []

    def __init_subclass__(cls) -> None:
        Registers.known.append(cls)


class NeedsAName(nn.Linear):
    def __init_subclass__(cls, *, name: str) -> None:
        cls.name = name


class HasNoSubclasses(nn.Linear):
    def __init_subclass__(cls, **options: Any) -> None:
        raise TypeError("this class is final")


class Plain(nn.Linear):
    pass


@pytest.mark.parametrize("made", [Registers, NeedsAName, HasNoSubclasses, Plain])
def test_class_of_a_wrapped_model_hears_of_no_subclass(made):
    model = made(4, 1)
    make_learner(Wraps(), model=model)
    assert isinstance(model, made)
    assert type(model).routed_from is made
    assert Registers.known == []
    assert type(model).__name__ == made.__name__


def test_copies_of_a_wrapped_model_have_its_own_class():
    model = Plain(4, 1)
    make_learner(Wraps(), model=model)
    for each in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(each) is Plain
        assert torch.equal(each.weight, model.weight)
