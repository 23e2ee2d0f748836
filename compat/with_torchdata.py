"""torchdata: the loader with a state, and loaders made of nodes, shuffled by generators of their own."""

from __future__ import annotations

from typing import Any

import torch
from checks import Program, main, pairs
from torch.utils.data import RandomSampler, SubsetRandomSampler, TensorDataset
from torchdata.nodes import Batcher, Loader, Mapper, SamplerWrapper
from torchdata.stateful_dataloader import StatefulDataLoader

NEEDS = ["torchdata==0.11.0"]


def samples(count: int, seed: int) -> TensorDataset:
    """A data set of random numbers."""
    return TensorDataset(*pairs((count,), seed)[0])


class Shuffled(Program):
    def train(self) -> Any:
        return StatefulDataLoader(samples(27, 2), batch_size=4, shuffle=True)

    def val(self) -> Any:
        return StatefulDataLoader(samples(6, 9), batch_size=4)


class OwnGenerator(Shuffled):
    def train(self) -> Any:
        generator = torch.Generator().manual_seed(5)
        return StatefulDataLoader(samples(27, 2), batch_size=4, shuffle=True, generator=generator)


class Subset(Shuffled):
    def train(self) -> Any:
        return StatefulDataLoader(samples(40, 2), batch_size=4, sampler=SubsetRandomSampler(range(0, 40, 2)))


class Nodes(Shuffled):
    def train(self) -> Any:
        data = samples(27, 2)
        node = Mapper(SamplerWrapper(RandomSampler(data)), data.__getitem__)
        stack = lambda batch: tuple(map(torch.stack, zip(*batch, strict=True)))  # noqa: E731
        return Loader(Mapper(Batcher(node, 4, drop_last=False), stack))


class Drawing(torch.utils.data.Sampler[int]):
    """Draws its order from a generator of its own."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(5)

    def __iter__(self) -> Any:
        return iter(torch.randperm(27, generator=self.generator).tolist())

    def __len__(self) -> int:
        return 27


class OwnSampler(Shuffled):
    def train(self) -> Any:
        return StatefulDataLoader(samples(27, 2), batch_size=4, sampler=Drawing())


if __name__ == "__main__":
    main(NEEDS, [Shuffled(), OwnGenerator(), Subset(), Nodes(), OwnSampler()])
