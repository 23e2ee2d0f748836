"""Plugins that no phase of a fit would ever call."""

from __future__ import annotations

import warnings

import pytest
from helpers import batches, make_learner, on

from loopkit import Event, Phase, TrainingPhase, ValidationPhase, hookimpl
from loopkit.errors import PluginError
from loopkit.events import LossBegin


class TwiddleBegin(Event):
    """A user's event."""


class Twiddling(TrainingPhase):
    """Trains, and emits an event of its own."""

    name = "twiddling"
    emits = (*TrainingPhase.emits, TwiddleBegin)

    def step(self, learner, step):
        super().step(learner, step)
        step.emit(TwiddleBegin)


class Measuring(Phase):
    name = "measuring"
    emits = (LossBegin,)

    def step(self, learner, step):
        step.emit(LossBegin)


def counting(hook, **options):
    calls = []
    return on(hook, lambda **_: calls.append(1), "counting", **options), calls


@pytest.mark.parametrize(
    ("hook", "options"),
    [("step_begin", {"phase": ValidationPhase}), ("epoch_context", {"phase": (ValidationPhase, Measuring)})],
)
def test_plugin_that_waits_for_a_validation_is_refused_in_a_fit_without_one(hook, options):
    plugin, calls = counting(hook, **options)
    ended = []
    learner = make_learner(plugin, on("fit_end", lambda result, **_: ended.append(result.reason), "ends"))
    with pytest.raises(PluginError) as raised:
        learner.fit(batches(3), epochs=1)
    said = str(raised.value)
    assert said.startswith(f"plugin 'counting' is never called: none of its hooks ({hook} of ValidationPhase")
    assert "(train)" in said
    assert "optional = (...)" in said
    assert (learner.progress.steps, ended, calls) == (0, [], [])  # nothing has begun
    learner.fit(batches(3), batches(2), epochs=1)
    assert calls


def test_hook_of_training_is_refused_where_no_phase_trains():
    plugin, _ = counting("backward_begin")
    learner = make_learner(plugin, phases=[Measuring()])
    with pytest.raises(PluginError, match=r"'counting' is never called: .*\(backward_begin\).*measuring"):
        learner.fit({"measuring": batches(3)}, epochs=1)
    replacing = on("optimizer_step", lambda default, **_: default(), "replacing")
    with pytest.raises(PluginError, match=r"'replacing' is never called"):
        make_learner(replacing, phases=[Measuring()]).fit({"measuring": batches(3)}, epochs=1)


def test_standard_phase_that_the_fit_does_not_run_does_not_count():
    learner = make_learner(counting("step_begin", phase=TrainingPhase)[0], phases=[Measuring()])
    with pytest.raises(PluginError, match="never called"):
        learner.fit({"measuring": batches(3)}, epochs=1)


def test_phase_of_ones_own_counts_though_the_fit_may_not_run_it():
    plugin, calls = counting("twiddle_begin")
    make_learner(plugin, phases=[Twiddling()]).fit({"train": batches(3)}, epochs=1)
    assert not calls


def test_plugin_that_is_called_somewhere_or_may_stay_idle_passes():
    class Some:
        @hookimpl(phase=ValidationPhase)
        def step_begin(self):
            """Never comes."""

        @hookimpl
        def phase_end(self):
            """Comes."""

    class Idle(Some):
        optional = ("step_begin",)
        phase_end = None

    for plugin in (Some(), Idle(), on("setup_model", lambda model, **_: model), on("fit_begin", lambda **_: None)):
        assert make_learner(plugin).fit(batches(3), epochs=1).steps == 3


def rounds(learner, *phases):
    for _ in learner.rounds(epochs=2):
        for phase in phases:
            learner.run(phase, batches(2))


def test_loop_of_ones_own_warns_once_at_its_end():
    learner = make_learner(counting("step_begin", phase=ValidationPhase)[0])
    with pytest.warns(UserWarning, match=r"'counting' is never called.*\(train\)") as caught:
        rounds(learner, "train")
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rounds(learner, "train", "val")


def test_plan_lists_what_is_never_called():
    class Other(Measuring):
        name = "other"

    learner = make_learner(counting("step_begin", phase=Other)[0], on("step_end", lambda **_: None, "called"))
    said = "plugin 'counting' is never called: none of its hooks (step_begin of Other) can fire"
    assert said in str(learner.explain())
    assert "'called'" not in learner.explain().never_called[0]
    assert "never called" not in str(learner.explain("train"))
