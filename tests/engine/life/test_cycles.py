"""`cycle_end`: a training epoch and all validations due after it are over."""

import copy

import pytest
from helpers import batches, make_learner, on

from loopkit import CancelFit, every, hookimpl


class Cycles:
    """Writes down the events that end something."""

    name = "cycles"

    def __init__(self):
        self.lines = []

    @hookimpl
    def phase_end(self, phase):
        self.lines.append(phase.name)

    @hookimpl
    def cycle_end(self, learner):
        self.lines.append(f"cycle {learner.progress.epochs}")
        assert not learner.current.open_epochs
        assert learner.current.can_save


@pytest.mark.parametrize(
    ("validate", "lines"),
    [
        (None, ["train", "cycle 1", "train", "cycle 2"]),
        (every(epochs=1), ["train", "val", "cycle 1", "train", "val", "cycle 2"]),
        (every(epochs=2), ["train", "cycle 1", "train", "val", "cycle 2"]),
        (every(updates=3), ["val", "train", "cycle 1", "val", "train", "val", "cycle 2"]),
    ],
)
def test_cycle_ends_after_the_validations_that_are_due(validate, lines):
    cycles = Cycles()
    data = (batches(4),) if validate is None else (batches(4), batches(1))
    options = {} if validate is None else {"validate": validate}
    make_learner(cycles).fit(*data, epochs=2, **options)
    assert cycles.lines == lines


def test_stop_in_a_phase_end_lets_the_last_validation_belong_to_the_cycle():
    cycles = Cycles()
    stop = on("phase_end", lambda learner, phase: learner.stop("enough") if phase.name == "train" else None, "stop")
    make_learner(cycles, stop).fit(batches(2), batches(1), epochs=4, validate=every(epochs=3))
    assert cycles.lines == ["train", "val", "cycle 1"]


@pytest.mark.parametrize("ask", [lambda learner: learner.stop("enough"), lambda learner: cancel()])
def test_stop_and_cancel_in_a_cycle_end_end_the_fit_after_a_last_validation(ask):
    cycles = Cycles()
    learner = make_learner(cycles, on("cycle_end", ask, "asking"))
    result = learner.fit(batches(2), batches(1), epochs=4, validate=every(epochs=3))
    assert (result.reason, cycles.lines) == ("stop", ["train", "cycle 1", "val"])


def cancel():
    raise CancelFit("enough")


def test_cancel_in_the_last_phase_end_of_a_cycle_ends_it():
    cycles = Cycles()
    leave = on("phase_end", lambda phase: cancel() if phase.name == "val" else None, "leave")
    make_learner(cycles, leave).fit(batches(2), batches(1), epochs=4)
    assert cycles.lines == ["train", "val", "cycle 1"]


def test_no_cycle_ends_after_an_error_in_the_validation():
    cycles = Cycles()
    fail = on("step_end", lambda phase: 1 / 0 if phase.name == "val" else None, "fail")
    with pytest.raises(ZeroDivisionError):
        make_learner(cycles, fail).fit(batches(2), batches(1), epochs=4)
    assert cycles.lines == ["train"]


def test_error_in_a_cycle_end_names_hook_and_plugin():
    with pytest.raises(ZeroDivisionError) as caught:
        make_learner(on("cycle_end", lambda: 1 / 0, "broken")).fit(batches(2), epochs=1)
    assert caught.value.__notes__ == ["loopkit: in cycle_end of plugin 'broken'"]


def test_each_round_of_an_own_loop_is_a_cycle():
    cycles = Cycles()
    learner = make_learner(cycles)
    for _ in learner.rounds(epochs=2):
        learner.run("train", batches(2))
        learner.run("train", batches(2))
        learner.evaluate(batches(1))
    assert cycles.lines == ["train", "train", "val", "cycle 2", "train", "train", "val", "cycle 4"]


def test_round_that_is_left_is_no_cycle():
    cycles = Cycles()
    learner = make_learner(cycles)
    for _ in learner.rounds(epochs=2):
        learner.run("train", batches(2))
        break
    assert cycles.lines == ["train"]


def test_nothing_outside_of_a_fit_is_a_cycle():
    cycles = Cycles()
    learner = make_learner(cycles)
    learner.run("train", batches(2))
    learner.evaluate(batches(1))
    assert cycles.lines == ["train", "val"]


@pytest.mark.parametrize(
    ("hook", "phase", "rest"),
    [
        ("phase_end", "train", ["val", "cycle 1", "train", "val", "cycle 2"]),
        ("step_end", "val", ["val", "cycle 1", "train", "val", "cycle 2"]),
        ("phase_end", "val", ["cycle 1", "train", "val", "cycle 2"]),
        ("cycle_end", None, ["train", "val", "cycle 2"]),
    ],
)
def test_cycle_ends_once_in_a_run_and_its_resume(hook, phase, rest):
    saved = []

    def save(learner, phase_name):
        if not saved and phase_name == phase:
            saved.append(copy.deepcopy(learner.state_dict()))

    if phase is None:
        saver = on(hook, lambda learner: save(learner, None), "saver", after=("cycles",))
    else:
        saver = on(hook, lambda learner, phase: save(learner, phase.name), "saver", after=("cycles",))
    make_learner(Cycles(), saver).fit(batches(2), batches(1), epochs=2)
    cycles = Cycles()
    learner = make_learner(cycles)
    learner.load_state_dict(saved[0], allow=("saver",))
    learner.fit(batches(2), batches(1), epochs=2)
    assert cycles.lines == rest


def test_state_of_a_version_without_the_event_ends_the_cycle_whose_validation_is_due():
    saved = []
    saver = on("phase_end", lambda learner: saved.append(copy.deepcopy(learner.state_dict())), "saver")
    make_learner(saver).fit(batches(2), batches(1), epochs=1)
    for state, lines in zip(saved, (["val", "cycle 1"], []), strict=True):
        del state["fit"]["cycle"]
        cycles = Cycles()
        learner = make_learner(cycles)
        learner.load_state_dict(state, allow=("saver",))
        learner.fit(batches(2), batches(1), epochs=1)
        assert cycles.lines == lines


def test_model_has_its_own_weights_and_mode():
    seen = []
    make_learner(on("cycle_end", lambda learner: seen.append(learner.model.training), "seen")).fit(
        batches(2), batches(1), epochs=1
    )
    assert seen == [True]
