from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from engine.resumed import X, Y, check_exact
from loopkit.data import Prefetch, ResumableSampler, TensorLoader
from loopkit.engine.kept.worker_draws import lost_when_it_begins


class Noisy(Dataset[Any]):
    """Draws from the global generator, which each worker has for itself."""

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, index: int) -> Any:
        return X[index] + torch.randn(3), Y[index]


class Own(Noisy):
    """Draws from a generator of its own."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)

    def __getitem__(self, index: int) -> Any:
        return X[index] + float(self.rng.normal()), Y[index]


def resumable() -> tuple[Any, Any]:
    return DataLoader(Noisy(), 4, sampler=ResumableSampler(24), num_workers=2), None


def resumable_with_its_own() -> tuple[Any, Any]:
    return DataLoader(Own(), 4, sampler=ResumableSampler(24), num_workers=2), None


def shuffled_with_its_own() -> tuple[Any, Any]:
    return DataLoader(Own(), 4, shuffle=True, num_workers=2), None


@pytest.mark.parametrize("make", [resumable, resumable_with_its_own, shuffled_with_its_own])
def test_batches_of_workers_that_draw_are_made_again(make):
    check_exact(make, "in mid-epoch")


class Noise:
    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)

    def __call__(self, batch: Any) -> Any:
        return batch


def test_generators_that_no_checkpoint_can_find_are_named():
    living = DataLoader(Own(), 4, num_workers=2, persistent_workers=True)
    ahead = Prefetch(TensorLoader(X, Y, batch_size=4).map(Noise()), "cpu")
    assert "DataLoader moves dataset.rng in its workers" in lost_when_it_begins(living)
    assert "rng in a thread that works ahead" in lost_when_it_begins(ahead)


@pytest.mark.parametrize("data", [DataLoader(Own(), 4, num_workers=2), DataLoader(TensorDataset(X, Y), 4), [X]])
def test_data_that_loses_no_generator_is_not_named(data):
    assert lost_when_it_begins(data) == ""
