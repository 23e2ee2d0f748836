"""Workers of loaders end at once with the learner that held them, although it is part of reference cycles."""

import gc
import subprocess
import sys
import time
import weakref
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from loopkit import Learner, hookimpl

LIMIT = 4.0
"""Seconds, of which a worker that is not told to end takes five."""


class Stops:
    """Ends a fit in mid-epoch by an error."""

    name = "stops"

    @hookimpl(phase="training")
    def step_end(self, learner):
        if learner.progress.steps == 5:
            raise ValueError("no more")


def fitted(plugins, **options):
    """Train a learner with a loader that nothing else holds; returns a weak reference to the learner."""
    data = TensorDataset(torch.randn(12, 3), torch.randn(12, 1))
    loader = DataLoader(data, batch_size=4, num_workers=1, **options)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    learner = Learner(model, nn.MSELoss(), optimizer, plugins=plugins, standard=False)
    with suppress(ValueError):
        learner.fit(loader, epochs=2)
    assert learner.progress.steps >= 5
    return weakref.ref(learner)


def seconds_to_collect(plugins):
    learner = fitted(plugins, persistent_workers=True)
    began = time.monotonic()
    gc.collect()
    assert learner() is None
    return time.monotonic() - began


@pytest.mark.parametrize("plugins", ["", "Stops()"], ids=["ended", "error"])
def test_persistent_workers_end_at_once_when_their_learner_is_collected(plugins):
    """In a process of its own, which pytest does not look into: it takes a second or two to start."""
    code = f"from engine.kept.data.test_worker_end import *; print(seconds_to_collect([{plugins}]))"
    tests = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", code], cwd=tests, capture_output=True, text=True, check=True)
    assert float(done.stdout) < LIMIT
