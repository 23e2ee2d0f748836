"""Errors, cancels and odd data: what is saved, what ends, and what just works."""

from __future__ import annotations

import random

import pytest
import torch
from distributed.processes import run

from engine.life.runs import STEPS, VALIDATED, Steps, at, end, make, same, saved, script, train, val, whole
from loopkit import CancelStep, TrainingPhase, ValidationPhase, checkpoint, every, hookimpl
from loopkit.errors import LoopkitError, StateError
from loopkit.plugins import DDP, Checkpoint, WeightAverage


def fail(learner):
    raise RuntimeError("the disk is full")


# An error in a validation


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("epochs", [1, 2])
def test_epoch_before_a_validation_that_fails_is_saved(epochs, index, tmp_path):
    learner = script(tmp_path, at(fail, phase="val", epochs=epochs, index=index))
    with pytest.raises(RuntimeError, match="disk"):
        learner.fit(train(), val(), epochs=3)
    newest = saved(tmp_path)[0]
    assert newest.about["progress"]["epochs"] == epochs
    steps = Steps()
    again = script(tmp_path, steps, again=True)
    again.fit(train(), val(), epochs=3)
    left = 3 - epochs
    assert steps.counts == {"train": left * STEPS, "val": (left + 1) * VALIDATED}
    same(whole(3), end(again))


def test_steps_before_a_validation_in_mid_epoch_that_fails_are_saved(tmp_path):
    def fit(learner):
        learner.fit(train(), val(), epochs=2, validate=every(updates=3))
        return end(learner)

    straight = fit(make())
    with pytest.raises(RuntimeError, match="disk"):
        fit(script(tmp_path, at(fail, phase="val", epochs=0, index=1)))
    assert saved(tmp_path)[0].about["progress"]["steps"] == 3
    same(straight, fit(script(tmp_path, again=True)))


def test_nothing_is_saved_before_a_validation_without_an_error(tmp_path):
    learner = make(Checkpoint(tmp_path, keep=99))
    learner.fit(train(), val(), epochs=3)
    assert [manifest.about["progress"]["epochs"] for manifest in saved(tmp_path)] == [3, 2, 1]
    checkpoint.verify(saved(tmp_path)[0].path)


class Drifts(ValidationPhase):
    """What it measures depends on the steps before."""

    saved = ("seen",)

    def __init__(self):
        super().__init__()
        self.seen = torch.zeros(())

    def loss(self, learner, outputs, targets):
        self.seen += outputs.mean()
        return learner.loss_fn(outputs, targets) + self.seen


class Draws:
    """Counts what it hears, and draws a random number each time."""

    def __init__(self):
        self.heard = []

    @hookimpl(phase=ValidationPhase)
    def epoch_begin(self):
        self.heard.append(random.random())

    step_end = epoch_end = epoch_begin

    def state_dict(self):
        return {"heard": self.heard}

    def load_state_dict(self, state):
        self.heard = state["heard"]


PLACES = [
    pytest.param({"hook": "epoch_begin"}, id="at_its_begin"),
    pytest.param({"index": 1}, id="in_mid_epoch"),
    pytest.param({"hook": "epoch_end", "reads": ("metrics.val.loss",)}, id="at_its_end"),
]


def probing(learner):
    """A probe that fails."""
    with learner.epoch(ValidationPhase("probe")) as epoch:
        epoch.step(None)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("act", [fail, probing])
def test_state_as_of_the_begin_of_a_validation_holds_nothing_of_it(act, place, tmp_path):
    def run(*plugins, again=False, where="cut"):
        drawing = Draws()
        average = WeightAverage(0.9)
        saving = Checkpoint(tmp_path / where, resume="auto")
        learner = make(saving, drawing, average, *plugins, seed=99 if again else 1, phases=[Drifts()])
        for _ in learner.rounds(epochs=2):
            learner.run("train", train())
            learner.run("val", val())
        return {"end": end(learner), "heard": drawing.heard, "average": average.state_dict()}

    straight = run(where="whole")
    with pytest.raises((RuntimeError, LoopkitError)):
        run(at(act, phase="val", epochs=2, **place))
    newest = saved(tmp_path / "cut")[0].about
    assert (newest["reason"], newest["progress"]["epochs"], "val/loss" in newest["metrics"]) == ("error", 2, False)
    same(straight, run(again=True))


def test_state_as_of_the_begin_of_a_validation_is_saved_once(tmp_path):
    asking = at(lambda learner: learner.current.request_save(), "epoch_end", name="asking")
    with pytest.raises(RuntimeError, match="disk"):
        script(tmp_path, asking, at(fail, phase="val", epochs=1, index=1), save=every(epochs=9)).fit(
            train(), val(), epochs=2
        )
    assert [manifest.about["reason"] for manifest in saved(tmp_path)] == ["asked for"]


