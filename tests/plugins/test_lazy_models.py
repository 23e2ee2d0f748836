"""Models whose shapes are not known before their first batch."""

from __future__ import annotations

import pytest
import torch
from distributed.processes import run
from helpers import batches
from torch import nn

from loopkit import Learner
from loopkit.errors import PluginError
from loopkit.plugins import DDP, Checkpoint, EarlyStopping, Freeze, Metrics, StopOnNonFinite, WeightAverage


def lazy():
    torch.manual_seed(0)
    return nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d(), nn.LazyLinear(1))


def build(*plugins, model=None):
    return Learner(
        lazy() if model is None else model,
        nn.MSELoss(),
        lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        plugins=[Metrics(), *plugins],
        standard=False,
    )


def weights(learner):
    return {name: value.clone() for name, value in learner.model.state_dict().items()}


def same(one, other):
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("seed", [0, 1])
def test_lazy_model_is_saved_and_resumed(tmp_path, seed):
    torch.manual_seed(2)
    whole = build()
    whole.fit(batches(3), batches(1), epochs=2)
    torch.manual_seed(2)
    build(Checkpoint(tmp_path)).fit(batches(3), batches(1), epochs=1)
    torch.manual_seed(seed)
    again = build(Checkpoint(tmp_path, resume="auto"))
    again.fit(batches(3), batches(1), epochs=2)
    same(weights(again), weights(whole))


@pytest.mark.parametrize(
    "plugin",
    [
        lambda: WeightAverage(0.5),
        lambda: EarlyStopping("val/loss", mode="min", restore_best=True),
        lambda: StopOnNonFinite("rollback"),
        lambda: StopOnNonFinite("skip"),
    ],
)
def test_lazy_model_trains_with_a_plugin(plugin):
    assert build(plugin()).fit(batches(3), batches(1), epochs=2).updates == 6


def test_lazy_model_is_frozen():
    learner = build(Freeze("0"))
    learner.fit(batches(1), epochs=1)
    before = weights(learner)
    learner.fit(batches(3), epochs=1)
    assert torch.equal(before["0.weight"], learner.model[0].weight)
    assert not torch.equal(before["2.weight"], learner.model[2].weight)


def test_lazy_model_is_thawed():
    learner = build(Freeze("0", thaw_at=1))
    learner.fit(batches(1), epochs=1)
    before = weights(learner)
    learner.fit(batches(3), epochs=1)
    assert not torch.equal(before["0.weight"], learner.model[0].weight)


def test_error_before_the_first_batch_is_the_only_one(tmp_path):
    with pytest.raises(ZeroDivisionError):
        build(WeightAverage(0.5), Checkpoint(tmp_path)).fit((1 / 0 for _ in range(2)), epochs=1)


def fails(rank):
    with pytest.raises(PluginError, match=r"'0.weight' of model 'model' is lazy.* run a batch through the model"):
        build(DDP())


def test_lazy_model_in_several_processes_is_an_error_with_a_way_out():
    run(fails, 2)
