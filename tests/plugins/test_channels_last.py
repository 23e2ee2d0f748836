from __future__ import annotations

import collections
from dataclasses import dataclass

import pytest
import torch
from loopkit_testing import Problem, check_plugin
from torch import nn

from loopkit import Learner, hookimpl
from loopkit.base.batches import map_tensors
from loopkit.plugins.channels_last import ChannelsLast
from loopkit.plugins.to_device import ToDevice

LAST = torch.channels_last
Pair = collections.namedtuple("Pair", "image label")


@dataclass
class Sample:
    image: torch.Tensor
    label: torch.Tensor


def images(*shape, dtype=torch.float32):
    return torch.arange(torch.tensor(shape).prod().item(), dtype=dtype).reshape(shape)


def moved(batch):
    return ChannelsLast().move_batch(batch)


def small_problem():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 9, 2))
    train = [(torch.randn(4, 3, 5, 5), torch.randint(2, (4,))) for _ in range(4)]
    return Problem(model, nn.functional.cross_entropy, lambda p: torch.optim.SGD(p, lr=0.1), train, train[:2])


class Layouts:
    """Says of each batch and each output of the convolution whether it is channels-last."""

    name = "layouts"

    def __init__(self):
        self.seen = []

    @hookimpl(reads=("inputs", "grads"))
    def update_begin(self, learner, step):
        inputs, grad = step.inputs, learner.model[0].weight.grad
        self.seen.append((inputs.is_contiguous(memory_format=LAST), grad.is_contiguous(memory_format=LAST)))


def test_model_is_channels_last_and_keeps_its_values():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Linear(4, 2))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    learner = Learner(model, plugins=[ChannelsLast()], standard=False)
    assert learner.model is model
    assert model[0].weight.is_contiguous(memory_format=LAST)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def test_parameters_stay_those_of_an_optimizer_that_was_given():
    model = nn.Conv2d(3, 4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    Learner(model, None, optimizer, plugins=[ChannelsLast()], standard=False)
    assert optimizer.param_groups[0]["params"][0] is model.weight


def test_batches_and_gradients_are_channels_last_in_training():
    problem, layouts = small_problem(), Layouts()
    problem.learner(plugins=[layouts, ChannelsLast()], standard=False).fit(problem.train, epochs=1)
    assert layouts.seen == [(True, True)] * 4


def test_images_keep_shape_and_values():
    batch = images(2, 3, 4, 4)
    result = moved(batch)
    assert result.is_contiguous(memory_format=LAST)
    assert result.shape == batch.shape
    assert torch.equal(result, batch)


@pytest.mark.parametrize(
    "tensor",
    [images(2, 3), images(2, 3, 4), images(2, 3, 4, 4, 4), images(2, 3, 4, 4, dtype=torch.int64)],
    ids=["2-D", "3-D", "5-D", "integer"],
)
def test_other_tensors_are_the_same_objects(tensor):
    assert moved(tensor) is tensor


def test_batch_in_this_layout_is_not_copied():
    batch = (images(2, 3, 4, 4).contiguous(memory_format=LAST), torch.zeros(2))
    assert moved(batch) is batch


def test_nested_batches_keep_their_types():
    image, label = images(2, 3, 4, 4), torch.zeros(2)
    batch = {"pair": Pair(image, label), "list": [image, "text"], "sample": Sample(image, label), "none": None}
    result = moved(batch)
    assert [type(part) for part in result.values()] == [Pair, list, Sample, type(None)]
    found = (result["pair"].image, result["list"][0], result["sample"].image)
    assert all(part.is_contiguous(memory_format=LAST) for part in found)
    assert result["pair"].label is label
    assert result["list"][1] == "text"


def test_given_batch_is_not_changed():
    batch = {"image": images(2, 3, 4, 4)}
    moved(batch)
    assert batch["image"].is_contiguous()


def test_map_tensors_reaches_tensors_alone():
    assert map_tensors({"a": (1, [torch.ones(2)]), "b": "text"}, lambda t: t + 1)["a"][1][0].tolist() == [2.0, 2.0]


def test_device_comes_first():
    learner = Learner(nn.Conv2d(3, 4, 3), plugins=[ChannelsLast(), ToDevice("cpu")], standard=False)
    registry = learner._engine.registry
    order = [placed.entry.plugin for placed in registry.plan(learner.phases["train"]).order["move_batch"]]
    assert order == ["to_device", "channels_last"]
    assert [impl.entry.plugin for impl in registry.ordered("setup_model")] == order


def test_channels_last_keeps_the_contract_on_images():
    check_plugin(ChannelsLast, problem=small_problem, skip=("unknown_phases",))


def test_removed_channels_last_puts_the_layout_back():
    learner = small_problem().learner(plugins=[ChannelsLast()], standard=False)
    images = [p for p in learner.model.parameters() if p.ndim == 4]
    assert images
    assert not any(p.is_contiguous() for p in images if p.shape[1] > 1)
    learner.remove("channels_last")
    assert all(p.is_contiguous() for p in images)
