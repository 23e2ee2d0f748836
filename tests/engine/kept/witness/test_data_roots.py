"""The witness names what data moves and no state holds: counters of samplers, data sets, collate functions."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers import make_learner, on
from torch import nn
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)
from torch.utils.data import default_collate as collate

from engine.kept.resumed import X, Y
from loopkit import every
from loopkit.data import Loader, ResumableSampler, TensorLoader, from_function, same, seeded
from loopkit.plugins import Checkpoint

SET = TensorDataset(X, Y)


class Order(Sampler[int]):
    """An order that others move by ``change``."""

    def __init__(self, change: Callable[[Any], None] = lambda order: None, **held: Any) -> None:
        self.change = change
        vars(self).update(held)

    def __len__(self) -> int:
        return len(X)

    def __iter__(self) -> Iterator[int]:
        self.change(self)
        return iter(range(len(X)))


class Batches(Order):
    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[Any]:
        return iter(list(BatchSampler(list(super().__iter__()), 4, False)))


class Samples(Order, Dataset[Any]):
    def __getitem__(self, index: int) -> Any:
        self.change(self)
        return X[index], Y[index]


class Stream(Order, IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return ((X[i], Y[i]) for i in super().__iter__())


class Collate(Order):
    def __call__(self, samples: Any) -> Any:
        self.change(self)
        return collate(samples)


class Around(Order):
    def __init__(self, inner: Any, *given: Any, **held: Any) -> None:
        super().__init__(*given, **held)
        self.inner = inner

    def __len__(self) -> int:
        return len(self.inner)

    def __iter__(self) -> Iterator[Any]:
        super().__iter__()
        return iter(self.inner)


class Transform(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Any) -> Any:
        self.calls += 1
        return x


class Transformed(Samples):
    def __getitem__(self, index: int) -> Any:
        return self.transform(X[index]), Y[index]


class OwnLoader(Loader):
    calls = 0

    def batches(self, epoch: int, start: int, indices: Any = None) -> Any:
        self.calls += 1
        return self.source.batches(epoch, start, indices)


class Worker(DataLoader[Any]):
    rounds = 0

    def __iter__(self) -> Any:
        self.rounds += 1
        return super().__iter__()


def count(order: Any) -> None:
    order.n += 1


def grown(batches: Any) -> None:
    batches.batch_size += 1


def maker() -> Any:
    n = 0

    def make() -> Any:
        nonlocal n
        n += 1
        return [(X[n : n + 4], Y[n : n + 4])] * 6

    return make


def closing_over() -> Any:
    sampler = Order(count, n=0)
    return lambda: DataLoader(SET, 4, sampler=sampler)


def naming() -> Any:
    calls = {"n": 0}

    def noisy(samples: Any) -> Any:
        calls["n"] += 1
        return collate(samples)

    return DataLoader(SET, 4, collate_fn=noisy)


class Maker:
    n = 0

    def __call__(self) -> Any:
        self.n += 1
        return [(X[:4], Y[:4])] * 6


def curriculum() -> Any:
    subset = Subset(SET, list(range(24)))
    return DataLoader(subset, 4, collate_fn=Collate(lambda it: setattr(subset, "indices", subset.indices[::-1])))


def weighted() -> Any:
    sampler = WeightedRandomSampler(torch.ones(24), 24)
    return DataLoader(SET, 4, sampler=sampler, collate_fn=Collate(lambda it: sampler.weights.mul_(2)))


NAMED: dict[str, tuple[Callable[[], Any], str]] = {
    "sampler": (lambda: DataLoader(SET, 4, sampler=Order(count, n=0)), "sampler.n"),
    "batch sampler": (lambda: DataLoader(SET, batch_sampler=Batches(count, n=0)), "batch_sampler.n"),
    "private": (lambda: DataLoader(SET, 4, sampler=Order(lambda o: vars(o).update(_n=o._n + 1), _n=0)), "sampler._n"),
    "data set": (lambda: DataLoader(Samples(count, n=0), 4), "dataset.n"),
    "stream": (lambda: DataLoader(Stream(count, n=0), 4), "dataset.n"),
    "subset": (lambda: DataLoader(Subset(Samples(count, n=0), range(24)), 4), "dataset.dataset.n"),
    "sets": (lambda: DataLoader(ConcatDataset([Samples(count, n=0)]), 4), "dataset.datasets[0].n"),
    "seed of its own": (
        lambda: DataLoader(SET, 4, sampler=Order(lambda o: vars(o).update(n=o.n or random.random()), n=None)),
        "sampler.n",
    ),
    "transform": (lambda: DataLoader(Transformed(transform=Transform()), 4), "dataset.transform.calls"),
    "array": (lambda: DataLoader(Samples(lambda s: s.n.__iadd__(1), n=np.zeros(3)), 4), "dataset.n"),
    "tensor": (lambda: DataLoader(Samples(lambda s: s.n.add_(1), n=torch.zeros(3)), 4), "dataset.n"),
    "tensor that is replaced": (
        lambda: DataLoader(Samples(lambda s: vars(s).update(n=s.n + 1), n=torch.zeros(3)), 4),
        "dataset.n",
    ),
    "buffer": (lambda: DataLoader(Samples(lambda s: s.n.append(1.0), n=[]), 4), "dataset.n"),
    "collate function": (lambda: DataLoader(SET, 4, collate_fn=Collate(count, n=0)), "collate_fn.n"),
    "closure of a collate function": (naming, "collate_fn.calls"),
    "indices": (curriculum, "dataset.indices"),
    "weights": (weighted, "sampler.weights"),
    "loader": (lambda: Worker(SET, 4), "rounds"),
    "loader of loopkit": (lambda: OwnLoader(TensorLoader(X, Y, batch_size=4)), "calls"),
    "wrapper": (lambda: Around(DataLoader(SET, 4), count, n=0), "n"),
    "function": (maker, "n"),
    "sampler of a function": (closing_over, "sampler.n"),
    "object that makes": (Maker, "n"),
}


def said(directory: Any, make: Callable[[], Any], val: Any = None) -> list[str]:
    """What is warned of in a run of two epochs that saves after each update."""
    learner = make_learner(Checkpoint(directory, save=every(updates=1)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        learner.fit(make(), val, epochs=3)
    return [str(each.message) for each in caught if "set_vital" not in str(each.message)]


@pytest.mark.parametrize("kind", NAMED)
def test_what_moves_in_data_is_named_once(kind, tmp_path):
    make, path = NAMED[kind]
    [message] = said(tmp_path, make)
    assert message.startswith("the data of phase 'train' (")
    assert f"has changed its {path!r} since the fit began" in message
    assert "set_epoch(epoch)" in message


def test_data_of_a_validation_are_looked_at(tmp_path):
    [message] = said(tmp_path, lambda: [(X[:4], Y[:4])], DataLoader(SET, 4, sampler=Order(count, n=0)))
    assert message.startswith("the data of phase 'val' (DataLoader) has changed its 'sampler.n'")


def batches_of_set() -> list[Any]:
    return list(zip(X.split(4), Y.split(4), strict=True))


def shuffle(samples: Any) -> None:
    random.shuffle(samples.found)


REORDERED: dict[str, Callable[[], Any]] = {
    "list": batches_of_set,
    "list of a function": lambda: (lambda found: lambda: found)(batches_of_set()),
    "long list of a data set": lambda: DataLoader(Samples(shuffle, found=[(n, str(n)) for n in range(3000)]), 4),
    "list of objects": lambda: DataLoader(Samples(shuffle, found=[SimpleNamespace() for _ in range(9)]), 4),
}


@pytest.mark.parametrize("kind", REORDERED)
def test_order_that_moves_is_named(kind, tmp_path):
    made = REORDERED[kind]()
    moving = made if type(made) is list else made() if callable(made) else []
    learner = make_learner(Checkpoint(tmp_path, save=every(updates=1)))
    learner.add(on("epoch_end", moving.reverse, "reversing"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        learner.fit(made, epochs=3)
    [message] = [str(each.message) for each in caught if "set_vital" not in str(each.message)]
    assert "has changed its " in message
    assert ("fit(make_data, ...)" in message) == (kind == "list")


class Told(Order):
    """Sets what it needs of the epoch, also by a method."""

    seed = epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self._follow()

    def _follow(self) -> None:
        self.seed = 3 * self.epoch


class WithState(Order):
    def state_dict(self) -> Any:
        return {"n": self.n}

    def load_state_dict(self, state: Any) -> None:
        self.n = state["n"]


class Lazy(Samples):
    """Reads its samples when the first is asked for."""

    table = names = handle = None

    def __getitem__(self, index: int) -> Any:
        if self.table is None:
            self.table, self.names, self.handle = X.clone(), ["a"], SimpleNamespace(reads=3)
        return self.table[index], Y[index]


def listing() -> Any:
    seen: list[Any] = []

    def make() -> Any:
        seen.append(len(seen))
        return [(X[:4], Y[:4])] * 6

    return make


QUIET: dict[str, Callable[[], Any]] = {
    "tensors": lambda: TensorLoader(X, Y, batch_size=4, shuffle=True),
    "mapped": lambda: TensorLoader(X, Y, batch_size=4, shuffle=True).map(lambda batch: batch),
    "the same batches": lambda: same(TensorLoader(X, Y, batch_size=4, shuffle=True), 3),
    "function of loopkit": lambda: from_function(6, lambda step: (X[:4], Y[:4])),
    "loader": lambda: DataLoader(SET, 4, shuffle=True),
    "resumable": lambda: DataLoader(SET, 4, sampler=ResumableSampler(SET)),
    "seeded": lambda: DataLoader(seeded(SET, lambda x, g: x), 4, sampler=ResumableSampler(SET)),
    "shared out": lambda: DataLoader(SET, 4, sampler=DistributedSampler(SET, 1, 0)),
    "stream": lambda: DataLoader(Stream(), 4),
    "told its epoch": lambda: DataLoader(SET, 4, sampler=Told()),
    "batches told their epoch": lambda: DataLoader(SET, batch_sampler=BatchSampler(Told(), 4, False)),
    "state": lambda: DataLoader(SET, 4, sampler=WithState(count, n=0)),
    "generator": lambda: DataLoader(SET, 4, sampler=Order(lambda o: o.rng.random(), rng=random.Random(0))),
    "cache": lambda: DataLoader(Samples(lambda s: s._seen.update({len(s._seen): X}), _seen={}), 4),
    "lazy": lambda: DataLoader(Lazy(), 4),
    "volatile": lambda: DataLoader(type("Own", (Samples,), {"volatile": ("n",)})(count, n=0), 4),
    "list": lambda: list(zip(X.split(4), Y.split(4), strict=True)),
    "function that notes": listing,
    "function": lambda: lambda: DataLoader(SET, 4, shuffle=True),
    "order": lambda: DataLoader(SET, batch_sampler=BatchSampler(SequentialSampler(SET), 4, False)),
}


@pytest.mark.parametrize("kind", QUIET)
def test_data_that_lose_nothing_are_not_named(kind, tmp_path):
    assert said(tmp_path, QUIET[kind]) == []


@pytest.mark.parametrize("options", [{"num_workers": 1}, {"num_workers": 2, "persistent_workers": True}])
def test_workers_lose_nothing(options, tmp_path):
    sampled = DataLoader(SET, 8, sampler=ResumableSampler(SET), **options)
    assert said(tmp_path, lambda: sampled, DataLoader(SET, 8, **options)) == []
