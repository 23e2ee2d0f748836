"""The events of a run, as literal lists: per phase, and per way of ending.

A line holds the events of one step, or those between two steps; see `helpers.EventLog`.
"""

from __future__ import annotations

import pytest
import torch
from helpers import EventLog, batches, make_learner, on, raising
from torch import nn

from loopkit import CancelEpoch, CancelFit, CancelStep, Event, Learner, Phase, TrainingPhase, every, hookimpl
from loopkit.errors import EventError
from loopkit.events import BackwardBegin, BackwardEnd, UpdateBegin, UpdateEnd, UpdateSkipped, snake_case

STEP = "step_begin forward_begin loss_begin backward_begin backward_end update_begin update_end step_end"
OPEN = (
    "step_begin forward_begin loss_begin backward_begin backward_end step_end"  # a step that does not fill its window
)
VAL = "step_begin forward_begin loss_begin step_end"


class ScoringBegin(Event):
    """Outputs are about to be scored."""


class ScoringPhase(TrainingPhase):
    emits = (ScoringBegin, *TrainingPhase.emits)

    def step(self, learner, step):
        step.emit(ScoringBegin)
        super().step(learner, step)


class Unsized:
    """Batches without a length."""

    def __init__(self, items):
        self.items = items

    def __iter__(self):
        return iter(self.items)


# Complete runs


def test_fit_two_epochs_with_validation():
    log = EventLog()
    make_learner(log).fit(batches(2), batches(1), epochs=2)
    assert log.lines == [
        "fit_begin",
        "train: epoch_begin",
        "train 0: step_begin forward_begin loss_begin backward_begin backward_end update_begin update_end step_end",
        "train 1: step_begin forward_begin loss_begin backward_begin backward_end update_begin update_end step_end",
        "train: epoch_end phase_end",
        "val: epoch_begin",
        "val 0: step_begin forward_begin loss_begin step_end",
        "val: epoch_end phase_end",
        "cycle_end",
        "train: epoch_begin",
        "train 0: step_begin forward_begin loss_begin backward_begin backward_end update_begin update_end step_end",
        "train 1: step_begin forward_begin loss_begin backward_begin backward_end update_begin update_end step_end",
        "train: epoch_end phase_end",
        "val: epoch_begin",
        "val 0: step_begin forward_begin loss_begin step_end",
        "val: epoch_end phase_end",
        "cycle_end",
        "fit_end",
    ]


def test_fit_contexts_stand_around_the_epoch_and_the_phases_step():
    log = EventLog(contexts=True)
    make_learner(log).fit(batches(1), batches(1), epochs=1)
    assert log.lines == [
        "fit_begin",
        "train: < epoch_begin",
        "train 0: step_begin [ forward_begin loss_begin backward_begin backward_end update_begin update_end ] step_end",
        "train: epoch_end > phase_end",
        "val: < epoch_begin",
        "val 0: step_begin [ forward_begin loss_begin ] step_end",
        "val: epoch_end > phase_end",
        "cycle_end",
        "fit_end",
    ]


def test_fit_with_standard_plugins_has_the_same_events():
    log = EventLog()
    make_learner(log, standard=True).fit(batches(1), batches(1), epochs=1)
    assert log.lines == [
        "fit_begin",
        "train: epoch_begin",
        f"train 0: {STEP}",
        "train: epoch_end phase_end",
        "val: epoch_begin",
        f"val 0: {VAL}",
        "val: epoch_end phase_end",
        "cycle_end",
        "fit_end",
    ]


def test_predict_has_forward_begin_but_no_fit_events_and_no_loss_begin():
    log = EventLog()
    make_learner(log).predict(batches(2))
    assert log.lines == [
        "predict: epoch_begin",
        "predict 0: step_begin forward_begin step_end",
        "predict 1: step_begin forward_begin step_end",
        "predict: epoch_end phase_end",
    ]


def test_evaluate_has_no_fit_events():
    log = EventLog()
    make_learner(log).evaluate(batches(1))
    assert log.lines == [
        "val: epoch_begin",
        "val 0: step_begin forward_begin loss_begin step_end",
        "val: epoch_end phase_end",
    ]


