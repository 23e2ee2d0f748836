"""Parts of a state that a load leaves out: a new head, its moments, averages and open windows."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers import batches, on
from torch import nn

from loopkit import Learner, checkpoint
from loopkit.errors import ArgumentError, StateError
from loopkit.plugins import WeightAverage


class Net(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.body = nn.Linear(3, 4)
        self.head = nn.Linear(4, classes)

    def forward(self, inputs):
        return self.head(self.body(inputs))


def make(classes=1, seed=0, **options):
    torch.manual_seed(seed)

    def loss(outputs, targets):
        return nn.functional.mse_loss(outputs, targets.expand_as(outputs))

    return Learner(Net(classes), loss, lambda p: torch.optim.Adam(p, lr=0.1), standard=False, **options)


def trained(tmp_path, **options):
    learner = make(**options)
    learner.fit(batches(4), epochs=1)
    checkpoint.save(learner, tmp_path)
    return learner


def moments(learner):
    names = dict(learner.model.named_parameters())
    return {name: learner.optimizer.state.get(p, {}) for name, p in names.items()}


def test_weights_that_changed_shape_are_left_out_with_their_moments(tmp_path):
    old, new = trained(tmp_path), make(5, seed=1)
    head = copy.deepcopy(new.model.head.state_dict())
    with pytest.raises(StateError):
        checkpoint.load(new, tmp_path)
    checkpoint.load(new, tmp_path, skip="head")
    assert torch.equal(new.model.body.weight, old.model.body.weight)
    assert all(torch.equal(new.model.head.state_dict()[key], value) for key, value in head.items())
    assert torch.equal(moments(new)["body.weight"]["exp_avg_sq"], moments(old)["body.weight"]["exp_avg_sq"])
    assert not moments(new)["head.weight"]
    assert new.progress == old.progress
    new.fit(batches(4), epochs=1)


def test_all_but_the_moments_of_the_head_are_loaded(tmp_path):
    old, new = trained(tmp_path), make(seed=1)
    checkpoint.load(new, tmp_path, skip={"moments": "head"})
    assert all(map(torch.equal, new.model.parameters(), old.model.parameters()))
    assert not moments(new)["head.bias"]
    assert torch.equal(moments(new)["body.bias"]["exp_avg"], moments(old)["body.bias"]["exp_avg"])
    by_hand = copy.deepcopy(old.model)
    optimizer = torch.optim.Adam(by_hand.parameters(), lr=0.1)
    saved = old.optimizer.state_dict()
    saved["state"] = {key: value for key, value in saved["state"].items() if key < 2}  # the body comes first
    optimizer.load_state_dict(saved)
    for inputs, targets in batches(4):
        optimizer.zero_grad()
        nn.functional.mse_loss(by_hand(inputs), targets).backward()
        optimizer.step()
    new.fit(batches(4), epochs=1)
    assert all(map(torch.equal, new.model.parameters(), by_hand.parameters()))


def test_weights_are_left_out_and_their_moments_loaded(tmp_path):
    old, new = trained(tmp_path), make(seed=1)
    weight = new.model.head.weight.detach().clone()
    checkpoint.load(new, tmp_path, skip={"weights": ["*.weight"]})
    assert torch.equal(new.model.head.weight, weight)
    assert torch.equal(new.model.head.bias, old.model.head.bias)
    assert torch.equal(moments(new)["head.weight"]["exp_avg"], moments(old)["head.weight"]["exp_avg"])


def test_average_of_a_weight_that_changed_shape_is_left_out(tmp_path):
    old = trained(tmp_path, plugins=[WeightAverage(0.5)])
    new = make(5, seed=1, plugins=[WeightAverage(0.5)])
    checkpoint.load(new, tmp_path, skip="head")
    with old.plugins["weight_average"].averaged(old):
        expected = old.model.body.weight.detach().clone()
    with new.plugins["weight_average"].averaged(new):
        assert torch.equal(new.model.body.weight, expected)


def test_open_window_holds_no_gradient_of_a_new_head(tmp_path):
    old = make(accumulate=2)
    old.add(on("step_end", lambda learner: learner.pause() if learner.progress.steps == 1 else None))
    old.fit(batches(4), epochs=1, on_interrupt="return")
    checkpoint.save(old, tmp_path)
    new = make(5, seed=1, accumulate=2)
    checkpoint.load(new, tmp_path, skip="head", allow=[name for name in old.plugins])  # noqa: C416
    new.fit(batches(4), epochs=1)
    assert new.progress.steps == 4


@pytest.mark.parametrize(
    ("skip", "message"),
    [
        ("haed", "'haed' has no match"),
        ({"weight": "head"}, "did you mean 'weights'"),
        ({"moments": "x"}, "has no match"),
    ],
)
def test_patterns_that_match_nothing_raise(tmp_path, skip, message):
    trained(tmp_path)
    with pytest.raises(StateError, match=message):
        checkpoint.load(make(), tmp_path, skip=skip)


@pytest.mark.parametrize(
    "skip", [5, 0.5, [b"head"], ["head", 3], [["head"]], nn.Linear(1, 1), {"weights": 5}, {"moments": [None]}]
)
def test_patterns_of_another_type_raise(tmp_path, skip):
    trained(tmp_path)
    with pytest.raises(ArgumentError, match=r"is no pattern. Give names or patterns of parameters"):
        checkpoint.load(make(), tmp_path, skip=skip)


@pytest.mark.parametrize(
    "skip",
    [
        lambda: (name for name in ("head",)),
        lambda: iter(["head.weight", "head.bias"]),
        lambda: map(str.lower, ["HEAD"]),
        lambda: {"head"},
        lambda: {"head": 1}.keys(),
    ],
)
def test_patterns_of_an_iterator_are_left_out_of_both_parts(tmp_path, skip):
    old, new = trained(tmp_path), make(5, seed=1)
    checkpoint.load(new, tmp_path, skip=skip())
    assert torch.equal(new.model.body.weight, old.model.body.weight)
    assert not moments(new)["head.weight"]


class Prototypes(nn.Module):
    """A loss with parameters, as many as there are classes, and a buffer."""

    def __init__(self, classes):
        super().__init__()
        self.centers = nn.Parameter(torch.randn(classes, 1))
        self.scale = nn.Linear(1, 1)
        self.register_buffer("seen", torch.zeros(classes))

    def forward(self, outputs, targets):
        self.seen += 1
        return (self.scale(outputs) - targets + self.centers.square().mean()).square().mean()


def with_loss(classes, seed=0):
    torch.manual_seed(seed)
    loss = Prototypes(classes)
    return Learner(Net(1), loss, lambda p: torch.optim.Adam([*p, *loss.parameters()], lr=0.1), standard=False)


@pytest.mark.parametrize("skip", ["loss function", ["loss function.centers", "loss function.seen"], "*.centers|*.seen"])
def test_parameters_of_a_loss_are_left_out_with_their_moments(tmp_path, skip):
    old = with_loss(2)
    old.fit(batches(4), epochs=1)
    checkpoint.save(old, tmp_path)
    new = with_loss(5, seed=1)
    centers = new.loss_fn.centers.detach().clone()
    with pytest.raises(StateError):
        checkpoint.load(new, tmp_path)
    checkpoint.load(new, tmp_path, skip=skip)
    assert torch.equal(new.loss_fn.centers, centers)
    assert torch.equal(new.loss_fn.seen, torch.zeros(5))
    assert torch.equal(new.model.head.weight, old.model.head.weight)
    assert torch.equal(new.loss_fn.scale.weight, old.loss_fn.scale.weight) == (skip != "loss function")
    assert not new.optimizer.state.get(new.loss_fn.centers)
    assert new.optimizer.state[new.model.head.weight]
    new.fit(batches(4), epochs=1)
    assert new.progress.epochs == 2


def test_only_the_moments_of_a_loss_are_left_out(tmp_path):
    old = with_loss(2)
    old.fit(batches(4), epochs=1)
    checkpoint.save(old, tmp_path)
    new = with_loss(2, seed=1)
    checkpoint.load(new, tmp_path, skip={"moments": "loss function"})
    assert torch.equal(new.loss_fn.centers, old.loss_fn.centers)
    assert not new.optimizer.state.get(new.loss_fn.centers)
