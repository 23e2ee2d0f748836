"""One process fails: the others end in time, say which one and where, and leave checkpoints that can be read.

The long form is ``python tests/distributed/campaign.py --trials 30``.
"""

from __future__ import annotations

import os
import signal

import pytest
import torch
from helpers import halved
from torch import nn

from distributed.campaign import PATIENT, TIMEOUT, Plan, planned, trial
from distributed.processes import run
from loopkit import CancelEpoch, CancelStep, Learner, every, hookimpl
from loopkit.data import TensorLoader
from loopkit.errors import CheckpointError, WorldError
from loopkit.plugins import DDP, Checkpoint

pytestmark = pytest.mark.clock


@pytest.mark.parametrize(("seed", "processes"), halved(range(3), [2, 4]))
def test_a_killed_process_is_named_and_the_others_end(seed, processes):
    plan = planned(seed + 100 * processes, processes, "kill")
    ended = trial(plan)
    assert not ended.faults(plan)
    assert ended.victim.code == -signal.SIGKILL
    assert ended.saved % 5 == 0 or ended.saved == -1


@pytest.mark.parametrize(
    ("hook", "victim"), [("step_begin", 0), ("update_begin", 1), ("epoch_begin", 1), ("epoch_end", 0), ("phase_end", 1)]
)
def test_an_error_of_one_process_is_told_by_the_others(hook, victim):
    plan = Plan("raise", victim, hook=hook)
    ended = trial(plan)
    assert not ended.faults(plan)
    assert "ValueError: the data is bad" in ended.victim.error
    assert ended.saved == (20 if hook in ("epoch_end", "phase_end") else 15 if hook[:4] in ("step", "upda") else 10)


@pytest.mark.parametrize("processes", [2, *(pytest.param(count, marks=pytest.mark.slow) for count in (3, 4))])
def test_a_process_that_hangs_is_named_and_all_end_within_ten_seconds_of_the_timeout(processes):
    plan = Plan("hang", 1, processes)
    ended = trial(plan)
    assert not ended.faults(plan)
    assert ended.victim.code == 1
    assert "has hung for" in ended.victim.output
    assert ended.last < TIMEOUT + 10.0


@pytest.mark.parametrize("victim", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_data_that_ends_early_on_one_process_is_said_to(victim):
    plan = Plan("short", victim)
    ended = trial(plan)
    assert not ended.faults(plan)
    said = (
        f"the data of rank {victim} ended early, after 7 steps of phase 'train', epoch 1, and rank {1 - victim} is at"
    )
    assert all(f"{said} step 7" in text for text in (*ended.texts(), ended.victim.error))


@pytest.mark.slow
@pytest.mark.parametrize("hook", ["step_begin", "update_begin", "epoch_begin", "epoch_end", "phase_end"])
@pytest.mark.parametrize("victim", [0, 3])
def test_a_process_of_four_that_hangs_is_named_and_ended(hook, victim):
    plan = Plan("hang", victim, 4, hook)
    assert not trial(plan).faults(plan)


class Counts:
    steps = 0

    @hookimpl
    def step_begin(self):
        self.steps += 1


def make_learner(*plugins, timeout=PATIENT, **options):
    torch.manual_seed(0)
    return Learner(
        nn.Linear(6, 3),
        nn.CrossEntropyLoss(),
        lambda params: torch.optim.SGD(params, lr=0.1),
        plugins=[DDP(timeout=timeout, **options), *plugins],
        standard=False,
    )


def samples(count):
    return torch.randn(count, 6), torch.randint(0, 3, (count,))


def unequal(rank):
    counts = Counts()
    learner = make_learner(counts, shard=False)
    with pytest.raises(WorldError) as caught:
        learner.fit(TensorLoader(*samples(8 + 4 * rank), batch_size=4), epochs=1)
    return str(caught.value), counts.steps


def test_data_of_unequal_length_is_refused_before_the_first_step():
    for text, steps in run(unequal, 2):
        assert "rank 0: phase 'train' over 2 batches; rank 1: phase 'train' over 3 batches" in text
        assert steps == 0


class Raises:
    def __init__(self, hook):
        self.hook = hook

    @hookimpl
    def fit_begin(self, learner):
        if self.hook == "fit_begin" and learner.world.rank == 1:
            raise ValueError("the data is bad")


def refused(rank, directory):
    learner = make_learner(Checkpoint(directory))
    with pytest.raises(CheckpointError) as caught:
        learner.fit(TensorLoader(*samples(16), batch_size=4), epochs=1)
    return str(caught.value)


def test_a_directory_that_rank_0_refuses_is_refused_by_all(tmp_path):
    learner = make_learner(Checkpoint(tmp_path))
    learner.fit(TensorLoader(*samples(16), batch_size=4), epochs=1)
    for text in run(refused, 2, tmp_path):
        assert "holds checkpoints of another run" in text


def test_an_error_in_fit_begin_of_one_process_is_told_by_the_others(tmp_path):
    one, other = run(fit_begins, 2, tmp_path / "saved", check=False)
    assert other.code != 0
    assert "ValueError: the data is bad" in other.error
    assert "rank 1 failed" in one.value
    assert "the data is bad" in one.value
    assert "fit_begin" in one.value


def fit_begins(rank, directory):
    learner = make_learner(Raises("fit_begin"), Checkpoint(directory))
    try:
        learner.fit(TensorLoader(*samples(16), batch_size=4), epochs=1)
    except Exception as error:
        if rank == 1:
            raise
        return f"{type(error).__name__}: {error}"
    return "nothing"


class Leaves:
    """Leaves a step in one process alone, for whose gradients the other waits."""

    def __init__(self, cancel):
        self.cancel = cancel

    @hookimpl
    def step_begin(self, learner, step):
        if learner.world.rank == 1 and step.index == 3:
            raise self.cancel("not this one")


def leaves(rank, cancel):
    learner = make_learner(Leaves(cancel), timeout=5)
    try:
        learner.fit(TensorLoader(*samples(160), batch_size=4), epochs=2)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.parametrize("cancel", [CancelStep, CancelEpoch])
def test_a_step_that_one_process_alone_cancels_ends_the_run(cancel):
    for each in run(leaves, 2, cancel, check=False):
        text = each.value or each.output
        assert "after it cancelled a step: phase 'train', epoch 1, step 3" in text


class KilledIn:
    """Ends its process while a checkpoint is made: rank 0 alone writes."""

    def state_dict(self):
        if self.armed and int(os.environ["RANK"]) == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return {}

    def load_state_dict(self, state):
        pass

    armed = False

    @hookimpl
    def update_end(self, learner):
        self.armed = learner.progress.updates == 6


def saves(rank, directory):
    learner = make_learner(KilledIn(), Checkpoint(directory, save=every(updates=3)))
    try:
        learner.fit(TensorLoader(*samples(160), batch_size=4), epochs=2)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_a_process_that_dies_in_a_save_leaves_the_one_before(tmp_path):
    one, other = run(saves, 2, tmp_path, check=False)
    assert other.code == -signal.SIGKILL
    assert "PeerError" in one.value
    assert "rank 1 is gone" in one.value
    assert sorted(path.name[-6:] for path in tmp_path.iterdir() if path.is_dir()) == ["step-3"]