def test_fitting_brackets_a_loop_of_your_own():
    log = EventLog()
    learner = make_learner(log)
    with learner.rounds():
        with learner.epoch("train", length=1) as epoch:
            epoch.step(batches(1)[0])
        learner.run("val", batches(1))
    assert log.lines == [
        "fit_begin",
        "train: epoch_begin",
        f"train 0: {STEP}",
        "train: epoch_end phase_end",
        "val: epoch_begin",
        f"val 0: {VAL}",
        "val: epoch_end phase_end",
        "fit_end",
    ]


def test_step_begin_sees_the_batch_after_move_batch():
    seen = []
    move = on("move_batch", lambda batch, **_: ("moved", *batch), name="move")
    look = on(
        "step_begin", lambda step, **_: seen.append(step.batch) or (_ for _ in ()).throw(CancelStep()), name="look"
    )
    make_learner(move, look).evaluate([("a", "b")])
    assert seen == [("moved", "a", "b")]


# Accumulation


def test_accumulation_updates_at_full_windows_and_at_the_last_step():
    log = EventLog()
    make_learner(log, accumulate=2).fit(batches(3), epochs=1)
    assert log.lines == [
        "fit_begin",
        "train: epoch_begin",
        "train 0: step_begin forward_begin loss_begin backward_begin backward_end step_end",
        "train 1: step_begin forward_begin loss_begin backward_begin backward_end update_begin update_end step_end",
        "train 2: step_begin forward_begin loss_begin backward_begin backward_end update_begin update_end step_end",
        "train: epoch_end phase_end",
        "cycle_end",
        "fit_end",
    ]


def test_accumulation_window_open_after_data_without_length_is_updated_after_the_last_step():
    log = EventLog()
    make_learner(log, accumulate=2).fit(Unsized(batches(3)), epochs=1)
    assert log.lines == [
        "fit_begin",
        "train: epoch_begin",
        f"train 0: {OPEN}",
        f"train 1: {STEP}",
        "train 2: step_begin forward_begin loss_begin backward_begin backward_end step_end update_begin update_end",
        "train: epoch_end phase_end",
        "cycle_end",
        "fit_end",
    ]


def test_accumulation_window_open_at_a_limit_is_updated_once():
    log = EventLog()
    result = make_learner(log, accumulate=4).fit(batches(8), max_steps=2)
    assert log.lines[2:-2] == [
        f"train 0: {OPEN}",
        "train 1: step_begin forward_begin loss_begin backward_begin backward_end step_end update_begin update_end",
        "train: epoch_end phase_end",
    ]
    assert (result.reason, result.steps, result.updates) == ("max_steps", 2, 1)


def test_accumulation_window_open_after_stop_is_updated_once():
    log = EventLog()
    learner = make_learner(log, accumulate=4)
    learner.add(on("step_end", lambda learner, **_: learner.stop("enough")))
    learner.fit(batches(8), epochs=1)
    assert log.lines[2:] == [
        "train 0: step_begin forward_begin loss_begin backward_begin backward_end step_end update_begin update_end",
        "train: epoch_end phase_end",
        "cycle_end",
        "fit_end",
    ]


def test_accumulation_window_open_at_a_break_is_updated_once():
    log = EventLog()
    learner = make_learner(log, accumulate=4)
    with learner.epoch("train", length=8) as epoch:
        for batch in batches(8):
            epoch.step(batch)
            break
    assert log.lines == [
        "train: epoch_begin",
        "train 0: step_begin forward_begin loss_begin backward_begin backward_end step_end update_begin update_end",
        "train: epoch_end phase_end",
    ]


@pytest.mark.parametrize("cancel", [CancelEpoch, CancelFit])
def test_accumulation_window_is_dropped_after_cancel(cancel):
    log = EventLog()
    learner = make_learner(log, raising("step_end", cancel(), at=1), accumulate=4)
    before = learner.model.weight.clone()
    learner.fit(batches(8), epochs=1)
    assert log.lines[2:] == [
        f"train 0: {OPEN}",
        f"train 1: {OPEN}",
        "train: epoch_end phase_end",
        "cycle_end",
        "fit_end",
    ]
    assert torch.equal(learner.model.weight, before)
    assert learner.model.weight.grad is None


def test_accumulation_step_cancelled_before_backward_does_not_count():
    log = EventLog()
    make_learner(log, raising("loss_begin", CancelStep(), at=1), accumulate=2).fit(batches(4), epochs=1)
    assert log.lines[2:-3] == [
        f"train 0: {OPEN}",
        "train 1: step_begin forward_begin loss_begin step_cancelled",
        f"train 2: {STEP}",
        f"train 3: {STEP}",  # the last one by len(data)
    ]


