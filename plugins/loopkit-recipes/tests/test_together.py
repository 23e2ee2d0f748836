"""Plugins of several distributions beside each other and the standard stack: one plan, right at once."""

import itertools

import pytest
import torch
from problems import CLASSES, batches
from torch import nn

from loopkit import Learner, hookimpl
from loopkit.logs import JsonLines
from loopkit.metrics import Accuracy
from loopkit.plugins import (
    DDP,
    ClipGradNorm,
    EarlyStopping,
    LogMetrics,
    LogTo,
    Metrics,
    MixedPrecision,
    Schedule,
    WeightAverage,
)
from loopkit.schedules import cosine, warmup
from loopkit_recipes import LabelSmoothing, Mixup

sam = pytest.importorskip("loopkit_recipes")
wandb = pytest.importorskip("loopkit_wandb")


class Noise:
    """A plugin of the user's own, who knows none of the others."""

    @hookimpl(phase="training", reads=("inputs",))
    def forward_begin(self, step):
        self.seen = step.inputs


def stack(directory):
    return [
        sam.SAM(rho=0.05),
        Mixup(CLASSES),
        LabelSmoothing(CLASSES),
        LogTo(wandb.Wandb(directory=directory), JsonLines(directory / "log.jsonl")),
        LogMetrics(),
        MixedPrecision("bfloat16"),
        ClipGradNorm(1.0),
        Schedule(warmup(4, then=cosine())),
        WeightAverage(0.9),
        EarlyStopping("val/loss", patience=5),
        Metrics(Accuracy()),
        DDP(),
        Noise(),
    ]


def make_learner(plugins):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, CLASSES))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Learner(model, nn.CrossEntropyLoss(), optimizer, plugins=plugins, accumulate=2)


def test_every_list_order_is_one_plan_without_a_word_from_the_user(tmp_path):
    plans = set()
    for first in itertools.combinations(range(4), 2):
        plugins = stack(tmp_path)
        front = [plugins[i] for i in first]
        plans.add(
            str(make_learner([*front, *[each for each in reversed(plugins) if each not in front]]).explain("train"))
        )
    assert len(plans) == 1
    lines = [
        line.split()[1] for line in plans.pop().partition("forward_begin\n")[2].splitlines() if line[2:3].isdigit()
    ]
    assert lines[: lines.index("sam") + 1] == ["mixup", "label_smoothing", "noise", "sam"]


def test_two_lists_in_other_orders_train_the_same_bits(tmp_path):
    states = []
    for number, turn in enumerate((1, -1)):
        learner = make_learner(stack(tmp_path / str(number))[::turn])
        torch.manual_seed(5)
        result = learner.fit(batches(5), batches(2), epochs=2)
        assert (result.reason, result.steps) == ("epochs", 10)
        states.append(learner.model.state_dict())
    assert [name for name in states[0] if not torch.equal(states[0][name], states[1][name])] == []
