"""Checkpoint: when it saves, what it keeps, how it resumes, and what it refuses."""

import copy
import itertools
import json
import math
import os
import re
import shutil
import sys
import threading
import time
import warnings
from functools import partial

import pytest
import torch
from faults.forked import forked
from helpers import batches, differences, install, keeps_contract, make_learner, on
from torch import nn

import loopkit
from loopkit import Learner, every, hookimpl
from loopkit.checkpoint import disk, storage
from loopkit.checkpoint.bundle import Contents
from loopkit.checkpoint.lock import Lock
from loopkit.checkpoint.manifest import FORMAT
from loopkit.errors import (
    CheckpointError,
    CorruptCheckpointError,
    FormatVersionError,
    NonFiniteError,
    PluginConflict,
    PluginError,
    ReentrancyError,
    StateError,
)
from loopkit.found.discovery import origin
from loopkit.plugins import Checkpoint, EarlyStopping, History, Metrics, SaveOptions, WeightAverage

NOT_AT_END = SaveOptions(at_end=False)


def found(directory):
    """(epoch, step) and reason of the checkpoints that are there, oldest first."""
    return [
        (m.about["progress"]["epochs"], m.about["progress"]["steps"], m.about["reason"])
        for m in reversed(storage.listing(directory))
    ]


def saves(directory, fit=lambda learner: learner.fit(batches(4), epochs=4), plugins=(), **options):
    """What a run saves in all."""
    fit(make_learner(Checkpoint(directory, keep=99, **options), *plugins))
    return [(epoch, step) for epoch, step, _ in found(directory)]


def scores(*values, phase="val"):
    """A plugin that makes the metric val/score."""
    left = iter(values)

    def epoch_end(learner, **given):
        if given["phase"].name == phase:
            learner.metrics[f"{phase}/score"] = next(left)

    return on("epoch_end", epoch_end, "scores", writes=(f"metrics.{phase}/score",))


@pytest.mark.parametrize(
    "background",
    [pytest.param(False, marks=pytest.mark.slow), True],  # the thread does what is done without it
)
def test_checkpoint_keeps_the_contract(background, tmp_path):
    numbers = itertools.count()
    keeps_contract(
        lambda: Checkpoint(tmp_path / str(next(numbers)), options=SaveOptions(background=background)), "checkpoint"
    )


# Weights alone


def alone(directory, *plugins, **options):
    return make_learner(*plugins, Metrics(), Checkpoint(directory, weights_only=True, **options), lr=0.1)


def test_weights_only_saves_plain_weights_and_nothing_else(tmp_path):
    learner = alone(tmp_path, WeightAverage(0.5), save=every(updates=3))
    learner.fit(batches(4), batches(1), epochs=2)
    assert [(step, reason) for _, step, reason in found(tmp_path)] == [(6, "interval"), (8, "end")]
    newest = storage.listing(tmp_path)[0].path
    names = ["manifest.json", "model.safetensors", "model.weight_average.safetensors", "structure.json"]
    assert sorted(file.name for file in newest.iterdir()) == names
    fresh = nn.Linear(3, 1)
    average = learner.plugins["weight_average"].model_state(learner)
    for source, expected in ((tmp_path, learner.model.state_dict()), (newest / names[2], average)):
        loopkit.checkpoint.load_weights(fresh, source)
        assert list(differences(dict(fresh.state_dict()), dict(expected))) == []
    assert not torch.equal(average["weight"], learner.model.weight)


@pytest.mark.parametrize("phases", [None, ()])
def test_best_of_weights_only_measures_what_the_metric_measured(phases, tmp_path):
    losses = []
    keep = on("phase_end", lambda learner, phase: phase.training or losses.append(learner.metrics["val/loss"]))
    options = {"best": "val/loss", "mode": "max"}
    alone(tmp_path, WeightAverage(0.5, phases=phases), keep, **options).fit(batches(2), batches(1), epochs=3)
    assert len(found(tmp_path)) == 3
    other = alone(tmp_path, WeightAverage(0.5, phases=phases))
    manifest = loopkit.checkpoint.load_best(other, tmp_path)
    assert manifest.metrics["val/loss"] == other.evaluate(batches(1))["val/loss"] == max(losses)


def test_weights_only_of_several_models_has_a_file_for_each(tmp_path):
    models = {"a": nn.Linear(3, 1), "b": nn.Linear(3, 1)}
    learner = Learner(models, plugins=[WeightAverage(0.5, name="ema")], standard=False)
    contents = Contents.weights(learner, learner.state_dict()["models"])
    assert [*contents.files()][:-1] == [
        f"model-{name}{average}.safetensors" for average in ("", ".ema") for name in models
    ]


def test_weights_only_in_a_validation_saves_the_models_own_weights(tmp_path):
    seen = []

    def step_end(learner, phase, **given):
        if phase.name == "val":
            seen.append(learner.plugins["weight_average"].in_place)
            learner.current.request_save()

    learner = alone(tmp_path, WeightAverage(0.5), on("step_end", step_end), options=NOT_AT_END)
    learner.fit(batches(4), batches(2), epochs=1)
    assert seen == [True, True]
    fresh = nn.Linear(3, 1)
    for manifest in storage.listing(tmp_path):
        loopkit.checkpoint.load_weights(fresh, manifest)
        assert torch.equal(fresh.weight, learner.model.weight)


def test_no_run_goes_on_from_weights_only(tmp_path):
    with pytest.raises(PluginError, match="resume='auto' cannot resume from weights_only=True"):
        alone(tmp_path, resume="auto")
    alone(tmp_path).fit(batches(1), epochs=1)
    with pytest.raises(CheckpointError, match=r"holds only weights, .* load_weights and load_best read them"):
        make_learner(Checkpoint(tmp_path, resume="auto")).fit(batches(1), epochs=1)
    with pytest.raises(CheckpointError, match="holds only weights"):
        loopkit.checkpoint.load(make_learner(), tmp_path)
    with pytest.raises(CheckpointError, match="holds checkpoints of another run"):
        alone(tmp_path).fit(batches(1), epochs=1)
    alone(tmp_path, overwrite=True).fit(batches(1), epochs=1)


def test_weights_only_beside_a_checkpoint_that_goes_on(tmp_path):
    def make():
        return alone(tmp_path / "w", Checkpoint(tmp_path / "a", resume="auto", name="whole"), overwrite=True)

    make().fit(batches(4), epochs=1)
    learner = make()
    learner.fit(batches(4), epochs=2)
    assert learner.progress.steps == 8
    fresh = nn.Linear(3, 1)
    loopkit.checkpoint.load_weights(fresh, tmp_path / "w")
    assert torch.equal(fresh.weight, learner.model.weight)


@pytest.mark.parametrize("phases", [None, ()], ids=["in_its_place", "aside"])
@pytest.mark.parametrize("weights_only", [True, False])
def test_own_weights_after_load_best_are_as_documented(weights_only, phases, tmp_path):
    saver = Checkpoint(tmp_path, best="val/score", mode="min", weights_only=weights_only)
    learner = make_learner(WeightAverage(0.5, phases=phases), saver, scores(1.0, 2.0), lr=0.1)
    learner.fit(batches(2), batches(1), epochs=1)
    own = {name: value.clone() for name, value in learner.model.state_dict().items()}
    average = learner.plugins["weight_average"].model_state(learner)
    assert list(differences(own, dict(average))) != []
    learner.fit(batches(2), batches(1), epochs=1)
    loopkit.checkpoint.load_best(learner, tmp_path)
    here = average if weights_only and phases is None else own
    assert list(differences(dict(learner.model.state_dict()), dict(here))) == []
    then = here if weights_only else average
    assert list(differences(dict(learner.plugins["weight_average"].model_state(learner)), dict(then))) == []


@pytest.mark.parametrize("also_whole", [False, True])
def test_pause_that_saves_weights_alone_says_that_no_run_goes_on(also_whole, tmp_path):
    whole = [Checkpoint(tmp_path / "a", resume="auto", name="whole")] * also_whole
    pause = on("step_end", lambda learner: learner.pause("time is up"))
    learner = alone(tmp_path / "w", *whole, pause)
    with warnings.catch_warnings(record=True, action="always") as caught, pytest.raises(SystemExit):
        learner.fit(batches(3), epochs=1)
    said = [str(each.message) for each in caught]
    assert len(said) == (not also_whole)
    assert also_whole or "no run resumes from Checkpoint(weights_only=True)" in said[0]
    assert [reason for *_, reason in found(tmp_path / "w")] == ["asked for"]