def test_accumulation_step_cancelled_after_backward_drops_the_window():
    log = EventLog()
    make_learner(log, raising("backward_end", CancelStep(), at=1), accumulate=3).fit(batches(6), epochs=1)
    assert log.lines[2:-3] == [
        f"train 0: {OPEN}",
        "train 1: step_begin forward_begin loss_begin backward_begin backward_end step_cancelled",
        f"train 2: {OPEN}",
        f"train 3: {OPEN}",
        f"train 4: {STEP}",
        f"train 5: {STEP}",  # the last one by len(data)
    ]


def test_accumulation_cancel_of_the_late_update_drops_the_window():
    log = EventLog()
    learner = make_learner(log, raising("update_begin", CancelStep(), at=0), accumulate=2)
    before = learner.model.weight.clone()
    learner.fit(Unsized(batches(1)), epochs=1)
    assert log.lines == [
        "fit_begin",
        "train: epoch_begin",
        "train 0: step_begin forward_begin loss_begin backward_begin backward_end step_end update_begin",
        "train: epoch_end phase_end",
        "cycle_end",
        "fit_end",
    ]
    assert torch.equal(learner.model.weight, before)


# Cancels, from each event of a step; the first of two epochs, the second of three steps

UP_TO = {
    "step_begin": "step_begin step_cancelled",
    "loss_begin": "step_begin forward_begin loss_begin step_cancelled",
    "backward_begin": "step_begin forward_begin loss_begin backward_begin step_cancelled",
    "backward_end": "step_begin forward_begin loss_begin backward_begin backward_end step_cancelled",
    "update_begin": "step_begin forward_begin loss_begin backward_begin backward_end update_begin step_cancelled",
    "update_end": f"{STEP.removesuffix('step_end')}step_cancelled",
    "step_end": STEP,
}
NAMES = ["acting", "zealous"]  # the plugin that cancels comes before or after the log


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("hook", UP_TO)
def test_cancel_step_ends_the_step_alone(hook, name):
    log = EventLog()
    result = make_learner(log, raising(hook, CancelStep("bad"), at=1, name=name)).fit(batches(3), epochs=2)
    assert log.lines == [
        "fit_begin",
        "train: epoch_begin",
        f"train 0: {STEP}",
        f"train 1: {UP_TO[hook]}",
        f"train 2: {STEP}",
        "train: epoch_end phase_end",
        "cycle_end",
        "train: epoch_begin",
        f"train 0: {STEP}",
        f"train 1: {STEP}",
        f"train 2: {STEP}",
        "train: epoch_end phase_end",
        "cycle_end",
        "fit_end",
    ]
    assert result.reason == "epochs"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("hook", UP_TO)
def test_cancel_epoch_ends_the_pass_alone(hook, name):
    log = EventLog()
    learner = make_learner(log, raising(hook, CancelEpoch("bad"), at=1, name=name))
    result = learner.fit(batches(3), batches(1), epochs=2)
    assert log.lines == [
        "fit_begin",
        "train: epoch_begin",
        f"train 0: {STEP}",
        f"train 1: {UP_TO[hook]}",
        "train: epoch_end phase_end",
        "val: epoch_begin",
        f"val 0: {VAL}",
        "val: epoch_end phase_end",
        "cycle_end",
        "train: epoch_begin",
        f"train 0: {STEP}",
        f"train 1: {STEP}",
        f"train 2: {STEP}",
        "train: epoch_end phase_end",
        "val: epoch_begin",
        f"val 0: {VAL}",
        "val: epoch_end phase_end",
        "cycle_end",
        "fit_end",
    ]
    assert (result.reason, result.epochs) == ("epochs", 2)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("hook", UP_TO)
def test_cancel_fit_ends_the_fit(hook, name):
    log = EventLog()
    learner = make_learner(log, raising(hook, CancelFit("bad"), at=1, name=name))
    result = learner.fit(batches(3), batches(1), epochs=2)
    assert log.lines == [
        "fit_begin",
        "train: epoch_begin",
        f"train 0: {STEP}",
        f"train 1: {UP_TO[hook]}",
        "train: epoch_end phase_end",
        "fit_end",
    ]
    assert (result.reason, result.message, result.by) == ("cancel", "bad", name)


