from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, Sampler, Subset, TensorDataset
from torch.utils.data import default_collate as collate

from engine.kept.resumed import PLACES, Make, X, Y, check_exact
from loopkit import Learner
from loopkit.base import generators
from loopkit.data import ResumableSampler, TensorLoader
from loopkit.engine.kept.data.data_parts import DataParts
from loopkit.plugins import Checkpoint

SET = TensorDataset(X, Y)


class ByNumPy(Sampler[int]):
    """An order from a generator of its own."""

    def __init__(self, rng: Any = None) -> None:
        self.rng = np.random.default_rng(0) if rng is None else rng

    def __len__(self) -> int:
        return len(X)

    def __iter__(self) -> Iterator[int]:
        return iter(self.rng.permutation(len(X)).tolist())


class OneByOne(Sampler[int]):
    """Draws each index when it is asked for."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(1)

    def __len__(self) -> int:
        return len(X)

    def __iter__(self) -> Iterator[int]:
        for _ in range(len(X)):
            yield int(torch.randint(len(X), (), generator=self.generator))


class ByPython:
    """Batches of indices."""

    def __init__(self) -> None:
        self.rng = random.Random(2)

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[list[int]]:
        order = list(range(len(X)))
        self.rng.shuffle(order)
        yield from (order[i : i + 4] for i in range(0, len(X), 4))


class Noisy(Dataset[Any]):
    """A data set that draws for each sample."""

    def __init__(self, rng: Any = None) -> None:
        self.rng = np.random.default_rng(3) if rng is None else rng

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, index: int) -> Any:
        return X[index] + float(self.rng.normal()), Y[index]


class Stream(IterableDataset[Any]):
    """Samples one after the other, in an order of its own."""

    def __init__(self) -> None:
        self.rng = random.Random(4)

    def __iter__(self) -> Iterator[Any]:
        order = list(range(len(X)))
        self.rng.shuffle(order)
        yield from ((X[i] + self.rng.random(), Y[i]) for i in order)


class Collate:
    """Draws for each batch."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(5)

    def __call__(self, samples: Any) -> Any:
        inputs, targets = collate(samples)
        return inputs + torch.rand(inputs.shape, generator=self.generator), targets


class Transformed(Dataset[Any]):
    """A data set with transforms in a list, of which one draws."""

    def __init__(self) -> None:
        self.transforms = [torch.neg, Noise()]

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, index: int) -> Any:
        return functools.reduce(lambda x, transform: transform(x), self.transforms, X[index]), Y[index]


class Noise:
    def __init__(self) -> None:
        self.rng = np.random.RandomState(6)

    def __call__(self, x: Any) -> Any:
        return x + float(self.rng.normal())


class Mapped:
    def __init__(self) -> None:
        self.noise = Noise()

    def __call__(self, batch: Any) -> Any:
        return self.noise(batch[0]), batch[1]


class Around:
    """A wrapper around data."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __iter__(self) -> Iterator[Any]:
        yield from self.inner


class ByIndex:
    """Batches by index, each with a draw."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(7)

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        if index >= 6:
            raise IndexError
        return X[4 * index : 4 * index + 4] + float(self.rng.normal()), Y[4 * index : 4 * index + 4]


class Counting(Sampler[int]):
    """An order that follows from the epoch, which others set."""

    epoch = 0

    def __len__(self) -> int:
        return len(X)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(len(X), generator=torch.Generator().manual_seed(self.epoch)).tolist())


class WithState(Counting):
    """Counts its epochs itself, and has a state."""

    set_epoch = None  # type: ignore[assignment]

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        return super().__iter__()

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch = state["epoch"]


