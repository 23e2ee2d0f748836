"""Models that the user has compiled with ``torch.compile``, as a whole or in part: their names are plain."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers import batches
from torch import nn

from loopkit import Learner, TrainingPhase
from loopkit.plugins import Freeze, WeightAverage


class Inner(nn.Module):
    def __init__(self, wrap=lambda module: module):
        super().__init__()
        self.body = wrap(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU()))
        self.head = nn.Linear(4, 1)

    def forward(self, inputs):
        return self.head(self.body(inputs))


def compiled(module):
    return torch.compile(module, backend="eager")


KINDS = {
    "whole": lambda: compiled(Inner()),
    "part": lambda: Inner(compiled),
    "both": lambda: compiled(Inner(compiled)),
    "list": lambda: nn.Sequential(*[compiled(each) for each in (nn.Linear(3, 4), nn.Linear(4, 1))]),
}


def build(model, *plugins, **options):
    return Learner(
        model,
        nn.MSELoss(),
        lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        plugins=plugins,
        standard=False,
        **options,
    )


def made(make):
    torch.manual_seed(0)
    return make()


def plain(kind):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)) if kind == "list" else Inner()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's own, as it compiles
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_model_is_saved_under_plain_names_and_loads_both_ways(kind):
    learner = build(made(KINDS[kind]))
    learner.fit(batches(3), epochs=1)
    state = copy.deepcopy(learner.state_dict())
    assert not [name for name in state["models"]["model"] if "_orig_mod" in name]
    plain(kind).load_state_dict(state["models"]["model"])
    other = build(plain(kind))
    other.load_state_dict(state)
    back = build(made(KINDS[kind]))
    back.load_state_dict(other.state_dict())
    for each in (learner, other, back):
        each.fit(batches(3), epochs=1)
    for name, tensor in learner.state_dict()["models"]["model"].items():
        assert torch.equal(tensor, other.state_dict()["models"]["model"][name])
        assert torch.equal(tensor, back.state_dict()["models"]["model"][name])


@pytest.mark.parametrize("kind", ["whole", "part"])
def test_compiled_model_runs_compiled(kind):
    torch._dynamo.reset()
    calls = []

    def backend(graph, inputs):
        calls.append(graph)
        return graph.forward

    def wrap(module):
        return torch.compile(module, backend=backend)

    build(wrap(Inner()) if kind == "whole" else Inner(wrap)).fit(batches(2), epochs=1)
    assert calls


def test_state_with_the_names_of_wrappers_loads():
    learner = build(plain("whole"))
    state = copy.deepcopy(learner.state_dict())
    tensors = state["models"]["model"]
    state["models"]["model"] = {
        f"_orig_mod.{name}".replace("body.", "body._orig_mod."): tensors[name] for name in tensors
    }
    build(made(KINDS["both"])).load_state_dict(state)


def test_mapping_with_a_compiled_model_has_plain_names():
    class Both(TrainingPhase):
        def forward(self, learner, inputs):
            return learner.model["a"](inputs) + learner.model["b"](inputs)

    learner = build({"a": compiled(Inner()), "b": Inner()}, phases=[Both()])
    learner.fit(batches(2), epochs=1)
    assert list(learner.state_dict()["models"]["a"]) == list(learner.state_dict()["models"]["b"])


def test_patterns_and_averages_know_the_plain_names():
    average = WeightAverage(0.5)
    learner = build(made(KINDS["both"]), Freeze("body"), average)
    learner.fit(batches(2), epochs=1)
    assert set(average.model_state(learner)) == set(Inner().state_dict())
    assert not learner.model.body[0].weight.requires_grad


@pytest.mark.parametrize("owner", ["loss", "phase"])
def test_compiled_module_beside_the_model_has_plain_names(owner):
    class Headed(TrainingPhase):
        def __init__(self):
            super().__init__()
            self.head = compiled(nn.Linear(1, 1))

    class Weighted(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, outputs, targets):
            return ((outputs - targets) * self.scale).square().mean()

    loss = compiled(Weighted()) if owner == "loss" else nn.MSELoss()
    learner = Learner(nn.Linear(3, 1), loss, phases=[Headed()] if owner == "phase" else [], standard=False)
    names = [name for each in learner.state_dict()["extras"].values() for name in each["tensors"]]
    assert names == (["scale"] if owner == "loss" else ["head.weight", "head.bias"])


def test_wrapper_with_a_hook_stays():
    model = compiled(Inner())
    seen = []
    model.register_forward_hook(lambda *_: seen.append(True))
    build(model).fit(batches(2), epochs=1)
    assert len(seen) == 2
