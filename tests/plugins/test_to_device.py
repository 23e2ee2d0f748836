"""ToDevice: nested batches, models and the state of optimizers.

Moving is seen here with the device ``meta``, which every machine has; the models stay on the CPU then.
"""

from collections import OrderedDict, UserDict, defaultdict, namedtuple
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import pytest
import torch
from helpers import batches, make_learner, on
from torch import nn

from loopkit import Learner, hookimpl
from loopkit.base.batches import move
from loopkit.errors import PluginError
from loopkit.plugins import ToDevice

CPU, META = torch.device("cpu"), torch.device("meta")
Pair = namedtuple("Pair", ["inputs", "targets"])


@dataclass
class Data:
    inputs: Any
    name: str = "data"


@dataclass(frozen=True)
class Frozen:
    inputs: Any
    doubled: Any = field(init=False)

    def __post_init__(self):
        object.__setattr__(self, "doubled", self.inputs * 2)


class Graph:
    """An object that can be moved."""

    def __init__(self, nodes):
        self.nodes = nodes

    def to(self, device):
        return Graph(self.nodes.to(device))


def tensor():
    return torch.arange(3.0)


NESTED = {
    "tensor": (tensor, lambda v: [v]),
    "tuple": (lambda: (tensor(), 1), lambda v: [v[0]]),
    "list": (lambda: [tensor(), [tensor()]], lambda v: [v[0], v[1][0]]),
    "dict": (lambda: {"x": tensor(), "y": (tensor(), "a")}, lambda v: [v["x"], v["y"][0]]),
    "named tuple": (lambda: Pair(tensor(), None), lambda v: [v.inputs]),
    "ordered dict": (lambda: OrderedDict(x=tensor()), lambda v: [v["x"]]),
    "default dict": (lambda: defaultdict(list, x=tensor()), lambda v: [v["x"]]),
    "mapping": (lambda: MappingProxyType({"x": tensor()}), lambda v: [v["x"]]),
    "user dict": (lambda: UserDict(x=tensor()), lambda v: [v["x"]]),
    "dataclass": (lambda: Data((tensor(),)), lambda v: [v.inputs[0]]),
    "frozen dataclass": (lambda: Frozen(tensor()), lambda v: [v.inputs, v.doubled]),
    "packed sequence": (lambda: nn.utils.rnn.pack_sequence([tensor(), tensor()]), lambda v: [v.data]),
}


@pytest.mark.parametrize("kind", NESTED)
def test_move_moves_nested_tensors_and_keeps_the_type(kind):
    make, parts = NESTED[kind]
    given = make()
    moved = move(given, META)
    assert type(moved) is type(given)
    assert {part.device.type for part in parts(moved)} == {"meta"}
    assert {part.device.type for part in parts(given)} == {"cpu"}


@pytest.mark.parametrize("kind", NESTED)
def test_move_returns_the_same_object_if_all_is_there(kind):
    given = NESTED[kind][0]()
    assert move(given, CPU) is given


def test_move_moves_objects_with_to():
    assert move([Graph(tensor())], META)[0].nodes.device == META


@pytest.mark.parametrize("value", [None, 3, "text", torch.Size([1, 2]), nn.Linear, range(3)])
def test_move_leaves_other_values_alone(value):
    assert move(value, META) is value


def test_move_keeps_the_other_parts():
    moved = move(Data(tensor(), "kept"), META)
    assert moved.name == "kept"
    graph = defaultdict(list, x=tensor(), y="kept")
    assert move(graph, META)["y"] == "kept"
    assert move(graph, META)["new"] == []


def test_to_device_moves_batches():
    seen = []
    log = on("step_begin", lambda step, **_: seen.append([part.device for part in step.batch]))
    learner = make_learner(ToDevice("meta"), log, model=nn.Linear(3, 1))
    learner.evaluate(batches(1))
    assert seen == [[META, META]]


def test_to_device_moves_the_models():
    models = {"one": nn.Linear(1, 1), "two": nn.BatchNorm1d(1)}
    Learner(models, plugins=[ToDevice("meta")], standard=False)
    tensors = [t for m in models.values() for t in m.state_dict().values()]
    assert {t.device for t in tensors} == {META}


