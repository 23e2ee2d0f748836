"""Plugins that no phase of a fit would ever call."""

from __future__ import annotations

import warnings

import pytest
from helpers import batches, make_learner, on

from loopkit import Event, Phase, TrainingPhase, ValidationPhase, hookimpl
from loopkit.errors import CancelStep, PluginError
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


class Silent(Twiddling):
    """Lists an event, and forgets to emit it."""

    name = "silent"

    def step(self, learner, step):
        TrainingPhase.step(self, learner, step)


def test_event_that_a_phase_lists_and_does_not_emit_is_warned_of_once():
    plugin, calls = counting("twiddle_begin")
    learner = make_learner(plugin, phases=[Silent()])
    with pytest.warns(UserWarning, match="Silent") as caught:
        learner.fit({"silent": batches(2)}, epochs=2)
    (one,) = caught
    assert str(one.message) == (
        "phase 'silent': Silent.emits lists TwiddleBegin, which Silent.step did not emit in its first epoch, and "
        "plugin 'counting' waits for it: add step.emit(TwiddleBegin) to Silent.step, or leave it out of Silent.emits"
    )
    assert one.filename == __file__
    assert not calls
    learner.fit({"silent": batches(2)}, epochs=1)  # said once


def test_event_that_comes_late_in_the_first_epoch_is_none_to_warn_of_and_reaches_its_plugin_once():
    class Late(Twiddling):
        name = "late"

        def step(self, learner, step):
            TrainingPhase.step(self, learner, step)
            if step.index > 0:
                step.emit(TwiddleBegin)

    plugin, calls = counting("twiddle_begin")
    make_learner(plugin, phases=[Late()]).fit({"late": batches(3)}, epochs=2)
    assert len(calls) == 4


def test_epoch_that_is_cut_short_tells_nothing_of_events():
    def cancel(step, **_):
        if step.epoch.phase.training:
            raise CancelStep("no")

    plugin, _ = counting("twiddle_begin")
    learner = make_learner(plugin, on("step_begin", cancel, "cancels"), phases=[Silent()])
    learner.fit({"silent": batches(2)}, epochs=1)
    learner.remove("cancels")
    stops = on("step_end", lambda learner, **_: learner.stop(), "stops")
    learner.add(stops)
    learner.fit({"silent": batches(2)}, epochs=1)
    learner.remove("stops")
    with pytest.warns(UserWarning, match="TwiddleBegin"):
        learner.run("silent", batches(2))


def test_event_that_plugins_can_do_without_need_not_come():
    plugin, _ = counting("twiddle_begin")
    plugin.optional = ("twiddle_begin",)
    make_learner(plugin, phases=[Silent()]).fit({"silent": batches(2)}, epochs=1)


def test_plugin_that_comes_in_mid_epoch_may_be_too_late_for_an_event():
    class Once(Twiddling):
        name = "once"

        def step(self, learner, step):
            TrainingPhase.step(self, learner, step)
            if step.index == 0:
                step.emit(TwiddleBegin)

    learner = make_learner(phases=[Once()])
    with learner.epoch("once") as epoch:
        first, second = batches(2)
        epoch.step(first)
        learner.add(counting("twiddle_begin")[0])
        epoch.step(second)
