from __future__ import annotations

import copy
import pickle
import re
from contextlib import contextmanager
from dataclasses import dataclass

import pluggy
import pytest
import torch
from torch import nn

from loopkit import Event, Learner, Phase, TrainingPhase, ValidationPhase, hookimpl
from loopkit.errors import OrderError, PluginConflict, PluginError
from loopkit.events import BackwardBegin, LossBegin, StepBegin, StepEnd, UpdateBegin
from loopkit.hooks import hooks
from loopkit.metrics import FunctionMetric, Precision
from loopkit.schedules import cosine, warmup


def make(*plugins, **options):
    torch.manual_seed(0)
    return Learner(
        nn.Linear(4, 3),
        nn.CrossEntropyLoss(),
        lambda p: torch.optim.SGD(p, lr=0.1),
        standard=False,
        plugins=plugins,
        **options,
    )


def batches(count=2):
    rng = torch.Generator().manual_seed(0)
    return [(torch.randn(5, 4, generator=rng), torch.tensor([0, 1, 2, 0, 1])) for _ in range(count)]


def scheduler(factory, **options):
    return factory(torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1), **options)


def refused(*plugins, message, error=PluginError, **options):
    """Refused when the learner is built, and when they are added to one, which stays as it was."""
    with pytest.raises(error, match=message):
        make(*plugins, **options)
    learner = make(Listener())
    plan = learner.explain()
    if not options:
        with pytest.raises(error, match=message):
            learner.add(*plugins)
        assert list(learner.plugins) == ["listener"]
        assert learner.explain() == plan


class Listener:
    def __init__(self):
        self.steps = []

    @hookimpl
    def step_begin(self, step):
        self.steps.append(step.index)


# What is refused when a plugin is added


def test_plugin_with_a_misspelt_hook_is_refused_with_the_nearest_spelling():
    class Plugin:
        @hookimpl
        def step_begins(self):
            pass

    refused(Plugin(), message=r"plugin 'plugin' \(Plugin\): there is no hook 'step_begins' \(did you mean 'step_begin'")


def test_plugin_with_an_unknown_hook_is_refused():
    class Plugin:
        @hookimpl
        def weather(self):
            pass

    refused(Plugin(), message=r"there is no hook 'weather'$")


def test_plugin_with_a_misspelt_argument_is_refused_with_the_nearest_spelling():
    class Plugin:
        @hookimpl
        def step_begin(self, lerner):
            pass

    refused(
        Plugin(),
        message=r"step_begin: no argument is called 'lerner' \(did you mean 'learner'\?\); "
        r"it can take learner, phase, epoch, step$",
    )


def test_plugin_that_wants_a_step_from_an_epoch_event_is_refused():
    class Plugin:
        @hookimpl
        def epoch_end(self, step):
            pass

    refused(Plugin(), message=r"epoch_end: no argument is called 'step'; it can take learner, phase, epoch$")


@pytest.mark.parametrize("kind", ["*args", "**kwargs", "*, step"])
def test_plugin_with_arguments_that_are_not_plain_is_refused(kind):
    scope = {"hookimpl": hookimpl}
    exec(f"class Plugin:\n    @hookimpl\n    def step_begin(self, {kind}): pass", scope)
    refused(scope["Plugin"](), message="no argument is called .*; it can take learner, phase, epoch, step")


def test_plugin_with_an_argument_with_a_default_is_refused():
    class Plugin:
        @hookimpl
        def step_begin(self, step=None):
            pass

    refused(Plugin(), message="step_begin: argument 'step' has a default; a hook's arguments have none")


def test_plugin_whose_method_has_a_hooks_name_but_no_marker_is_refused():
    class Plugin:
        def step_begin(self):
            pass

    refused(Plugin(), message="step_begin has a hook's name but no @hookimpl; add it, or rename the method")


def test_plugin_whose_subclass_forgets_the_marker_is_refused():
    class Quiet(Listener):
        def step_begin(self, step):
            pass

    refused(Quiet(), message="step_begin has a hook's name but no @hookimpl")


def test_plugin_class_instead_of_an_instance_is_refused():
    refused(Listener, message=r"Listener is a class; a plugin is an instance: Listener\(\.\.\.\)")


def test_plugin_class_with_a_name_property_is_refused_as_a_class():
    class Named:
        name = property(lambda self: "named")

    refused(Named, message="Named is a class")


