from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Sampler, SubsetRandomSampler, TensorDataset, WeightedRandomSampler

from engine.kept.resumed import PLACES, X, Y, check_exact, make_run
from loopkit.data import Prefetch, ResumableSampler, TensorLoader
from loopkit.engine.kept.data.worker_draws import lost_when_it_begins


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


class OneByOne(Sampler[int]):
    """Draws each index when it is asked for; from a generator of its own, or from the global ones."""

    def __init__(self, rng: Any = None) -> None:
        self.rng = rng

    def __len__(self) -> int:
        return len(X)

    def __iter__(self) -> Any:
        for _ in range(len(X)):
            yield int(torch.randint(len(X), ()) if self.rng is None else self.rng.integers(len(X)))


class ByPython(OneByOne):
    def __iter__(self) -> Any:
        return (random.randrange(len(X)) for _ in range(len(X)))


SET = TensorDataset(X, Y)
WORKERS: dict[str, dict[str, Any]] = {
    "1": {"num_workers": 1},
    "2": {"num_workers": 2},
    "persistent": {"num_workers": 2, "persistent_workers": True},
}


@pytest.mark.parametrize("place", ["in mid-epoch", "between epochs"])
@pytest.mark.parametrize("workers", WORKERS)
def test_a_sampler_with_its_own_generator_is_exact_ahead_of_the_batch(workers, place):
    def make() -> tuple[Any, Any]:
        return DataLoader(SET, 4, sampler=OneByOne(np.random.default_rng(0)), **WORKERS[workers]), DataLoader(SET, 8)

    check_exact(make, place)


AHEAD = "sampler of DataLoader draws from the global random generator for each batch, ahead of the batch in use"


@pytest.mark.parametrize(
    ("sampler", "workers"), [(OneByOne, "1"), (ByPython, "1"), (OneByOne, "persistent"), (ByPython, "2")]
)
def test_a_sampler_that_draws_for_each_batch_is_named_in_mid_epoch(sampler, workers):
    def make() -> tuple[Any, Any]:
        return DataLoader(SET, 4, sampler=sampler(), **WORKERS[workers]), None

    with pytest.warns(UserWarning, match=AHEAD):
        make_run(make, PLACES["in mid-epoch"])


@pytest.mark.parametrize(
    "sampler", [lambda: SubsetRandomSampler(range(24)), lambda: WeightedRandomSampler([1.0] * 24, 24), lambda: None]
)
def test_a_sampler_that_draws_as_it_begins_is_not_named(sampler):
    made = sampler()
    options = {"shuffle": True} if made is None else {"sampler": made}
    make_run(lambda: (DataLoader(SET, 2, num_workers=1, **options), None), PLACES["in mid-epoch"])


class Counting(Noisy):
    """Counts its samples, and shows it."""

    count = 0

    def __getitem__(self, index: int) -> Any:
        self.count += 1
        return X[index] + self.count, Y[index]


class Hidden(Counting):
    volatile = ("count",)


def saved_after(data: Any) -> None:
    make_run(lambda: (data, DataLoader(SET, 8)), PLACES["between epochs"])


def test_a_number_that_moves_only_in_workers_that_live_on_is_named():
    with pytest.warns(UserWarning, match="a number in the data set of DataLoader moves in its workers"):
        saved_after(DataLoader(Counting(), 4, **WORKERS["persistent"]))


@pytest.mark.parametrize(
    "data",
    [
        DataLoader(Counting(), 4, **WORKERS["2"]),
        DataLoader(Hidden(), 4, **WORKERS["persistent"]),
        DataLoader(SET, 4, **WORKERS["persistent"]),
    ],
)
def test_a_number_that_each_epoch_begins_anew_is_not_named(data):
    saved_after(data)
