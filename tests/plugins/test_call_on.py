"""call_on: a function as a plugin."""

import functools

import pytest
from helpers import batches, make_learner, on

from loopkit import Event, Phase, TrainingPhase, ValidationPhase
from loopkit.errors import OrderError, PluginError
from loopkit.events import EpochEnd, FitEnd, StepEnd, UpdateBegin
from loopkit.plugins import call_on


class CallOnTestBegin(Event):
    """An event of these tests."""


class Emitting(Phase):
    name = "emitting"
    emits = (CallOnTestBegin,)

    def step(self, learner, step):
        step.emit(CallOnTestBegin)


def test_call_on_calls_the_function_on_its_event():
    seen = []

    def note(phase, learner):
        seen.append((phase.name, learner.progress.steps))

    make_learner(call_on(EpochEnd, note)).fit(batches(2), batches(1), epochs=2)
    assert seen == [("train", 2), ("val", 2), ("train", 4), ("val", 4)]


def test_call_on_takes_functions_without_arguments():
    seen = []
    make_learner(call_on(StepEnd, lambda: seen.append(1), name="count")).evaluate(batches(3))
    assert seen == [1, 1, 1]


def test_call_on_takes_the_result_of_a_fit():
    seen = []
    result = make_learner(call_on(FitEnd, lambda result: seen.append(result), name="keep")).fit(batches(1), epochs=1)
    assert seen == [result]


def test_call_on_takes_methods_and_objects():
    class Counts:
        def __init__(self):
            self.count = 0

        def add(self, step):
            self.count += step.samples

        def __call__(self, step):
            self.count += 100

    counts = Counts()
    partial = functools.partial(lambda number, step: counts.add(step), 1)
    plugins = call_on(StepEnd, counts.add), call_on(StepEnd, counts), call_on(StepEnd, partial, name="partial")
    make_learner(*plugins).evaluate(batches(2))
    assert counts.count == 216


def test_call_on_takes_events_of_ones_own():
    seen = []
    learner = make_learner(call_on(CallOnTestBegin, lambda step: seen.append(step.index), name="note"))
    learner.run(Emitting(), batches(2))
    assert seen == [0, 1]


def test_call_on_is_named_after_the_function():
    def shout():
        pass

    assert call_on(StepEnd, shout).name == "shout"
    assert repr(call_on(StepEnd, shout)) == "call_on('shout')"
    assert call_on(StepEnd, shout, name="whisper").name == "whisper"


def test_call_on_leaves_the_function_as_it_was():
    def shout():
        pass

    before = dict(vars(shout))
    call_on(StepEnd, shout)
    assert vars(shout) == before


def test_call_on_can_serve_two_events_with_one_function():
    seen = []

    def note(phase):
        seen.append(phase.name)

    make_learner(call_on(StepEnd, note), call_on(EpochEnd, note, name="note_too")).evaluate(batches(2))
    assert seen == ["val", "val", "val"]


def test_call_on_is_limited_to_a_phase():
    seen = []
    plugin = call_on(StepEnd, lambda phase: seen.append(phase.name), name="note", phase=TrainingPhase)
    make_learner(plugin).fit(batches(1), batches(1), epochs=1)
    assert seen == ["train"]


def test_call_on_is_ordered_by_what_it_declares():
    seen = []
    learner = make_learner(
        call_on(UpdateBegin, lambda: seen.append("reads"), name="a", reads=("grads",)),
        call_on(UpdateBegin, lambda: seen.append("updates"), name="b", updates=("grads",)),
        call_on(UpdateBegin, lambda: seen.append("writes"), name="c", writes=("grads",)),
        call_on(UpdateBegin, lambda: seen.append("before"), name="z", before=("c",)),
        call_on(UpdateBegin, lambda: seen.append("after"), name="A", after=("a",)),
    )
    learner.fit(batches(1), epochs=1)
    assert seen == ["before", "writes", "updates", "reads", "after"]


def test_call_on_clashes_like_any_plugin():
    one = call_on(UpdateBegin, lambda: None, name="one", updates=("grads",))
    other = call_on(UpdateBegin, lambda: None, name="other", updates=("grads",))
    with pytest.raises(OrderError, match="one"):
        make_learner(one, other)


def test_call_on_needs_a_name_for_a_lambda():
    with pytest.raises(PluginError, match=r'a lambda has no name; give it one, call_on\(\.\.\., name="\.\.\."\)'):
        call_on(StepEnd, lambda: None)


@pytest.mark.parametrize("event", ["step_context", 5, int, None])
def test_call_on_refuses_what_is_no_event(event):
    with pytest.raises(PluginError, match=r"is no event; give a class of loopkit.events"):
        call_on(event, print)


def test_call_on_refuses_arguments_that_the_event_has_not():
    plugin = call_on(StepEnd, lambda stepp: None, name="note")
    with pytest.raises(PluginError, match="no argument is called 'stepp'"):
        make_learner(plugin)


def test_call_on_passes_errors_through_with_its_name():
    def broken():
        raise ZeroDivisionError("deliberate")

    with pytest.raises(ZeroDivisionError) as caught:
        make_learner(call_on(StepEnd, broken), on("step_begin", lambda **_: None)).evaluate(batches(1))
    assert caught.value.__notes__ == ["loopkit: in step_end of plugin 'broken', phase 'val', epoch 0, step 0"]


WHEN = {
    "every": ({"every": 3}, [3, 6, 9]),
    "at": ({"at": 2}, [2]),
    "several": ({"at": [1, 4, 20]}, [1, 4]),
    "since": ({"since": 8}, [8, 9, 10]),
    "until": ({"until": 2}, [1, 2]),
    "all": ({"every": 2, "since": 3, "until": 8}, [4, 6, 8]),
}


@pytest.mark.parametrize("when", WHEN)
def test_call_on_counts_calls_in_each_phase_over_epochs_and_states(when):
    def stack():
        return [
            call_on("step_end", note, phase=TrainingPhase, **options),
            call_on(StepEnd, lambda: vals.append(1), name="b", phase=ValidationPhase, **options),
        ]

    def note(learner):
        seen.append(learner.progress.steps)

    (options, expected), seen, vals = WHEN[when], [], []
    first = make_learner(*stack())
    first.fit(batches(5), batches(5), epochs=1)
    again = make_learner(*stack())
    again.load_state_dict(first.state_dict())
    again.fit(batches(5), batches(5), epochs=1)
    assert (seen, len(vals)) == (expected, len(expected))


@pytest.mark.parametrize("options", [{"every": 0}, {"at": []}, {"at": [0]}, {"since": True}, {"until": 1.5}])
def test_call_on_refuses_what_is_no_count(options):
    with pytest.raises(
        PluginError, match=f"call_on: {next(iter(options))} is .*: it counts calls of the event, from 1"
    ):
        call_on(StepEnd, print, name="p", **options)


def test_call_on_refuses_a_hook_that_is_no_event():
    with pytest.raises(PluginError, match=r"'step_ends' is no event \(did you mean 'step_end'"):
        call_on("step_ends", print, name="p")


def test_call_on_counts_events_of_fits():
    seen = []
    learner = make_learner(call_on("fit_end", lambda result: seen.append(result.reason), name="n", every=2))
    for _ in range(4):
        learner.fit(batches(1), epochs=1)
    assert len(seen) == 2
