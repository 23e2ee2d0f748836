"""What is refused when a plugin is added."""

from __future__ import annotations

import pluggy
import pytest

from engine.compile.making import Listener, Verb, batches, make, refused
from loopkit import TrainingPhase, ValidationPhase, hookimpl
from loopkit.errors import OrderError, PluginConflict, PluginError


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


def test_optional_hooks_as_a_text_are_refused():
    plugin = Listener()
    plugin.name, plugin.optional = "other", "step_end"
    refused(plugin, message=r"optional is 'step_end': give a tuple of hooks, optional = \('step_end',\)")


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

    refused(Plugin(), message="plugin 'plugin': the result of reads is the string 'grads'")


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


@pytest.mark.parametrize("word", ["list", "check", "early"])
def test_word_that_begins_another_name_may_be_a_plugin_that_is_not_there(word):
    class Plugin:
        @hookimpl(before=(word,))
        def step_begin(self):
            pass

    assert list(make(Plugin(), Listener()).plugins) == ["listener", "plugin"]


@pytest.mark.parametrize("root", ["opti", "buff", "metr"])
def test_owner_of_a_word_that_begins_a_state_is_no_misspelling(root):
    class Plugin:
        owns = (f"{root}.values",)

        @hookimpl
        def step_begin(self):
            pass

    assert "plugin" in make(Plugin()).plugins
