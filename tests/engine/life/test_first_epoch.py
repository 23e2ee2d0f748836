"""Data that several learners go over: each begins with its epoch 0, or where a state has it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import make_learner
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, Sampler, TensorDataset

from engine.kept.resumed import X, Y
from loopkit import seed_everything
from loopkit.data import Loader, Prefetch, ResumableSampler, TensorLoader, from_function

SET = TensorDataset(X, Y)


class Around:
    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __iter__(self) -> Any:
        return iter(self.inner)


def tensors() -> TensorLoader:
    return TensorLoader(X, Y, batch_size=4, shuffle=True)


def drawn() -> Loader:
    return from_function(6, lambda index, generator: (torch.randn(4, 3, generator=generator), Y[:4]), seed=0)


LOADERS: dict[str, Callable[[], Any]] = {
    "TensorLoader": tensors,
    "map": lambda: tensors().map(lambda batch: batch),
    "from_function": drawn,
    "Prefetch": lambda: Prefetch(tensors(), "cpu"),
    "ResumableSampler": lambda: DataLoader(SET, 4, sampler=ResumableSampler(24)),
    "batch sampler": lambda: DataLoader(SET, batch_sampler=BatchSampler(ResumableSampler(24), 4, False)),
    "wrapper": lambda: Around(tensors()),
    "function": lambda: (lambda loader: lambda: loader)(tensors()),
}


def fit(train: Any, epochs: int = 2, **options: Any) -> Any:
    seed_everything(0)
    learner = make_learner()
    learner.fit(train, epochs=epochs, **options)
    return learner


@pytest.mark.parametrize("name", LOADERS)
def test_second_learner_has_the_order_of_the_first(name):
    train = LOADERS[name]()
    first, second, fresh = fit(train), fit(train), fit(LOADERS[name]())
    assert torch.equal(first.model.weight, second.model.weight)
    assert torch.equal(first.model.weight, fresh.model.weight)


@pytest.mark.parametrize("name", LOADERS)
def test_second_fit_of_a_learner_goes_on_with_the_next_epoch(name):
    train = LOADERS[name]()
    twice = fit(train, epochs=1)
    twice.fit(train, epochs=1)
    assert torch.equal(twice.model.weight, fit(LOADERS[name]()).model.weight)


@pytest.mark.parametrize("choose", [lambda loader: loader.set_epoch(1), lambda loader: loader.load_state_dict(AT_1)])
def test_epoch_that_was_chosen_stays(choose):
    train, chosen = tensors(), tensors()
    fit(train)
    choose(train)
    chosen.set_epoch(1)
    assert torch.equal(fit(train).model.weight, fit(chosen).model.weight)
    assert not torch.equal(fit(train).model.weight, fit(chosen, epochs=1).model.weight)


AT_1 = {**tensors().state_dict(), "epoch": 1}


def test_learner_that_is_resumed_with_a_loader_in_use_goes_on_where_its_state_says():
    train = tensors()
    state = fit(train, epochs=1).state_dict()
    fit(train)
    again = make_learner()
    again.load_state_dict(state)
    again.fit(train, epochs=1)
    assert torch.equal(again.model.weight, fit(tensors()).model.weight)


def test_evaluation_by_another_learner_has_the_order_of_the_first():
    seen: list[list[Any]] = []

    def note(batch: Any) -> Any:
        seen[-1].append(batch[0].sum().item())
        return batch

    loader = tensors().map(note)
    for _ in range(2):
        seen.append([])
        make_learner().evaluate(loader)
    assert seen[0] == seen[1]


# set_epoch


class Told:
    """Has ``set_epoch``, and notes what it was told."""

    def __init__(self) -> None:
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


class ToldSampler(Told, Sampler[int]):
    def __len__(self) -> int:
        return 24

    def __iter__(self) -> Any:
        return iter(range(24))


class ToldBatches(ToldSampler):
    def __len__(self) -> int:
        return 12

    def __iter__(self) -> Any:
        return iter([[i, i + 1] for i in range(0, 24, 2)])


class ToldSet(Told, torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        return X[index], Y[index]


class ToldLoader(Told):
    def __iter__(self) -> Any:
        return iter([(X, Y)])


def told_in_a_sampler() -> Any:
    sampler = ToldSampler()
    return DataLoader(SET, 4, sampler=sampler), sampler


def told_in_batches() -> Any:
    sampler = ToldBatches()
    return DataLoader(SET, batch_sampler=sampler), sampler


def told_in_a_set() -> Any:
    dataset = ToldSet()
    return DataLoader(dataset, 4), dataset


def told_in_a_wrapper() -> Any:
    loader, sampler = told_in_a_sampler()
    return Around(loader), sampler


def told_itself() -> Any:
    loader = ToldLoader()
    return loader, loader


@pytest.mark.parametrize(
    "make",
    [told_in_a_sampler, told_in_batches, told_in_a_set, told_in_a_wrapper, told_itself],
    ids=lambda f: f.__name__,
)
def test_set_epoch_is_called_before_each_epoch(make):
    train, told = make()
    learner = fit(train, epochs=2)
    learner.fit(train, epochs=1)
    assert told.epochs == [0, 1, 2]


def test_set_epoch_is_not_called_in_a_validation():
    train, told = told_in_a_sampler()
    make_learner().fit([(X, Y)], train, epochs=2)
    assert told.epochs == []


def test_distributed_sampler_has_a_new_order_in_each_epoch_of_one_process():
    seen: list[float] = []
    sampler = DistributedSampler(SET, num_replicas=1, rank=0)
    learner = make_learner()
    learner.fit(Around(DataLoader(SET, 24, sampler=sampler)), epochs=1)
    loader = DataLoader(SET, 4, sampler=sampler, collate_fn=lambda samples: noted(samples, seen))
    make_learner().fit(loader, epochs=2)
    assert seen[:6] != seen[6:]


def noted(samples: Any, seen: list[float]) -> Any:
    inputs, targets = torch.utils.data.default_collate(samples)
    seen.append(inputs.sum().item())
    return inputs, targets
