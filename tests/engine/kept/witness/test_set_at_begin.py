"""Attributes of data that a hook of ``epoch_begin`` sets from the counters, and others that it changes."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from engine.kept.witnessed import said
from loopkit import Learner, every, hookimpl
from loopkit.plugins import Checkpoint


class Levels(Dataset):
    """A data set with a level of difficulty."""

    def __init__(self) -> None:
        self.level = 1.0

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return torch.ones(2) * self.level, torch.ones(1)

    def set_level(self, level: float) -> None:
        self.level = level

    def raise_level(self, level: float) -> None:
        if level == 1:
            self.level = 2.0

    def add_level(self, level: float) -> None:
        self.level += level


class Curriculum:
    """Changes the level when an epoch begins."""

    name = "curriculum"

    def __init__(self, dataset: Levels) -> None:
        self.dataset = dataset


class Assigns(Curriculum):
    @hookimpl(phase="training")
    def epoch_begin(self, learner: Any) -> None:
        self.dataset.level = 1 + learner.progress.epochs


class Numbers(Curriculum):
    @hookimpl
    def epoch_begin(self, epoch: Any) -> None:
        self.dataset.level = epoch.number


class Calls(Curriculum):
    @hookimpl(phase="train")
    def epoch_begin(self, learner: Any) -> None:
        self.dataset.set_level(2 * learner.progress.epochs)


class Adds(Curriculum):
    @hookimpl(phase="training")
    def epoch_begin(self, learner: Any) -> None:
        self.dataset.level += learner.progress.epochs


class CallsToAdd(Curriculum):
    @hookimpl(phase="training")
    def epoch_begin(self, learner: Any) -> None:
        self.dataset.add_level(learner.progress.epochs)


class Draws(Curriculum):
    @hookimpl(phase="training")
    def epoch_begin(self, learner: Any) -> None:
        self.dataset.level = learner.progress.epochs + random.random()


class AtOneEpoch(Curriculum):
    @hookimpl(phase="training")
    def epoch_begin(self, learner: Any) -> None:
        if learner.progress.epochs == 1:
            self.dataset.level = 2.0


class CallsAtOneEpoch(Curriculum):
    @hookimpl(phase="training")
    def epoch_begin(self, learner: Any) -> None:
        if learner.progress.epochs == 1:
            self.dataset.set_level(2.0)


class CallsToRaise(Curriculum):
    @hookimpl(phase="training")
    def epoch_begin(self, learner: Any) -> None:
        self.dataset.raise_level(learner.progress.epochs)


class Loops(Curriculum):
    @hookimpl(phase="training")
    def epoch_begin(self, learner: Any) -> None:
        for number in range(learner.progress.epochs):
            self.dataset.level = number


class AtTheEnd(Curriculum):
    @hookimpl(phase="training")
    def phase_end(self, learner: Any) -> None:
        self.dataset.level = learner.progress.epochs


def named(tmp_path: Any, kind: type[Curriculum], validated: bool = False) -> list[str]:
    dataset = Levels()
    model = nn.Linear(2, 1)
    learner = Learner(
        model,
        nn.MSELoss(),
        torch.optim.SGD(model.parameters(), lr=0.1),
        plugins=[kind(dataset), Checkpoint(tmp_path, save=every(updates=1))],
        standard=False,
    )
    loader = DataLoader(dataset, 4)
    return said(lambda: learner.fit(loader, DataLoader(dataset, 4) if validated else None, epochs=3))


@pytest.mark.parametrize("kind", [Assigns, Numbers, Calls])
def test_attribute_of_data_that_is_set_from_the_counters_is_not_named(tmp_path, kind):
    assert named(tmp_path, kind) == []


@pytest.mark.parametrize("kind", [Adds, CallsToAdd, Draws, AtOneEpoch, CallsAtOneEpoch, CallsToRaise, Loops, AtTheEnd])
def test_attribute_that_a_resumed_run_lacks_is_named_once_though_plugin_and_data_hold_it(tmp_path, kind):
    (message,) = named(tmp_path, kind)
    assert message.startswith("plugin 'curriculum'")
    assert "'dataset.level'" in message


def test_attribute_that_a_resumed_validation_reads_is_named(tmp_path):
    (message,) = named(tmp_path, Assigns, validated=True)
    assert message.startswith("the data of phase 'val'")
