"""throttle: a plugin on some steps only, and else as it is."""

import time
from contextlib import contextmanager

import pytest
import torch
from helpers import EVENTS, EventLog, batches, make_learner, on

from loopkit import TrainingPhase, hookimpl
from loopkit.errors import OrderError, PluginError
from loopkit.events import StepEnd, UpdateBegin
from loopkit.plugins import History, Metrics, call_on, throttle

STEP_EVENTS = {
    "step_begin",
    "forward_begin",
    "loss_begin",
    "backward_begin",
    "backward_end",
    "update_begin",
    "update_end",
    "step_end",
}


def log_of(every=None, seconds=None, fit=None, **options):
    log = EventLog(contexts=True)
    learner = make_learner(throttle(log, every=every, seconds=seconds), **options)
    (fit or (lambda learner: learner.fit(batches(5), epochs=1)))(learner)
    return log


def steps(log, phase="train"):
    """The steps of a phase that the log saw, and the events of each."""
    found = {}
    for place, word in log.words:
        if place.startswith(f"{phase} "):
            found.setdefault(int(place.split()[1]), []).append(word)
    return found


def test_throttle_calls_the_first_and_every_nth_step():
    assert list(steps(log_of(every=2))) == [0, 2, 4]


def test_throttle_counts_on_over_epochs():
    log = log_of(every=2, fit=lambda learner: learner.fit(batches(3), epochs=2))
    assert [place for place, word in log.words if word == "step_end"] == ["train 0", "train 2", "train 1"]


def test_throttle_of_every_step_calls_each():
    assert list(steps(log_of(every=1))) == [0, 1, 2, 3, 4]


def test_throttle_calls_all_hooks_of_a_step_together():
    plain = EventLog(contexts=True)
    make_learner(plain).fit(batches(5), epochs=1)
    throttled = log_of(every=2)
    assert {k: v for k, v in steps(plain).items() if k % 2 == 0} == steps(throttled)
    assert STEP_EVENTS | {"[", "]"} == set(steps(throttled)[0])


def test_throttle_always_calls_what_belongs_to_epochs_and_fits():
    log = log_of(every=1000, fit=lambda learner: learner.fit(batches(2), batches(1), epochs=2))
    outside = [word for place, word in log.words if " " not in place]
    epoch = ["<", "epoch_begin", "epoch_end", ">", "phase_end"]
    assert outside == ["fit_begin", *[*epoch * 2, "cycle_end"] * 2, "fit_end"]


def test_throttle_counts_each_phase_on_its_own():
    log = log_of(every=2, fit=lambda learner: learner.fit(batches(3), batches(4), epochs=1))
    assert list(steps(log, "train")) == [0, 2]
    assert list(steps(log, "val")) == [0, 2]


def test_throttle_keeps_a_step_together_around_a_phase_inside_it():
    log = EventLog()
    inside = on("update_end", lambda learner, **_: learner.evaluate(batches(3)))
    make_learner(throttle(log, every=2), inside).fit(batches(4), epochs=1)
    assert list(steps(log, "train")) == [0, 2]
    assert all(set(words) == STEP_EVENTS for words in steps(log, "train").values())


def test_throttle_calls_a_cancelled_step_to_its_end():
    def cancel(step, **_):
        raise_at = step.index in (1, 2)
        if raise_at:
            from loopkit import CancelStep

            raise CancelStep("not this one")

    log = EventLog()
    make_learner(throttle(log, every=2), on("loss_begin", cancel)).fit(batches(4), epochs=1)
    assert steps(log)[2] == ["step_begin", "forward_begin", "loss_begin", "step_cancelled"]
    assert 1 not in steps(log)


def test_throttle_counts_steps_in_which_the_plugin_has_something_to_do():
    seen = []
    plugin = call_on(UpdateBegin, lambda step: seen.append(step.index), name="note")
    make_learner(throttle(plugin, every=2), accumulate=2).fit(batches(8), epochs=1)
    assert seen == [1, 5]