@pytest.mark.parametrize("wrong", [None, (), [Listener()]])
def test_plugin_that_is_no_object_with_hooks_is_refused(wrong):
    refused(wrong, message="is no plugin: plugins are objects with hooks")


def test_plugin_that_is_registered_already_is_refused():
    learner = make(Listener())
    with pytest.raises(PluginError, match=r"two plugins are called 'listener': the same object; give it name="):
        learner.add(learner.plugins["listener"])
    assert list(learner.plugins) == ["listener"]


def test_plugins_of_one_name_are_refused():
    class Named(Listener):
        def __init__(self, name):
            super().__init__()
            self.name = name

        def __repr__(self):
            return f"Named({self.name!r})"

    assert list(make(Named("a"), Named("b")).plugins) == ["a", "b"]
    refused(
        Named("a"),
        Named("a"),
        message=r"two plugins are called 'a': Named\('a'\) and Named\('a'\); give it name=\.\.\. to have both",
    )


@pytest.mark.parametrize("name", ["", "a.b", "a\nb", 3])
def test_plugin_with_an_impossible_name_is_refused(name):
    plugin = Listener()
    plugin.name = name
    refused(plugin, message="its name is .*; a name is printable text without a dot")


@pytest.mark.parametrize("word", ["two words", 3])
def test_plugin_that_provides_no_word_is_refused(word):
    plugin = Listener()
    plugin.name, plugin.provides = "other", word
    refused(plugin, message=f"provides is {word!r}; it is one word, such as 'clip'")


@pytest.mark.parametrize("option", ["tryfirst", "trylast"])
def test_hookimpl_refuses_pluggys_ways_to_order(option):
    with pytest.raises(PluginError, match=rf"hookimpl\({option}=.*declared access; use before=.* or after="):
        hookimpl(**{option: True})


@pytest.mark.parametrize("option", ["wrapper", "hookwrapper"])
def test_hookimpl_refuses_pluggys_wrappers(option):
    with pytest.raises(PluginError, match=rf"hookimpl\({option}=.*; use a step_context or epoch_context"):
        hookimpl(**{option: True})


def test_plugin_with_an_option_of_pluggys_marker_is_refused():
    class Plugin:
        @pluggy.HookimplMarker("loopkit")(tryfirst=True)
        def step_begin(self):
            pass

    refused(Plugin(), message="step_begin uses pluggy's own options; use before=, after= or a context")


def test_plugin_marked_by_pluggys_marker_is_refused():
    class Plugin:
        @pluggy.HookimplMarker("loopkit")
        def step_begin(self):
            pass

    refused(Plugin(), message=r"step_begin is marked by pluggy's marker; use loopkit\.hookimpl")


@pytest.mark.parametrize("label", ["reads", "updates", "writes", "before", "after"])
def test_hookimpl_refuses_a_declaration_that_is_a_string(label):
    with pytest.raises(PluginError, match=rf"hookimpl\({label}=.*is the string 'grads': write a tuple, \('grads',\)"):
        hookimpl(**{label: "grads"})


@pytest.mark.parametrize("value", [["grads"], ("grads", 1), 3])
def test_hookimpl_refuses_a_declaration_that_is_no_tuple_of_names(value):
    with pytest.raises(PluginError, match=r"hookimpl\(reads=.*: write a tuple of names, or a function of the plugin"):
        hookimpl(reads=value)


@pytest.mark.parametrize("label", ["reads", "updates", "writes", "before", "after", "owns"])
def test_plugin_with_a_class_declaration_that_is_a_string_is_refused(label):
    plugin = type("Plugin", (Listener,), {label: "grads"})()
    refused(plugin, message=rf"plugin 'plugin': {label} is the string 'grads': write a tuple")


def test_plugin_whose_declaring_function_returns_a_string_is_refused():
    class Plugin:
        @hookimpl(reads=lambda plugin: "grads")
        def update_begin(self):
            pass

    refused(Plugin(), message="plugin 'plugin': what reads returns is the string 'grads'")


@pytest.mark.parametrize("label", ["reads", "updates", "writes"])
def test_plugin_with_a_misspelt_state_is_refused_with_the_nearest_spelling(label):
    class Plugin:
        @hookimpl(**{label: ("grad",)})
        def update_begin(self):
            pass

    refused(
        Plugin(),
        message=r"plugin 'plugin', update_begin: no state is called 'grad' \(did you mean 'grads'\?\); known are batch",
    )


