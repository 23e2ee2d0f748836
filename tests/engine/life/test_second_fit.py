"""A second fit of one learner in one process: a new one after an end, the same one after an interrupt."""

from __future__ import annotations

import os
import signal

import pytest

from engine.life.runs import STEPS, at, end, make, phases, placed, same, tensors, train, val, whole
from loopkit.data import TensorLoader
from loopkit.errors import StateError
from loopkit.plugins import Checkpoint

INTERRUPTS = {
    "sigint": (lambda learner: os.kill(os.getpid(), signal.SIGINT), KeyboardInterrupt),
    "sigterm": (lambda learner: os.kill(os.getpid(), signal.SIGTERM), SystemExit),
    "pause": (lambda learner: learner.pause("later"), SystemExit),
}


def said(capfd):
    """The lines that were printed."""
    captured = capfd.readouterr()
    return [line for line in (captured.out + captured.err).splitlines() if line.strip()]


def fail(learner):
    raise RuntimeError("the disk is full")


def interrupted(how, place, directory, on_interrupt="raise", epochs=3):
    """A learner whose fit was interrupted, and its data."""
    act, raised = INTERRUPTS[how]
    learner = make(Checkpoint(directory), placed(act, place))
    data = train(), val()
    if on_interrupt == "raise":
        with pytest.raises(raised):
            learner.fit(*data, epochs=epochs, on_interrupt="raise")
    else:
        result = learner.fit(*data, epochs=epochs, on_interrupt="return")
        assert result.reason == ("pause" if how == "pause" else "signal")
    return learner, data


# After an end


def test_fit_after_a_normal_end_is_a_new_one(capfd):
    learner, data = make(), (train(), val())
    learner.fit(*data, epochs=2)
    result = learner.fit(*data, epochs=1)
    assert (result.reason, result.epochs, result.steps) == ("epochs", 1, STEPS)
    assert (learner.progress.epochs, learner.progress.steps) == (3, 3 * STEPS)
    assert [row["phase"] for row in result.history] == ["train", "val"]
    assert said(capfd) == []


def test_fit_after_a_stop_is_a_new_one(capfd):
    learner, data = make(placed(lambda learner: learner.stop("enough"), "in_mid_epoch")), (train(), val())
    learner.fit(*data, epochs=3)
    steps = learner.progress.steps
    result = learner.fit(*data, epochs=1)
    assert (result.reason, result.epochs, result.steps) == ("epochs", 1, STEPS)
    assert learner.progress.steps == steps + STEPS
    assert said(capfd) == []


# After an interrupt


@pytest.mark.parametrize("on_interrupt", ["raise", "return"])
@pytest.mark.parametrize("place", ["in_mid_epoch", "in_validation", "when_the_epoch_has_ended"])
@pytest.mark.parametrize("how", INTERRUPTS)
def test_fit_after_an_interrupt_goes_on_where_it_was(how, place, on_interrupt, tmp_path, capfd):
    learner, data = interrupted(how, place, tmp_path, on_interrupt)
    said(capfd)
    result = learner.fit(*data, epochs=3)
    assert (result.reason, result.epochs, result.steps) == ("epochs", 3, 3 * STEPS)
    assert result.history == learner.plugins["history"].rows
    same(whole(3), end(learner))
    assert len(said(capfd)) == 1


def test_fit_after_ctrl_c_goes_on_without_a_checkpoint_and_with_new_loaders():
    learner = make(placed(INTERRUPTS["sigint"][0], "in_mid_epoch"))
    with pytest.raises(KeyboardInterrupt):
        learner.fit(train(), val(), epochs=3)
    learner.fit(train(), val(), epochs=3)
    same(whole(3), end(learner))


@pytest.mark.parametrize("how", INTERRUPTS)
def test_limits_of_the_fit_that_goes_on_count_from_the_begin_of_the_interrupted_one(how, tmp_path):
    learner, data = interrupted(how, "in_mid_epoch", tmp_path, epochs=9)
    assert learner.fit(*data, epochs=2).epochs == 2
    same(whole(2), end(learner))


def test_fit_that_goes_on_refuses_other_data(tmp_path):
    learner, _ = interrupted("sigterm", "in_mid_epoch", tmp_path)
    with pytest.raises(StateError):
        learner.fit(TensorLoader(*tensors(30), batch_size=5, shuffle=True, seed=1), val(), epochs=3)


@pytest.mark.parametrize("how", INTERRUPTS)
def test_fit_after_an_interrupt_that_was_forgotten_is_a_new_one(how, tmp_path, capfd):
    learner, data = interrupted(how, "in_mid_epoch", tmp_path)
    steps = learner.progress.steps
    learner.forget()
    said(capfd)
    result = learner.fit(*data, epochs=1)
    assert (result.reason, result.epochs, result.steps) == ("epochs", 1, STEPS)
    assert learner.progress.steps == steps + STEPS
    assert phases(learner)[-2:] == ["train", "val"]
    assert said(capfd) == []


# After an error


def test_fit_after_an_error_is_a_new_one_and_says_what_was_left(capfd):
    learner, data = make(at(fail, epochs=1, index=1)), (train(), val())
    with pytest.raises(RuntimeError, match="disk"):
        learner.fit(*data, epochs=3)
    steps = learner.progress.steps
    said(capfd)
    result = learner.fit(*data, epochs=1)
    assert (result.reason, result.epochs, result.steps) == ("epochs", 1, STEPS)
    assert learner.progress.steps == steps + STEPS
    [line] = said(capfd)
    assert "epoch" in line