class Own:
    """A loader with a state, which lacks the generator that it draws its order, or its batches, from."""

    def __init__(self, order: bool) -> None:
        self.generator, self.order, self.next = torch.Generator().manual_seed(8), order, 0

    def __iter__(self) -> Iterator[Any]:
        order = torch.randperm(24, generator=self.generator) if self.order else torch.arange(24)
        for step in range(self.next, 6):
            self.next = step + 1
            noise = 0.0 if self.order else torch.rand((), generator=self.generator)
            chosen = order[4 * step : 4 * step + 4]
            yield X[chosen] + noise, Y[chosen]
        self.next = 0

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


def closing_over() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(9)

    def noisy(samples: Any) -> Any:
        inputs, targets = collate(samples)
        return inputs + torch.rand((), generator=generator), targets

    return DataLoader(SET, 4, collate_fn=noisy)


def sharing() -> DataLoader[Any]:
    rng = np.random.default_rng(10)
    return DataLoader(Noisy(rng), 4, sampler=ByNumPy(rng))


def shuffled(**options: Any) -> TensorLoader:
    return TensorLoader(X, Y, batch_size=4, shuffle=True, **options)


at_module = np.random.default_rng(7)


def shaken(x: Any) -> Any:
    return x + float(at_module.normal())


class UsesModule(Dataset[Any]):
    """Draws from a generator of its module."""

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, index: int) -> Any:
        return X[index] + float(at_module.normal()), Y[index]


class UsesFunction(UsesModule):
    """Calls a function that draws."""

    def __getitem__(self, index: int) -> Any:
        return shaken(X[index]), Y[index]


class OrderOfModule(ByNumPy):
    def __iter__(self) -> Iterator[int]:
        return iter(at_module.permutation(len(X)).tolist())


def with_module(make: Callable[[], Any]) -> Callable[[], Any]:
    def made() -> Any:
        global at_module
        at_module = np.random.default_rng(7)
        return make()

    return made


def in_closure() -> Any:
    rng = random.Random(8)

    class Local(UsesModule):
        def __getitem__(self, index: int) -> Any:
            return X[index] + rng.random(), Y[index]

    return DataLoader(Local(), 4, shuffle=True)


TRAIN: dict[str, Callable[[], Any]] = {
    "sampler with NumPy's generator": lambda: DataLoader(SET, 4, sampler=ByNumPy()),
    "sampler that draws one by one": lambda: DataLoader(SET, 4, sampler=OneByOne()),
    "sampler with a state": lambda: DataLoader(SET, 4, sampler=WithState()),
    "sampler with set_epoch": lambda: DataLoader(SET, 4, sampler=Counting()),
    "batch sampler": lambda: DataLoader(SET, batch_sampler=ByPython()),
    "batch sampler around a sampler": lambda: DataLoader(SET, batch_sampler=BatchSampler(ByNumPy(), 4, False)),
    "data set that draws": lambda: DataLoader(Noisy(), 4, shuffle=True),
    "data set that draws, position kept": lambda: DataLoader(Noisy(), 4, sampler=ResumableSampler(24)),
    "subset of a data set that draws": lambda: DataLoader(Subset(Noisy(), list(range(24))), 4, shuffle=True),
    "transforms in a list": lambda: DataLoader(Transformed(), 4, shuffle=True),
    "stream": lambda: DataLoader(Stream(), 4),
    "collate function": lambda: DataLoader(SET, 4, sampler=ResumableSampler(24), collate_fn=Collate()),
    "collate function that closes over": closing_over,
    "one generator in sampler and data set": sharing,
    "wrapper around a TensorLoader": lambda: Around(shuffled()),
    "wrappers around a seeded DataLoader": lambda: Around(
        Around(DataLoader(SET, 4, shuffle=True, generator=torch.Generator().manual_seed(1)))
    ),
    "batches by index": ByIndex,
    "mapped by an object": lambda: shuffled().map(Mapped()),
    "own state, own order": lambda: Own(True),
    "own state, own noise": lambda: Own(False),
    "data set that draws from a generator of its module": with_module(lambda: DataLoader(UsesModule(), 4)),
    "data set with a function that draws": with_module(lambda: DataLoader(Subset(UsesFunction(), range(24)), 4)),
    "sampler that draws from a generator of its module": with_module(
        lambda: DataLoader(SET, 4, sampler=OrderOfModule())
    ),
    "class in a function": in_closure,
}
"""Data that moves more than a position."""