@pytest.mark.parametrize(
    ("cancel", "after"),
    [
        (
            CancelStep,
            ["train 0: STEP", "train 1: LOSS", "train 2: STEP", "train: epoch_end phase_end", "cycle_end", "fit_end"],
        ),
        (CancelEpoch, ["train 0: STEP", "train 1: LOSS", "train: epoch_end phase_end", "cycle_end", "fit_end"]),
        (CancelFit, ["train 0: STEP", "train 1: LOSS", "train: epoch_end phase_end", "cycle_end", "fit_end"]),
    ],
)
def test_cancel_raised_by_the_phase(cancel, after):
    class Cancelling(TrainingPhase):
        def loss(self, learner, outputs, targets):
            if learner.progress.steps == 1 and learner.current.epoch.steps == 2:
                raise cancel("why")
            return super().loss(learner, outputs, targets)

    log = EventLog()
    result = make_learner(log, phases=[Cancelling()]).fit(batches(3), epochs=1)
    after = [
        line.replace("STEP", STEP).replace("LOSS", "step_begin forward_begin loss_begin step_cancelled")
        for line in after
    ]
    assert log.lines[2:] == after
    assert result.by == ("phase train" if cancel is CancelFit else "")


def test_cancel_epoch_at_epoch_begin_runs_no_step():
    log = EventLog()
    make_learner(log, raising("epoch_begin", CancelEpoch())).fit(batches(1), batches(1), epochs=1)
    assert log.lines == [
        "fit_begin",
        "train: epoch_begin epoch_end phase_end",
        "val: epoch_begin",
        f"val 0: {VAL}",
        "val: epoch_end phase_end",
        "cycle_end",
        "fit_end",
    ]


def test_cancel_epoch_at_epoch_begin_ends_a_loop_of_your_own():
    log = EventLog()
    learner = make_learner(log, raising("epoch_begin", CancelEpoch()))
    with learner.epoch("train") as epoch:
        epoch.step(batches(1)[0])
    assert log.lines == ["train: epoch_begin epoch_end phase_end"]


def test_cancel_fit_at_epoch_begin_runs_no_step():
    log = EventLog()
    result = make_learner(log, raising("epoch_begin", CancelFit("no"))).fit(batches(1), batches(1), epochs=1)
    assert log.lines == ["fit_begin", "train: epoch_begin epoch_end phase_end", "fit_end"]
    assert (result.reason, result.message, result.by) == ("cancel", "no", "acting")


@pytest.mark.parametrize("hook", ["epoch_end", "phase_end"])
def test_cancel_epoch_at_the_end_of_the_pass_changes_nothing(hook):
    log = EventLog()
    make_learner(log, raising(hook, CancelEpoch())).fit(batches(1), batches(1), epochs=1)
    assert log.lines == [
        "fit_begin",
        "train: epoch_begin",
        f"train 0: {STEP}",
        "train: epoch_end phase_end",
        "val: epoch_begin",
        f"val 0: {VAL}",
        "val: epoch_end phase_end",
        "cycle_end",
        "fit_end",
    ]


@pytest.mark.parametrize("hook", ["epoch_end", "phase_end"])
def test_cancel_fit_at_the_end_of_the_pass_skips_what_follows(hook):
    log = EventLog()
    result = make_learner(log, raising(hook, CancelFit("no"))).fit(batches(1), batches(1), epochs=2)
    assert log.lines == [
        "fit_begin",
        "train: epoch_begin",
        f"train 0: {STEP}",
        "train: epoch_end phase_end",
        "fit_end",
    ]
    assert (result.reason, result.message, result.by) == ("cancel", "no", "acting")


def test_cancel_fit_at_fit_begin_runs_no_pass():
    log = EventLog()
    result = make_learner(log, raising("fit_begin", CancelFit("no"))).fit(batches(1), epochs=1)
    assert log.lines == ["fit_begin", "fit_end"]
    assert (result.reason, result.message, result.by) == ("cancel", "no", "acting")


def test_cancel_at_fit_end_changes_nothing():
    log = EventLog()
    result = make_learner(log, raising("fit_end", CancelFit("late"), name="zealous")).fit(batches(1), epochs=1)
    assert log.lines[-1] == "fit_end"
    assert result.reason == "epochs"