def test_weights_only_writes_a_tied_parameter_of_an_average_once(tmp_path):
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False), nn.Linear(64, 1))
    model[1].weight = model[0].weight
    learner = Learner(model, nn.MSELoss(), partial(torch.optim.SGD, lr=0.1), plugins=[WeightAverage(0.5)])
    learner.add(Checkpoint(tmp_path, weights_only=True))
    learner.fit([(torch.randn(4, 64), torch.randn(4, 1))], epochs=1)
    own, average = (storage.listing(tmp_path)[0].files[f"model{of}.safetensors"] for of in ("", ".weight_average"))
    assert own.size == average.size < 2 * 64 * 64 * 4
    fresh = copy.deepcopy(model)
    path = storage.listing(tmp_path)[0].path / "model.weight_average.safetensors"
    loopkit.checkpoint.load_weights(fresh, path)
    expected = learner.plugins["weight_average"].model_state(learner)
    assert list(differences(dict(fresh.state_dict()), dict(expected))) == []


def test_weights_only_refuses_state_that_is_no_tensor_before_the_first_step(tmp_path):
    class Counting(nn.Linear):
        def get_extra_state(self):
            return {"n": 1}

        def set_extra_state(self, state):
            pass

    learner = make_learner(Checkpoint(tmp_path, weights_only=True), model=Counting(3, 1))
    with pytest.raises(StateError, match=r"model.safetensors: '_extra_state' is dict, not a tensor"):
        learner.fit(batches(1), epochs=1)
    assert learner.progress.steps == 0


# When it saves


def test_saves_at_the_end_of_every_epoch_by_default(tmp_path):
    assert saves(tmp_path) == [(1, 4), (2, 8), (3, 12), (4, 16)]


def test_saves_after_the_validation_of_an_epoch(tmp_path):
    assert saves(tmp_path, lambda learner: learner.fit(batches(2), batches(1), epochs=2)) == [(1, 2), (2, 4)]
    first = storage.listing(tmp_path)[-1].about
    assert first["reason"] == "epoch"


def test_every_epochs_2_saves_every_other_epoch_and_the_end(tmp_path):
    assert saves(tmp_path, lambda learner: learner.fit(batches(2), epochs=5), save=every(epochs=2)) == [
        (2, 4),
        (4, 8),
        (5, 10),
    ]
    assert found(tmp_path)[-1] == (5, 10, "end")


def test_every_epochs_2_without_the_end(tmp_path):
    saved = saves(tmp_path, lambda learner: learner.fit(batches(2), epochs=5), save=every(epochs=2), options=NOT_AT_END)
    assert saved == [(2, 4), (4, 8)]


def test_every_updates_3_saves_between_steps(tmp_path):
    assert saves(tmp_path, lambda learner: learner.fit(batches(4), epochs=2), save=every(updates=3)) == [
        (0, 3),
        (1, 6),
        (2, 8),
    ]


def test_every_updates_counts_updates_and_not_steps(tmp_path):
    learner = make_learner(Checkpoint(tmp_path, save=every(updates=2), keep=99), accumulate=3)
    learner.fit(batches(12), epochs=1)
    assert found(tmp_path) == [(0, 6, "interval"), (1, 12, "end")]


def test_last_update_is_kept_once(tmp_path):
    learner = make_learner(Metrics(), Checkpoint(tmp_path, save=every(updates=1)))
    learner.fit(batches(4), batches(1), epochs=2)
    assert [step for _, step, _ in found(tmp_path)] == [7, 8]
    newest = storage.listing(tmp_path)[0].about
    assert (newest["reason"], newest["progress"]["epochs"]) == ("end", 2)
    assert "val/loss" in newest["metrics"]


def test_save_before_the_validation_is_not_that_of_its_end(tmp_path):
    ask = on("phase_end", lambda learner, phase, **given: phase.training and learner.current.request_save(), "ask")
    learner = make_learner(Metrics(), Checkpoint(tmp_path), ask)
    learner.fit(batches(2), batches(1), epochs=1)
    assert found(tmp_path) == [(1, 2, "asked for"), (1, 2, "epoch")]
    assert "val/loss" in storage.listing(tmp_path)[0].about["metrics"]


def test_last_update_is_kept_with_its_monitored_value(tmp_path):
    learner = make_learner(
        Checkpoint(tmp_path, save=[every(updates=1), every(epochs=1)], best="val/score", mode="min"), scores(3.0, 2.0)
    )
    learner.plugins["checkpoint"].unsaved = True  # as that of a log which has written since
    learner.fit(batches(2), batches(1), epochs=2)
    assert found(tmp_path) == [(1, 3, "interval"), (2, 4, "epoch"), (2, 4, "end")]
    assert loopkit.checkpoint.best(tmp_path).about["reason"] == "epoch"


def test_step_that_is_the_only_one_keeps_one_to_fall_back_to(tmp_path):
    make_learner(Checkpoint(tmp_path, save=every(updates=1))).fit(batches(1), epochs=1)
    assert found(tmp_path) == [(0, 1, "interval"), (1, 1, "end")]


def test_saves_within_an_update_all_count(tmp_path):
    ask = on("step_end", lambda learner, step, **given: step.index < 2 and learner.current.request_save(), "ask")
    make_learner(Checkpoint(tmp_path, keep=3), ask, accumulate=4).fit(batches(3), epochs=1)
    counts = [manifest.about["progress"] for manifest in storage.listing(tmp_path)]
    assert [(each["steps"], each["updates"]) for each in counts] == [(3, 1), (2, 0), (1, 0)]


def test_metrics_in_a_manifest_are_numbers(tmp_path):
    learner = make_learner(Checkpoint(tmp_path, best="val/score", mode="min"), scores(0.25))
    learner.metrics["val/odd"] = math.nan
    learner.fit(batches(1), batches(1), epochs=1)
    about = storage.listing(tmp_path)[0].about
    assert about["metrics"]["val/score"] == 0.25
    assert about["monitored"] == {"metric": "val/score", "mode": "min", "value": 0.25}


def test_metric_that_json_has_no_number_for_is_a_text(tmp_path):
    learner = make_learner()
    learner.metrics.update({"val/a": math.nan, "val/b": -math.inf, "val/c": 1})
    assert loopkit.checkpoint.save(learner, tmp_path).about["metrics"] == {
        "val/a": "nan",
        "val/b": "-inf",
        "val/c": 1.0,
    }


def test_values_that_were_saved_as_texts_are_still_read(tmp_path, monkeypatch):
    monkeypatch.setattr("loopkit.checkpoint.retention.number", repr)
    make_learner(Checkpoint(tmp_path, best="val/score", mode="min"), scores(0.5, 0.25, 2.0, 3.0, 4.0)).fit(
        batches(1), batches(1), epochs=5
    )
    monkeypatch.undo()
    assert loopkit.checkpoint.best(tmp_path).about["monitored"]["value"] == "0.25"
    learner = make_learner(Checkpoint(tmp_path, best="val/score", resume="auto", mode="min"), scores(0.3, 0.3))
    learner.fit(batches(1), batches(1), epochs=7)
    assert loopkit.checkpoint.best(tmp_path).about["monitored"]["value"] == "0.25"


def test_every_updates_and_every_epochs_add_up(tmp_path):
    saved = saves(tmp_path, lambda learner: learner.fit(batches(4), epochs=2), save=[every(updates=3), every(epochs=1)])
    assert saved == [(0, 3), (1, 4), (1, 6), (2, 8)]


