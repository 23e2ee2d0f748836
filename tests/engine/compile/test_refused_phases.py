"""What is refused when a phase is first run."""

from __future__ import annotations

import pytest

from engine.compile.making import Listener, Rain, batches, make
from loopkit import hookimpl
from loopkit.errors import PluginError


class Umbrella:
    def __init__(self):
        self.opened = 0

    @hookimpl
    def rain_begin(self):
        self.opened += 1


def test_learner_refuses_an_event_that_no_known_phase_emits_before_the_first_step():
    listener = Listener()
    learner = make(Umbrella(), listener)
    with pytest.raises(PluginError, match=r"plugin 'umbrella', rain_begin: no known phase emits .*phases=\[\.\.\.\]"):
        learner.fit(batches(), epochs=1)
    assert listener.steps == []
    assert not learner._engine.running.epochs
    learner.remove("umbrella")
    learner.fit(batches(), epochs=1)
    assert listener.steps == [0, 1]


def test_learner_calls_a_plugin_for_the_event_of_a_phase_it_was_given():
    umbrella = Umbrella()
    learner = make(umbrella, phases=[Rain()])
    learner.run("train", batches())
    assert umbrella.opened == 0
    learner.run("rain", batches())
    assert umbrella.opened == 2


def test_learner_calls_a_plugin_for_the_event_of_a_phase_it_learns_of_when_it_is_run():
    umbrella = Umbrella()
    make(umbrella).run(Rain(), batches())
    assert umbrella.opened == 2


def reader(state, hook="phase_end"):
    def method(self):
        pass

    return type("Reader", (), {hook: hookimpl(reads=(state,))(method)})()


class Accuracy:
    @hookimpl(writes=("metrics.*/accuracy",))
    def epoch_end(self):
        pass


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ("metrics.val/accurcy", r"which no plugin makes \(did you mean 'val/accuracy'\?\); made are val/accuracy"),
        ("metrics.vall/accuracy", r"but no phase is called 'vall' \(did you mean 'val'\?\)"),
    ],
)
def test_learner_refuses_a_metric_that_is_read_and_never_made(state, message):
    learner = make(Accuracy(), reader(state), Listener())
    with pytest.raises(PluginError, match=rf"plugin 'reader', phase_end: reads '{state}', {message}"):
        learner.run("train", batches())
    assert learner.plugins["listener"].steps == []


def test_learner_refuses_a_metric_that_is_read_when_none_is_made():
    with pytest.raises(PluginError, match=r"reads 'metrics.val/loss', which no plugin makes; made are none"):
        make(reader("metrics.val/loss")).evaluate(batches())


@pytest.mark.parametrize("state", ["metrics.val/accuracy", "metrics.*/accuracy", "metrics.val/*", "metrics"])
def test_learner_takes_a_metric_that_is_read_and_made(state):
    learner = make(Accuracy(), reader(state))
    learner.run("train", batches())
    assert learner.progress.steps == 2


def test_learner_refuses_plugin_state_that_is_read_and_never_made():
    with pytest.raises(PluginError, match=r"reads 'clip.norm', but no plugin is called 'clip' or provides it"):
        make(reader("clip.norm")).run("train", batches())


def test_learner_checks_again_after_a_plugin_came():
    learner = make()
    learner.run("train", batches())
    learner.add(Umbrella())
    with pytest.raises(PluginError, match="rain_begin: no known phase emits"):
        learner.run("train", batches())
