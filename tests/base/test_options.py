"""`fresh`: a new plugin with the options of another one."""

from __future__ import annotations

import pytest
import torch
from helpers import batches, make_learner
from torch import nn

from loopkit import fresh, hookimpl, metrics, plugins
from loopkit.base.options import options_of
from loopkit.criteria import NumberSinceBest, TimeLimit
from loopkit.errors import PluginError
from loopkit.logs import JsonLines
from loopkit.plugins import EarlyStopping, LogTo, Metrics, TorchSchedule, call_on, throttle
from loopkit.schedules import cosine


class Keeps:
    """A plugin with one option."""

    def __init__(self, part) -> None:
        self.part = part

    @hookimpl
    def step_end(self):
        """Nothing."""


class Forgets(Keeps):
    """A plugin that does not keep its options."""

    def __init__(self, size, *, more) -> None:
        super().__init__(size)


MADE = [
    EarlyStopping("val/loss", patience=2, restore_best=True, best_device="cpu"),
    EarlyStopping("val/loss", criterion=NumberSinceBest(3) | TimeLimit(60.0)),
    Metrics(metrics.F1(average="macro"), top=metrics.Accuracy()),
    LogTo(JsonLines("log.jsonl"), every=3),
    plugins.Schedule(cosine(), attribute="*.dropout.p"),
    plugins.WeightAverage(None, every="epoch"),
    plugins.StopOnNonFinite("rollback", max_rollbacks=7),
    plugins.ClipGradNorm(1.0),
    plugins.Freeze("a.*"),
    plugins.ToDevice("cpu"),
]


@pytest.mark.parametrize("plugin", MADE, ids=lambda plugin: plugin.name)
def test_fresh_plugin_has_the_same_options(plugin):
    made = fresh(plugin)
    assert made is not plugin
    assert type(made) is type(plugin)
    assert repr(made) == repr(plugin)


def test_fresh_plugin_has_new_parts_where_these_have_a_state():
    criterion, backend, metric = NumberSinceBest(3), JsonLines("log.jsonl"), metrics.Accuracy()
    assert options_of(fresh(EarlyStopping("val/loss", criterion=criterion)))["criterion"] is not criterion
    assert options_of(fresh(LogTo(backend)))["backends"][0] is not backend
    assert options_of(fresh(Metrics(metric)))["metrics"][0] is not metric


def test_fresh_metric_is_empty():
    metric = metrics.Accuracy()
    metric.update(torch.eye(3), torch.arange(3))
    assert fresh(Keeps(metric)).part.is_empty


def test_fresh_plugin_has_the_same_functions_and_data():
    data = batches(2)
    assert fresh(Keeps(print)).part is print
    average = plugins.WeightAverage(0.9, update_bn=lambda: data)
    assert fresh(average).update_bn is average.update_bn


def test_fresh_plugin_of_a_throttled_one_is_throttled():
    class Calls(Keeps):
        calls = 0

        @hookimpl
        def step_end(self):
            self.calls += 1

    throttled = fresh(throttle(Calls(3), every=2))
    make_learner(throttled).run("val", batches(4))
    assert (throttled.plugin.part, throttled.plugin.calls) == (3, 2)


@pytest.mark.parametrize(
    ("plugin", "message"),
    [
        (Forgets(3, more=4), r"Forgets does not keep its 'size', 'more'"),
        (Keeps(nn.Linear(1, 1)), r"Keeps\(part=...\) is a Linear, which has a state"),
        (Keeps([Forgets(3, more=4)]), "Forgets does not keep its 'size'"),
        (
            TorchSchedule(torch.optim.lr_scheduler.StepLR(torch.optim.SGD(nn.Linear(1, 1).parameters(), 0.1), 3)),
            r"TorchSchedule\(scheduler=...\) is a StepLR, which has a state",
        ),
        (call_on("epoch_end", print, name="a"), "does not keep its"),
    ],
    ids=["options", "module", "part", "scheduler", "function"],
)
def test_fresh_names_what_cannot_be_made_anew(plugin, message):
    with pytest.raises(PluginError, match=message):
        fresh(plugin)