def test_every_minutes_goes_by_the_monotonic_clock(tmp_path, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    tick = on("step_begin", lambda phase, **given: clock.__setitem__(0, clock[0] + 25), "tick")
    saved = saves(
        tmp_path, lambda learner: learner.fit(batches(8), epochs=1), [tick], save=every(minutes=1), options=NOT_AT_END
    )
    assert saved == [(0, 3), (0, 6)]  # at 75 s and at 150 s, each the first step a minute after the last save


def test_every_minutes_takes_fractions(tmp_path, monkeypatch):
    clock = itertools.count(0.0, 10.0)
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    assert (
        len(
            saves(
                tmp_path,
                lambda learner: learner.fit(batches(8), epochs=1),
                save=every(minutes=0.25),
                options=NOT_AT_END,
            )
        )
        >= 3
    )


def test_validation_in_mid_epoch_saves_nothing_by_itself(tmp_path):
    fit = lambda learner: learner.fit(batches(4), batches(1), epochs=2, validate=every(updates=2))  # noqa: E731
    assert saves(tmp_path, fit) == [(1, 4), (2, 8)]


def test_epochs_without_validation_are_complete_at_their_own_end(tmp_path):
    fit = lambda learner: learner.fit(batches(2), batches(1), epochs=3, validate=every(epochs=2))  # noqa: E731
    assert saves(tmp_path, fit) == [(1, 2), (2, 4), (3, 6)]


def test_own_loop_saves_after_each_training_pass(tmp_path):
    def loop(learner):
        for _ in learner.rounds(epochs=2):
            learner.run("train", batches(2))

    assert saves(tmp_path, loop) == [(1, 2), (2, 4)]


def test_evaluate_outside_of_a_fit_saves_nothing(tmp_path):
    learner = make_learner(Checkpoint(tmp_path))
    learner.evaluate(batches(1))
    assert found(tmp_path) == []


def test_nothing_trained_saves_nothing_at_the_end(tmp_path):
    learner = make_learner(Checkpoint(tmp_path))
    with learner.rounds():
        pass
    assert found(tmp_path) == []


def test_error_between_two_steps_saves(tmp_path):
    def broken():
        yield from batches(3)
        raise OSError("the disk is gone")

    learner = make_learner(Checkpoint(tmp_path))
    with pytest.raises(OSError, match="the disk is gone"):
        learner.fit(lambda: broken(), epochs=1)
    assert found(tmp_path) == [(0, 3, "error")]


def test_open_predictions_from_before_the_fit_do_not_hinder(tmp_path):
    learner = make_learner(Checkpoint(tmp_path, keep=9, options=SaveOptions(at_end=False)))
    predictions = learner.predict_batches(batches(3))
    next(predictions)
    learner.fit(batches(2), batches(1), epochs=2)
    predictions.close()
    assert found(tmp_path) == [(1, 2, "epoch"), (2, 4, "epoch")]


def test_error_inside_a_step_saves_nothing(tmp_path):
    def spoil(step, **given):
        if step.index == 2:
            raise RuntimeError("in mid-step")

    with pytest.raises(RuntimeError, match="in mid-step"):
        make_learner(Checkpoint(tmp_path), on("backward_end", spoil)).fit(batches(4), epochs=1)
    assert found(tmp_path) == []


def test_on_error_false_saves_nothing(tmp_path):
    def broken():
        yield from batches(3)
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        make_learner(Checkpoint(tmp_path, options=SaveOptions(on_error=False))).fit(lambda: broken(), epochs=1)
    assert found(tmp_path) == []


# The best


def best(directory, values, **options):
    options = {"best": "val/score", "mode": "min", **options}
    learner = make_learner(Checkpoint(directory, **options), scores(*values))
    learner.fit(batches(1), batches(1), epochs=len(values))
    return [epoch for epoch, _, _ in found(directory)]


@pytest.mark.parametrize(
    ("values", "options", "kept"),
    [
        ([3.0, 1.0, 2.0, 2.0, 2.0], {}, [2, 4, 5]),
        ([3.0, 1.0, 2.0, 2.0, 2.0], {"mode": "max"}, [1, 4, 5]),
        ([3.0, 1.0, 2.0, 0.5, 2.0, 2.0], {"options": SaveOptions(keep_best=2)}, [2, 4, 5, 6]),
        ([1.0, 0.0, 2.0, 2.0], {}, [2, 3, 4]),
        ([-1.0, 0.0, -2.0, -2.0], {"mode": "max"}, [2, 3, 4]),
        ([1.0, 1.0, 1.0, 1.0], {}, [1, 3, 4]),
        ([math.nan, 2.0, math.nan, math.nan, math.nan], {}, [2, 4, 5]),
        ([math.nan, math.nan, math.nan], {"mode": "max"}, [2, 3]),
        ([math.inf, 2.0, 3.0, 3.0], {}, [2, 3, 4]),
        ([2.0, -math.inf, 3.0, 3.0], {"mode": "max"}, [3, 4]),
        ([1.0, 2.0, 3.0, 4.0], {"save": every(epochs=9)}, [1, 4]),
        ([4.0, 3.0, 2.0, 1.0, 5.0], {"save": every(epochs=9)}, [4, 5]),
        ([1.0, 2.0, 3.0], {"keep": 1}, [1, 3]),
    ],
    ids=str,
)
def test_best_are_kept(values, options, kept, tmp_path):
    assert best(tmp_path, values, **options) == kept


def test_best_of_an_earlier_run_stays_the_best(tmp_path):
    make = lambda *values: make_learner(  # noqa: E731
        Checkpoint(tmp_path, best="val/score", resume="auto", mode="min"), scores(*values)
    )
    make(1.0, 2.0).fit(batches(1), batches(1), epochs=2)
    make(3.0, 4.0, 5.0).fit(batches(1), batches(1), epochs=5)
    assert [epoch for epoch, _, _ in found(tmp_path)] == [1, 4, 5]


def test_fit_that_does_not_run_the_phase_of_the_best_is_refused_before_the_first_step(tmp_path):
    learner = make_learner(Checkpoint(tmp_path, best="val/score", mode="min"), scores())
    with pytest.raises(PluginError, match=r"'checkpoint', phase_end: reads the metric 'val/score', but this fit does"):
        learner.fit(batches(1), epochs=2)
    assert learner.progress.steps == 0
    assert found(tmp_path) == []


def test_own_loop_that_does_not_run_the_phase_of_the_best_is_told_at_the_end(tmp_path):
    learner = make_learner(Checkpoint(tmp_path, best="val/score", mode="min"), scores())

    def loop():
        for _ in learner.rounds(epochs=1):
            learner.run("train", batches(1))

    with pytest.warns(UserWarning, match=r"'checkpoint', phase_end: reads the metric 'val/score', but phase 'val' did"):
        loop()
    with pytest.raises(CheckpointError, match=r"no checkpoint that was saved with a value.*did the metric's"):
        loopkit.checkpoint.best(tmp_path)


def test_monitored_phase_that_ran_before_the_fit_was_resumed_is_no_reason_to_warn(tmp_path):
    for _ in range(2):  # nothing is left to do in the second one
        learner = make_learner(
            Checkpoint(tmp_path, best="val/score", resume="auto", mode="min"), scores(math.nan, math.nan)
        )
        learner.fit(batches(1), batches(1), epochs=2)
    assert learner.progress.epochs == 2


def test_monitored_phase_of_a_fit_that_was_stopped_is_no_reason_to_warn(tmp_path):
    stop = on("step_end", lambda learner, **_: learner.stop("enough"))
    learner = make_learner(Checkpoint(tmp_path, best="val/score", mode="min"), scores(1.0), stop)
    assert learner.fit(batches(1), batches(1), epochs=2).reason == "stop"


def test_best_is_saved_in_mid_epoch(tmp_path):
    learner = make_learner(Checkpoint(tmp_path, best="val/score", mode="min"), scores(3.0, 1.0, 2.0, 2.0))
    learner.fit(batches(4), batches(1), epochs=2, validate=every(updates=2))
    assert (0, 2, "best") not in found(tmp_path)  # a better one came
    assert [(epoch, step) for epoch, step, _ in found(tmp_path)] == [(0, 4), (1, 4), (2, 8)]


def test_absent_metric_is_an_error_that_names_those_that_are_there(tmp_path):
    learner = make_learner(Checkpoint(tmp_path, best="val/scor", mode="min"), scores(1.0))
    with pytest.raises(PluginError, match=r"'metrics.val/scor'.*no plugin makes \(did you mean 'val/score'\?\)"):
        learner.fit(batches(1), batches(1), epochs=1)
    assert learner.progress.steps == 0


def test_load_best_loads_the_weights_of_the_best_into_any_learner(tmp_path):
    kept = []
    learner = make_learner(Checkpoint(tmp_path, best="val/score", mode="min"), scores(3.0, 1.0, 2.0), lr=0.1)
    learner.add(on("phase_end", lambda learner, phase: phase.training or kept.append(learner.model.weight.clone())))
    learner.fit(batches(2), batches(1), epochs=3)
    for other in (learner, make_learner()):
        manifest = loopkit.checkpoint.load_best(other, tmp_path)
        assert manifest.about["monitored"]["value"] == 1.0
        assert torch.equal(other.model.weight, kept[1])


def test_load_best_measures_what_the_metric_measured(tmp_path):
    losses = []
    learner = make_learner(Checkpoint(tmp_path, best="val/loss", mode="max"), WeightAverage(0.5), Metrics(), lr=0.1)
    learner.add(on("phase_end", lambda learner, phase: phase.training or losses.append(learner.metrics["val/loss"])))
    learner.fit(batches(2), batches(1), epochs=3)
    loopkit.checkpoint.load_best(learner, tmp_path)
    assert learner.evaluate(batches(1))["val/loss"] == max(losses) == losses[0]


def test_load_best_refuses_other_models_and_changes_nothing(tmp_path):
    make_learner(Checkpoint(tmp_path, best="val/score", mode="min"), scores(1.0)).fit(batches(1), batches(1), epochs=1)
    one = nn.Linear(3, 1)
    with pytest.raises(StateError, match="do not have the same models"):
        loopkit.checkpoint.load_best(Learner({"a": one, "b": nn.Linear(3, 1)}, nn.MSELoss()), tmp_path)
    other = make_learner(model=nn.Linear(3, 2))
    before = other.model.weight.clone()
    with pytest.raises(StateError, match="no tensor was loaded"):
        loopkit.checkpoint.load_best(other, tmp_path)
    assert torch.equal(other.model.weight, before)


class Refusing(WeightAverage):
    """Keeps the state that it is given, and refuses it."""

    def load_state_dict(self, state):
        super().load_state_dict(state)
        if self.refuses:
            self.refuses = False
            raise StateError("no")


def test_load_best_whose_second_average_is_refused_changes_nothing(tmp_path):
    def make():
        averages = WeightAverage(0.5, name="a", phases=()), Refusing(0.5, name="b", phases=())
        averages[1].refuses = False
        return averages, make_learner(
            *averages, Checkpoint(tmp_path, best="val/score", resume="auto", mode="min"), scores(1.0, 2.0)
        )

    averages, learner = make()
    learner.fit(batches(2), batches(1), epochs=2)
    before = copy.deepcopy([learner.model.state_dict(), *(each.state_dict() for each in averages)])
    averages[1].refuses = True
    with pytest.raises(StateError, match=r"^no$"):
        loopkit.checkpoint.load_best(learner, tmp_path)
    assert list(differences([learner.model.state_dict(), *(each.state_dict() for each in averages)], before)) == []
    manifest = loopkit.checkpoint.load_best(learner, tmp_path)
    assert list(differences(averages[0].state_dict(), before[1])) != []
    assert manifest.metrics == {"val/score": 1.0}


def test_load_best_is_refused_in_an_epoch(tmp_path):
    with pytest.raises(ReentrancyError, match="load_best"):
        make_learner(on("step_end", lambda learner, **given: loopkit.checkpoint.load_best(learner, tmp_path))).fit(
            batches(1), epochs=1
        )


def test_monitor_that_was_changed_ranks_only_its_own(tmp_path):
    def make(monitor, mode, values):
        saver = Checkpoint(tmp_path, best=monitor, mode=mode, resume="auto")
        return make_learner(saver, Metrics(), scores(*values))

    make("val/loss", "min", [0.1]).fit(batches(4), batches(1), epochs=1)
    again = make("val/score", "max", [0.001, 0.003, 0.002, 0.0025, 0.0026])
    again.fit(batches(4), batches(1), epochs=6)
    assert again.metrics["val/loss"] > 0.1  # beside it, any of these scores would be worse
    assert [epoch for epoch, _, _ in found(tmp_path)] == [3, 5, 6]


@pytest.mark.parametrize("last", [1, 2, 3])
def test_never_fewer_than_two_are_kept(last, tmp_path):
    make_learner(Checkpoint(tmp_path, keep=last)).fit(batches(1), epochs=5)
    assert [epoch for epoch, _, _ in found(tmp_path)] == list(range(6 - max(last, 2), 6))


# Options


@pytest.mark.parametrize(
    "options",
    [
        {"save": "epoch"},
        {"save": []},
        {"save": [every(epochs=1), 3]},
        {"save": every(updates=3, first=True)},
        {"keep": 0},
        {"keep": "2"},
        {"keep": 2.5},
        {"keep": True},
        {"keep": -1},
        {"best": "val/loss", "mode": "less"},
        {"best": "val_loss"},
        {"best": "/loss"},
        {"best": "val/"},
        {"best": 3},
        {"options": {"background": True}},
        {"resume": "Auto"},
        {"resume": "AUTO"},
    ],
    ids=str,
)
def test_options_out_of_range_are_refused(options, tmp_path):
    with pytest.raises(PluginError, match=re.escape(f"{[*options][-1]} is ")):
        Checkpoint(tmp_path, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"options": SaveOptions(keep_best=3)}, "options.keep_best is 3"),
        ({"mode": "max"}, "mode is 'max'"),
        ({"mode": "min", "weights_only": True}, "mode is 'min'"),
    ],
    ids=str,
)
def test_options_of_the_best_without_a_metric_are_refused(options, message, tmp_path):
    with pytest.raises(PluginError, match=f"{message}, and no metric defines .* give best='val/loss'"):
        Checkpoint(tmp_path, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"keep_best": 0},
        {"keep_best": "2"},
        {"keep_best": 2.5},
        {"keep_best": True},
        {"background": "yes"},
        {"on_error": 1},
        {"allow": "history"},
        {"allow": [1]},
    ],
    ids=str,
)
def test_rare_options_out_of_range_are_refused(options):
    with pytest.raises(PluginError, match=f"SaveOptions: {next(iter(options))} is "):
        SaveOptions(**options)


