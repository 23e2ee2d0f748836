"""Data whose order follows from a count of epochs that they keep themselves, as deterministic shuffles do."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from loopkit import Learner, TrainingPhase, every, hookimpl
from loopkit.plugins import Checkpoint

INPUTS = torch.arange(60.0).reshape(20, 3) / 60


class Counts:
    """Shuffles by the number of the epoch."""

    def __init__(self):
        self.epoch = -1

    def __call__(self, source):
        self.epoch += 1
        samples = list(source)
        random.Random(self.epoch).shuffle(samples)
        return iter(samples)


class Pipeline(IterableDataset):
    """Stages in a list, as webdataset has them."""

    def __init__(self):
        self.stages = [Counts()]

    def __iter__(self):
        source = range(20)
        for stage in self.stages:
            source = stage(source)
        return iter(source)


class Stream(IterableDataset):
    """A count of its own."""

    def __init__(self):
        self.epoch = 0

    def __iter__(self):
        self.epoch += 1
        samples = list(range(20))
        random.Random(self.epoch).shuffle(samples)
        return iter(samples)


class Named(IterableDataset):
    """Stages by name."""

    def __init__(self):
        self.stages = {"shuffle": Counts()}

    def __iter__(self):
        return self.stages["shuffle"](range(20))


class Indices(TrainingPhase):
    volatile = ("seen",)

    def __init__(self):
        super().__init__()
        self.seen = []

    def unpack(self, batch):
        self.seen.append(batch.tolist())
        return INPUTS[batch], INPUTS[batch].sum(1, keepdim=True)


class Died(Exception):
    pass


class Dies:
    @hookimpl(phase="train")
    def step_begin(self, learner):
        if learner.progress.steps == 7:
            raise Died


def run(folder, data, *plugins):
    torch.manual_seed(0)
    phase, saving = Indices(), Checkpoint(folder, save=every(updates=1), resume="auto")
    learner = Learner(
        *(nn.Linear(3, 1), nn.MSELoss(), lambda params: torch.optim.SGD(params, lr=0.1)),
        plugins=[saving, *plugins],
        phases=[phase],
        standard=False,
    )
    learner.fit(DataLoader(data, batch_size=4), epochs=3)
    return phase.seen


class Kept(Counts):
    """A count that can be saved."""

    def state_dict(self):
        return {"epoch": self.epoch}

    def load_state_dict(self, state):
        self.epoch = state["epoch"]


@pytest.mark.filterwarnings("ignore:checkpoints come less often than")
@pytest.mark.parametrize("made", [Pipeline, Stream, Named])
def test_count_of_epochs_in_the_data_is_named_with_the_way_out(tmp_path, made):
    with pytest.warns(UserWarning, match=r"has changed its \S*epoch. since the fit began.*state_dict"):
        run(tmp_path, made())


@pytest.mark.filterwarnings("ignore:checkpoints come less often than")
@pytest.mark.parametrize("made", [Pipeline, Named])
def test_count_with_a_state_is_resumed(tmp_path, monkeypatch, made):
    monkeypatch.setitem(globals(), "Counts", Kept)
    whole = run(tmp_path / "whole", made())
    with pytest.raises(Died):
        run(tmp_path / "killed", made(), Dies())
    assert run(tmp_path / "killed", made())[-8:] == whole[-8:]