@pytest.mark.parametrize("hook", ["epoch_begin", "epoch_end", "phase_end"])
def test_cancel_step_outside_a_step_is_an_error_that_says_where(hook):
    learner = make_learner(raising(hook, CancelStep("which?")))
    with pytest.raises(CancelStep) as caught:
        learner.fit(batches(1), epochs=1)
    (note,) = caught.value.__notes__
    assert hook in note
    assert "'acting'" in note
    assert "'train'" in note


def test_cancel_fit_at_step_cancelled_wins_over_the_step():
    log = EventLog()
    learner = make_learner(
        log, raising("loss_begin", CancelStep(), at=0, name="a"), raising("step_cancelled", CancelFit("no"), name="b")
    )
    result = learner.fit(batches(2), epochs=1)
    assert log.lines[2:] == [
        "train 0: step_begin forward_begin loss_begin step_cancelled",
        "train: epoch_end phase_end",
        "cycle_end",
        "fit_end",
    ]
    assert (result.reason, result.by) == ("cancel", "b")


def test_cancel_fit_is_not_replaced_by_a_later_one():
    learner = make_learner(
        raising("loss_begin", CancelFit("first"), name="a"), raising("step_cancelled", CancelFit("second"), name="b")
    )
    result = learner.fit(batches(2), epochs=1)
    assert (result.message, result.by) == ("first", "a")


def test_cancel_fit_in_validation_ends_the_fit():
    log = EventLog()
    result = make_learner(log, raising("loss_begin", CancelFit("no"), phase="val")).fit(
        batches(1), batches(2), epochs=3
    )
    assert log.lines == [
        "fit_begin",
        "train: epoch_begin",
        f"train 0: {STEP}",
        "train: epoch_end phase_end",
        "val: epoch_begin",
        "val 0: step_begin forward_begin loss_begin step_cancelled",
        "val: epoch_end phase_end",
        "cycle_end",
        "fit_end",
    ]
    assert result.reason == "cancel"


@pytest.mark.parametrize("order", [["a", "b", "c"], ["c", "b", "a"]])
def test_cancels_of_several_plugins_the_strongest_counts(order):
    log = EventLog()
    learner = make_learner(
        log,
        raising("loss_begin", CancelStep("weak"), name="a"),
        raising("loss_begin", CancelFit("strong"), name="b"),
        raising("loss_begin", CancelEpoch("middle"), name="c"),
        order=order,
    )
    result = learner.fit(batches(2), epochs=2)
    assert log.lines[2:] == [
        "train 0: step_begin forward_begin loss_begin step_cancelled",
        "train: epoch_end phase_end",
        "cycle_end",
        "fit_end",
    ]
    assert (result.reason, result.message, result.by) == ("cancel", "strong", "b")


@pytest.mark.parametrize("order", [["a", "event_log", "b"], ["b", "event_log", "a"]])
def test_cancel_and_error_in_one_event_the_error_counts(order):
    log = EventLog()
    error = KeyError("broken")
    learner = make_learner(
        log, raising("loss_begin", CancelFit("why"), name="a"), raising("loss_begin", error, name="b"), order=order
    )
    with pytest.raises(KeyError) as caught:
        learner.fit(batches(2), epochs=1)
    assert caught.value is error
    assert log.lines[-1] == "fit_end"
    assert "step_cancelled" not in " ".join(log.lines)
    if order[0] == "a":
        assert any("CancelFit('why') by plugin 'a'" in note for note in error.__notes__)


# Stop, limits, break, error


def test_stop_lets_the_step_and_the_pass_end():
    log = EventLog()
    learner = make_learner(log)
    learner.add(on("backward_end", lambda learner, **_: learner.stop("enough", by="acting")))
    result = learner.fit(batches(3), batches(1), epochs=2)
    assert log.lines == [
        "fit_begin", "train: epoch_begin", f"train 0: {STEP}", "train: epoch_end phase_end",
        "val: epoch_begin", f"val 0: {VAL}", "val: epoch_end phase_end", "cycle_end", "fit_end",
    ]  # fmt: skip
    assert (result.reason, result.message, result.by) == ("stop", "enough", "acting")