def test_plugin_with_an_unknown_state_is_refused():
    class Plugin:
        @hookimpl(reads=("weather.rain",))
        def update_begin(self):
            pass

    refused(Plugin(), message=r"no state is called 'weather.rain'; known are .*, step.<attribute> and <plugin>.<field>")


def test_plugin_that_owns_a_misspelt_state_is_refused_with_the_nearest_spelling():
    plugin = type("Plugin", (Listener,), {"owns": ("optimzer.lr",)})()
    refused(plugin, message=r"plugin 'plugin': owns 'optimzer.lr', .* \(did you mean 'optimizer'\?\)")


@pytest.mark.parametrize("label", ["before", "after"])
@pytest.mark.parametrize(("word", "meant"), [("lisener", "listener"), ("clipp", "clip")])
def test_plugin_with_a_misspelt_neighbour_is_refused_with_the_nearest_spelling(label, word, meant):
    class Plugin:
        @hookimpl(**{label: (word,)})
        def step_begin(self):
            pass

    message = rf"plugin 'plugin', step_begin: no plugin is called '{word}' \(did you mean '{meant}'\?\)"
    with pytest.raises(OrderError, match=message):
        make(Listener(), Plugin())


def test_learner_refuses_an_order_with_a_misspelt_plugin():
    with pytest.raises(OrderError, match=r"order: no plugin is called 'listner' \(did you mean 'listener'\?\)"):
        make(Listener(), order=["listner", "clip"])


def test_learner_takes_an_order_with_absent_plugins():
    assert list(make(Listener(), order=["listener", "weather"]).plugins) == ["listener"]


@pytest.mark.parametrize("order", ["listener", ["listener", ["clip", "noise"]], [["clip", 3]]])
def test_learner_refuses_an_order_that_is_no_list_of_names(order):
    with pytest.raises(OrderError, match=r"order (is the string|holds) .*: write (a|one) list of plugin names"):
        make(Listener(), order=order)


@pytest.mark.parametrize("phase", ["", 3, ValidationPhase(), (TrainingPhase, 3)])
def test_hookimpl_refuses_a_phase_that_is_neither_a_name_nor_a_class(phase):
    with pytest.raises(PluginError, match=r"hookimpl\(phase=.*\): write the name of a phase, .*, or its class"):
        hookimpl(phase=phase)


@pytest.mark.parametrize(
    ("name", "meant"),
    [("vall", "val"), ("validation", "val"), ("eval", "val"), ("trainig", "training"), ("prediction", "predict")],
)
@pytest.mark.parametrize("wrapped", [str, lambda name: (TrainingPhase, name)], ids=["name", "tuple"])
def test_hookimpl_names_a_phase_that_is_close_to_a_known_one(name, meant, wrapped):
    class Plugin:
        @hookimpl(phase=wrapped(name))
        def step_begin(self):
            """Never comes."""

    with pytest.raises(PluginError, match=rf"'plugin', step_begin: phase='{name}', .*did you mean '{meant}'\?"):
        make(Plugin()).fit(batches(1), epochs=1)


def test_hookimpl_takes_a_name_that_is_close_to_another_one_if_there_is_such_a_phase():
    seen = []

    class Plugin:
        @hookimpl(phase="validation")
        def phase_end(self, phase):
            seen.append(phase.name)

    make(Plugin()).fit(batches(1), {"val": batches(1), "validation": batches(1)}, epochs=1)
    assert seen == ["validation"]


def test_hookimpl_with_a_name_that_is_like_none_is_never_called():
    class Plugin:
        @hookimpl(phase="test")
        def step_begin(self):
            """Never comes."""

    with pytest.raises(PluginError, match=r"'plugin' is never called: none of its hooks \(step_begin of test\)"):
        make(Plugin()).fit(batches(1), epochs=1)


@pytest.mark.parametrize("hook", ["fit_begin", "fit_end", "setup_model"])
def test_plugin_that_limits_a_hook_without_a_phase_is_refused(hook):
    def method(self):
        pass

    plugin = type("Plugin", (), {hook: hookimpl(phase=TrainingPhase)(method)})()
    refused(plugin, message=rf"{hook} belongs to no phase, so it takes no phase=\.\.\.")