# Resuming


class Killed(BaseException):
    pass


def run(directory, epochs=3, at=None, resume="auto", **options):
    """A run that is killed after a training step."""

    def kill(learner, phase, **given):
        if at is not None and phase.training and learner.progress.steps == at:
            raise Killed

    plugin = Checkpoint(directory, resume=resume, **options)
    learner = make_learner(plugin, WeightAverage(0.5), History(), on("step_begin", kill, "kill"), lr=0.05)
    if at is None:
        learner.remove("kill")
    learner.fit(batches(4), batches(1), epochs=epochs)
    return learner


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("at", [3, 4, 5, 7, 11])
def test_killed_run_goes_on_as_if_nothing_had_happened(at, background, tmp_path, capsys):
    straight = run(tmp_path / "straight", options=SaveOptions(background=background))
    with pytest.raises(Killed):
        run(tmp_path / "killed", at=at, save=every(updates=2), options=SaveOptions(background=background))
    again = run(tmp_path / "killed", save=every(updates=2), options=SaveOptions(background=background))
    assert not list(differences(straight.state_dict(), again.state_dict()))
    assert f"resumed {tmp_path / 'killed'}" in capsys.readouterr().err


def test_resume_auto_begins_and_says_so_where_there_is_nothing(tmp_path, capsys):
    assert run(tmp_path / "new").result.steps == 12
    assert f"loopkit: no checkpoint in {tmp_path / 'new'}: starting a new run" in capsys.readouterr().err


def test_resume_true_raises_where_there_is_nothing(tmp_path):
    with pytest.raises(CheckpointError, match=r"holds no checkpoint: give resume='auto' to begin a run there"):
        run(tmp_path / "new", resume=True)


def test_resume_true_goes_on(tmp_path):
    run(tmp_path, epochs=1)
    assert run(tmp_path, epochs=2, resume=True).result.steps == 8


def test_resume_from_a_path_leaves_that_directory_alone(tmp_path):
    run(tmp_path / "a", epochs=2)
    before = sorted((tmp_path / "a").rglob("*"))
    oldest = storage.listing(tmp_path / "a")[-1].path
    learner = run(tmp_path / "b", epochs=2, resume=oldest)
    assert learner.result.steps == 8
    assert found(tmp_path / "b") == [(2, 8, "epoch")]
    assert sorted((tmp_path / "a").rglob("*")) == before


def test_resume_from_a_path_that_is_not_there(tmp_path):
    with pytest.raises(CheckpointError, match=r"cannot find the checkpoint .*000001-nothing"):
        run(tmp_path, resume=tmp_path / "000001-nothing")


def test_directory_of_another_run_is_refused_without_resume(tmp_path):
    run(tmp_path, epochs=1)
    newest = storage.listing(tmp_path)[0].path.name
    with pytest.raises(CheckpointError, match=rf"checkpoints of another run, the newest {newest}: give resume='auto'"):
        run(tmp_path, resume=None)


def test_path_of_elsewhere_is_refused_in_the_directory_of_another_run(tmp_path):
    run(tmp_path / "a", epochs=2)
    run(tmp_path / "b", epochs=3)
    before = found(tmp_path / "b")
    newest = storage.listing(tmp_path / "b")[0].path.name
    with pytest.raises(CheckpointError, match=rf"b holds checkpoints of another run, the newest {newest}"):
        run(tmp_path / "b", epochs=4, resume=storage.listing(tmp_path / "a")[0].path)
    assert found(tmp_path / "b") == before


