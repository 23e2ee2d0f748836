"""Stop: this run is over. Its last weights are validated once, and it stays over until a limit is raised."""

from __future__ import annotations

import pytest
from distributed.processes import run

from engine.life.runs import (
    PLACES,
    SAVERS,
    STEPS,
    VALIDATED,
    Steps,
    at,
    end,
    make,
    phases,
    placed,
    rows,
    same,
    saved,
    script,
    train,
    val,
)
from loopkit import checkpoint, every
from loopkit.errors import LoopkitError, PhaseError
from loopkit.plugins import DDP, Checkpoint, EarlyStopping


def stop(learner):
    learner.stop("enough", by="me")


def over(result):
    return result.reason, result.message, result.by


# In a validation


@pytest.mark.parametrize("index", range(VALIDATED - 1))
def test_stop_in_a_validation_leaves_no_metric_of_a_part(index, tmp_path):
    steps = Steps()
    saver = Checkpoint(tmp_path, best="val/loss")
    learner = make(saver, steps, at(stop, phase="val", epochs=1, index=index))
    result = learner.fit(train(), val(), epochs=3)
    assert over(result) == ("stop", "enough", "me")
    assert steps.counts == {"train": STEPS, "val": VALIDATED}
    expected = make(seed=2)
    checkpoint.load_weights(expected.model, saved(tmp_path)[0].path)
    assert result.metrics["val/loss"] == expected.evaluate(val())["val/loss"]
    assert float(checkpoint.best(tmp_path).about["metrics"]["val/loss"]) == result.metrics["val/loss"]


def test_stop_in_an_evaluation_that_a_hook_runs_leaves_no_metric_of_a_part():
    seen = []
    evaluate = at(lambda learner: seen.append(learner.evaluate(val())), "phase_end", epochs=1, name="evaluate")
    learner = make(evaluate, at(stop, phase="val", epochs=1, index=0))
    learner.fit(train(), epochs=3)
    assert seen == [make_equal(learner).evaluate(val())]


def make_equal(learner):
    """A learner with the same weights."""
    equal = make(seed=2)
    equal.model.load_state_dict(learner.model.state_dict())
    return equal


# The last weights are validated once


@pytest.mark.parametrize(
    "place",
    [
        *PLACES,
    ],
)
def test_last_weights_are_validated_once_after_a_stop(place):
    learner = make(placed(stop, place))
    result = learner.fit(train(), val(), epochs=5)
    assert over(result) == ("stop", "enough", "me")
    assert phases(learner) == ["train", "val"] * 2
    trained, validated = rows(learner)[-2:]
    assert validated["steps"] == trained["steps"] == learner.progress.steps == result.steps
    assert validated["val/loss"] == result.metrics["val/loss"]
    assert result.metrics["val/loss"] == make_equal(learner).evaluate(val())["val/loss"]
    assert result.history == learner.plugins["history"].rows


@pytest.mark.parametrize("limit", [{"max_steps": STEPS + 2}, {"max_updates": STEPS + 2}, {"epochs": 2}])
def test_last_weights_are_validated_once_at_a_limit(limit):
    learner = make()
    learner.fit(train(), val(), **limit)
    assert phases(learner) == ["train", "val"] * 2
    assert rows(learner)[-1]["steps"] == learner.progress.steps


def test_last_weights_are_validated_although_it_is_not_their_turn():
    learner = make()
    learner.fit(train(), val(), epochs=3, validate=every(epochs=2))
    assert phases(learner) == ["train", "train", "val", "train", "val"]


def test_without_validation_data_nothing_is_validated_after_a_stop():
    learner = make(placed(stop, "in_mid_epoch"))
    learner.fit(train(), epochs=3)
    assert phases(learner) == ["train"] * 2


# The script is started again


@pytest.mark.parametrize(
    ("place", "saver"),
    [
        *(pytest.param(place, {"save": every(updates=3)}, id=f"{place}_every_3_updates") for place in PLACES),
        *(pytest.param(place, {}, id=f"{place}_every_epoch") for place in PLACES),
    ],
)
def test_run_that_was_stopped_is_over_when_it_is_started_again(place, saver, tmp_path):
    learner = script(tmp_path, placed(stop, place), **saver)
    first = learner.fit(train(), val(), epochs=5)
    steps = Steps()
    again = script(tmp_path, steps, again=True, **saver)
    result = again.fit(train(), val(), epochs=5)
    assert over(result) == over(first) == ("stop", "enough", "me")
    assert steps.counts == {}
    assert (result.steps, result.metrics) == (first.steps, first.metrics)
    same(end(learner), end(again))


