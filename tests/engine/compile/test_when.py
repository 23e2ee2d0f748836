"""`hookimpl(when=)`: a plugin has a hook only if its options need it."""

import pytest
from helpers import batches, make_learner

from loopkit import hookimpl
from loopkit.errors import PluginError
from loopkit.hooks import implemented
from loopkit.plugins import throttle


class Watch:
    """Counts calls; each hook has an option."""

    def __init__(self, name="watch", steps=False, clips=False, fits=True):
        self.name = name
        self.steps = steps
        self.clips = clips
        self.fits = fits
        self.calls = []

    @hookimpl(when=lambda plugin: plugin.fits)
    def fit_begin(self):
        self.calls.append("fit_begin")

    @hookimpl(when=lambda plugin: plugin.steps)
    def step_end(self):
        self.calls.append("step_end")

    @hookimpl(when=lambda plugin: plugin.clips, updates=("grads",), phase="training")
    def update_begin(self):
        self.calls.append("update_begin")

    @hookimpl
    def fit_end(self):
        self.calls.append("fit_end")


@pytest.mark.parametrize(
    ("options", "calls"),
    [
        ({}, ["fit_begin", "fit_end"]),
        ({"fits": False}, ["fit_end"]),
        ({"steps": True}, ["fit_begin", "step_end", "fit_end"]),
        ({"clips": True, "steps": True}, ["fit_begin", "update_begin", "step_end", "fit_end"]),
    ],
)
def test_only_hooks_that_the_options_need_are_called(options, calls):
    watch = Watch(**options)
    make_learner(watch).fit(batches(1), epochs=1)
    assert watch.calls == calls
    assert sorted(implemented(watch)) == sorted(calls)


def test_class_can_have_all_hooks():
    assert implemented(Watch) == ["fit_begin", "fit_end", "step_end", "update_begin"]


def test_options_are_looked_at_when_the_plugin_is_added():
    watch = Watch()
    learner = make_learner(watch)
    watch.steps = True
    learner.fit(batches(1), epochs=1)
    assert "step_end" not in watch.calls
    learner.replace("watch", watch := Watch(steps=True))
    learner.fit(batches(1), epochs=1)
    assert "step_end" in watch.calls


def test_plan_does_not_list_hooks_that_are_not_needed():
    learner = make_learner(Watch("one"), Watch("two", clips=True))
    text = str(learner.explain())
    assert "update_begin" in text
    plan = text.partition("update_begin")[2].splitlines()[0]
    assert "two" in plan
    assert "one" not in plan


def test_plugin_that_stays_has_its_hooks_after_a_change_that_failed():
    watch = Watch(steps=True)
    learner = make_learner(watch)
    with pytest.raises(PluginError, match="no hooks"):
        learner.replace("watch", object())
    learner.fit(batches(1), epochs=1)
    assert "step_end" in watch.calls


def test_throttled_plugin_has_the_hooks_that_its_options_need():
    watch = Watch(clips=True)
    make_learner(throttle(watch, every=2)).fit(batches(2), epochs=1)
    assert watch.calls == ["fit_begin", "update_begin", "fit_end"]


def test_error_of_the_function_names_the_plugin():
    class Broken(Watch):
        @hookimpl(when=lambda plugin: plugin.stepz)
        def step_end(self):
            pass

    with pytest.raises(AttributeError, match="stepz") as caught:
        make_learner(Broken("broken"))
    assert caught.value.__notes__ == ["loopkit: in hookimpl(when=...) of Broken.step_end"]


@pytest.mark.parametrize("when", [True, "steps", ("steps",)])
def test_when_that_is_no_function_raises(when):
    with pytest.raises(PluginError, match=r"hookimpl\(when=.*\): write a function of the plugin, such as when=lambda"):
        hookimpl(when=when)