def test_path_in_the_directory_of_the_run_is_kept(tmp_path):
    run(tmp_path, epochs=3, keep=9)
    first = storage.listing(tmp_path)[-1].path
    learner = run(tmp_path, epochs=6, resume=first)
    assert learner.progress.epochs == 6
    assert [epoch for epoch, _, _ in found(tmp_path)] == [1, 5, 6]
    assert storage.verify(first).path == first


def head_then_all(directory, at=None, resume="auto", only=None):
    """Two fits of one learner; the process ends at the begin of the epoch ``at``."""
    die = on("epoch_begin", lambda learner, phase: os._exit(9) if learner.progress.epochs == at else None)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    learner = make_learner(Checkpoint(directory, resume=resume), die, model=model)
    if only is None:
        model[0].requires_grad_(False)
        learner.fit(batches(3), epochs=2)
        model[0].requires_grad_(True)
    learner.fit(batches(3), epochs=3)
    return learner


def test_second_of_two_fits_is_not_taken_for_the_first(tmp_path):
    straight = head_then_all(tmp_path / "straight").state_dict()
    assert forked(lambda: head_then_all(tmp_path / "killed", 4)).code == 9
    newest = storage.listing(tmp_path / "killed")[0].path
    with pytest.raises(StateError, match=rf"{newest} was saved in fit 2 of its learner, and this is fit 1.*'{newest}'"):
        head_then_all(tmp_path / "killed")
    again = head_then_all(tmp_path / "killed", resume=newest, only=2)
    for part in ("models", "optimizers", "progress", "fit"):
        assert not list(differences(straight[part], again.state_dict()[part]))


def test_killed_first_of_two_fits_goes_on_with_both(tmp_path):
    straight = head_then_all(tmp_path / "straight").state_dict()
    assert forked(lambda: head_then_all(tmp_path / "killed", 1)).code == 9
    again = head_then_all(tmp_path / "killed").state_dict()
    for part in ("models", "optimizers", "progress", "fit"):
        assert not list(differences(straight[part], again[part]))


def test_second_fit_of_the_same_plugin_goes_on_saving(tmp_path):
    learner = make_learner(Checkpoint(tmp_path))
    learner.fit(batches(2), epochs=1)
    learner.fit(batches(2), epochs=1)
    assert found(tmp_path) == [(1, 2, "epoch"), (2, 4, "epoch")]


def test_finished_run_ends_at_once(tmp_path):
    first = run(tmp_path)
    again = run(tmp_path)
    assert again.result.reason == "epochs"
    assert again.result.steps == first.result.steps
    assert not list(differences(first.state_dict(), again.state_dict()))
    assert len(again.result.history) == len(first.result.history)


@pytest.mark.parametrize("epochs", [1, 9])
def test_run_that_stopped_early_stops_again_at_once(epochs, tmp_path):
    def make():
        stopping = EarlyStopping("val/score", patience=1, mode="min")
        return make_learner(
            Checkpoint(tmp_path, save=every(epochs=epochs), resume="auto"), stopping, scores(1.0, 2.0, 3.0)
        )

    first, again = make(), make()
    assert first.fit(batches(1), batches(1), epochs=5).epochs == 2
    result = again.fit(batches(1), batches(1), epochs=5)
    assert (result.reason, result.epochs, result.message) == ("stop", 2, first.result.message)
    assert not list(differences(first.state_dict(), again.state_dict()))


