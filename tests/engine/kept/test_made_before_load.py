"""What a constructor does to an optimizer is done before its state is loaded."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch
from helpers import batches
from torch import nn

from loopkit import Learner, every, hookimpl
from loopkit.plugins import Checkpoint


class Died(Exception):
    pass


class Warmup:
    """Lowers the rate when it is made, as pytorch_warmup's classes do, and raises it with each update."""

    def __init__(self, optimizer, end=None):
        self.optimizer, self.end = optimizer, end
        self.rate, self.count, self.rates = optimizer.param_groups[0]["lr"], 0, []
        self.lower()

    volatile = ("rates",)

    def lower(self):
        self.optimizer.param_groups[0]["lr"] = self.rate * (self.count + 1) / 10

    @hookimpl(updates=("optimizer.lr",))
    def update_end(self, learner):
        self.rates.append(self.optimizer.param_groups[0]["lr"])
        self.count += 1
        self.lower()

    @hookimpl(phase="train", reads=("progress",))
    def step_begin(self, learner):
        if learner.progress.updates == self.end:
            raise Died

    def state_dict(self):
        return {"rate": self.rate, "count": self.count}

    def load_state_dict(self, state):
        self.rate, self.count = state["rate"], state["count"]


def rates(folder, end=None):
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    warmup = Warmup(optimizer, end)
    stack = [warmup, Checkpoint(folder, save=every(updates=1), resume="auto")]
    learner = Learner(model, nn.MSELoss(), optimizer, plugins=stack, standard=False)
    with suppress(Died):
        learner.fit(batches(6), epochs=1)
    return warmup.rates


@pytest.mark.filterwarnings("ignore:checkpoints come less often than")
@pytest.mark.parametrize("end", [1, 3, 5])
def test_rate_that_a_warmup_lowers_when_it_is_made_is_the_saved_one_after_a_resume(tmp_path, end):
    whole = rates(tmp_path / "whole")
    assert rates(tmp_path / "parts", end) + rates(tmp_path / "parts") == whole
