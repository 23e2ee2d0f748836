"""Loaders of torchdata draw an epoch's order again, as it was, whatever their samplers are."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, RandomSampler, Sampler, SubsetRandomSampler, TensorDataset
from torch.utils.data import default_collate as collate

from engine.resumed import PLACES, Make, X, Y, check_exact

stateful = pytest.importorskip("torchdata.stateful_dataloader")
nodes = pytest.importorskip("torchdata.nodes")
Stateful = pytest.importorskip("torchdata.stateful_dataloader.sampler").RandomSampler

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
SET = TensorDataset(X, Y)


class AtOnce(Sampler[int]):
    """Draws an order when an iteration begins."""

    def __len__(self) -> int:
        return len(X)

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(len(X)).tolist())


class Later(AtOnce):
    """Draws an order when the first index is asked for."""

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(len(X)).tolist()


class OneByOne(AtOnce):
    """Draws each index when it is asked for."""

    def __iter__(self) -> Iterator[int]:
        for _ in range(len(X)):
            yield int(torch.randint(len(X), ()))


class Own(AtOnce):
    """Draws an order from a generator of its own."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)

    def __iter__(self) -> Iterator[int]:
        return iter(self.rng.permutation(len(X)).tolist())


class Batches:
    """Batches of indices, drawn by Python when an iteration begins."""

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[list[int]]:
        order = list(range(len(X)))
        random.shuffle(order)
        return iter([order[i : i + 4] for i in range(0, len(X), 4)])


class Noisy(Dataset[Any]):
    """Draws for each sample."""

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, index: int) -> Any:
        return X[index] + torch.randn(()), Y[index]


SAMPLERS: dict[str, Callable[[], Any]] = {
    "subset": lambda: SubsetRandomSampler(range(24)),
    "at once": AtOnce,
    "later": Later,
    "one by one": OneByOne,
    "own generator": Own,
}


def loaded(sampler: Callable[[], Any], **options: Any) -> Make:
    return lambda: (stateful.StatefulDataLoader(SET, 4, sampler=sampler(), **options), DataLoader(SET, 8))


def linked(sampler: Callable[[], Any], data: Any = SET, **options: Any) -> Make:
    def make() -> tuple[Any, Any]:
        samples = nodes.MapStyleWrapper(map_dataset=data, sampler=sampler())
        return nodes.Loader(nodes.Mapper(nodes.Batcher(samples, 4), collate), **options), DataLoader(SET, 8)

    return make


KINDS: dict[str, Make] = {
    **{name: loaded(sampler) for name, sampler in SAMPLERS.items()},
    **{f"nodes, {name}": linked(sampler) for name, sampler in SAMPLERS.items()},
    "nodes, sampler of torchdata": linked(lambda: Stateful(SET)),
    "nodes, sampler of torch": linked(lambda: RandomSampler(SET)),
    "nodes, noise": linked(Later, Noisy()),
    "nodes that do not restart": linked(AtOnce, restart_on_stop_iteration=False),
    "batches": lambda: (stateful.StatefulDataLoader(SET, batch_sampler=Batches()), DataLoader(SET, 8)),
}
WORKERS: dict[str, Make] = {
    "own generator": loaded(Own, num_workers=2),
    "subset": loaded(SAMPLERS["subset"], num_workers=1),
    "persistent": loaded(AtOnce, num_workers=2, persistent_workers=True),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", KINDS)
def test_order_of_a_loader_of_torchdata_is_exact_after_a_resume(kind, place):
    check_exact(KINDS[kind], place)


@pytest.mark.slow  # each run starts workers three times
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", WORKERS)
def test_order_is_exact_with_workers(kind, place):
    check_exact(WORKERS[kind], place)
