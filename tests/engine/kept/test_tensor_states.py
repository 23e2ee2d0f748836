"""Tensors that consist of others in the state of an optimizer, such as moments of 8 bits."""

from __future__ import annotations

import pytest
import torch
from helpers import batches
from torch import nn
from torch.serialization import safe_globals

from loopkit import Learner
from loopkit.engine.kept import objects
from loopkit.errors import StateError
from loopkit.plugins import Checkpoint

PACKAGE = __name__.partition(".")[0]


class Coded(torch.Tensor):
    """Numbers as codes in int8, and a scale."""

    @staticmethod
    def __new__(cls, codes, scale, steps):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes, scale, steps):
        self.codes, self.scale, self.steps = codes, scale, steps

    def __tensor_flatten__(self):
        return ["codes", "scale"], [self.steps]

    @classmethod
    def __tensor_unflatten__(cls, tensors, context, outer_size=None, outer_stride=None):
        return cls(tensors["codes"], tensors["scale"], *context)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten.detach, torch.ops.aten.clone, torch.ops.aten._to_copy):
            return cls(args[0].codes.clone(), args[0].scale.clone(), args[0].steps)
        raise NotImplementedError(str(func))

    def values(self):
        return self.codes * self.scale


class Nested(Coded):
    """Its scale consists of tensors, too."""

    def values(self):
        return self.codes * self.scale.values()


def coded(like):
    return Coded(torch.zeros_like(like, dtype=torch.int8), torch.ones(()), 0)


def nested(like):
    scale = Coded(torch.ones((), dtype=torch.int8), torch.full((), 0.5), 7)
    return Nested(torch.zeros_like(like, dtype=torch.int8), scale, 0)


class CodedSGD(torch.optim.SGD):
    """Momentum in codes."""

    make = staticmethod(coded)

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            held = state.setdefault("held", self.make(p))
            moment = held.values() * 0.9 + p.grad
            scale = moment.abs().max() / 127 + 1e-9
            inner = Coded(held.scale.codes, scale, 7) if isinstance(held, Nested) else scale
            state["held"] = type(held)((moment / scale).round().to(torch.int8), inner, held.steps + 1)
            p.sub_(state["held"].values(), alpha=0.1)


class NestedSGD(CodedSGD):
    make = staticmethod(nested)


def fit(directory, epochs, kind=CodedSGD):
    torch.manual_seed(0)
    plugins = [Checkpoint(directory, resume="auto")] if directory else []
    learner = Learner(nn.Linear(3, 1), nn.MSELoss(), lambda p: kind(p, lr=0.1), plugins=plugins, standard=False)
    learner.fit(batches(3), epochs=epochs)
    return learner


@pytest.mark.parametrize("kind", [CodedSGD, NestedSGD])
def test_a_run_with_tensors_of_tensors_goes_on_bitwise(tmp_path, kind):
    with safe_globals([Coded, Nested]):
        whole = fit(tmp_path / "whole", 4, kind)
        fit(tmp_path / "parts", 2, kind)
        resumed = fit(tmp_path / "parts", 4, kind)
    assert torch.equal(whole.model.weight, resumed.model.weight)
    one, other = (each.optimizer.state[each.model.weight]["held"] for each in (whole, resumed))
    assert type(other) is type(one)
    assert (other.steps, other.codes.dtype) == (12, torch.int8)
    assert torch.equal(one.codes, other.codes)


def test_a_class_that_its_package_has_not_declared_safe_is_refused_at_the_first_save(tmp_path):
    with pytest.raises(StateError, match=r"held'\].*Checkpoint\(weights_only=True\)"):
        fit(tmp_path, 1)


def test_tensors_of_other_packages_stay_as_they_are():
    with safe_globals([Coded]):
        value = coded(torch.ones(2))
        assert objects.taken_apart([value], "torch")[0] is value


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (".tensor_class", "builtins:eval"),
        (".tensor_class", f"{__name__}:Nested"),
        (".tensor_class", f"{__name__}:CodedSGD"),
        (".context", []),
        (".tensors", {"codes": torch.ones(2)}),
    ],
)
def test_a_damaged_form_is_refused(key, value):
    with safe_globals([Coded]):
        form = objects.taken_apart(coded(torch.ones(2)), PACKAGE)
        assert isinstance(objects.put_together(form, PACKAGE), Coded)
        with pytest.raises(StateError, match=r"it holds an object|cannot be made again"):
            objects.put_together({**form, key: value}, PACKAGE)


def test_a_tensor_that_is_not_loaded_as_it_was_saved_is_named():
    class Rounding(CodedSGD):
        def load_state_dict(self, state):
            super().load_state_dict(state)
            for each in self.state.values():
                each["held"] = coded(each["held"].codes)

    Rounding.__module__ = __name__
    with safe_globals([Coded]):
        state = fit(None, 2, Rounding).state_dict()
        with pytest.warns(UserWarning, match="does not load its own state as it was saved"):
            fit(None, 1, Rounding).load_state_dict(state)
