"""Averages in the weights' place: who stands there when, and what is saved meanwhile."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from engine.life.runs import at, end, make, rows, same, saved, script, sigterm, train, val
from loopkit import Learner, checkpoint, every
from loopkit.errors import PluginConflict
from loopkit.plugins import Checkpoint, Metrics, SaveOptions, WeightAverage

FAST, SLOW = 0.3, 0.9


def two(apart):
    """A fast and a slow average, of which the one named stands nowhere by itself."""
    decays = {"fast": FAST, "slow": SLOW}
    return [
        WeightAverage(decay, name=name, **({"phases": ()} if name == apart else {})) for name, decay in decays.items()
    ]


@pytest.mark.parametrize("order", [["fast", "slow"], ["slow", "fast"]])
def test_two_averages_that_want_one_phase_are_refused(order):
    with pytest.raises(PluginConflict, match=r"(?s)fast.*slow.*own \"weights.*phases=\(\)"):
        make(*two(None), order=order)


def figure_of(learner, name):
    """The loss of an average, without anything of the learner but its weights."""
    model = copy.deepcopy(learner.model)
    model.load_state_dict(learner.plugins[name].model_state(learner))
    return make_plain(model).evaluate(val())


def make_plain(model):
    return Learner(model, nn.MSELoss(), None, plugins=[Metrics()], standard=False)


@pytest.mark.parametrize(("apart", "place"), [("fast", "slow"), ("slow", "fast")])
def test_each_of_two_averages_can_be_evaluated(apart, place):
    learner = make(*two(apart))
    learner.fit(train(), val(), epochs=2)
    expected = {name: figure_of(learner, name) for name in ("fast", "slow")}
    assert expected["fast"] != expected["slow"]
    assert rows(learner)[-1]["val/loss"] == expected[place]["val/loss"]
    assert learner.evaluate(val()) == expected[place]
    for name, figure in expected.items():
        with learner.plugins[name].averaged(learner):
            assert learner.evaluate(val()) == figure
        assert learner.evaluate(val(), weights=name) == figure
    plain = make_plain(copy.deepcopy(learner.model)).evaluate(val())
    assert plain not in expected.values()  # the weights themselves are back


def test_average_is_found_by_what_it_provides():
    learner = make(WeightAverage(SLOW, phases=()))
    learner.fit(train(), val(), epochs=1)
    expected = figure_of(learner, "weight_average")
    assert learner.evaluate(val(), weights="average") == learner.evaluate(val(), weights="weight_average") == expected
    assert learner.evaluate(val()) != expected


def test_average_stands_in_the_phases_that_it_names():
    learner = make(WeightAverage(SLOW, phases=("predict",)))
    learner.fit(train(), val(), epochs=1)
    plain = make_plain(copy.deepcopy(learner.model))
    assert learner.evaluate(val()) == plain.evaluate(val())
    outputs = learner.predict(val())
    assert not torch.equal(outputs, plain.predict(val()))
    plain.model.load_state_dict(learner.plugins["weight_average"].model_state(learner))
    assert torch.equal(outputs, plain.predict(val()))


def one():
    return [WeightAverage(SLOW)]


AVERAGES = [
    pytest.param(one, id="one"),
    pytest.param(lambda: two("slow"), id="fast_of_two"),
    pytest.param(lambda: two("fast"), id="slow_of_two"),
]


def uninterrupted(averages):
    learner = make(*averages())
    learner.fit(train(), val(), epochs=3)
    return end(learner)


@pytest.mark.parametrize("averages", AVERAGES)
def test_run_that_sigterm_ends_in_a_validation_goes_on(averages, tmp_path):
    learner = script(tmp_path, *averages(), at(sigterm, phase="val", epochs=2, index=1))
    with pytest.raises(SystemExit):
        learner.fit(train(), val(), epochs=3)
    again = script(tmp_path, *averages(), again=True)
    again.fit(train(), val(), epochs=3)
    same(uninterrupted(averages), end(again))


@pytest.mark.parametrize("averages", AVERAGES)
def test_run_that_is_saved_in_a_validation_goes_on(averages, tmp_path):
    ask = at(lambda learner: learner.current.request_save(), phase="val", epochs=2, index=1)
    learner = make(Checkpoint(tmp_path, save=every(epochs=100), options=SaveOptions(at_end=False)), *averages(), ask)
    learner.fit(train(), val(), epochs=3)
    same(uninterrupted(averages), end(learner))
    [manifest] = saved(tmp_path)
    again = make(*averages(), seed=99)
    checkpoint.load(again, manifest.path)
    again.fit(train(), val(), epochs=3)
    same(uninterrupted(averages), end(again))
