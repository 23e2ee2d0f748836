"""Transforms of batches."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from engine.compile.making import Clip, Files, Norms, batches, make, refused, scheduler
from loopkit import Learner, hookimpl
from loopkit.errors import OrderError, PluginError
from loopkit.metrics import FunctionMetric, Precision
from loopkit.schedules import cosine, warmup


class Double:
    @hookimpl
    def move_batch(self, batch):
        inputs, targets = batch
        return inputs * 2, targets


class PlusOne:
    @hookimpl(after=("double",))
    def move_batch(self, batch):
        inputs, targets = batch
        return inputs + 1, targets


@pytest.mark.parametrize("plugins", [(Double(), PlusOne()), (PlusOne(), Double())])
def test_move_batch_passes_the_batch_on_in_the_plans_order(plugins):
    seen = []

    class See:
        @hookimpl
        def step_begin(self, step):
            seen.append(step.batch[0])

    data = batches(1)
    make(*plugins, See()).run("train", data)
    assert seen[0].equal(data[0][0] * 2 + 1)


def test_move_batch_leaves_the_loaders_batch_alone():
    data = batches(1)
    before = data[0][0].clone()
    make(Double()).run("train", data)
    assert data[0][0].equal(before)


@pytest.mark.parametrize(
    ("part", "wrapped"),
    [
        (Precision(), "Metrics(Precision(...))"),
        (FunctionMetric(nn.functional.mse_loss), "Metrics(FunctionMetric(...))"),
        (scheduler(torch.optim.lr_scheduler.StepLR, step_size=2), "TorchSchedule(StepLR(...))"),
        (scheduler(torch.optim.lr_scheduler.ReduceLROnPlateau), "Plateau(monitor=...)"),
        (cosine(), "Schedule(cosine(updates=None, start=1.0, end=0.0))"),
        (cosine(9), "Schedule(cosine(updates=9, start=1.0, end=0.0))"),
        (warmup(2, then=cosine()), "Schedule(warmup(2, then=cosine(updates=None, start=1.0, end=0.0)))"),
        (cosine, "Schedule(cosine)"),
    ],
)
def test_part_of_a_plugin_is_refused_with_the_plugin_that_takes_it(part, wrapped):
    refused(part, message=re.escape(f"is no plugin: wrap it, {wrapped}") + "$")
    with pytest.raises(PluginError, match=re.escape(wrapped)):
        Learner(nn.Linear(1, 1), plugins=[part])


def test_plugin_that_is_a_metric_too_is_a_plugin():
    class Both(Precision):
        name = "both"

        @hookimpl
        def step_end(self):
            pass

    assert list(make(Both()).plugins) == ["both"]


@pytest.mark.parametrize(("has", "lacks"), [("state_dict", "load_state_dict"), ("load_state_dict", "state_dict")])
def test_plugin_with_half_of_a_state_is_refused_before_it_is_saved(has, lacks):
    class Half:
        @hookimpl
        def step_end(self):
            pass

    plugin = Half()
    setattr(plugin, has, lambda *given: {})
    with pytest.raises(
        PluginError, match=rf"plugin 'half' \(Half\) has {has}, but no {lacks}: the saved state could not"
    ):
        Learner(nn.Linear(3, 1), plugins=[plugin])
    setattr(plugin, lacks, lambda *given: {})
    Learner(nn.Linear(3, 1), plugins=[plugin])


@pytest.mark.parametrize("place", ["before", "after", "order"])
def test_word_near_the_name_of_a_plugin_that_is_installed_is_refused(place):
    class Listener:
        @hookimpl
        def step_end(self):
            pass

    words = ("clip_grad_nrom",)
    listener = Listener()
    options = {"order": ["listener", *words]} if place == "order" else {}
    setattr(listener, place, words)
    with pytest.raises(OrderError, match=r"no plugin is called 'clip_grad_nrom' \(did you mean 'clip_grad_norm'\?\)"):
        Learner(nn.Linear(3, 1), plugins=[listener], standard=False, **options)
    setattr(listener, place, ("clip_grad_norm", "of_somebody_else"))
    Learner(nn.Linear(3, 1), plugins=[listener], standard=False)


def test_explain_of_all_phases_shows_what_changes_something_once():
    class Average:
        @hookimpl(updates=("params",))
        def epoch_context(self, phase):
            pass

    learner = make(Clip(), Norms(), Files(), Average())
    assert (
        str(learner.explain())
        == """\
phase 'train'
  update_begin   clip (grads)
  epoch_context  average (params)

phase 'val', phase 'predict'
  epoch_context  average (params)

the learner
  nothing is changed

look on: files, norms
explain(full=True) shows every hook, and why each plugin stands there"""
    )
