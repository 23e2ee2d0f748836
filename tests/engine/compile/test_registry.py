"""All or none."""

from __future__ import annotations

import pytest
import torch

from engine.compile.making import Broken, Listener, Scale, Verb, batches, make
from loopkit import hookimpl
from loopkit.errors import PluginError


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
