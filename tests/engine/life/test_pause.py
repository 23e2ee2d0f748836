"""Pause: this process ends here, the run does not. Started again, it goes on bit for bit."""

from __future__ import annotations

import pytest
from distributed.processes import run
from helpers import EventLog, on

from engine.life.runs import (
    PLACES,
    SAVERS,
    STEPS,
    VALIDATED,
    Steps,
    at,
    end,
    make,
    placed,
    same,
    saved,
    script,
    train,
    val,
    whole,
)
from loopkit import hookimpl
from loopkit.plugins import DDP

TEMPORARY = 75
"""The exit code that says that the run is to be started again."""


def pause(learner):
    learner.pause("time is up", by="me")


def paused(learner, **options):
    """Fit until it is paused."""
    with pytest.raises(SystemExit) as caught:
        learner.fit(train(), val(), epochs=3, **options)
    assert caught.value.code == TEMPORARY


@pytest.mark.parametrize("saver", SAVERS)
@pytest.mark.parametrize("place", PLACES)
def test_run_that_was_paused_goes_on_when_it_is_started_again(place, saver, tmp_path):
    seen = []
    look = on("fit_end", lambda result, **_: seen.append((result.reason, result.message, result.by)), "look")
    paused(script(tmp_path, placed(pause, place), look, **saver))
    assert seen == [("pause", "time is up", "me")]
    again = script(tmp_path, again=True, **saver)
    result = again.fit(train(), val(), epochs=3)
    assert (result.reason, result.epochs, result.steps) == ("epochs", 3, 3 * STEPS)
    same(whole(3), end(again))


def test_pause_that_nobody_saves_is_warned_of():
    learner = make(placed(pause, "in_mid_epoch"))
    with pytest.warns(UserWarning, match="pause ends this process, and no plugin saves the run"):
        paused(learner)


@pytest.mark.parametrize("place", ["in_mid_epoch", "in_validation"])
def test_pause_can_be_a_result(place, tmp_path):
    learner = script(tmp_path, placed(pause, place))
    result = learner.fit(train(), val(), epochs=3, on_interrupt="return")
    assert (result.reason, result.message, result.by) == ("pause", "time is up", "me")
    again = script(tmp_path, again=True)
    assert again.fit(train(), val(), epochs=3, on_interrupt="return").reason == "epochs"
    same(whole(3), end(again))


@pytest.mark.parametrize(
    ("place", "ended"), [("in_mid_epoch", ["train", "val"]), ("in_validation", ["train", "val", "train"])]
)
def test_pause_takes_effect_after_the_step_without_an_end_of_the_epoch(place, ended, tmp_path):
    log = EventLog()
    paused(script(tmp_path, log, placed(pause, place)))
    for hook in ("epoch_end", "phase_end"):
        assert [phase for phase, word in log.words if word == hook] == ended
    steps = (
        {"train": 2 * STEPS, "val": VALIDATED + 1}
        if place == "in_validation"
        else {"train": STEPS + 2, "val": VALIDATED}
    )
    for phase, count in steps.items():
        assert [where.split()[0] for where, word in log.words if word == "step_end"].count(phase) == count
    assert saved(tmp_path)[0].about["progress"]["steps"] == steps["train"]


class PausesAfterEachStep:
    @hookimpl
    def step_end(self, learner):
        learner.pause()


@pytest.mark.parametrize("accumulate", [1, 3])
def test_run_that_is_paused_after_each_step_ends_as_the_whole_one(accumulate, tmp_path):
    begun = 0
    result = None
    while result is None:
        learner = script(tmp_path, PausesAfterEachStep(), again=begun > 0, accumulate=accumulate)
        begun += 1
        assert begun < 40
        try:
            result = learner.fit(train(), val(), epochs=2)
        except SystemExit:
            pass
    assert begun >= 2 * (STEPS + VALIDATED)
    same(whole(2, accumulate), end(learner))


def test_pause_in_an_evaluation_that_a_hook_runs_waits_for_its_end(tmp_path):
    def make_script(*plugins, again=False):
        evaluate = at(lambda learner: learner.evaluate(val()), "phase_end", epochs=2, name="evaluate")
        return script(tmp_path, evaluate, *plugins, again=again)

    straight = make(at(lambda learner: learner.evaluate(val()), "phase_end", epochs=2, name="evaluate"))
    straight.fit(train(), epochs=3)
    steps = Steps()
    learner = make_script(steps, at(pause, phase="val", epochs=2, index=0))
    with pytest.raises(SystemExit):
        learner.fit(train(), epochs=3)
    assert steps.counts == {"train": 2 * STEPS, "val": VALIDATED}
    again = make_script(again=True)
    again.fit(train(), epochs=3)
    same(end(straight), end(again))


def parallel(rank, directory, place, accumulate):
    def make_parallel(*plugins, again=False, where=directory / "cut"):
        return script(where, DDP(timeout=60), *plugins, again=again, accumulate=accumulate)

    straight = make_parallel(where=directory / "whole")
    straight.fit(train(), val(), epochs=3)
    learner = make_parallel(placed(lambda learner: learner.world.rank == 1 and pause(learner), place))
    paused(learner)
    again = make_parallel(again=True)
    assert again.fit(train(), val(), epochs=3).reason == "epochs"
    same(end(straight), end(again))
    return learner.progress.steps


@pytest.mark.parametrize(("place", "accumulate"), [("at_the_first_step", 2), ("in_validation", 1)])
def test_pause_of_one_process_pauses_all(place, accumulate, tmp_path):
    one, other = run(parallel, 2, tmp_path, place, accumulate)
    assert one == other < 3 * 2
