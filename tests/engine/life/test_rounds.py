"""Rounds: a fit whose loop is the user's own. Killed anywhere, it goes on with what was not done."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from engine.life.runs import (
    STEPS,
    VALIDATED,
    Steps,
    at,
    end,
    kill,
    killed,
    make,
    phases,
    same,
    script,
    sigterm,
    train,
    val,
    whole,
)
from loopkit import every, hookimpl
from loopkit.errors import PluginError
from loopkit.plugins import EarlyStopping, Schedule
from loopkit.schedules import linear

PLACES = [
    *(("step_begin", "train", epochs, index) for epochs in (0, 1) for index in range(STEPS)),
    *(("step_begin", "val", epochs, index) for epochs in (1, 2) for index in range(VALIDATED)),
    *((hook, "train", epochs, None) for hook in ("epoch_begin", "epoch_end") for epochs in (0, 1)),
    *((hook, "val", epochs, None) for hook in ("epoch_begin", "epoch_end", "phase_end") for epochs in (1, 2)),
    *(("phase_end", "train", epochs, None) for epochs in (1, 2)),
]


def loop(learner, epochs=2, **options):
    """The user's loop; returns how many rounds this process has begun."""
    first, second = train(), val()
    begun = 0
    for _ in learner.rounds(epochs=epochs, **options):
        begun += 1
        learner.run("train", first)
        learner.run("val", second)
    return begun


def test_rounds_end_as_a_fit_does():
    learner = make()
    assert loop(learner) == 2
    same(whole(2), end(learner))
    assert phases(learner) == ["train", "val"] * 2
    assert learner.result.history == learner.plugins["history"].rows
    assert (learner.result.epochs, learner.result.steps) == (2, 2 * STEPS)
    assert learner.current is None


@pytest.mark.parametrize("saver", [{}, {"save": every(updates=1)}], ids=["every_epoch", "every_update"])
def test_rounds_that_are_killed_anywhere_go_on(saver, tmp_path):
    for number, (hook, phase, epochs, index) in enumerate(PLACES):
        directory = tmp_path / str(number)
        death = at(kill, hook, phase, epochs, index)
        with killed():
            loop(script(directory, death, **saver))
        again = script(directory, again=any(directory.glob("*/manifest.json")), **saver)
        loop(again)
        same(whole(2), end(again))


@pytest.mark.parametrize(
    ("phase", "epochs", "index", "left"),
    [
        ("train", 1, 1, {"train": STEPS - 2, "val": VALIDATED}),
        ("val", 1, 0, {"train": STEPS, "val": 2 * VALIDATED - 1}),
        ("val", 2, 1, {"val": VALIDATED - 2}),
    ],
)
def test_rounds_skip_what_was_done(phase, epochs, index, left, tmp_path):
    with pytest.raises(SystemExit):
        loop(script(tmp_path, at(sigterm, phase=phase, epochs=epochs, index=index)))
    steps = Steps()
    again = script(tmp_path, steps, again=True)
    loop(again)
    assert steps.counts == left
    same(whole(2), end(again))


class PausesBetween:
    """Pauses when an epoch of a phase has ended, once."""

    def __init__(self, phase, epochs):
        self.place = phase, epochs

    @hookimpl
    def phase_end(self, learner, phase):
        if (phase.name, learner.progress.epochs) == self.place:
            learner.pause()


@pytest.mark.parametrize(
    ("place", "left"),
    [
        (("train", 1), {"train": STEPS, "val": 2 * VALIDATED}),
        (("val", 1), {"train": STEPS, "val": VALIDATED}),
        (("train", 2), {"val": VALIDATED}),
    ],
)
def test_rounds_that_are_paused_between_two_runs_go_on_with_the_next(place, left, tmp_path):
    with pytest.raises(SystemExit):
        loop(script(tmp_path, PausesBetween(*place)))
    steps = Steps()
    again = script(tmp_path, steps, again=True)
    loop(again)
    assert steps.counts == left
    same(whole(2), end(again))