def test_stop_at_epoch_begin_runs_no_step():
    log = EventLog()
    learner = make_learner(log)
    learner.add(on("epoch_begin", lambda learner, **_: learner.stop()))
    learner.fit(batches(3), epochs=2)
    assert log.lines == ["fit_begin", "train: epoch_begin epoch_end phase_end", "cycle_end", "fit_end"]


def test_stop_at_fit_begin_runs_no_pass():
    log = EventLog()
    learner = make_learner(log)
    learner.add(on("fit_begin", lambda learner: learner.stop("no need")))
    result = learner.fit(batches(3), epochs=2)
    assert log.lines == ["fit_begin", "fit_end"]
    assert (result.reason, result.message) == ("stop", "no need")


def test_stop_in_validation_ends_the_fit_after_its_pass():
    log = EventLog()
    learner = make_learner(log)
    learner.add(on("phase_end", lambda learner, phase: phase.name == "val" and learner.stop()))
    learner.fit(batches(1), batches(1), epochs=3)
    assert log.lines == [
        "fit_begin",
        "train: epoch_begin",
        f"train 0: {STEP}",
        "train: epoch_end phase_end",
        "val: epoch_begin",
        f"val 0: {VAL}",
        "val: epoch_end phase_end",
        "cycle_end",
        "fit_end",
    ]


def test_stop_ends_a_loop_of_your_own_at_its_next_step():
    log = EventLog()
    learner = make_learner(log)
    with learner.epoch("train") as epoch:
        for batch in batches(3):
            epoch.step(batch)
            learner.stop()
    assert log.lines == ["train: epoch_begin", f"train 0: {STEP}", "train: epoch_end phase_end"]


@pytest.mark.parametrize("limit", ["max_steps", "max_updates"])
def test_limit_ends_the_pass_and_validates_once(limit):
    log = EventLog()
    result = make_learner(log).fit(batches(3), batches(1), **{limit: 4})
    assert log.lines == [
        "fit_begin",
        "train: epoch_begin",
        f"train 0: {STEP}",
        f"train 1: {STEP}",
        f"train 2: {STEP}",
        "train: epoch_end phase_end",
        "val: epoch_begin",
        f"val 0: {VAL}",
        "val: epoch_end phase_end",
        "cycle_end",
        "train: epoch_begin",
        f"train 0: {STEP}",
        "train: epoch_end phase_end",
        "val: epoch_begin",
        f"val 0: {VAL}",
        "val: epoch_end phase_end",
        "cycle_end",
        "fit_end",
    ]
    assert (result.reason, result.steps, result.updates) == (limit, 4, 4)


def test_break_out_of_an_epoch_is_a_normal_end():
    log = EventLog()
    learner = make_learner(log)
    with learner.epoch("train") as epoch:
        for batch in batches(3):
            epoch.step(batch)
            break
    assert log.lines == ["train: epoch_begin", f"train 0: {STEP}", "train: epoch_end phase_end"]
    assert learner.progress.epochs == 1


@pytest.mark.parametrize("hook", UP_TO)
def test_error_leaves_contexts_and_fires_fit_end_alone(hook):
    log = EventLog(contexts=True)
    inside = hook not in ("step_begin", "step_end")
    with pytest.raises(RuntimeError, match="broken"):
        make_learner(log, raising(hook, RuntimeError("broken"), name="zealous")).fit(batches(2), epochs=1)
    before = UP_TO[hook].removesuffix(" step_cancelled").replace("step_begin", "step_begin [", 1)
    step = {"step_begin": "step_begin", "step_end": before.replace(" step_end", " ] step_end")}.get(hook, f"{before} ]")
    assert inside == step.endswith("]")
    assert log.lines == ["fit_begin", "train: < epoch_begin", f"train 0: {step}", "train: >", "fit_end"]


@pytest.mark.parametrize(
    ("hook", "lines"),
    [
        ("epoch_begin", ["fit_begin", "train: epoch_begin", "fit_end"]),
        ("epoch_end", ["fit_begin", "train: epoch_begin", f"train 0: {STEP}", "train: epoch_end", "fit_end"]),
        (
            "phase_end",
            [
                "fit_begin",
                "train: epoch_begin",
                f"train 0: {STEP}",
                "train: epoch_end phase_end",
                "fit_end",
            ],
        ),
        ("fit_begin", ["fit_begin", "fit_end"]),
    ],
)
def test_error_outside_a_step_fires_fit_end_alone(hook, lines):
    log = EventLog()
    with pytest.raises(RuntimeError, match="broken"):
        make_learner(log, raising(hook, RuntimeError("broken"), name="zealous")).fit(batches(1), batches(1), epochs=1)
    assert log.lines == lines