def test_relative_directory_is_resolved_when_the_plugin_is_made(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    learner = make_learner(Checkpoint("runs", resume="auto"))
    monkeypatch.chdir(tmp_path / "elsewhere")
    learner.fit(batches(1), epochs=1)
    assert found(tmp_path / "runs") == [(1, 1, "epoch")]
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_link_to_a_directory_is_resolved_when_the_plugin_is_made(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    learner = make_learner(Checkpoint(tmp_path / "link"))
    (tmp_path / "link").unlink()
    learner.fit(batches(1), epochs=1)
    assert found(tmp_path / "disk") == [(1, 1, "epoch")]
    assert not (tmp_path / "link").exists()


def test_run_goes_on_through_a_link_to_its_directory(tmp_path):
    make_learner(Checkpoint(tmp_path / "disk")).fit(batches(1), epochs=1)
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    path = tmp_path / "link" / storage.listing(tmp_path / "disk")[0].path.name
    for epochs, resume in ((2, path), (3, "auto")):
        learner = make_learner(Checkpoint(tmp_path / "link", resume=resume))
        assert learner.fit(batches(1), epochs=epochs).epochs == epochs
    loopkit.checkpoint.save(learner, tmp_path / "link")
    assert found(tmp_path / "disk")[-1] == (3, 3, "asked for")


def test_link_and_its_directory_are_one_directory(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    with pytest.raises(PluginConflict, match=r"both own"):
        make_learner(Checkpoint(tmp_path / "disk"), Checkpoint(tmp_path / "link", name="second"))


def test_file_in_the_place_of_the_directory_is_refused_before_the_first_step(tmp_path):
    (tmp_path / "runs").write_text("no directory")
    learner = make_learner(Checkpoint(tmp_path / "runs"))
    with pytest.raises(CheckpointError, match=r"runs is a file, not a directory"):
        learner.fit(batches(1), epochs=1)
    assert learner.progress.steps == 0


def test_two_runs_in_one_directory_are_refused(tmp_path):
    plugin = Checkpoint(tmp_path)
    errors = []

    def second(**given):
        if not errors:
            with pytest.raises(CheckpointError) as caught:
                make_learner(Checkpoint(tmp_path, resume="auto")).fit(batches(1), epochs=1)
            errors.append(str(caught.value))

    make_learner(plugin, on("step_begin", second)).fit(batches(1), epochs=1)
    assert str(tmp_path) in errors[0]
    make_learner(Checkpoint(tmp_path, resume="auto")).fit(batches(1), epochs=1)


# When the directory goes under the run

GONE = r"was removed or moved.* while the run saved there: it is locked again"


def at_step(index, act, name="at_step"):
    """A plugin that acts once, before the step of this number."""
    left = [act]

    def step_begin(step, **given):
        if step.index == index and left:
            left.pop()()

    return on("step_begin", step_begin, name)


def is_locked(directory):
    """Whether another process is refused there."""
    outcome = forked(lambda: Lock(directory).acquire())
    return "locked by process" in outcome.error if outcome.error else False


@pytest.mark.parametrize("background", [False, True])
def test_removed_directory_is_taken_again_with_its_lock(background, tmp_path):
    path, locked = tmp_path / "runs", []

    def written(act):
        for thread in threading.enumerate():
            if thread.name == "loopkit-checkpoint":
                thread.join()
        act()

    learner = make_learner(
        Checkpoint(path, save=every(updates=1), options=SaveOptions(background=background)),
        at_step(2, lambda: written(lambda: shutil.rmtree(path))),
        at_step(6, lambda: written(lambda: locked.append(is_locked(path))), "look"),
    )
    with pytest.warns(UserWarning, match=GONE) as said:
        learner.fit(batches(8), epochs=1)
    assert len(said) == 1
    assert locked == [True]
    assert found(path)[-1][1] == 8
    assert sorted(os.listdir(path)) == [manifest.path.name for manifest in reversed(storage.listing(path))]


def test_renamed_directory_is_free_for_others_and_a_new_one_begins(tmp_path):
    path, other, locked = tmp_path / "runs", tmp_path / "other", []
    learner = make_learner(
        Checkpoint(path, save=every(updates=1)),
        at_step(2, lambda: path.rename(other)),
        on("step_end", lambda step, **given: step.index == 3 and locked.extend([is_locked(path), is_locked(other)])),
    )
    with pytest.warns(UserWarning, match=GONE):
        learner.fit(batches(4), epochs=1)
    assert locked == [True, False]
    assert [step for _, step, _ in found(other)] == [1, 2]
    assert [step for _, step, _ in found(path)][-1] == 4


def test_directory_that_another_run_has_taken_meanwhile_is_refused(tmp_path):
    path, theirs = tmp_path / "runs", Lock(tmp_path / "runs")

    def replace():
        path.rename(tmp_path / "other")
        path.mkdir()
        theirs.acquire()

    learner = make_learner(
        Checkpoint(path, save=every(updates=1), options=SaveOptions(on_error=False)), at_step(2, replace)
    )
    with pytest.raises(CheckpointError, match="is locked by this process"):
        learner.fit(batches(4), epochs=1)
    assert os.listdir(path) == [".lock"]
    theirs.release()


@pytest.mark.parametrize("steps", [4, 2], ids=["other names", "the same names"])
def test_checkpoints_of_another_run_in_the_place_of_the_directory_are_left_alone(steps, tmp_path):
    path = tmp_path / "runs"

    def replace():
        path.rename(tmp_path / "other")
        make_learner(Checkpoint(path, save=every(updates=1), options=NOT_AT_END), lr=0.05).fit(batches(steps), epochs=1)

    learner = make_learner(Checkpoint(path, save=every(updates=1)), at_step(2, replace))
    with pytest.raises(CheckpointError, match="holds checkpoints of another run"):
        learner.fit(batches(4), epochs=1)
    assert not (path / ".lock").exists()
    with pytest.raises(CheckpointError, match="holds checkpoints of another run"):
        learner.fit(batches(4), epochs=1)
    assert [step for _, step, _ in found(path)] == [steps - 1, steps]


def test_second_fit_goes_on_where_a_checkpoint_of_the_first_was_removed(tmp_path):
    learner = make_learner(Checkpoint(tmp_path, save=every(updates=1), keep=9))
    learner.fit(batches(3), epochs=1)
    storage.remove([storage.listing(tmp_path)[0].path])
    learner.fit(batches(3), epochs=1)
    assert len(found(tmp_path)) == 5


def test_lock_that_was_removed_is_taken_again(tmp_path):
    locked = []
    learner = make_learner(
        Checkpoint(tmp_path, save=every(updates=1), options=SaveOptions(at_end=False)),
        at_step(2, (tmp_path / ".lock").unlink),
        on("step_end", lambda step, **given: step.index == 3 and locked.append(is_locked(tmp_path))),
    )
    with pytest.warns(UserWarning, match=GONE):
        learner.fit(batches(4), epochs=1)
    assert locked == [True]
    assert [step for _, step, _ in found(tmp_path)] == [3, 4]


def test_directory_that_was_moved_and_left_a_link_is_followed(tmp_path):
    path, other = tmp_path / "runs", tmp_path / "other"

    def move():
        path.rename(other)
        path.symlink_to(other)

    learner = make_learner(Checkpoint(path, save=every(updates=1), options=SaveOptions(at_end=False)), at_step(2, move))
    with pytest.warns(UserWarning, match=f"moved to {other}"):
        learner.fit(batches(4), epochs=1)
    assert [step for _, step, _ in found(other)] == [3, 4]
    assert not (other / ".lock").exists()


def test_best_of_a_directory_without_checkpoints_says_so(tmp_path):
    (tmp_path / "empty").mkdir()
    for name, lacks in (("empty", "holds no checkpoint that can be read"), ("none", "is not there")):
        with pytest.raises(CheckpointError, match=f"{name} {lacks}: give the directory of a run, as Checkpoint was"):
            loopkit.checkpoint.best(tmp_path / name)


def test_lock_is_let_go_after_an_error(tmp_path):
    learner = make_learner(
        Checkpoint(tmp_path, options=SaveOptions(on_error=False)), on("loss_begin", lambda **given: 1 / 0)
    )
    with pytest.raises(ZeroDivisionError):
        learner.fit(batches(1), epochs=1)
    make_learner(Checkpoint(tmp_path)).fit(batches(1), epochs=1)


def test_lock_is_let_go_after_a_failed_resume(tmp_path):
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        make_learner(Checkpoint(tmp_path, resume=True)).fit(batches(1), epochs=1)
    make_learner(Checkpoint(tmp_path)).fit(batches(1), epochs=1)


def damage(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("name", ["manifest.json", "model.safetensors", "state.json", "state.safetensors"])
def test_damaged_newest_is_passed_over_with_a_warning(name, tmp_path):
    straight = run(tmp_path / "straight")
    run(tmp_path / "a", epochs=2)
    newest = storage.listing(tmp_path / "a")[0].path
    damage(newest / name)
    with pytest.warns(UserWarning, match=rf"{newest.name}.*\(.*{newest.name} is passed over\)"):
        again = run(tmp_path / "a")
    assert not list(differences(straight.state_dict(), again.state_dict()))


@pytest.mark.filterwarnings("ignore:.*is passed over")
@pytest.mark.parametrize("name", ["manifest.json", "model.safetensors", "state.json", "state.safetensors"])
def test_damaged_one_does_not_count_among_those_to_keep(name, tmp_path):
    run(tmp_path, epochs=3)
    damaged, whole = (manifest.path for manifest in storage.listing(tmp_path))
    damage(damaged / name)
    run(tmp_path, epochs=3)  # saves once
    assert damaged.exists()
    sound = {manifest.path for manifest in storage.listing(tmp_path)} - {damaged}
    assert len(sound) == 2
    assert whole in sound
    for path in sound:
        storage.verify(path)


@pytest.mark.filterwarnings("ignore:.*is passed over")
@pytest.mark.parametrize("name", ["manifest.json", "state.json"])
@pytest.mark.parametrize("resume", ["auto", True])
def test_all_damaged_is_an_error_and_no_fresh_start(name, resume, tmp_path):
    run(tmp_path, epochs=2)
    for path in tmp_path.glob(f"*/{name}"):
        damage(path)
    learner = make_learner(Checkpoint(tmp_path, resume=resume))
    with pytest.raises(CorruptCheckpointError, match="holds no checkpoint that can be read: see the warnings"):
        learner.fit(batches(1), epochs=1)
    assert learner.progress.steps == 0


def test_newer_format_is_an_error_and_not_passed_over(tmp_path, monkeypatch):
    run(tmp_path, epochs=1)
    monkeypatch.setattr(storage, "FORMAT", FORMAT + 1)
    run(tmp_path, epochs=2)
    monkeypatch.undo()
    with pytest.raises(FormatVersionError, match="written by a newer one"):
        run(tmp_path, epochs=3)


def test_state_that_does_not_fit_is_an_error_and_no_fresh_start(tmp_path):
    run(tmp_path, epochs=1)
    learner = make_learner(Checkpoint(tmp_path, resume="auto"), History())
    with pytest.raises(StateError, match=r"'weight_average'.*allow="):
        learner.fit(batches(1), epochs=1)
    allowed = make_learner(
        Checkpoint(tmp_path, resume="auto", options=SaveOptions(allow=["weight_average"])), History()
    )
    assert allowed.fit(batches(4), batches(1), epochs=2).steps == 8


def test_replay_can_be_refused(tmp_path):
    def data():
        yield from batches(4)

    make_learner(Checkpoint(tmp_path, save=every(updates=2), options=SaveOptions(at_end=False))).fit(data, max_steps=3)
    with pytest.raises(StateError, match=r"SaveOptions\(replay=True\)"):
        make_learner(Checkpoint(tmp_path, resume="auto", options=SaveOptions(replay=False))).fit(data, max_steps=4)
    assert make_learner(Checkpoint(tmp_path, resume="auto")).fit(data, max_steps=4).steps == 4


# What cannot be saved


class Stateful:
    """A plugin with whatever state."""

    name = "stateful"

    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return self.state() if callable(self.state) else self.state

    def load_state_dict(self, state):
        self.state = state

    @hookimpl
    def step_end(self):
        pass


@pytest.mark.parametrize(
    ("state", "path"),
    [
        ({"fn": print}, r"plugins\.stateful.*fn.*builtin_function_or_method"),
        ({"deep": [{"set": {print}}]}, r"plugins\.stateful.*deep.*set"),
        ({"sparse": torch.eye(2).to_sparse()}, "stateful.*sparse"),
        ({"key": {(1, print): 3}}, "stateful.*key"),
    ],
    ids=["function", "set", "sparse", "key"],
)
def test_plugin_state_that_cannot_be_saved_is_found_before_the_first_step(state, path, tmp_path):
    learner = make_learner(Checkpoint(tmp_path, save=every(epochs=100)), Stateful(state))
    with pytest.raises(StateError, match=path):
        learner.fit(batches(2), epochs=1)
    assert learner.progress.steps == 0
    assert found(tmp_path) == []


class Strange(torch.optim.SGD):
    """Holds something that cannot be saved, from its first step on."""

    def step(self, closure=None):
        super().step(closure)
        self.state[self.param_groups[0]["params"][0]]["made"] = object()


def test_optimizer_state_that_cannot_be_saved_is_found_after_the_first_step(tmp_path):
    plugins = [Checkpoint(tmp_path, save=every(epochs=100))]
    learner = Learner(nn.Linear(3, 1), nn.MSELoss(), lambda p: Strange(p, lr=0.1), plugins=plugins, standard=False)
    with pytest.raises(StateError, match=r"optimizers.*made.*object"):
        learner.fit(batches(9), epochs=1)
    assert learner.progress.steps == 1


def test_parameters_that_are_not_finite_are_not_saved(tmp_path):
    def spoil(learner, **given):
        if learner.progress.steps == 6:
            with torch.no_grad():
                learner.model.bias.fill_(math.nan)

    learner = make_learner(Checkpoint(tmp_path), on("update_end", spoil))
    with pytest.raises(
        NonFiniteError, match="parameter 'weight' of model 'model' is not finite at step 8: no checkpoint was"
    ):
        learner.fit(batches(4), epochs=3)
    assert found(tmp_path) == [(1, 4, "epoch")]


# Writing in a thread


@pytest.fixture
def slow_writes(monkeypatch):
    """Let writing wait until it is told to go on; -> the event that tells it, and the names of threads that wrote."""
    go, threads, real = threading.Event(), [], storage.write

    def write(*args, **options):
        threads.append(threading.current_thread().name)
        if threads[-1] == "loopkit-checkpoint":
            assert go.wait(60)
        return real(*args, **options)

    monkeypatch.setattr(storage, "write", write)
    yield go, threads
    go.set()


def test_background_write_is_of_a_copy(tmp_path, slow_writes):
    """Parameters, optimizer and the state of plugins change while it is written."""
    go, threads = slow_writes
    shared = {"list": [0], "tensor": torch.zeros(2), "dict": {"n": 0}}
    expected = {}

    def change(learner, **given):
        if learner.progress.steps == 2:
            expected.update(copy.deepcopy({"state": learner.state_dict()["models"], "shared": shared}))

    def later(learner, **given):
        n = learner.progress.steps
        shared["list"].append(n)
        shared["tensor"] += n
        shared["dict"]["n"] = n
        if n == 3:
            go.set()

    learner = make_learner(
        Checkpoint(tmp_path, save=every(updates=2), keep=9, options=SaveOptions(background=True)),
        Stateful(lambda: shared),
        on("step_end", change, "expect", reads=("*",)),
        on("step_begin", later, "later"),
    )
    learner.fit(batches(4), epochs=1)
    from loopkit.checkpoint.bundle import read_state

    oldest = read_state(storage.listing(tmp_path)[-1])
    assert threads[0] == "loopkit-checkpoint"
    assert not list(differences(expected["state"], oldest["models"]))
    assert not list(differences(expected["shared"], oldest["plugins"]["stateful"]))
    assert shared["list"] != expected["shared"]["list"]


def test_background_says_its_memory_and_frees_it(tmp_path):
    held = []
    plugin = Checkpoint(tmp_path, save=every(updates=1), options=SaveOptions(background=True))
    model = nn.Linear(64, 64)
    learner = make_learner(plugin, on("step_begin", lambda **given: held.append(plugin.memory)), model=model)
    learner.fit([(torch.ones(2, 64), torch.ones(2, 64))] * 3, epochs=1)
    weights = 4 * (64 * 64 + 64)
    assert held[0] == 0
    assert weights <= held[-1] < weights + 16_384  # and the states of generators
    assert plugin.memory == 0
    assert Checkpoint(tmp_path / "other").memory == 0


def test_at_most_one_background_write_is_under_way(tmp_path, slow_writes):
    go, _ = slow_writes
    alive = []

    def look(learner, **given):
        alive.append(sum(t.name == "loopkit-checkpoint" for t in threading.enumerate()))
        if learner.progress.steps == 5:
            go.set()

    learner = make_learner(
        Checkpoint(tmp_path, save=every(updates=1), keep=99, options=SaveOptions(background=True)),
        on("step_begin", look),
        lr=0.01,
    )
    learner.fit(batches(8), epochs=1)
    assert alive[1:6] == [1] * 5
    assert max(alive) == 1
    saved = [step for _, step, _ in found(tmp_path)]
    assert saved[0] == 1
    assert not {2, 3, 4} & set(saved)  # due, but the first was still being written
    assert saved[-1] == 8
    assert all(thread.name != "loopkit-checkpoint" for thread in threading.enumerate())


def test_error_of_a_background_write_is_raised_at_the_end_of_the_next_step(tmp_path, monkeypatch):
    failed = threading.Event()

    def write(*args, **options):
        failed.set()
        raise CheckpointError("the disk is full")

    plugin = Checkpoint(tmp_path, save=every(updates=2), options=SaveOptions(background=True, on_error=False))

    def wait(learner, **given):
        if learner.progress.steps == 2:
            assert failed.wait(60)
            plugin._writer.join()

    monkeypatch.setattr(storage, "write", write)
    learner = make_learner(plugin, on("step_begin", wait))
    with pytest.raises(CheckpointError, match="the disk is full"):
        learner.fit(batches(8), epochs=1)
    assert learner.progress.steps == 3


def test_error_of_the_last_background_write_is_raised_by_fit(tmp_path, monkeypatch):
    def write(*args, **options):
        raise CheckpointError("the disk is full")

    monkeypatch.setattr(storage, "write", write)
    learner = make_learner(
        Checkpoint(tmp_path, save=every(updates=4), options=SaveOptions(background=True, at_end=False))
    )
    with pytest.raises(CheckpointError, match="the disk is full"):
        learner.fit(batches(4), epochs=1)


@pytest.fixture
def first_write_fails(monkeypatch):
    real, failed = storage.write, threading.Event()

    def write(*args, **options):
        if not failed.is_set():
            failed.set()
            raise CheckpointError("the disk is full")
        return real(*args, **options)

    monkeypatch.setattr(storage, "write", write)


def join_writer():
    for thread in threading.enumerate():
        if thread.name == "loopkit-checkpoint":
            thread.join()


def test_failed_background_write_is_no_reason_not_to_save_at_an_error(tmp_path, first_write_fails):
    def broken():
        yield from batches(2)
        join_writer()
        raise ValueError("a bad file")

    learner = make_learner(Checkpoint(tmp_path, save=every(updates=2), options=SaveOptions(background=True)))
    with (
        pytest.warns(UserWarning, match="an earlier write failed, and this one did not: the disk is full") as told,
        pytest.raises(ValueError, match="a bad file"),
    ):
        learner.fit(lambda: broken(), epochs=1)
    assert len(told) == 1
    assert found(tmp_path) == [(0, 2, "error")]


def test_failed_background_write_is_no_reason_not_to_save_at_the_end(tmp_path, monkeypatch):
    real, go, failed = storage.write, threading.Event(), []

    def write(*args, **options):
        if threading.current_thread().name == "loopkit-checkpoint":
            assert go.wait(60)
            failed.append(1)
            raise CheckpointError("the disk is full")
        return real(*args, **options)

    monkeypatch.setattr(storage, "write", write)
    learner = make_learner(
        Checkpoint(tmp_path, save=every(updates=4), options=SaveOptions(background=True)),
        on("fit_end", lambda **given: go.set()),
    )
    with pytest.warns(UserWarning, match="an earlier write failed, and this one did not: the disk is full") as told:
        assert learner.fit(batches(4), epochs=1).reason == "epochs"
    assert (len(told), failed) == (1, [1])
    assert found(tmp_path) == [(1, 4, "end")]


@pytest.mark.filterwarnings("ignore:cannot remove")
def test_old_checkpoint_that_cannot_be_removed_does_not_end_the_run(tmp_path, monkeypatch):
    class Held(disk.System):
        def rmdir(self, path):
            if ".old-" in str(path):
                raise OSError(39, "Directory not empty")
            super().rmdir(path)

    monkeypatch.setattr(disk, "system", Held())
    learner = make_learner(Checkpoint(tmp_path))
    with pytest.warns(UserWarning, match=r"cannot remove .*000001-step-1: .*Directory not empty"):
        assert learner.fit(batches(1), epochs=6).reason == "epochs"
    assert found(tmp_path) == [(5, 5, "epoch"), (6, 6, "epoch")]


def test_background_keeps_apart_what_shared_memory_in_an_earlier_save(tmp_path):
    from loopkit.checkpoint.bundle import read_state

    held = {"best": torch.zeros(3), "latest": torch.zeros(3)}

    def change(learner, **given):
        held["latest"] = torch.full((3,), float(learner.progress.epochs))
        if learner.progress.epochs == 1:
            held["best"] = held["latest"]

    learner = make_learner(
        Checkpoint(tmp_path, keep=9, options=SaveOptions(background=True)),
        Stateful(lambda: {name: tensor.detach() for name, tensor in held.items()}),
        on("phase_end", change),
    )
    learner.fit(batches(2), epochs=3)
    saved = [read_state(manifest)["plugins"]["stateful"] for manifest in reversed(storage.listing(tmp_path))]
    assert [(s["best"].tolist(), s["latest"].tolist()) for s in saved] == [
        ([1.0] * 3, [n] * 3) for n in (1.0, 2.0, 3.0)
    ]


def test_disk_error_at_the_final_save_is_raised_by_fit_and_the_lock_let_go(tmp_path, monkeypatch):
    def write(*args, **options):
        raise CheckpointError("the disk is full")

    learner = make_learner(Checkpoint(tmp_path, save=every(epochs=9)))
    with monkeypatch.context() as patched:
        patched.setattr(storage, "write", write)
        with pytest.raises(CheckpointError, match="the disk is full") as caught:
            learner.fit(batches(4), epochs=1)
    assert "in fit_end of plugin 'checkpoint'" in caught.value.__notes__[0]
    make_learner(Checkpoint(tmp_path)).fit(batches(1), epochs=1)


def test_real_disk_error_in_a_write_leaves_the_older_ones(tmp_path, monkeypatch):
    class Full(disk.System):
        full = False

        def write(self, file, data):
            if self.full:
                raise OSError(28, "No space left on device")
            return super().write(file, data)

    system = Full()
    monkeypatch.setattr(disk, "system", system)
    fill = on("epoch_begin", lambda learner, **given: setattr(system, "full", learner.progress.epochs == 1))
    with pytest.raises(CheckpointError, match="No space left"):
        make_learner(Checkpoint(tmp_path), fill).fit(batches(2), epochs=3)
    assert found(tmp_path) == [(1, 2, "epoch")]
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".tmp")] == []


# With other plugins


def test_comes_last_in_every_plan(tmp_path):
    learner = make_learner(Checkpoint(tmp_path), WeightAverage(0.5), History(), EarlyStopping(), standard=True)
    order: dict[str, list[str]] = {}
    hook = ""
    for line in str(learner.explain("train")).splitlines() + str(learner.explain("val")).splitlines():
        if re.match(r"\s+\d+\. ", line):
            order[hook].append(line.split()[1])
        elif line and line[0] not in " =":
            hook = line.split()[0]
            order.setdefault(hook, [])
    for hook in ("step_end", "phase_end", "fit_end"):
        assert "checkpoint" in order[hook]
    assert order["phase_end"][-1] == "checkpoint"
    assert order["step_end"][-1] == "checkpoint"


def test_two_with_directories_and_names_of_their_own(tmp_path):
    often = Checkpoint(tmp_path / "often", save=every(updates=1), keep=1, name="often", resume="auto")
    rare = Checkpoint(tmp_path / "rare", save=every(epochs=2), name="rare")
    make_learner(often, rare).fit(batches(2), epochs=3)
    assert found(tmp_path / "often") == [(2, 6, "interval"), (3, 6, "end")]
    assert found(tmp_path / "rare") == [(2, 4, "epoch"), (3, 6, "end")]


def test_two_in_one_directory_are_refused(tmp_path):
    with pytest.raises(PluginConflict, match="checkpoints in"):
        make_learner(Checkpoint(tmp_path, name="a"), Checkpoint(tmp_path, name="b"))


def test_two_that_resume_are_refused(tmp_path):
    with pytest.raises(PluginConflict, match=r"checkpoint\.resume"):
        make_learner(
            Checkpoint(tmp_path / "a", name="a", resume="auto"), Checkpoint(tmp_path / "b", name="b", resume=True)
        )


def test_weights_of_a_checkpoint_are_the_raw_ones(tmp_path):
    from loopkit.checkpoint.bundle import read_state

    learner = make_learner(Checkpoint(tmp_path), WeightAverage(0.5))
    learner.fit(batches(4), batches(1), epochs=1)
    saved = read_state(storage.listing(tmp_path)[0])["models"]["model"]
    assert torch.equal(saved["weight"], learner.model.weight)


@pytest.fixture
def distribution(tmp_path, monkeypatch):
    """Install a version of a distribution with the plugin ``versioned``, in the place of the one before it."""
    module = "versioned_" + re.sub(r"\W", "_", tmp_path.name)
    source = "from loopkit import hookimpl\n\n\nclass Versioned:\n    @hookimpl\n    def fit_end(self):\n        pass\n"
    entry_points = f"[loopkit.plugins]\nversioned = {module}:Versioned\n"
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])

    def installed(version, name="versioned-plugins"):
        for folder in tmp_path.glob("*.dist-info"):
            shutil.rmtree(folder)
        install(tmp_path, name, entry_points, version, **{module: source})
        origin.cache_clear()

    yield installed
    origin.cache_clear()
    sys.modules.pop(module, None)