def test_mark_of_another_epoch_is_refused():
    marks = []

    class Marks:
        @hookimpl
        def epoch_context(self, epoch):
            marks.append(epoch.mark())

    learner = make(Marks())
    learner.fit(train(), val(), epochs=1)
    assert marks[0] is None
    with pytest.raises(StateError, match="mark"):
        learner.state_dict(marks[1])


def parallel(rank, directory):
    def make_parallel(*plugins, again=False, where=directory / "cut"):
        return script(where, DDP(timeout=60), *plugins, again=again)

    straight = make_parallel(where=directory / "whole")
    straight.fit(train(), val(), epochs=3)
    with pytest.raises(RuntimeError, match="disk"):
        make_parallel(at(fail, phase="val", epochs=2, index=0)).fit(train(), val(), epochs=3)
    straight.world.gather(rank)  # rank 0 has written what it writes
    found = [manifest.about["progress"]["epochs"] for manifest in saved(directory / "cut")]
    straight.world.gather(rank)
    again = make_parallel(again=True)
    again.fit(train(), val(), epochs=3)
    same(end(straight), end(again))
    return found


def test_last_save_of_several_processes_stands_after_an_error_in_a_validation(tmp_path):
    assert run(parallel, 2, tmp_path) == [[1], [1]]


# Steps that are all cancelled


class Hopeless(TrainingPhase):
    """Cancels every step, up to far beyond any limit of the fit."""

    def __init__(self):
        super().__init__()
        self.tried = 0

    def step(self, learner, step):
        self.tried += 1
        if self.tried > 20 * STEPS:
            raise AssertionError("the fit does not end")
        raise CancelStep("hopeless")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("limit", [{"max_steps": 5}, {"max_updates": 5}])
def test_fit_without_any_completed_step_ends_with_an_error(limit):
    phase = Hopeless()
    with pytest.raises(LoopkitError):
        make(phases=[phase]).fit(train(), **limit)
    assert phase.tried == 2 * STEPS


class Rarely(TrainingPhase):
    """Completes the last step of each second epoch."""

    def __init__(self):
        super().__init__()
        self.tried = 0

    def step(self, learner, step):
        self.tried += 1
        if self.tried % (2 * STEPS):
            raise CancelStep("not yet")
        super().step(learner, step)


def test_fit_with_a_completed_step_now_and_then_goes_on():
    phase = Rarely()
    result = make(phases=[phase]).fit(train(), max_steps=3)
    assert (result.reason, result.steps, phase.tried) == ("max_steps", 3, 3 * 2 * STEPS)


# Data without a length


class Endless:
    """Data whose author left ``__len__`` open."""

    def __init__(self, data):
        self.data = data

    def __len__(self):
        raise NotImplementedError

    def __iter__(self):
        return iter(self.data)


def test_data_whose_length_is_not_implemented_trains():
    learner = make()
    result = learner.fit(Endless(train()), Endless(val()), epochs=2)
    assert (result.reason, result.steps) == ("epochs", 2 * STEPS)
    other = make()
    other.fit(train(), val(), epochs=2)
    same(end(other), end(learner))
    assert learner.evaluate(Endless(val())) == other.evaluate(val())


# An error in an evaluation that a hook runs


class Brackets:
    """Notes how a fit begins and ends, and evaluates in a hook."""

    name = "brackets"

    def __init__(self, data):
        self.data, self.seen = data, []

    @hookimpl
    def fit_begin(self):
        self.seen.append("begin")

    @hookimpl
    def fit_end(self, result):
        self.seen.append("end")


class InAStep(Brackets):
    @hookimpl(phase="training")
    def step_end(self, learner):
        learner.evaluate(self.data)


class AtAnEpochsEnd(Brackets):
    @hookimpl(phase="training")
    def phase_end(self, learner):
        learner.evaluate(self.data)


class AfterAValidation(Brackets):
    @hookimpl
    def cycle_end(self, learner):
        learner.evaluate(self.data)


@pytest.mark.parametrize("kind", [InAStep, AtAnEpochsEnd, AfterAValidation])
def test_fit_end_comes_after_an_error_in_an_evaluation_of_a_hook(kind):
    def broken():
        yield from val()
        raise RuntimeError("the disk is full")

    plugin = kind(broken())
    learner = make(plugin)
    with pytest.raises(RuntimeError, match="disk"):
        learner.fit(train(), val(), epochs=2)
    assert plugin.seen == ["begin", "end"]
    plugin.data = val()
    assert learner.fit(train(), val(), epochs=1).reason == "epochs"
    assert plugin.seen == ["begin", "end"] * 2
