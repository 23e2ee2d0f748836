"""The graphs of models."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException

from loopkit_tensorboard.graph import modules_graph, traced_graph


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))


def edges(graph):
    return {node.name: (node.op, list(node.input)) for node in graph.node}


def shapes(graph):
    return {
        node.name: [[dim.size for dim in shape.dim] for shape in node.attr["_output_shapes"].list.shape]
        for node in graph.node
    }


class Tower(nn.Module):
    """Uses a layer twice, functions, and a scope in a scope."""

    def __init__(self):
        super().__init__()
        self.shared = nn.Linear(3, 3, bias=False)
        self.head = nn.Sequential(nn.Linear(3, 1, bias=False))

    def forward(self, x, *, scale):
        y = torch.relu(self.shared(self.shared(x))) + x
        return {"scores": self.head(y * scale)}


class LooksAtValues(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(3, 3)

    def forward(self, x):
        return self.a(x) if x.sum() > 0 else x


def test_modules_without_children_are_nodes(model):
    nodes = {
        node.name: (node.op, {key: value.s for key, value in node.attr.items()}) for node in modules_graph(model).node
    }
    assert nodes == {
        "0": ("Linear", {"weight": b"float32[8, 4]", "bias": b"float32[8]"}),
        "1": ("BatchNorm1d", {"weight": b"float32[8]", "bias": b"float32[8]"}),
        "2": ("Dropout", {}),
        "3": ("Linear", {"weight": b"float32[2, 8]", "bias": b"float32[2]"}),
    }


def test_modules_are_scopes():
    assert [node.name for node in modules_graph(Tower()).node] == ["shared", "head/0"]


def test_a_model_that_is_one_module_has_a_name():
    assert [node.name for node in modules_graph(nn.Linear(1, 1)).node] == ["model"]


def test_operations_are_nodes_and_tensors_edges():
    graph = traced_graph(Tower(), {"x": torch.ones(5, 3), "scale": torch.ones(3)})
    assert edges(graph) == {
        "input": ("Input", []),
        "input_1": ("Input", []),
        "shared/weight": ("Parameter", []),
        "shared/linear": ("linear", ["input", "shared/weight"]),
        "shared/linear_1": ("linear", ["shared/linear", "shared/weight"]),
        "model/relu": ("relu", ["shared/linear_1"]),
        "model/add": ("add", ["model/relu", "input"]),
        "model/mul": ("mul", ["model/add", "input_1"]),
        "head/0/weight": ("Parameter", []),
        "head/0/linear": ("linear", ["model/mul", "head/0/weight"]),
        "output": ("Output", ["head/0/linear"]),
    }
    found = shapes(graph)
    assert (found["input"], found["shared/linear"], found["output"]) == ([[5, 3]], [[5, 3]], [[5, 1]])


def test_in_place_operations_are_followed():
    class InPlace(nn.Module):
        def forward(self, x):
            return x.clone().add_(1).mul_(2)

    assert edges(traced_graph(InPlace(), torch.ones(2))) == {
        "input": ("Input", []),
        "model/clone": ("clone", ["input"]),
        "model/add": ("add", ["model/clone"]),
        "model/mul": ("mul", ["model/add"]),
        "output": ("Output", ["model/mul"]),
    }


@pytest.mark.parametrize("training", [True, False])
def test_the_model_does_not_notice(model, training):
    model.train(training)
    calls = []
    model[0].register_forward_hook(lambda *args: calls.append("hook"))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.get_rng_state()
    traced_graph(model, torch.randn(4, 4, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert (calls, model.training, len(model[0]._forward_hooks)) == ([], training, 1)
    assert all(p.grad is None for p in model.parameters())


def test_what_looks_at_values_cannot_be_traced():
    with pytest.raises(DataDependentOutputException):
        traced_graph(LooksAtValues(), torch.ones(1, 3))
