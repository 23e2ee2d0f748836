"""Functions that plugins and phases hold: what they move, and no state holds, is named once at the first save."""

import contextlib

import pytest
import torch

from engine.kept.witnessed import named_by
from engine.life.runs import make
from loopkit import TrainingPhase, every, hookimpl
from loopkit.plugins import Checkpoint


class Counter:
    def __init__(self):
        self.n = 0

    def __call__(self):
        self.n += 1


def closing():
    n = 0

    def act():
        nonlocal n
        n += 1

    return act


def default_counter():
    def count(calls=[0]):  # noqa: B006  # what the test is about
        calls[0] += 1

    return count


def counter_in_closure():
    count = closing()
    return lambda: count()


def generator_in_closure():
    rng = torch.Generator()
    return lambda: torch.rand(1, generator=rng)


def object_in_closure():
    counter = Counter()
    return lambda: counter()


FUNCTIONS = {
    "closure": closing,
    "default": default_counter,
    "function in a closure": counter_in_closure,
    "generator": generator_in_closure,
    "object": object_in_closure,
}


def plugin_that_calls(act):
    class Calls:
        name = "calls"

        def __init__(self):
            self.act = act

        @hookimpl
        def step_end(self):
            self.act()

    return Calls()


def plugin_with_method(act):
    class Calls:
        name = "calls"

        @hookimpl
        def step_end(self):
            act()

    return Calls()


def plugin_with_context(act):
    class Calls:
        name = "calls"

        @hookimpl
        @contextlib.contextmanager
        def epoch_context(self):
            act()
            yield

    return Calls()


HOLDERS = {
    "attribute": plugin_that_calls,
    "method": plugin_with_method,
    "context": plugin_with_context,
}


@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize("kind", FUNCTIONS)
def test_what_a_function_of_a_plugin_moves_is_named_once(holder, kind, tmp_path):
    plugin = HOLDERS[holder](FUNCTIONS[kind]())
    [message] = named_by(make(plugin, Checkpoint(tmp_path, save=every(updates=1))))
    assert message.startswith("plugin 'calls' (Calls) has changed its '")
    assert "Keep it in an attribute of an object with a state" in message


def test_default_and_closure_of_a_method_of_a_phase_are_named(tmp_path):
    act = closing()

    class Own(TrainingPhase):
        def step(self, learner, step, calls=[0]):  # noqa: B006  # what the test is about
            act()
            calls[0] += 1
            super().step(learner, step)

    [message] = named_by(make(Checkpoint(tmp_path, save=every(updates=1)), phases=[Own()]))
    assert "has changed its 'step.calls'" in message
    assert "'step.act.n'" in message


def test_function_that_notes_what_it_sees_is_not_named(tmp_path):
    seen = []
    assert (
        named_by(make(plugin_with_method(lambda: seen.append(1.0)), Checkpoint(tmp_path, save=every(updates=1)))) == []
    )