def test_error_of_the_loader_fires_fit_end_alone():
    def loader():
        yield batches(1)[0]
        raise OSError("disk")

    log = EventLog()
    with pytest.raises(OSError, match="disk"):
        make_learner(log).fit(loader, epochs=1)
    assert log.lines == ["fit_begin", "train: epoch_begin", f"train 0: {STEP}", "fit_end"]


# Validation within training, skipped updates


def test_validation_every_two_updates_is_nested_in_training():
    log = EventLog()
    make_learner(log).fit(batches(3), batches(1), epochs=2, validate=every(updates=2))
    nested = ["val: epoch_begin", f"val 0: {VAL}", "val: epoch_end phase_end"]
    assert log.lines == [
        "fit_begin",
        "train: epoch_begin",
        f"train 0: {STEP}",
        f"train 1: {STEP}",
        *nested,
        f"train 2: {STEP}",
        "train: epoch_end phase_end",
        "cycle_end",
        "train: epoch_begin",
        f"train 0: {STEP}",
        *nested,
        f"train 1: {STEP}",
        f"train 2: {STEP}",
        *nested,
        "train: epoch_end phase_end",
        "cycle_end",
        "fit_end",
    ]


def test_validate_every_two_epochs():
    log = EventLog()
    make_learner(log).fit(batches(1), batches(1), epochs=3, validate=every(epochs=2))
    passes = [line for line in log.lines if line.endswith("epoch_begin")]
    train, val = "train: epoch_begin", "val: epoch_begin"
    assert passes == [train, train, val, train, val]  # the last weights are validated, too


def test_skip_update_fires_update_skipped_instead_of_update_end():
    log = EventLog()
    skip = on("update_begin", lambda step, **_: step.index == 0 and step.skip_update("too large"))
    learner = make_learner(log, skip)
    seen = []
    learner.add(on("update_skipped", lambda learner, **_: seen.append(learner.model.weight.clone()), name="look"))
    before = learner.model.weight.clone()
    result = learner.fit(batches(2), epochs=1)
    assert log.lines[2:-3] == [
        "train 0: step_begin forward_begin loss_begin backward_begin backward_end update_begin update_skipped step_end",
        f"train 1: {STEP}",
    ]
    assert torch.equal(seen[0], before)
    assert (result.steps, result.updates) == (2, 1)


def test_skip_update_within_optimizer_step_fires_update_skipped():
    log = EventLog()
    verb = on("optimizer_step", lambda step, **_: step.skip_update("overflow"))
    result = make_learner(log, verb).fit(batches(1), epochs=1)
    assert log.lines[2] == (
        "train 0: step_begin forward_begin loss_begin backward_begin backward_end update_begin update_skipped step_end"
    )
    assert result.updates == 0


# Events of one's own


def test_own_event_reaches_its_hook():
    log = EventLog("scoring_begin")
    make_learner(log, phases=[ScoringPhase()]).fit(batches(1), batches(1), epochs=1)
    assert log.lines == [
        "fit_begin",
        "train: epoch_begin",
        f"train 0: {STEP.replace('forward_begin', 'scoring_begin forward_begin')}",
        "train: epoch_end phase_end",
        "val: epoch_begin",
        f"val 0: {VAL}",
        "val: epoch_end phase_end",
        "cycle_end",
        "fit_end",
    ]


def test_own_event_of_another_module_reaches_its_hook():
    module = {"__name__": "somebodys_events", "Event": Event}
    exec("class SharpenBegin(Event): ...", module)

    class Sharpening(TrainingPhase):
        emits = (*TrainingPhase.emits, module["SharpenBegin"])

        def step(self, learner, step):
            super().step(learner, step)
            step.emit(module["SharpenBegin"])

    log = EventLog("sharpen_begin")
    make_learner(log, phases=[Sharpening()]).fit(batches(1), epochs=1)
    assert log.lines[2].endswith("update_end sharpen_begin step_end")


def test_own_event_that_the_phase_does_not_list_is_refused():
    class Forgetful(ScoringPhase):
        emits = TrainingPhase.emits

    with pytest.raises(EventError, match=r"Forgetful.step emits ScoringBegin, which Forgetful.emits does not list"):
        make_learner(phases=[Forgetful()]).fit(batches(1), epochs=1)


