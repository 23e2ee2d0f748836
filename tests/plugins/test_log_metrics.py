"""`LogMetrics` without ``every``: the learning rates of each training epoch."""

from __future__ import annotations

import pytest
import torch
from helpers import batches, make_learner
from torch import nn

from loopkit import Learner, TrainingPhase, hookimpl
from loopkit.plugins import LogMetrics, Schedule, TorchSchedule
from loopkit.schedules import exponential


class Keep:
    """Keep what is logged under names that begin so."""

    provides = "log"

    def __init__(self, begin="lr"):
        self.begin = begin
        self.seen = []

    @hookimpl
    def log_value(self, record):
        if record.name.startswith(self.begin):
            self.seen.append((record.name, record.value))


@pytest.mark.parametrize(
    "schedule",
    [
        lambda: Schedule(exponential(0.5), every="epoch"),
        lambda: TorchSchedule(lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.5), every="epoch"),
    ],
)
def test_rate_is_that_of_the_epoch_that_has_ended(schedule):
    keep = Keep()
    make_learner(LogMetrics(), schedule(), keep).fit(batches(2), batches(1), epochs=3)
    assert keep.seen == [("lr", 0.1), ("lr", 0.05), ("lr", 0.025)]


def test_rate_of_a_schedule_by_updates_is_the_one_after_the_last_step():
    keep = Keep()
    make_learner(LogMetrics(), Schedule(exponential(0.5)), keep).fit(batches(2), epochs=2)
    assert keep.seen == [("lr", 0.025), ("lr", 0.1 / 16)]


def test_rates_of_groups_and_of_optimizers_have_names():
    def two(params):
        first, second = params
        return torch.optim.SGD([{"params": [first], "lr": 0.1}, {"params": [second], "lr": 0.2}])

    class Both(TrainingPhase):
        def step(self, learner, step):
            step.inputs, step.targets = step.batch
            loss = sum(learner.loss_fn(model(step.inputs), step.targets) for model in learner.models.values())
            step.backward(loss)
            for name in learner.optimizers:
                step.update(name)

    keep = Keep()
    learner = Learner(
        {"a": nn.Linear(3, 1), "b": nn.Linear(3, 1)},
        nn.MSELoss(),
        {"a": two, "b": lambda params: torch.optim.SGD(params, lr=0.3)},
        plugins=[LogMetrics(), keep],
        phases=[Both()],
        standard=False,
    )
    learner.fit(batches(1), epochs=1)
    assert keep.seen == [("lr/a/0", 0.1), ("lr/a/1", 0.2), ("lr/b", 0.3)]


def test_rates_come_after_steps_only_with_every():
    keep = Keep()
    make_learner(LogMetrics(every=2), keep).fit(batches(3), epochs=2)
    assert keep.seen == [("lr", 0.1)] * 3


def test_epochs_that_do_not_train_log_no_rate():
    keep = Keep()
    learner = make_learner(LogMetrics(), keep)
    learner.evaluate(batches(2))
    learner.predict(batches(2))
    assert keep.seen == []