def test_rounds_that_are_done_are_not_done_again(tmp_path):
    loop(script(tmp_path))
    again = script(tmp_path, again=True)
    assert loop(again) == 0
    more = script(tmp_path, again=True)
    assert loop(more, epochs=3) == 1
    same(whole(3), end(more))


@pytest.mark.parametrize(("phase", "epochs", "index"), [("train", 1, 2), ("val", 2, 1), ("train", 3, 0)])
def test_rounds_in_which_a_phase_runs_twice_go_on(phase, epochs, index, tmp_path):
    def twice(learner):
        first, second = train(), val()
        for _ in learner.rounds(epochs=2):
            for _ in range(2):
                learner.run("train", first)
                learner.run("val", second)
        return end(learner)

    with killed():
        twice(script(tmp_path, at(kill, "step_begin", phase, epochs, index), save=every(updates=1)))
    same(twice(make()), twice(script(tmp_path, again=True, save=every(updates=1))))


def test_stop_ends_the_rounds():
    learner = make(at(lambda learner: learner.stop("enough", by="me"), index=1))
    assert loop(learner, epochs=5) == 1
    assert (learner.result.reason, learner.result.message, learner.result.by) == ("stop", "enough", "me")


def test_break_ends_the_fit_normally():
    learner = make()
    for _ in learner.rounds(epochs=5):
        learner.run("train", train())
        break
    assert learner.current is None
    assert (learner.result.epochs, learner.result.reason) == (1, "end")


class Ends:
    """Notes how the fit ended."""

    def __init__(self):
        self.seen = []

    @hookimpl
    def fit_end(self, result):
        self.seen.append(result.reason)


def test_error_in_a_run_reaches_fit_end_at_once():
    ends = Ends()
    learner = make(ends, at(fail, index=1))
    rounds = learner.rounds(epochs=2)
    with pytest.raises(ZeroDivisionError):
        loop_over(rounds, learner)
    assert ends.seen == ["error"]
    assert learner.current is None


def fail(learner):
    raise ZeroDivisionError


def loop_over(rounds, learner):
    for _ in rounds:
        learner.run("train", train())


class Failing:
    @hookimpl
    def fit_begin(self):
        raise ZeroDivisionError


@pytest.mark.parametrize(
    ("plugin", "error"),
    [
        (Failing, ZeroDivisionError),
        (lambda: Schedule(linear()), ValueError),  # rounds have no length in updates
        (lambda: EarlyStopping("val/accuracy"), PluginError),
    ],
    ids=["a hook", "a schedule", "a metric"],
)
@pytest.mark.parametrize("managed", [False, True])
def test_error_in_the_begin_of_rounds_is_raised(managed, plugin, error):
    learner = make(plugin())
    rounds = learner.rounds(epochs=2)
    with pytest.raises(error):
        begin(rounds, learner, managed)
    assert phases(learner) == []
    assert learner.current is None


def begin(rounds, learner, managed):
    with rounds if managed else nullcontext():
        loop_over(rounds, learner)


def test_error_between_two_runs_reaches_fit_end():
    def failing(learner):
        with learner.rounds(epochs=2) as rounds:
            for _ in rounds:
                learner.run("train", train())
                fail(learner)

    ends = Ends()
    learner = make(ends)
    with pytest.raises(ZeroDivisionError):
        failing(learner)
    assert ends.seen == ["error"]
    assert learner.current is None
    assert phases(learner) == ["train"]


def test_current_is_the_fit_that_runs():
    learner = make()
    assert learner.current is None
    seen = []
    for _ in learner.rounds(epochs=2):
        seen.append((learner.current.position.epochs, learner.current.resumed, learner.current.ending))
        learner.run("train", train())
    assert seen == [(0, False, False), (1, False, False)]
    assert learner.current is None