@pytest.mark.parametrize("saver", SAVERS)
def test_run_that_came_to_its_limit_is_over_when_it_is_started_again(saver, tmp_path):
    script(tmp_path, **saver).fit(train(), val(), epochs=2)
    steps = Steps()
    result = script(tmp_path, steps, again=True, **saver).fit(train(), val(), epochs=2)
    assert (result.reason, result.steps, steps.counts) == ("epochs", 2 * STEPS, {})


@pytest.mark.parametrize("saver", SAVERS)
@pytest.mark.parametrize(
    ("first", "second"), [({"epochs": 2}, {"epochs": 3}), ({"max_steps": STEPS}, {"max_steps": 3 * STEPS})]
)
def test_raised_limit_reopens_a_run(first, second, saver, tmp_path):
    script(tmp_path, **saver).fit(train(), val(), **first)
    again = script(tmp_path, again=True, **saver)
    again.fit(train(), val(), **second)
    straight = make()
    straight.fit(train(), val(), epochs=3)
    same(end(straight), end(again))


def test_raised_limit_reopens_a_run_that_was_stopped(tmp_path):
    learner = script(tmp_path, placed(stop, "in_mid_epoch"))
    learner.fit(train(), val(), epochs=3)
    assert script(tmp_path, again=True).fit(train(), val(), epochs=3).reason == "stop"
    again = script(tmp_path, again=True)
    assert again.fit(train(), val(), epochs=4).reason == "epochs"
    assert again.progress.steps > learner.progress.steps
    assert phases(again)[-2:] == ["train", "val"]


def patient(directory, *, again):
    """It never sees an improvement that is large enough, so it stops after its first epoch and two more."""
    return script(directory, EarlyStopping(patience=2, min_delta=99.0), again=again)


def test_plugin_that_stopped_a_run_begins_anew_when_its_limit_is_raised(tmp_path):
    first = patient(tmp_path, again=False).fit(train(), val(), epochs=10)
    assert (first.reason, first.by, first.epochs) == ("stop", "early_stopping", 3)
    same_limit = patient(tmp_path, again=True).fit(train(), val(), epochs=10)
    assert (over(same_limit), same_limit.epochs) == (over(first), 3)
    raised = patient(tmp_path, again=True)
    result = raised.fit(train(), val(), epochs=20)
    assert (result.reason, result.by, result.epochs) == ("stop", "early_stopping", 6)
    assert phases(raised) == ["train", "val"] * 6


@pytest.mark.parametrize("ask", ["stop", "pause"])
def test_request_before_a_fit_is_refused(ask):
    learner = make()
    with pytest.raises(PhaseError):
        getattr(learner, ask)("too early")
    learner.fit(train(), epochs=1)
    with pytest.raises(LoopkitError):
        getattr(learner, ask)("too late")


# Several processes


def stopped(rank, directory, index, phase):
    def make_parallel(*plugins, again=False):
        return script(directory, DDP(timeout=60), *plugins, again=again, save=every(updates=3))

    ask = at(lambda learner: learner.world.rank == 1 and stop(learner), phase=phase, epochs=1, index=index)
    learner = make_parallel(ask)
    first = learner.fit(train(), val(), epochs=5)
    steps = Steps()
    again = make_parallel(steps, again=True)
    result = again.fit(train(), val(), epochs=5)
    same(end(learner), end(again))
    return over(first), over(result), phases(learner), steps.counts


@pytest.mark.parametrize(("phase", "index"), [("train", 0), ("val", 0)])
def test_stop_of_one_process_ends_the_run_of_all(phase, index, tmp_path):
    reason = ("stop", "enough", "me")
    for found in run(stopped, 2, tmp_path, index, phase):
        assert found == (reason, reason, ["train", "val"] * (2 if phase == "train" else 1), {})