def validated(make: Callable[[], Any]) -> Make:
    return lambda: (make(), DataLoader(SET, 8))


KINDS = {name: validated(make) for name, make in TRAIN.items()}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", KINDS)
def test_data_that_draws_is_exact_after_a_pause(kind, place):
    check_exact(KINDS[kind], place)


def in_one() -> tuple[Any, Any]:
    loader = DataLoader(SET, 4, sampler=ByNumPy())
    return loader, loader


def with_one_generator() -> tuple[Any, Any]:
    rng = np.random.default_rng(1)
    return DataLoader(SET, 4, sampler=ByNumPy(rng)), DataLoader(Noisy(rng), 8)


VALIDATIONS: dict[str, Make] = {
    "shuffled": lambda: (shuffled(), DataLoader(SET, 8, shuffle=True)),
    "of several sets": lambda: (
        shuffled(),
        {"val": DataLoader(Noisy(), 8, shuffle=True), "ood": DataLoader(SET, 8, sampler=ByNumPy())},
    ),
    "the same loader": in_one,
    "the same TensorLoader": lambda: (loader := shuffled(), loader),
    "the same generator": with_one_generator,
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", VALIDATIONS)
def test_validation_data_that_draws_is_exact_after_a_pause(kind, place):
    check_exact(VALIDATIONS[kind], place)


# What is found


def test_each_generator_is_found_once_under_its_first_path():
    rng = np.random.default_rng(0)
    parts = DataParts(DataLoader(Noisy(rng), 4, sampler=ByNumPy(rng)))
    assert list(parts.generators) == ["dataset.rng"]


@pytest.mark.parametrize("found", [torch.default_generator, np.random.mtrand._rand, random.shuffle.__self__])
def test_a_global_generator_is_left_to_its_owner(found):
    assert not DataParts(Around(found)).generators


@pytest.mark.parametrize("held", [nn.Linear(1, 1), [*range(5000)], Learner(nn.Linear(1, 1), standard=False)])
def test_models_learners_and_long_lists_have_no_part(held):
    parts = DataParts(Around(held))
    assert (parts.states, parts.generators) == ({}, {})


def test_a_state_that_is_the_place_in_an_iteration_is_put_back_and_named():
    class Place(WithState):
        def state_dict(self) -> dict[str, int]:
            return {"epoch": 7}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.loaded = state

    sampler = Place()
    with pytest.warns(UserWarning, match="sampler .Place. of the data is not restored.*place in one iteration"):
        DataParts(DataLoader(SET, sampler=sampler)).load({"generators": {}, "states": {"sampler": {"epoch": 3}}})
    assert sampler.loaded == {"epoch": 7}


def test_a_load_can_be_undone():
    sampler = ByNumPy()
    parts = DataParts(DataLoader(SET, sampler=sampler))
    saved = parts.saved()
    expected = np.random.default_rng(0)
    expected.permutation(3)
    sampler.rng.permutation(3)
    undo = parts.load(saved)
    undo()
    assert generators.state_of(sampler.rng) == generators.state_of(expected)


def test_parts_that_are_gone_are_named(tmp_path):
    def learner(**options: Any) -> Learner:
        model = nn.Linear(3, 1)
        checkpoint = Checkpoint(tmp_path, **options)
        return Learner(model, nn.MSELoss(), lambda p: torch.optim.SGD(p, 0.1), plugins=[checkpoint], standard=False)

    learner().fit(DataLoader(SET, 4, sampler=ByNumPy()), epochs=1)
    with pytest.warns(UserWarning, match=r"generators in it: sampler\.rng before, sampler\.generator now"):
        learner(resume="auto").fit(DataLoader(SET, 4, sampler=OneByOne()), epochs=2)
