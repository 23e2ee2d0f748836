"""Plans."""

from __future__ import annotations

import pytest

from engine.compile.making import Listener, batches, make
from loopkit import Event, Phase, TrainingPhase, hookimpl
from loopkit.errors import PluginError
from loopkit.events import BackwardBegin, LossBegin, StepBegin, StepEnd, UpdateBegin


def test_plan_has_none_for_events_without_listeners():
    learner = make(Listener())
    fire = learner._engine.registry.plan(learner.phases["train"]).fire
    assert {event for event, call in fire.items() if call is not None} == {StepBegin}
    assert {LossBegin, BackwardBegin, UpdateBegin, StepEnd} <= set(fire)


def test_plan_has_the_events_that_the_phase_can_fire_alone():
    learner = make()
    assert UpdateBegin not in learner._engine.registry.plan(learner.phases["val"]).fire


def test_plan_is_kept_while_the_plugins_stay():
    learner = make(Listener())
    registry = learner._engine.registry
    assert registry.plan(learner.phases["train"]) is registry.plan(learner.phases["train"])


def test_plan_is_rebuilt_when_a_plugin_is_added():
    learner, listener = make(), Listener()
    learner.run("train", batches())
    learner.add(listener)
    learner.run("train", batches())
    assert listener.steps == [0, 1]


def test_plan_is_rebuilt_when_a_plugin_is_removed():
    listener = Listener()
    learner = make(listener)
    learner.run("train", batches())
    learner.remove("listener")
    learner.run("train", batches())
    assert listener.steps == [0, 1]


def test_plan_is_rebuilt_in_mid_epoch_from_the_next_step_on():
    listener = Listener()
    learner = make()

    class Adds:
        @hookimpl
        def step_end(self, step):
            if step.index == 0:
                learner.add(listener)
            if step.index == 2:
                learner.remove("listener")

    learner.add(Adds())
    learner.run("train", batches(5))
    assert listener.steps == [1, 2]


def test_plan_has_an_event_that_was_defined_after_the_learner_was_built():
    learner = make()
    learner.run("train", batches())

    class DewBegin(Event):
        pass

    try:

        class Dew(Phase):
            name = "dew"
            emits = (DewBegin,)

            def step(self, learner, step):
                step.emit(DewBegin)

        seen = []

        class Plugin:
            @hookimpl
            def dew_begin(self, step):
                seen.append(step.index)

        learner.add(Plugin())
        learner.run(Dew(), batches())
        assert seen == [0, 1]
    finally:
        del Event.by_hook["dew_begin"]


def test_data_is_set_up_before_its_length_is_asked_for():
    class Halves:
        @hookimpl(phase=TrainingPhase)
        def setup_data(self, data):
            return data[::2]

    learner = make(Halves())
    result = learner.fit(batches(5), batches(4), epochs=2)
    assert (result.planned.steps, result.steps) == (6, 6)


def test_data_that_is_none_is_refused():
    class Forgets:
        @hookimpl
        def setup_data(self, data):
            pass

    with pytest.raises(PluginError, match="plugin 'forgets': setup_data returned NoneType, not an iterable"):
        make(Forgets()).fit(batches(1), epochs=1)
