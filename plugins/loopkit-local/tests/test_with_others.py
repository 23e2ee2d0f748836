"""Plugins that decide something, beside averages: each process decides by itself, and all end with equal models."""

import pytest
import torch
from distributed.processes import run
from helpers import on
from small import learner_of, make_data, same, values
from torch import nn

from loopkit import every
from loopkit.checkpoint import storage
from loopkit.data import TensorLoader
from loopkit.plugins import Checkpoint, GradNoise, MixedPrecision, SkipSpikes, StopOnNonFinite
from loopkit_local import AverageParameters, EverySteps

SIZE, SPIKE = 4, 5
"""Samples of a process in a step, and the step in which rank 1 has a spike."""
KINDS = {
    "noise": lambda: GradNoise(0.1),
    "spikes": lambda: SkipSpikes(0.5, warmup=2),
    "skip": lambda: StopOnNonFinite("skip"),
    "scaling": lambda: MixedPrecision("float32", scaling=True, init_scale=2.0**127, growth_interval=2),
}


def _beside(rank, name):
    torch.manual_seed(100 + rank)
    learner = learner_of(AverageParameters(), KINDS[name]())
    learner.fit(make_data(samples=80), epochs=1)
    return values(learner.model)


@pytest.mark.parametrize("name", KINDS)
def test_parameters_are_equal_at_the_end_with(name):
    one, other = run(_beside, 2, name)
    assert same(one, other)
    assert all(p.isfinite().all() for p in one)


def _spiked(rank):
    x, y = make_data(samples=80)._tensors
    first = (2 * SPIKE + 1) * SIZE
    x[first : first + SIZE] *= 1000
    cancelled = []
    torch.manual_seed(0)
    learner = learner_of(
        AverageParameters(),
        SkipSpikes(8.0, warmup=3),
        on("step_cancelled", lambda step, **_: cancelled.append(step.index)),
        model=nn.Linear(3, 2),
        optimizer=lambda params: torch.optim.SGD(params, lr=1e-4),
    )
    learner.fit(TensorLoader(x, y, batch_size=SIZE), epochs=1)
    return cancelled, values(learner.model)


def test_process_decides_by_itself_on_its_own_loss():
    (none, one), (cancelled, other) = run(_spiked, 2)
    assert (none, cancelled) == ([], [SPIKE])
    assert same(one, other)


def _saved(rank, directory):
    learner = learner_of(AverageParameters(EverySteps(2)), Checkpoint(directory, save=every(updates=3), keep=9))
    learner.fit(make_data(samples=80), epochs=1)
    return [manifest.about["progress"]["updates"] for manifest in storage.listing(directory)]


def test_checkpoint_of_an_interval_is_saved_where_the_processes_next_agree(tmp_path):
    saved, _ = run(_saved, 2, tmp_path)
    assert saved[0] == 10
    assert len(saved) > 2
