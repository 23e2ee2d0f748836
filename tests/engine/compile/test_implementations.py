"""What a hook implementation can be."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from engine.compile.making import Listener, Rain, batches, make
from loopkit import Phase, TrainingPhase, ValidationPhase, hookimpl
from loopkit.errors import PluginConflict
from loopkit.events import StepBegin


@pytest.mark.parametrize(
    "limit", [TrainingPhase, (TrainingPhase, Rain), "train", "training", ("train", "weather"), (Rain, "train")]
)
def test_hookimpl_limits_a_hook_to_phases(limit):
    seen = []

    class Plugin:
        @hookimpl(phase=limit)
        def step_begin(self, phase):
            seen.append(phase.name)

    learner = make(Plugin())
    learner.run("val", batches(1))
    learner.run("train", batches(1))
    assert seen == ["train"]
    assert learner._engine.registry.plan(learner.phases["val"]).fire[StepBegin] is None


@pytest.mark.parametrize("name", ["val", "test", "predict"])
def test_hookimpl_limits_a_hook_to_the_phase_of_a_name(name):
    seen = []

    class Plugin:
        @hookimpl(phase=name)
        def epoch_begin(self, phase):
            seen.append(phase.name)

    learner = make(Plugin())
    learner.evaluate(batches(1))
    learner.evaluate(batches(1), ValidationPhase("test"))
    learner.predict(batches(1))
    assert seen == [name]


@pytest.mark.parametrize("call", ["evaluate", "predict", "fit"])
def test_error_outside_of_a_fit_leaves_the_contexts_and_fires_no_event_of_a_fit(call):
    seen = []

    class Plugin:
        @contextmanager
        def around(self):
            try:
                yield
            finally:
                seen.append("left")

        @hookimpl
        def epoch_context(self):
            return self.around()

        @hookimpl
        def step_begin(self):
            raise KeyError("x")

        @hookimpl
        def fit_begin(self):
            seen.append("fit_begin")

        @hookimpl
        def fit_end(self):
            seen.append("fit_end")

    with pytest.raises(KeyError):
        getattr(make(Plugin()), call)(batches(1), **({"epochs": 1} if call == "fit" else {}))
    assert seen == (["fit_begin", "left", "fit_end"] if call == "fit" else ["left"])


def test_hookimpl_limits_a_hook_to_subclasses_too():
    class Special(TrainingPhase):
        name = "special"

    seen = []

    class Plugin:
        @hookimpl(phase=TrainingPhase)
        def step_begin(self, phase):
            seen.append(phase.name)

    learner = make(Plugin(), phases=[Special()])
    for name in ("special", "train", "val"):
        learner.run(name, batches(1))
    assert seen == ["special", "train"]


def test_verbs_of_different_phases_go_together():
    class Special(TrainingPhase):
        name = "special"

    class Left:
        @hookimpl(phase=Special)
        def optimizer_step(self, default):
            default()

    class Other(Phase):
        name = "other"
        training = True

    class Right:
        @hookimpl(phase=Other)
        def optimizer_step(self, default):
            default()

    assert list(make(Left(), Right(), phases=[Special(), Other()]).plugins) == ["left", "right"]


def entry(learner, plugin, hook):
    impls = learner._engine.registry.implementations(hook)
    return next(impl.entry for impl in impls if impl.entry.plugin == plugin)


def test_class_declarations_are_defaults_for_all_hooks():
    class Plugin:
        reads = ("loss",)
        after = ("clip",)

        @hookimpl
        def step_end(self):
            pass

        @hookimpl(reads=("grads",))
        def update_begin(self):
            pass

    learner = make(Plugin())
    assert entry(learner, "plugin", "step_end").reads == ("loss",)
    assert entry(learner, "plugin", "update_begin").reads == ("grads",)
    assert entry(learner, "plugin", "update_begin").after == ("clip",)


def test_declaration_is_called_with_the_plugin():
    class Plugin:
        def __init__(self, monitor):
            self.monitor = monitor

        @hookimpl(reads=lambda plugin: (f"metrics.{plugin.monitor}",))
        def phase_end(self):
            pass

    assert entry(make(Plugin("val/loss")), "plugin", "phase_end").reads == ("metrics.val/loss",)


def test_class_declaration_can_be_a_method():
    class Plugin(Listener):
        def owns(self):
            return ("optimizer.lr",)

    with pytest.raises(PluginConflict, match="both own"):
        make(Plugin(), type("Other", (Plugin,), {})())


def test_hook_takes_any_arguments_in_any_order():
    seen = []

    class Plugin:
        @hookimpl
        def step_begin(self):
            seen.append(())

        @hookimpl
        def loss_begin(self, step, learner):
            seen.append((step.index, learner))

        @hookimpl
        def backward_begin(self, phase, step, learner):
            seen.append((phase.name, step.index, learner))

        @hookimpl
        def backward_end(self, learner, phase, step):
            seen.append((learner, phase.name, step.index))

        @hookimpl
        def update_begin(self, phase):
            seen.append((phase.name,))

        @hookimpl
        def update_end(self, learner, step):
            seen.append((learner, step.index))

        @hookimpl
        def epoch_end(self, phase, learner):
            seen.append((phase.name, learner))

    learner = make(Plugin())
    learner.run("train", batches(1))
    assert seen == [
        (),
        (0, learner),
        ("train", 0, learner),
        (learner, "train", 0),
        ("train",),
        (learner, 0),
        ("train", learner),
    ]


def test_verb_takes_any_arguments_in_any_order():
    seen = []

    class Plugin:
        @hookimpl
        def optimizer_step(self, default, phase, optimizer):
            seen.append((phase.name, optimizer))
            default()

    learner = make(Plugin())
    learner.run("train", batches(1))
    assert seen == [("train", learner.optimizer)]
    assert learner.progress.updates == 1


def test_hook_can_be_a_static_method():
    seen = []

    class Plugin:
        @staticmethod
        @hookimpl
        def step_begin(step):
            seen.append(step.index)

    make(Plugin()).run("train", batches())
    assert seen == [0, 1]


def test_plugin_can_be_a_dataclass_that_has_no_hash():
    @dataclass
    class Plugin:
        name: str
        steps: int = 0

        @hookimpl
        def step_begin(self):
            self.steps += 1

    a, b = Plugin("a"), Plugin("b")
    make(a, b).run("train", batches())
    assert (a.steps, b.steps) == (2, 2)
