"""What is called in the place of others' hooks."""

from __future__ import annotations

import pytest

from engine.compile.making import Listener, Scale, batches, make
from loopkit import Event, hookimpl
from loopkit.errors import PluginError
from loopkit.hooks import hooks


class Everything:
    """Listens everywhere, changes nothing."""


def _everything(hook):
    names = ", ".join(("self", *hook.arguments))
    body = {
        "optimizer_step": "default()",
        "take_step": "default()",
        "setup_model": "return model",
        "setup_optimizer": "return optimizer",
        "setup_data": "return data",
        "move_batch": "return batch",
        "instrument_call": "return call",
    }
    scope = {}
    exec(f"def {hook.name}({names}): {body.get(hook.name, 'pass')}", scope)
    return hookimpl(scope[hook.name])


for _hook in hooks().values():
    event = Event.by_hook.get(_hook.name)
    if event is None or event.__module__ == Event.__module__:  # not those that other tests define
        setattr(Everything, _hook.name, _everything(_hook))


TRAIN_STEP = [
    "move_batch",
    "step_begin",
    "step_context",
    "take_step",
    "forward_begin",
    "loss_begin",
    "backward_begin",
    "backward_end",
    "update_begin",
    "optimizer_step",
    "update_end",
    "step_end",
]


class Spy:
    """Notes which hooks it is told of, and each call with what it is given."""

    def __init__(self, name="spy"):
        self.name = name
        self.told, self.calls, self.given = [], [], []

    @hookimpl
    def instrument_call(self, target, call):
        key = (target.phase, target.hook, target.plugin)
        self.told.append(key)

        def noted(*values):
            self.calls.append(key)
            self.given.append(dict(zip(target.arguments, values, strict=True)))
            return call(*values)

        return noted


def test_instrument_sees_every_call():
    spy = Spy()
    learner = make(Everything(), spy)
    learner.fit(batches(), batches(1), epochs=1)
    assert {plugin for _, _, plugin in spy.calls} == {"everything"}
    assert [hook for _, hook, _ in spy.calls] == [
        "setup_model",
        "setup_optimizer",
        *("setup_data", "setup_data"),  # once for each, when their lengths are asked for
        "fit_begin",
        *("epoch_context", "epoch_begin", *TRAIN_STEP, *TRAIN_STEP, "epoch_end", "phase_end"),
        *("epoch_context", "epoch_begin"),
        *("move_batch", "step_begin", "step_context", "take_step", "forward_begin", "loss_begin", "step_end"),
        *("epoch_end", "phase_end", "cycle_end", "fit_end"),
    ]
    assert {(phase, hook) for phase, hook, _ in spy.calls if hook in ("fit_begin", "setup_data", "epoch_end")} == {
        ("", "fit_begin"),
        *(("train", "setup_data"), ("val", "setup_data"), ("train", "epoch_end"), ("val", "epoch_end")),
    }


def test_instrument_is_told_of_other_plugins_alone():
    one, two = Spy("one"), Spy("two")
    make(two, one, Listener()).fit(batches(), epochs=1)
    assert {plugin for _, _, plugin in (*one.told, *two.told)} == {"listener"}
    assert one.calls == two.calls == [("train", "step_begin", "listener")] * 2


def test_instrument_is_given_the_arguments_of_the_implementation():
    class Takes:
        @hookimpl
        def step_end(self, step, learner):
            pass

        @hookimpl
        def epoch_end(self, phase):
            pass

        @hookimpl
        def fit_begin(self):
            pass

    spy = Spy()
    learner = make(Takes(), spy)
    learner.fit(batches(1), epochs=1)
    begin, step_end, epoch_end = spy.given
    assert begin == {}
    assert list(step_end) == ["step", "learner"]
    assert step_end["learner"] is learner
    assert step_end["step"].index == 0
    assert epoch_end == {"phase": learner.phases["train"]}


def test_instruments_wrap_each_other_in_the_order_of_the_plan():
    order = []

    class Notes(Spy):
        @hookimpl
        def instrument_call(self, call):
            return lambda *values: (order.append(self.name), call(*values))[1]

    class Second(Notes):
        @hookimpl(after=("zz",))
        def instrument_call(self, call):
            return lambda *values: (order.append(self.name), call(*values))[1]

    make(Second("a"), Notes("zz"), Listener()).run("train", batches(1))
    assert order == ["a", "zz"]


def test_instrument_leaves_the_result_as_it_is():
    plain, measured = make(Everything(), Scale()), make(Everything(), Scale(), Spy())
    for learner in (plain, measured):
        learner.fit(batches(), epochs=2)
    assert plain.model.weight.equal(measured.model.weight)
    measured.remove("spy")
    assert plain.explain() == measured.explain()


def test_instrument_that_is_removed_sees_nothing_more():
    spy = Spy()
    learner = make(Listener(), spy)
    learner.run("train", batches(1))
    learner.remove("spy")
    learner.run("train", batches(1))
    assert len(spy.calls) == 1


def test_instrument_sees_the_plugins_order():
    class Second(Listener):
        @hookimpl(after=("zz",))
        def step_begin(self):
            pass

    first, spy = Listener(), Spy()
    first.name = "zz"
    make(Second(), first, spy).run("train", batches(1))
    assert [plugin for _, _, plugin in spy.calls] == ["zz", "second"]


def test_instrument_that_returns_nothing_to_call_is_refused():
    class Forgets:
        @hookimpl
        def instrument_call(self, call):
            pass

    with pytest.raises(PluginError, match="plugin 'forgets': instrument_call returned NoneType, not what to call"):
        make(Forgets(), Listener())


def test_instrument_that_raises_is_named():
    class Broken:
        @hookimpl
        def instrument_call(self, call):
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken") as caught:
        make(Broken(), Listener())
    assert any("instrument_call of plugin 'broken'" in note for note in caught.value.__notes__)


def test_error_in_a_hook_that_is_instrumented_names_its_plugin():
    class Bad:
        @hookimpl
        def step_end(self):
            raise ValueError("no")

    with pytest.raises(ValueError, match="no") as caught:
        make(Spy(), Bad()).run("train", batches(1))
    assert any("step_end of plugin 'bad'" in note for note in caught.value.__notes__)