@pytest.mark.parametrize(
    ("name", "hook"),
    [
        ("LossBegin", "loss_begin"),
        ("GANBegin", "gan_begin"),
        ("TrainGANEnd", "train_gan_end"),
        ("Pass2Begin", "pass2_begin"),
        ("Begin", "begin"),
    ],
)
def test_snake_case_takes_an_acronym_as_one_word(name, hook):
    assert snake_case(name) == hook


def test_event_defined_again_in_its_module_replaces_the_first():
    module = {"__name__": "notebook", "Event": Event, "TrainingPhase": TrainingPhase}
    cell = """
class CellBegin(Event): ...
class CellPhase(TrainingPhase):
    emits = (CellBegin, *TrainingPhase.emits)
    def step(self, learner, step):
        step.emit(CellBegin)
        super().step(learner, step)
"""
    for _ in range(2):
        exec(cell, module)
        log = EventLog("cell_begin")
        make_learner(log, phases=[module["CellPhase"]()]).fit(batches(1), epochs=1)
        assert log.count("cell_begin") == 1
    assert Event.by_hook["cell_begin"] is module["CellBegin"]


def test_event_defined_again_in_another_module_is_refused():
    with pytest.raises(
        EventError, match=r"elsewhere.ScoringBegin.*'scoring_begin' belongs to test_events.ScoringBegin"
    ):
        exec("class ScoringBegin(Event): ...", {"__name__": "elsewhere", "Event": Event})
    assert Event.by_hook["scoring_begin"] is ScoringBegin


def test_event_of_the_engine_cannot_be_redefined():
    with pytest.raises(EventError, match=r"belongs to loopkit.events.LossBegin"):
        type("LossBegin", (Event,), {})


def test_event_with_the_hook_of_another_name_is_refused():
    with pytest.raises(EventError, match=r"'scoring_begin' belongs to test_events.ScoringBegin"):
        type("SCORINGBegin", (Event,), {})


def test_event_name_must_end_in_begin_or_end():
    with pytest.raises(EventError, match="ScoringBegin"):
        type("Scoring", (Event,), {})
    with pytest.raises(EventError, match="ScoringSkippedBegin"):
        type("ScoringSkipped", (Event,), {})


# Two optimizers


class TwoPhase(Phase):
    name = "train"
    training = True
    emits = (BackwardBegin, BackwardEnd, UpdateBegin, UpdateEnd, UpdateSkipped)

    def step(self, learner, step):
        inputs, targets = step.batch
        for name in ("one", "two"):
            step.backward(((learner.model[name](inputs) - targets) ** 2).mean(), name)
        step.update()


def two(**options):
    torch.manual_seed(0)
    models = {"one": nn.Linear(3, 1), "two": nn.Linear(3, 1)}
    sgd = lambda p: torch.optim.SGD(p, lr=0.1)  # noqa: E731
    return Learner(models, None, {"one": sgd, "two": sgd}, phases=[TwoPhase()], standard=False, **options)


def test_each_optimizer_has_its_own_update_events():
    names = []

    class Names:
        @hookimpl
        def update_begin(self, step):
            names.append(f"begin {step.optimizer_name}")

        @hookimpl
        def update_end(self, step):
            names.append(f"end {step.optimizer_name}")

    log = EventLog()
    result = two(plugins=[log, Names()]).fit(batches(1), epochs=1)
    assert log.lines[2] == (
        "train 0: step_begin backward_begin backward_end backward_begin backward_end "
        "update_begin update_end update_begin update_end step_end"
    )
    assert names == ["begin one", "end one", "begin two", "end two"]
    assert result.updates == 2


def test_skip_update_of_one_optimizer_leaves_the_other_its_own():
    log = EventLog()
    skip = on("update_begin", lambda step, **_: step.optimizer_name == "one" and step.skip_update("no"))
    learner = two(plugins=[log, skip])
    before = {name: model.weight.clone() for name, model in learner.models.items()}
    learner.fit(batches(1), epochs=1)
    assert log.lines[2].endswith("update_begin update_skipped update_begin update_end step_end")
    assert torch.equal(before["one"], learner.models["one"].weight)
    assert not torch.equal(before["two"], learner.models["two"].weight)