def test_plugins_that_own_the_same_state_are_refused():
    a = type("Schedule", (Listener,), {"owns": ("optimizer.lr",)})()
    b = type("Plateau", (Listener,), {"owns": ("optimizer.lr",)})()
    refused(a, b, message="'plateau' and 'schedule' both own \"optimizer.lr\": keep one of them", error=PluginConflict)


def test_plugins_that_own_a_state_and_what_is_under_it_are_refused():
    a = type("First", (Listener,), {"owns": ("optimizer",)})()
    b = type("Second", (Listener,), {"owns": ("optimizer.lr",)})()
    refused(a, b, message="'first' and 'second' both own", error=PluginConflict)


def test_plugin_may_own_a_state_twice():
    assert list(make(type("Plugin", (Listener,), {"owns": ("grads", "grads.scale")})()).plugins) == ["plugin"]


class Verb:
    def __init__(self, name="verb"):
        self.name = name
        self.calls = 0

    @hookimpl
    def optimizer_step(self, default):
        self.calls += 1
        default()


def test_plugins_with_the_same_verb_are_refused():
    message = "'a' and 'b' both implement optimizer_step in phase 'train': keep one"
    refused(Verb("a"), Verb("b"), message=message, error=PluginConflict)


def test_plugins_that_update_the_same_state_without_an_order_are_refused():
    class Clip:
        @hookimpl(updates=("grads",))
        def update_begin(self):
            pass

    class Noise(Clip):
        pass

    refused(Clip(), Noise(), message="plugins 'clip' and 'noise' both update 'grads'", error=OrderError)
    assert list(make(Clip(), Noise(), order=["noise", "clip"]).plugins) == ["clip", "noise"]


@pytest.mark.parametrize("hook", ["setup_model", "fit_begin", "epoch_context", "step_end", "move_batch"])
def test_plugins_in_a_cycle_are_refused_in_every_kind_of_hook(hook):
    a = type("A", (), {hook: hookimpl(before=("b",))(lambda self: None)})()
    b = type("B", (), {hook: hookimpl(before=("a",))(lambda self: None)})()
    refused(a, b, message=f"{hook}: the order of the plugins is a cycle, 'a' -> 'b' -> 'a'", error=OrderError)


# What is refused when a phase is first run


class Quiet(Phase):
    name = "quiet"

    def step(self, learner, step):
        pass


class RainBegin(Event):
    """Of a phase that a learner may not know."""


class Rain(Phase):
    name = "rain"
    emits = (RainBegin,)

    def step(self, learner, step):
        step.emit(RainBegin)


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
    assert not learner._core.epochs
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


# All or none


def test_add_takes_none_of_several_plugins_if_one_is_wrong():
    learner = make()
    with pytest.raises(PluginError, match="is a class"):
        learner.add(Verb(), Listener)
    assert learner.plugins == {}


def test_replace_keeps_the_old_plugin_if_the_new_one_is_wrong():
    old = Listener()
    learner = make(old)
    with pytest.raises(PluginError, match="is a class"):
        learner.replace("listener", Verb)
    assert learner.plugins == {"listener": old}
    learner.run("train", batches())
    assert old.steps == [0, 1]


def test_remove_of_an_unknown_plugin_removes_none():
    learner = make(Listener(), Verb())
    with pytest.raises(
        PluginError, match=r"no plugin is called 'verbs' \(did you mean 'verb'\?\); there are: listener, verb"
    ):
        learner.remove("listener", "verbs")
    assert list(learner.plugins) == ["listener", "verb"]


class Scaled(nn.Module):
    def __init__(self, module, factor):
        super().__init__()
        self.module = module
        self.factor = factor
        self.calls = 0

    def forward(self, *inputs):
        self.calls += 1
        return self.module(*inputs) * self.factor


class Scale:
    def __init__(self, factor=2.0, name="scale"):
        self.factor = factor
        self.name = name
        self.wrappers = []

    @hookimpl
    def setup_model(self, model):
        self.wrappers.append(Scaled(model, self.factor))
        return self.wrappers[-1]


class Broken:
    name = "zz"

    @hookimpl
    def setup_model(self):
        raise RuntimeError("broken")