def test_throttle_by_seconds(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    log = EventLog(contexts=True)
    tick = on("step_end", lambda **_: now.__setitem__(0, now[0] + 4.0))
    make_learner(throttle(log, seconds=10), tick).fit(batches(8), epochs=1)
    assert list(steps(log)) == [0, 3, 6]
    assert steps(log)[3] == steps(log)[0]


def test_throttle_by_no_seconds_calls_each_step():
    assert list(steps(log_of(seconds=0))) == [0, 1, 2, 3, 4]


def test_throttle_takes_the_arguments_that_the_plugin_wants():
    class Wants:
        def __init__(self):
            self.seen = []

        @hookimpl
        def step_end(self, step, learner):
            self.seen.append((step.index, learner.progress.steps))

        @hookimpl
        def step_begin(self, epoch):
            self.seen.append(epoch.name)

        @hookimpl
        @contextmanager
        def step_context(self, phase):
            self.seen.append(phase.name)
            yield

    wants = Wants()
    make_learner(throttle(wants, every=2)).fit(batches(3), epochs=1)
    assert wants.seen == ["train", "train", (0, 1), "train", "train", (2, 3)]


def test_throttle_leaves_verbs_and_transforms_alone():
    class Moves:
        def __init__(self):
            self.moved = self.stepped = self.set_up = 0

        @hookimpl
        def setup_model(self, model):
            self.set_up += 1
            return model

        @hookimpl
        def move_batch(self, batch):
            self.moved += 1
            return batch

        @hookimpl
        def optimizer_step(self, default):
            self.stepped += 1
            default()

    moves = Moves()
    make_learner(throttle(moves, every=10)).fit(batches(4), epochs=1)
    assert (moves.set_up, moves.moved, moves.stepped) == (1, 4, 4)


# Forwarded


def test_throttle_keeps_name_and_what_is_provided():
    throttled = throttle(Metrics(), every=2)
    assert throttled.name == "metrics"
    assert throttled.provides == "metrics"
    assert make_learner(throttled).plugins == {"metrics": throttled}


def test_throttle_names_a_plugin_after_its_class():
    class NotesThings:
        @hookimpl
        def step_end(self):
            pass

    assert list(make_learner(throttle(NotesThings(), every=2)).plugins) == ["notes_things"]


def test_throttled_metrics_are_found_by_what_comes_after_them():
    seen = []
    plugin = call_on(
        StepEnd,
        lambda learner, epoch: seen.append(dict(learner.plugins["metrics"].peek(epoch.name))),
        name="a",
        after=("metrics",),
    )
    make_learner(plugin, throttle(Metrics(), every=2)).evaluate(batches(2))
    assert [list(values) for values in seen] == [["loss"], ["loss"]]


def test_throttled_metrics_are_those_of_their_steps():
    one = make_learner(throttle(Metrics(), every=2)).evaluate(batches(5))
    other = make_learner(Metrics()).evaluate(batches(5)[::2])
    assert one == other


def test_throttle_keeps_access():
    one = call_on(UpdateBegin, lambda: None, name="one", updates=("grads",))
    other = call_on(UpdateBegin, lambda: None, name="other", updates=("grads",))
    with pytest.raises(OrderError, match="one"):
        make_learner(throttle(one, every=2), other)


def test_throttle_keeps_the_order_of_a_class():
    class First:
        name = "z_first"
        before = ("event_log",)

        def __init__(self):
            self.seen = []

        @hookimpl
        def step_begin(self):
            self.seen.append(len(log.words))

    log = EventLog()
    first = First()
    make_learner(throttle(first, every=1), log).evaluate(batches(1))
    assert first.seen == [log.words.index(("val 0", "step_begin"))]


def test_throttle_keeps_the_phase_of_a_hook():
    seen = []
    plugin = call_on(StepEnd, lambda phase: seen.append(phase.name), name="note", phase=TrainingPhase)
    make_learner(throttle(plugin, every=2)).fit(batches(3), batches(3), epochs=1)
    assert seen == ["train", "train"]


def test_throttle_gives_access_to_the_plugin():
    history = History()
    throttled = throttle(history, every=2)
    make_learner(throttled).fit(batches(2), epochs=1)
    assert throttled.plugin is history
    assert throttled.rows is history.rows
    with pytest.raises(AttributeError, match="rowz"):
        throttled.rowz  # noqa: B018


def test_throttle_can_be_throttled():
    seen = []
    plugin = call_on(StepEnd, lambda step: seen.append(step.index), name="note")
    make_learner(throttle(throttle(plugin, every=2), every=3)).fit(batches(13), epochs=1)
    assert seen == [0, 6, 12]


# State


def test_throttle_goes_on_from_its_state():
    history, resumed = History(steps=True), History(steps=True)
    one, other = throttle(history, every=3), throttle(resumed, every=3)
    make_learner(one).evaluate(batches(4))
    other.load_state_dict(one.state_dict())
    make_learner(other).evaluate(batches(4))
    assert resumed.rows[:1] == history.rows
    assert [row["step"] for row in resumed.step_rows] == [0, 3, 2]


def test_throttle_of_a_plugin_without_state_keeps_its_counts():
    seen = []

    def make():
        return throttle(call_on(StepEnd, lambda step: seen.append(step.index), name="note"), every=3)

    one, other = make(), make()
    make_learner(one).evaluate(batches(4))
    other.load_state_dict(one.state_dict())
    make_learner(other).evaluate(batches(4))
    assert seen == [0, 3, 2]


# What is refused


@pytest.mark.parametrize("given", [{}, {"every": 2, "seconds": 1.0}])
def test_throttle_takes_one_of_steps_and_seconds(given):
    with pytest.raises(PluginError, match=r"give one of every=\.\.\. \(steps\), seconds=\.\.\. and when="):
        throttle(History(), **given)


@pytest.mark.parametrize("every", [0, -1, 2.5, True])
def test_throttle_refuses_steps_out_of_range(every):
    with pytest.raises(PluginError, match=f"every is {every}: it is a whole number, from 1"):
        throttle(History(), every=every)


@pytest.mark.parametrize("seconds", [-1, float("nan")])
def test_throttle_refuses_seconds_out_of_range(seconds):
    with pytest.raises(PluginError, match=f"seconds is {seconds}: it is a number of seconds, from 0"):
        throttle(History(), seconds=seconds)


def test_throttle_refuses_a_class():
    with pytest.raises(PluginError, match=r"History is a class; a plugin is an instance: History\(\.\.\.\)"):
        throttle(History, every=2)


def test_throttle_leaves_training_bitwise_alone():
    one, other = make_learner(throttle(Metrics(), every=2)), make_learner()
    for learner in (one, other):
        learner.fit(batches(3), epochs=2)
    assert torch.equal(one.model.weight, other.model.weight)


def test_event_log_of_these_tests_hears_every_event():
    assert set(EVENTS) >= STEP_EVENTS


def test_throttle_asks_a_function_once_a_step():
    log, asked = EventLog(), []

    def when(step, phase):
        asked.append((phase.name, step.index))
        return step.index % 3 == 1

    make_learner(throttle(log, when=when)).fit(batches(5), batches(2), epochs=1)
    assert asked == [*(("train", i) for i in range(5)), *(("val", i) for i in range(2))]
    assert (list(steps(log)), list(steps(log, "val"))) == ([1, 4], [1])
    assert set(steps(log)[1]) == STEP_EVENTS


def test_throttle_refuses_what_is_no_function():
    with pytest.raises(PluginError, match="it is a function"):
        throttle(EventLog(), when=True)
