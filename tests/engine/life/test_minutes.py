"""``fit(minutes=...)``: a limit by the clock, counted over all processes that a fit has had."""

from __future__ import annotations

import math
import time

import pytest
import torch
from distributed.processes import run
from torch import nn

from engine.life.runs import STEPS, make, tensors, train, val
from loopkit import Learner, every, hookimpl
from loopkit.data import TensorLoader
from loopkit.errors import PluginError
from loopkit.plugins import DDP, Metrics, Schedule
from loopkit.schedules import cosine


class Clock:
    """A clock that training steps and validation steps move on, in seconds."""

    def __init__(self, training=25.0, validation=0.0):
        self.now = 1000.0
        self.training = training
        self.validation = validation

    @hookimpl
    def step_end(self, phase):
        self.now += self.training if phase.training else self.validation


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(time, "monotonic", lambda: made.now)
    return made


def phases(learner):
    return [row["phase"] for row in learner.plugins["history"].rows]


@pytest.mark.parametrize(("minutes", "steps"), [(0.1, 1), (1, 3), (1.25, 3), (1.26, 4), (2.0, 5)])
def test_minutes_end_a_fit_after_the_step_in_which_they_are_over(minutes, steps, clock):
    result = make(clock).fit(train(), minutes=minutes)
    assert (result.reason, result.steps, result.seconds) == ("minutes", steps, 25.0 * steps)
    assert str(result).startswith("finished (minutes): ")


def test_minutes_end_a_fit_in_mid_epoch_and_the_last_weights_are_validated_once(clock):
    clock.validation = 500.0
    learner = make(clock)
    result = learner.fit(train(), val(), minutes=0.4, validate=every(updates=100))
    assert (result.reason, phases(learner)) == ("minutes", ["train", "val"])
    assert result.steps == 1 < STEPS
    assert result.history[-1]["val/loss"] == result.metrics["val/loss"]


@pytest.mark.parametrize(
    ("limits", "reason"),
    [({"epochs": 1}, "epochs"), ({"epochs": math.inf}, "minutes"), ({"max_steps": 2}, "max_steps")],
)
def test_first_limit_that_is_reached_ends_the_fit(limits, reason, clock):
    assert make(clock).fit(train(), minutes=60 if reason != "minutes" else 1, **limits).reason == reason


def test_minutes_are_counted_over_a_pause(clock):
    class Pauses:
        @hookimpl
        def step_end(self, learner, step):
            if learner.progress.steps == 2:
                learner.pause("enough for now")

    first = make(clock, Pauses())
    first.fit(train(), val(), minutes=1, on_interrupt="return")
    state = first.state_dict()
    clock.now = 5.0  # another machine
    again = make(clock)
    again.load_state_dict(state)
    result = again.fit(train(), val(), minutes=1)
    assert (result.reason, result.steps, result.seconds) == ("minutes", 3, 75.0)
    assert phases(again) == ["train", "val"]


def test_state_saved_in_the_last_validation_trains_no_more(clock):
    class Saves:
        volatile = ("state",)

        @hookimpl
        def step_end(self, learner, phase):
            if not phase.training:
                self.state = learner.state_dict()

    saves = Saves()
    straight = make(clock, saves)
    straight.fit(train(), val(), minutes=1)
    again = make(clock)
    again.load_state_dict(saves.state)
    result = again.fit(train(), val(), minutes=1)
    assert (result.reason, result.steps, phases(again)) == ("minutes", 3, ["train", "val"])
    assert result.metrics == straight.metrics


@pytest.mark.parametrize(("limits", "steps"), [({"minutes": 2}, 5), ({"epochs": 2}, 3 + STEPS), ({"minutes": 1}, 3)])
def test_fit_that_minutes_have_ended_resumes_if_they_are_raised_or_gone(limits, steps, clock):
    class Saves:
        @hookimpl
        def fit_end(self, learner):
            self.state = learner.state_dict()

    saves = Saves()
    make(clock, saves).fit(train(), val(), minutes=1)
    again = make(clock)
    again.load_state_dict(saves.state)
    assert again.fit(train(), val(), **limits).steps == steps


@pytest.mark.parametrize("minutes", [0, -1, math.nan, math.inf, True, "10", [1]])
def test_minutes_that_are_no_number_above_0_raise(minutes):
    with pytest.raises(ValueError, match=r"minutes is .*: give a number above 0, as in fit\(minutes=30\)"):
        make().fit(train(), minutes=minutes)


def test_minutes_give_no_length_to_a_schedule(clock):
    with pytest.raises((ValueError, PluginError), match=r"spans the whole fit"):
        make(clock, Schedule(cosine())).fit(train(), minutes=1)


def by_the_clock(rank):
    """The clock of rank 0 runs, that of rank 1 stands still."""
    torch.manual_seed(0)
    learner = Learner(
        nn.Linear(3, 1),
        nn.MSELoss(),
        lambda params: torch.optim.SGD(params, lr=0.05),
        plugins=[DDP(timeout=60), Metrics()],
        standard=False,
    )
    if rank:
        time.monotonic = lambda now=time.monotonic(): now  # noqa: B008 - it stands still
    result = learner.fit(TensorLoader(*tensors(40_000), batch_size=2), val(), minutes=2e-3)
    return result.reason, result.steps, result.metrics, [p.detach() for p in learner.model.parameters()]


def test_minutes_go_by_the_clock_of_rank_0_in_all_processes():
    one, other = run(by_the_clock, 2)
    assert one[:3] == other[:3]
    assert one[0] == "minutes"
    assert all(map(torch.equal, one[3], other[3]))
    assert "val/loss" in one[2]