@pytest.mark.parametrize("wrapped", [False, True])
def test_add_unwraps_the_model_if_a_plugin_fails_to_set_it_up(wrapped):
    learner = make(*([Scale(3.0, "first")] if wrapped else []))
    x = torch.ones(1, 4)
    before = learner.model(x)
    with pytest.raises(RuntimeError, match="broken"):
        learner.add(Scale(), Broken())
    assert list(learner.plugins) == (["first"] if wrapped else [])
    assert learner.model(x).equal(before)


def test_replace_puts_the_old_plugin_back_if_the_new_one_fails_to_set_up():
    learner = make(Listener())
    old = learner.plugins["listener"]
    new = Broken()
    new.name = "listener"
    with pytest.raises(RuntimeError, match="broken"):
        learner.replace("listener", new)
    assert learner.plugins == {"listener": old}


class FitLog:
    def __init__(self, log, label, fails=False):
        self.name = "fit_log"
        self.log, self.label, self.fails = log, label, fails

    @hookimpl
    def fit_begin(self):
        self.log.append(f"begin {self.label}")
        if self.fails:
            raise RuntimeError("broken")

    @hookimpl
    def fit_end(self):
        self.log.append(f"end {self.label}")


def test_replace_in_a_fit_ends_each_plugin_that_began_once_even_if_the_new_one_failed():
    log = []
    learner = make(FitLog(log, "old"))
    with learner.rounds():
        with pytest.raises(RuntimeError, match="broken"):
            learner.replace("fit_log", FitLog(log, "failing", fails=True))
        learner.replace("fit_log", FitLog(log, "new"))
    assert log == ["begin old", "begin failing", "end failing", "begin new", "end new", "end old"]


# What a hook implementation can be


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
    assert learner._core.registry.plan(learner.phases["val"]).fire[StepBegin] is None


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
    impls = learner._core.registry.implementations(hook)
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


# Plans


def test_plan_has_none_for_events_without_listeners():
    learner = make(Listener())
    fire = learner._core.registry.plan(learner.phases["train"]).fire
    assert {event for event, call in fire.items() if call is not None} == {StepBegin}
    assert {LossBegin, BackwardBegin, UpdateBegin, StepEnd} <= set(fire)


def test_plan_has_the_events_that_the_phase_can_fire_alone():
    learner = make()
    assert UpdateBegin not in learner._core.registry.plan(learner.phases["val"]).fire


def test_plan_is_kept_while_the_plugins_stay():
    learner = make(Listener())
    assert learner._core.registry.plan(learner.phases["train"]) is learner._core.registry.plan(learner.phases["train"])


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


# What is called in the place of others' hooks


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
        *("epoch_end", "phase_end", "fit_end"),
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


# Explain


class Sync:
    provides = "sync"
    owns = ("grads.sync",)

    @hookimpl(writes=("grads",))
    def update_begin(self, step):
        pass


class Clip:
    provides = "clip"

    @hookimpl(updates=("grads",))
    def update_begin(self, step):
        pass


class Norms:
    @hookimpl
    def fit_begin(self):
        pass

    @hookimpl
    def fit_end(self):
        pass

    @hookimpl(reads=("grads", "params"), writes=("metrics.*/norm",), before=("clip",))
    def update_begin(self, step):
        pass


class Files:
    @hookimpl(before=("norms",))
    def fit_begin(self):
        pass

    @hookimpl
    def fit_end(self):
        pass

    @hookimpl(reads=("*",))
    def step_end(self, step):
        pass


class Display:
    @hookimpl(phase=ValidationPhase)
    def step_end(self, step):
        pass


def test_explain_says_what_runs_when_and_why():
    learner = make(Norms(), Display(), Clip(), Files(), Sync())
    assert (
        str(learner.explain(full=True))
        == """\
the learner
===========
fit_begin
  1. files
  2. norms
                because 'files' says before 'norms'
fit_end (in reverse of fit_begin)
  1. norms
  2. files

phase 'train'
=============
update_begin
  1. sync     writes grads
  2. norms    reads grads, params; writes metrics.*/norm
                because 'sync' writes 'grads', 'norms' reads 'grads'
  3. clip     updates grads
                because 'norms' says before 'clip'
                because 'sync' writes 'grads', 'clip' updates 'grads'
step_end
  1. files    reads *

phase 'val'
===========
step_end
  1. display
  2. files    reads *
                because 'files' reads everything

phase 'predict'
===============
step_end
  1. files    reads *"""
    )


