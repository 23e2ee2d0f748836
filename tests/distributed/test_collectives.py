"""How many collectives an epoch costs on two processes: literal numbers, so that none is added unseen.

Counted are the calls of c10d, which all of ``torch.distributed`` and DDP come down to: to gather objects takes
two of them, the sizes and the bytes. Operations of the store are apart: a thread makes them by the clock.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from distributed.processes import run
from loopkit import Learner, hookimpl
from loopkit.data import TensorLoader
from loopkit.distributed import member
from loopkit.plugins import DDP, Checkpoint, Metrics

STEPS = 6  # with DDP, each makes one allreduce of the gradients
OBJECTS = 2  # collectives for one gathering, or sharing, of objects


class Counts:
    """Counts collectives from the begin of one epoch to the begin of the next."""

    def __init__(self):
        self.found = []
        """The phase and the counts of each epoch."""
        self._profile = None

    @hookimpl(reads=("*",))
    def epoch_begin(self, phase):
        self._end()
        self.found.append((phase.name, Counter()))
        self._profile = profile(activities=[ProfilerActivity.CPU])
        self._profile.__enter__()

    @hookimpl(reads=("*",))
    def fit_end(self):
        self._end()

    def _end(self):
        if self._profile is not None:
            self._profile.__exit__(None, None, None)
            events = [event for event in self._profile.key_averages() if event.key.startswith("c10d::")]
            self.found[-1][1].update({event.key.removeprefix("c10d::").strip("_"): event.count for event in events})


def saved(directory):
    return [DDP(timeout=60), Metrics(), Checkpoint(directory)]


def counted(rank, make):
    """The counts of the second training epoch and of the second validation."""
    member.AGREED_EVERY = 1e9  # seconds: else how often processes agree depends on how fast they are
    torch.manual_seed(0)
    counts = Counts()
    learner = Learner(
        nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1)),
        nn.MSELoss(),
        lambda params: torch.optim.AdamW(params, lr=0.05),
        plugins=[*make(), counts],
        standard=False,
    )
    inputs = torch.randn(8 * STEPS, 5)
    data = TensorLoader(inputs, inputs[:, :1], batch_size=4)
    learner.fit(data, data, epochs=3)
    assert [phase for phase, _ in counts.found] == ["train", "val"] * 3
    return [dict(found) for _, found in counts.found[2:4]]


@pytest.mark.parametrize(
    ("make", "train", "val"),
    [
        # When an epoch begins, the processes compare what it is, and agree; when it ends, they agree again.
        pytest.param(
            lambda directory: [DDP(timeout=60)],
            {"allgather": OBJECTS, "allreduce": STEPS + 2},
            {"allgather": OBJECTS, "allreduce": 2},
            marks=pytest.mark.slow,  # all of these come in the next one, too
        ),
        # Metrics gather once; the checkpoint shares whether it is due, and gathers what is of each process.
        (
            saved,
            {"allgather": 2 * OBJECTS, "allreduce": STEPS + 2, "broadcast": OBJECTS},
            {"allgather": 3 * OBJECTS, "allreduce": 2, "broadcast": OBJECTS},
        ),
    ],
)
def test_collectives_of_an_epoch(make, train, val, tmp_path):
    assert run(counted, 2, lambda: make(tmp_path)) == [[train, val]] * 2


def begun(rank):
    """The collectives of joining and of wrapping a model without buffers."""
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))
        Learner(model, nn.MSELoss(), torch.optim.AdamW, plugins=[DDP(timeout=60)], standard=False)
    return {
        event.key.removeprefix("c10d::").strip("_"): event.count
        for event in seen.key_averages()
        if event.key.startswith("c10d::broadcast")
    }


def test_parameters_are_sent_once_when_a_run_begins():
    """Beside them, an object: the name of the memory that the processes of a machine share."""
    assert run(begun, 2) == [{"broadcast": 2 * OBJECTS + 1}] * 2
