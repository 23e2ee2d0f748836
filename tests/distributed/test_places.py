"""Places: a process that was killed is named with the step that it was in, however fast the steps are."""

from __future__ import annotations

import os
import re
import signal
import tempfile

import pytest
import torch
from torch import nn

from distributed.processes import run
from loopkit import Learner, hookimpl
from loopkit.data import TensorLoader
from loopkit.distributed import join, places
from loopkit.plugins import DDP

pytestmark = pytest.mark.clock


class KilledAt:
    """Kills a rank in a hook of the step that it is told, by SIGKILL."""

    def __init__(self, ranks, phase, step, hook="step_begin"):
        self.ranks, self.at, self.hook = ranks, (phase, step), hook

    def _act(self, hook, learner, phase, step):
        if hook == self.hook and learner.world.rank in self.ranks and (phase.name, step.index) == self.at:
            os.kill(os.getpid(), signal.SIGKILL)

    @hookimpl
    def step_begin(self, learner, phase, step):
        self._act("step_begin", learner, phase, step)

    @hookimpl
    def step_end(self, learner, phase, step):
        self._act("step_end", learner, phase, step)


def data(count):
    return TensorLoader(torch.randn(count, 6), torch.randint(0, 3, (count,)), batch_size=2)


def fitted(rank, killed, accumulate):
    """Two epochs of 80 steps, each with a validation of 10; returns what ended them."""
    torch.manual_seed(0)
    learner = Learner(
        nn.Linear(6, 3),
        nn.CrossEntropyLoss(),
        lambda params: torch.optim.SGD(params, lr=0.1),
        accumulate=accumulate,
        plugins=[DDP(), killed],
        standard=False,
    )
    try:
        learner.fit(data(320), data(40), epochs=2)
    except Exception as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("accumulate", "phase", "step", "hook"),
    [
        (1, "train", 57, "step_begin"),
        (8, "train", 57, "step_begin"),
        (8, "train", 57, "step_end"),
        (1, "val", 3, "step_end"),
    ],
)
def test_a_killed_process_is_named_with_the_step_that_it_was_in(accumulate, phase, step, hook, tmp_path, monkeypatch):
    monkeypatch.setattr(places, "SHARED", str(tmp_path))
    survivor, dead = run(fitted, 2, KilledAt((1,), phase, step, hook), accumulate, check=False)
    assert dead.code == -signal.SIGKILL
    place = rf"phase '{phase}', epoch 1, step {step}"
    assert re.search(rf"rank 1 is gone; it was last heard of \d\.\d s ago \([^()]*{place}\)[,.]", survivor.value)
    assert not list(tmp_path.iterdir())


def test_rank_zero_that_was_killed_is_named_with_the_step_that_it_was_in():
    dead, survivor = run(fitted, 2, KilledAt((0,), "train", 57), 8, check=False)
    assert dead.code == -signal.SIGKILL
    assert "phase 'train', epoch 1, step 57)" in survivor.value


def test_processes_that_are_all_killed_leave_no_file(tmp_path, monkeypatch):
    monkeypatch.setattr(places, "SHARED", str(tmp_path))
    outcomes = run(fitted, 2, KilledAt((0, 1), "train", 7), 1, check=False)
    assert [outcome.code for outcome in outcomes] == [-signal.SIGKILL] * 2
    assert not list(tmp_path.iterdir())


def dies_at_the_barrier(rank):
    world = join("gloo")
    if rank == 1:
        world.highest = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    places.lay_out(world)


def test_process_that_is_killed_while_all_open_it_leaves_no_file(tmp_path, monkeypatch):
    monkeypatch.setattr(places, "SHARED", str(tmp_path))
    survivor, dead = run(dies_at_the_barrier, 2, check=False)
    assert dead.code == -signal.SIGKILL
    assert survivor.code
    assert not list(tmp_path.iterdir())


def placed(rank, directory):
    """Where each process is, before an epoch, in two that are one in the other, and after them."""
    world = join("gloo")
    if directory is not None:
        places.SHARED = tempfile.tempdir = directory
    places.lay_out(world)
    learner = Learner(nn.Linear(6, 3), nn.CrossEntropyLoss(), standard=False)
    told = []

    def read():
        world.gather(None)
        told.append([places.last_place(world, rank) for rank in range(world.size)])
        world.gather(None)

    with learner.epoch("val", length=9) as epoch:
        places.enter(world, [epoch])
        read()
        world.slot[0] = 4 + rank
        read()
    places.enter(world, [])
    read()
    return told


def test_each_process_reads_the_places_of_all():
    outer, last = "phase 'val', epoch 0", "between two epochs"
    assert run(placed, 2, None) == [[[outer, outer], [f"{outer}, step 3", f"{outer}, step 4"], [last, last]]] * 2


def test_processes_without_a_place_for_the_file_know_their_own_alone(tmp_path):
    outer, last = "phase 'val', epoch 0", "between two epochs"
    one, other = run(placed, 2, str(tmp_path / "none"))
    assert one == [[outer, ""], [f"{outer}, step 3", ""], [last, ""]]
    assert other == [["", outer], ["", f"{outer}, step 4"], ["", last]]