def test_explain_says_each_reason_once():
    learner = make(Norms(), Files(), Sync(), Clip(), order=["sync", "norms", "clip"])
    assert [row.reasons for row in learner.explain("train").rows if row.plugin == "clip"] == [
        ("the order given to the learner",)
    ]


def test_explain_of_a_phase_leaves_the_others_out():
    learner = make(Display())
    assert str(learner.explain("val")) == "phase 'val'\n===========\nstep_end\n  1. display"


def test_explain_without_plugins_says_so():
    assert str(make().explain()) == "no plugins"


# Models that are wrapped


def test_wrapped_model_stays_the_users_module():
    model = nn.Linear(4, 3)
    learner = Learner(model, plugins=[Scale()], standard=False)
    assert learner.model is model
    assert isinstance(model, nn.Linear)
    assert repr(model) == "Linear(in_features=4, out_features=3, bias=True)"


def test_wrapped_model_is_called_through_the_wrapper_once():
    scale = Scale()
    learner = make(scale)
    x = torch.ones(2, 4)
    assert learner.model(x).equal(nn.functional.linear(x, learner.model.weight, learner.model.bias) * 2)
    assert scale.wrappers[0].calls == 1


def test_wrapped_model_is_called_through_the_wrapper_by_phases():
    scale = Scale()
    learner = make(scale)
    learner.fit(batches(), batches(1), epochs=1)
    assert scale.wrappers[0].calls == 3


def test_wrapped_model_is_called_through_wrappers_in_the_plans_order():
    class Shift:
        @hookimpl(after=("scale",))
        def setup_model(self, model):
            return nn.Sequential(model, nn.Hardtanh())

    learner = make(Shift(), Scale(100.0))
    assert learner.model(torch.ones(2, 4)).abs().max() == 1


def test_wrapped_models_forward_hooks_run_once():
    learner = make(Scale())
    runs = []
    learner.model.register_forward_pre_hook(lambda module, inputs: runs.append("before"))
    learner.model.register_forward_hook(lambda module, inputs, output: runs.append("after"))
    learner.model(torch.ones(2, 4))
    assert runs == ["before", "after"]


def test_wrapped_models_state_keeps_its_names():
    learner = make(Scale())
    assert list(learner.model.state_dict()) == ["weight", "bias"]
    assert [name for name, _ in learner.model.named_parameters()] == ["weight", "bias"]


def test_wrapped_models_copy_is_not_wrapped():
    scale = Scale()
    learner = make(scale)
    other = copy.deepcopy(learner.model)
    x = torch.ones(2, 4)
    assert (other(x) * 2).equal(learner.model(x))
    assert type(other) is nn.Linear
    assert scale.wrappers[0].calls == 1


def test_wrapped_models_class_makes_modules_that_are_not_wrapped():
    scale = Scale()
    type(make(scale).model)(4, 3)(torch.ones(2, 4))
    assert scale.wrappers[0].calls == 0


def test_wrapped_model_can_be_pickled():
    learner = make(Scale())
    other = pickle.loads(pickle.dumps(learner.model))
    assert type(other) is nn.Linear
    assert other.weight.equal(learner.model.weight)


def test_wrapped_model_can_be_called_after_its_wrapper_raised():
    learner = make(Scale())
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        learner.model(torch.ones(2, 5))
    x = torch.ones(2, 4)
    assert learner.model(x).equal(nn.functional.linear(x, learner.model.weight, learner.model.bias) * 2)


def test_wrapper_of_a_plugin_added_later_takes_part():
    learner = make()
    before = learner.model(torch.ones(2, 4))
    learner.add(Scale())
    assert learner.model(torch.ones(2, 4)).equal(before * 2)


def test_setup_model_sees_every_model_with_its_name():
    seen = []

    class Plugin:
        @hookimpl
        def setup_model(self, learner, name, model):
            seen.append((name, model is learner.models[name]))
            return model

    Learner({"actor": nn.Linear(2, 2), "critic": nn.Linear(2, 1)}, plugins=[Plugin()], standard=False)
    assert seen == [("actor", True), ("critic", True)]


def test_setup_model_that_returns_no_module_is_refused():
    class Plugin:
        @hookimpl
        def setup_model(self, model):
            pass

    refused(Plugin(), message="plugin 'plugin': setup_model returned NoneType, not a module")


# Transforms of batches


