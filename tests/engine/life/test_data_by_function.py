from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from helpers import make_learner, on
from torch.utils.data import DataLoader, TensorDataset

from engine.kept.resumed import PLACES, Make, X, Y, check_exact, make_run
from loopkit.base import generators
from loopkit.data import TensorLoader

SET = TensorDataset(X, Y)


def by_list() -> list[Any]:
    order = torch.randperm(24)
    return list(zip(X[order].split(4), Y[order].split(4), strict=True))


def by_generator() -> Iterator[Any]:
    order = torch.from_numpy(np.random.permutation(24))
    for inputs, targets in zip(X[order].split(4), Y[order].split(4), strict=True):
        yield inputs + torch.rand(()), targets


def slice_of(noise: float, first: int) -> Any:
    return X[first : first + 4] + noise + random.random(), Y[first : first + 4]


def by_iterator() -> Iterator[Any]:
    return map(functools.partial(slice_of, random.random()), range(0, 24, 4))


def by_seed() -> TensorLoader:
    return TensorLoader(X, Y, batch_size=4, shuffle=True, seed=random.randrange(1000))


def by_loader() -> DataLoader[Any]:
    return DataLoader(SET, 4, shuffle=True)


def fresh() -> TensorLoader:
    return TensorLoader(X, Y, batch_size=4, shuffle=True)


def kept() -> Callable[[], Any]:
    loader = fresh()
    return lambda: loader


def closing_over() -> Callable[[], Any]:
    generator = torch.Generator().manual_seed(1)

    def make() -> Iterator[Any]:
        for _ in range(6):
            chosen = torch.randint(24, (4,), generator=generator)
            yield X[chosen], Y[chosen]

    return make


def partial() -> Callable[[], Any]:
    return functools.partial(lambda rng: [(x + float(rng.normal()), y) for x, y in by_list()], random_state())


def random_state() -> Any:
    return np.random.RandomState(2)


class Maker:
    """Makes the data of an epoch by a generator of its own."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(3)

    def __call__(self) -> list[Any]:
        return [(x + float(self.rng.normal()), y) for x, y in by_list()]

    def epoch(self) -> list[Any]:
        return self()


class Counter:
    """Makes the data of an epoch by its number, which is its state."""

    def __init__(self) -> None:
        self.epochs = 0

    def __call__(self) -> TensorLoader:
        self.epochs += 1
        return TensorLoader(X, Y, batch_size=4, shuffle=True, seed=self.epochs)

    def state_dict(self) -> dict[str, int]:
        return {"epochs": self.epochs}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epochs = state["epochs"]


class Alternating:
    """Gives two loaders in turn."""

    def __init__(self) -> None:
        self.loaders = [fresh(), TensorLoader(X, Y, batch_size=4, shuffle=True, seed=5)]
        self.learner: Any = None

    def __call__(self) -> TensorLoader:
        return self.loaders[self.learner.progress.epochs % 2]


FUNCTIONS: dict[str, Callable[[], Any]] = {
    "list": lambda: by_list,
    "generator": lambda: by_generator,
    "iterator": lambda: by_iterator,
    "loader with a drawn seed": lambda: by_seed,
    "DataLoader": lambda: by_loader,
    "fresh loader": lambda: fresh,
    "the same loader": kept,
    "closes over a generator": closing_over,
    "partial": partial,
    "object": Maker,
    "method": lambda: Maker().epoch,
    "object with a state": Counter,
}


def trained(make: Callable[[], Any]) -> Make:
    return lambda: (make(), lambda: [(X[:8] + torch.rand(()), Y[:8])] * 3)


MADE = {name: trained(make) for name, make in FUNCTIONS.items()}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", MADE)
def test_data_of_a_function_is_exact_after_a_resume(name, place):
    check_exact(MADE[name], place)


def test_function_is_called_with_the_generators_of_the_begin_and_left_with_those_of_the_pause():
    saved, _ = make_run(MADE["list"], PLACES["in mid-epoch"])
    record = saved.state["epochs"][0]["data"]
    torch.manual_seed(99)
    generators.restore(record["made"]["generators"])
    again = by_list()
    after, _ = make_run(MADE["list"], state=saved.state)
    assert [total for _, total in after.batches[:4]] == [x.sum().item() for x, _ in again[2:]]


def test_position_of_one_epochs_loader_is_not_loaded_into_the_next():
    saved, _ = make_run(lambda: (fresh, None), ("phase_end", "train", 1))
    assert saved.state["data"]["train"]["kind"] == "function"
    after, _ = make_run(lambda: (fresh, None), state=saved.state)
    first, _ = make_run(lambda: (fresh, None))
    assert after.batches[:6] == first.batches[:6]


def test_loaders_that_a_function_gives_in_turn_keep_their_positions():
    def run(epochs: int, state: Any = None) -> Any:
        learner, make = make_learner(), Alternating()
        make.learner = learner
        if state is not None:
            learner.load_state_dict(state)
        learner.fit(make, epochs=epochs)
        return learner

    whole, again = run(5), run(3, run(2).state_dict())
    assert torch.equal(again.model.weight, whole.model.weight)


@pytest.mark.parametrize("function", [by_list, by_generator, by_seed])
def test_epoch_of_a_loop_of_ones_own_is_exact_before_its_first_batch(function):
    def run(state: Any = None, save: bool = False) -> Any:
        generators_of(0 if state is None else 99)
        learner = make_learner()
        if state is not None:
            learner.load_state_dict(state)
        with learner.epoch("train", data=function) as epoch:
            if save:
                return learner.state_dict()
            for batch in epoch.batches():
                epoch.step(batch)
        return learner.model.weight

    assert torch.equal(run(run(save=True)), run())


def generators_of(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def test_function_is_not_called_for_an_epoch_that_is_passed_over():
    calls, states = [], []

    def make() -> list[Any]:
        calls.append(1)
        return by_list()

    def rounds(learner: Any) -> None:
        for _ in learner.rounds(epochs=2):
            learner.run("train", make)
            learner.run("val", by_list)

    rounds(make_learner(on("phase_end", lambda learner, phase: keep(learner, phase, states))))
    calls.clear()
    again = make_learner()
    again.load_state_dict(states[1])
    rounds(again)
    assert calls == []


def keep(learner: Any, phase: Any, states: list[Any]) -> None:
    if phase.name == "train":
        states.append(learner.state_dict())