def test_versions_of_plugins_are_recorded(distribution, tmp_path):
    distribution("1.0")
    make_learner("versioned", Checkpoint(tmp_path / "run")).fit(batches(2), epochs=1)
    assert storage.listing(tmp_path / "run")[0].about["plugin_versions"] == {
        "checkpoint": {"distribution": "loopkit-engine", "version": loopkit.__version__},
        "versioned": {"distribution": "versioned-plugins", "version": "1.0"},
    }


def test_resume_with_the_same_versions_says_nothing(distribution, tmp_path):
    distribution("1.0")
    for epochs in (1, 2):
        make_learner("versioned", Checkpoint(tmp_path / "run", resume="auto")).fit(batches(2), epochs=epochs)


@pytest.mark.parametrize("name", ["versioned-plugins", "fork-of-them"])
def test_resume_with_another_version_warns_and_goes_on(name, distribution, tmp_path):
    distribution("1.0")
    make_learner("versioned", Checkpoint(tmp_path / "run")).fit(batches(2), epochs=1)
    distribution("1.1", name)
    learner = make_learner("versioned", Checkpoint(tmp_path / "run", resume="auto"))
    message = (
        rf"other versions of plugins: 'versioned': versioned-plugins 1\.0 then, {name} 1\.1 now\. The run may "
        rf"continue diff"
    )
    with pytest.warns(UserWarning, match=message):
        learner.fit(batches(2), epochs=2)
    assert learner.progress.epochs == 2


