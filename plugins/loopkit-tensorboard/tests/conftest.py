"""A learner that logs, and TensorBoard's own reader."""

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

from loopkit import Learner, TrainingPhase, hookimpl


class LogLoss:
    """Logs each training step's loss as ``loss``."""

    @hookimpl(phase=TrainingPhase, reads=("loss",))
    def step_end(self, learner, step):
        learner.log("loss", step.loss)


class LogOnce:
    """Logs given values, in the given step."""

    def __init__(self, step=1, **values):
        self.step = step
        self.values = values

    @hookimpl(phase=TrainingPhase)
    def step_end(self, learner):
        if learner.progress.steps == self.step:
            for name, value in self.values.items():
                learner.log(name, value)


@pytest.fixture
def batches():
    torch.manual_seed(0)
    return [(torch.randn(4, 3), torch.randn(4, 1)) for _ in range(5)]


@pytest.fixture
def make_learner():
    def make(*plugins, **options):
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return Learner(model, nn.MSELoss(), optimizer, plugins=plugins, standard=False, **options)

    return make


@pytest.fixture
def read():
    """What TensorBoard reads of a directory: everything, as it is there."""

    def accumulate(directory):
        kinds = ("scalars", "tensors", "histograms", "images", "audio")
        return EventAccumulator(str(directory), dict.fromkeys(kinds, 0), purge_orphaned_data=False).Reload()

    return accumulate
