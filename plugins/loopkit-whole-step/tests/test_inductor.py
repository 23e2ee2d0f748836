"""The step compiled: one model for all tests here, since compiling takes seconds."""

from __future__ import annotations

import pytest
import torch
from helpers import on
from test_whole_step import OPTIMIZERS, TWO, apart, batches, dropping, make, modes, spiky, whole
from torch import nn

from loopkit.metrics import Accuracy
from loopkit.plugins import Checkpoint, ClipGradNorm, Metrics, Schedule, SkipSpikes, StopOnNonFinite
from loopkit.schedules import cosine


def model():
    return nn.Sequential(nn.Linear(6, 12, bias=False), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(0.2), nn.Linear(12, 3))


@pytest.fixture(scope="module")
def learners(tmp_path_factory):
    """An eager learner and one with the compiled step, trained alike."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        made = []
        for step in ([], [whole(backend="inductor")]):
            stack = [Metrics(Accuracy()), ClipGradNorm(0.5), Schedule(cosine(50)), StopOnNonFinite(), *step]
            learner = make(*stack, model=model, optimizer=OPTIMIZERS["adam"])
            torch.manual_seed(1)
            learner.fit(batches(), batches(2), epochs=2)
            made.append(learner)
        yield made


def test_compiled_step_trains_as_the_eager_one(learners):
    eager, learner = learners
    assert modes(learner.plugins["whole_step"])[0] == "graph"  # of the training phase
    assert apart(eager, learner) < 1e-5  # of numbers below 2, after 24 updates in float32


def test_compiled_step_counts_and_measures_as_the_eager_one(learners):
    eager, learner = learners
    assert eager.progress == learner.progress
    assert learner.metrics == pytest.approx(eager.metrics, rel=1e-5)


def test_float64_sums_without_dimensions_are_not_lost(learners):
    eager, learner = learners
    assert learner.metrics["train/loss"] > 0
    assert learner.metrics["train/loss"] == pytest.approx(eager.metrics["train/loss"], rel=1e-5)
    assert all(value["step"] == 24 for value in learner.optimizer.state.values())
    assert learner.model[1].num_batches_tracked == 24


def test_compiling_is_timed_and_told(learners):
    _, learner = learners
    (row,) = [row for row in learner.explain("train").rows if row.hook == "take_step"]
    assert "a graph, compiled in" in row.note


@pytest.mark.slow
def test_two_optimizers_and_a_spike_are_compiled(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    made = []
    for step in ([], [whole(backend="inductor")]):
        learner = make(SkipSpikes(3.0, warmup=3), ClipGradNorm(0.5), *step, model=dropping, **TWO)
        learner.fit(spiky(), epochs=2)
        made.append(learner)
    eager, learner = made
    assert modes(learner.plugins["whole_step"])[0] == "graph"  # of the training phase
    assert eager.plugins["skip_spikes"].skipped == learner.plugins["skip_spikes"].skipped >= 1
    assert eager.progress == learner.progress
    assert apart(eager, learner) < 1e-5  # of numbers below 1, after 40 updates in float32


@pytest.mark.slow
def test_compiled_run_that_goes_on_is_bitwise_the_one_in_one_piece(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))

    def made(*plugins):
        stack = [Metrics(Accuracy()), ClipGradNorm(0.5), whole(backend="inductor"), *plugins]
        return make(*stack, model=model, optimizer=OPTIMIZERS["adam"])

    one = made()
    one.fit(batches(), epochs=2)
    pause = on("step_end", lambda learner: learner.progress.updates == 17 and learner.pause("test"), "pause")
    made(Checkpoint(tmp_path / "run"), pause).fit(batches(), epochs=2, on_interrupt="return")
    again = made(Checkpoint(tmp_path / "run", resume="auto"))
    again.fit(batches(), epochs=2)
    assert modes(again.plugins["whole_step"]) == ["graph"]
    assert apart(one, again) == 0.0
    assert one.metrics == again.metrics