@pytest.mark.parametrize("saved", [None, 3, [], {"history": 3}, {"other": {"distribution": "x", "version": "1"}}])
def test_manifest_without_versions_that_can_be_compared_says_nothing(saved, tmp_path, monkeypatch):
    monkeypatch.setattr("loopkit.checkpoint.bundle.plugin_versions", lambda plugins: saved)
    make_learner(History(), Checkpoint(tmp_path)).fit(batches(2), epochs=1)
    monkeypatch.undo()
    make_learner(History(), Checkpoint(tmp_path, resume="auto")).fit(batches(2), epochs=2)


def test_manifest_with_versions_of_other_types_shows_them(tmp_path, monkeypatch):
    saved = {"history": {"distribution": "\x1b[2J" * 99, "version": 3}, "checkpoint": {}}
    monkeypatch.setattr("loopkit.checkpoint.bundle.plugin_versions", lambda plugins: saved)
    make_learner(History(), Checkpoint(tmp_path)).fit(batches(2), epochs=1)
    monkeypatch.undo()
    with pytest.warns(UserWarning, match=r"'checkpoint': None None then, .*; 'history': \\x1b\[2J.* then") as caught:
        make_learner(History(), Checkpoint(tmp_path, resume="auto")).fit(batches(2), epochs=2)
    assert "\x1b" not in str(caught[0].message)


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("at", [2, 4, 6])
def test_run_whose_lock_another_host_has_taken_stops_at_its_next_save(at, background, tmp_path):
    def take():
        said = json.loads((tmp_path / ".lock").read_bytes())
        (tmp_path / "new").write_text(json.dumps({**said, "host": "elsewhere", "pid": 7}))
        (tmp_path / "new").rename(tmp_path / ".lock")

    options = SaveOptions(background=background, on_error=False)
    learner = make_learner(Checkpoint(tmp_path, save=every(updates=1), options=options), at_step(at, take))
    with pytest.raises(CheckpointError, match=r"was taken over by process 7 on elsewhere .*this run stops"):
        learner.fit(batches(8), epochs=1)
    assert learner.progress.steps < 8 or background  # the thread may be the slower
    assert json.loads((tmp_path / ".lock").read_bytes())["host"] == "elsewhere"