class Double:
    @hookimpl
    def move_batch(self, batch):
        inputs, targets = batch
        return inputs * 2, targets


class PlusOne:
    @hookimpl(after=("double",))
    def move_batch(self, batch):
        inputs, targets = batch
        return inputs + 1, targets


@pytest.mark.parametrize("plugins", [(Double(), PlusOne()), (PlusOne(), Double())])
def test_move_batch_passes_the_batch_on_in_the_plans_order(plugins):
    seen = []

    class See:
        @hookimpl
        def step_begin(self, step):
            seen.append(step.batch[0])

    data = batches(1)
    make(*plugins, See()).run("train", data)
    assert seen[0].equal(data[0][0] * 2 + 1)


def test_move_batch_leaves_the_loaders_batch_alone():
    data = batches(1)
    before = data[0][0].clone()
    make(Double()).run("train", data)
    assert data[0][0].equal(before)


@pytest.mark.parametrize(
    ("part", "wrapped"),
    [
        (Precision(), "Metrics(Precision(...))"),
        (FunctionMetric(nn.functional.mse_loss), "Metrics(FunctionMetric(...))"),
        (scheduler(torch.optim.lr_scheduler.StepLR, step_size=2), "TorchSchedule(StepLR(...))"),
        (scheduler(torch.optim.lr_scheduler.ReduceLROnPlateau), "Plateau(monitor=...)"),
        (cosine(), "Schedule(cosine(updates=None, start=1.0, end=0.0))"),
        (cosine(9), "Schedule(cosine(updates=9, start=1.0, end=0.0))"),
        (warmup(2, then=cosine()), "Schedule(warmup(2, then=cosine(updates=None, start=1.0, end=0.0)))"),
        (cosine, "Schedule(cosine)"),
    ],
)
def test_part_of_a_plugin_is_refused_with_the_plugin_that_takes_it(part, wrapped):
    refused(part, message=re.escape(f"is no plugin: wrap it, {wrapped}") + "$")
    with pytest.raises(PluginError, match=re.escape(wrapped)):
        Learner(nn.Linear(1, 1), plugins=[part])


def test_plugin_that_is_a_metric_too_is_a_plugin():
    class Both(Precision):
        name = "both"

        @hookimpl
        def step_end(self):
            pass

    assert list(make(Both()).plugins) == ["both"]


@pytest.mark.parametrize(("has", "lacks"), [("state_dict", "load_state_dict"), ("load_state_dict", "state_dict")])
def test_plugin_with_half_of_a_state_is_refused_before_it_is_saved(has, lacks):
    class Half:
        @hookimpl
        def step_end(self):
            pass

    plugin = Half()
    setattr(plugin, has, lambda *given: {})
    with pytest.raises(
        PluginError, match=rf"plugin 'half' \(Half\) has {has}, but no {lacks}: the saved state could not"
    ):
        Learner(nn.Linear(3, 1), plugins=[plugin])
    setattr(plugin, lacks, lambda *given: {})
    Learner(nn.Linear(3, 1), plugins=[plugin])


@pytest.mark.parametrize("place", ["before", "after", "order"])
def test_word_near_the_name_of_a_plugin_that_is_installed_is_refused(place):
    class Listener:
        @hookimpl
        def step_end(self):
            pass

    words = ("clip_grad_nrom",)
    listener = Listener()
    options = {"order": ["listener", *words]} if place == "order" else {}
    setattr(listener, place, words)
    with pytest.raises(OrderError, match=r"no plugin is called 'clip_grad_nrom' \(did you mean 'clip_grad_norm'\?\)"):
        Learner(nn.Linear(3, 1), plugins=[listener], standard=False, **options)
    setattr(listener, place, ("clip_grad_norm", "of_somebody_else"))
    Learner(nn.Linear(3, 1), plugins=[listener], standard=False)


def test_explain_of_all_phases_shows_what_changes_something_once():
    class Average:
        @hookimpl(updates=("params",))
        def epoch_context(self, phase):
            pass

    learner = make(Clip(), Norms(), Files(), Average())
    assert (
        str(learner.explain())
        == """\
phase 'train'
  update_begin   clip (grads)
  epoch_context  average (params)

phase 'val', phase 'predict'
  epoch_context  average (params)

the learner
  nothing is changed

look on: files, norms
explain(full=True) shows every hook, and why each plugin stands there"""
    )