def test_to_device_keeps_the_parameters_that_an_optimizer_holds():
    model = nn.Linear(3, 1)
    before = list(model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    learner = Learner(model, nn.MSELoss(), optimizer, plugins=[ToDevice("cpu")], standard=False)
    learner.fit(batches(1), epochs=1)
    assert all(a is b for a, b in zip(model.parameters(), before, strict=True))


def used(optimizer_class, **options):
    """A model and an optimizer with state."""
    model = nn.Linear(3, 1)
    optimizer = optimizer_class(model.parameters(), lr=0.1, **options)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def test_to_device_moves_the_state_of_an_optimizer_when_a_pass_begins():
    model, optimizer = used(torch.optim.AdamW)
    with META:
        model = nn.Linear(3, 1)
    on_meta = torch.optim.AdamW(model.parameters(), lr=0.1)
    for p, state in zip(model.parameters(), optimizer.state.values(), strict=True):
        on_meta.state[p] = state
    learner = Learner(model, nn.MSELoss(), on_meta, plugins=[ToDevice("meta")], standard=False)
    with learner.epoch("train"):
        pass
    states = list(on_meta.state.values())
    assert len(states) == 2
    assert {state[key].device for state in states for key in ("exp_avg", "exp_avg_sq")} == {META}
    assert {state["step"].device for state in states} == {CPU}


def test_to_device_leaves_the_state_of_an_optimizer_alone_if_it_is_there():
    model, optimizer = used(torch.optim.SGD, momentum=0.9)
    for state in optimizer.state.values():
        state["momentum_buffer"] = state["momentum_buffer"].double()
    before = [state["momentum_buffer"] for state in optimizer.state.values()]
    learner = Learner(model, nn.MSELoss(), optimizer, plugins=[ToDevice("cpu")], standard=False)
    with learner.epoch("train"):
        pass
    after = [state["momentum_buffer"] for state in optimizer.state.values()]
    assert all(a is b for a, b in zip(after, before, strict=True))


class Compile:
    """Stands in for a plugin that compiles."""

    name = "a_compile"
    provides = "compile"

    def __init__(self):
        self.seen = []

    @hookimpl
    def setup_model(self, model):
        self.seen.append({p.device.type for p in model.parameters()})
        return model


@pytest.mark.parametrize("first", [True, False])
def test_to_device_comes_before_what_compiles(first):
    compiled = Compile()
    plugins = [compiled, ToDevice("meta")] if first else [ToDevice("meta"), compiled]
    Learner(nn.Linear(1, 1), plugins=plugins, standard=False)
    assert compiled.seen == [{"meta"}]


def test_to_device_auto_is_the_accelerator_that_is_there():
    found = torch.accelerator.current_accelerator(check_available=True)
    assert ToDevice().device == (found or CPU)
    assert ToDevice("auto").device == ToDevice().device


def test_to_device_auto_is_the_cpu_without_an_accelerator(monkeypatch):
    built_for = torch.device("cuda")  # torch was built for it, but the machine has none

    def current(check_available=False):
        return None if check_available else built_for

    monkeypatch.setattr(torch.accelerator, "current_accelerator", current)
    assert ToDevice().device == CPU


@pytest.mark.parametrize(
    ("device", "hint"),
    [
        ("nowhere", ""),
        ("gpu", " (did you mean 'cuda'?)"),
        ("GPU:1", " (did you mean 'cuda'?)"),
        ("cuba", " (did you mean 'cuda'?)"),
        (1.5, ""),
    ],
)
def test_to_device_refuses_an_unknown_device(device, hint):
    with pytest.raises(PluginError) as caught:
        ToDevice(device)
    assert (
        str(caught.value) == f"ToDevice: device is {device!r}: it is a torch device, such as 'cuda:0', or 'auto'{hint}"
    )


def test_to_device_leaves_training_bitwise_alone():
    one, other = make_learner(ToDevice("cpu")), make_learner()
    for learner in (one, other):
        learner.fit(batches(3), epochs=2)
    assert torch.equal(one.model.weight, other.model.weight)
