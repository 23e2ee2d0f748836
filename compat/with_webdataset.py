"""webdataset: shards of samples as tar files, shuffled by a generator that is given."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import Any

import torch
import webdataset
from checks import Program, main, pairs

NEEDS = ["webdataset==1.0.2"]
FOLDER = tempfile.TemporaryDirectory()


def shard(name: str, count: int, seed: int) -> str:
    """The path of a shard of random numbers, which is written if it is not there."""
    path = Path(FOLDER.name) / f"{name}.tar"
    if not path.exists():
        with webdataset.TarWriter(str(path)) as writer:
            for index, (inputs, targets) in enumerate(zip(*pairs((count,), seed)[0], strict=True)):
                writer.write({"__key__": f"{index:04}", "x.npy": inputs.numpy(), "y.npy": targets.numpy()})
    return str(path)


def stream(path: str, seed: int | None = None) -> Any:
    """Batches of a shard."""
    data = webdataset.WebDataset(path, shardshuffle=False)
    if seed is not None:
        data = data.shuffle(20, rng=random.Random(seed))
    return data.decode().to_tuple("x.npy", "y.npy").batched(4).map(lambda batch: tuple(map(torch.as_tensor, batch)))


class InOrder(Program):
    def train(self) -> Any:
        return stream(shard("train", 27, 2))

    def val(self) -> Any:
        return stream(shard("val", 6, 9))


class Shuffled(InOrder):
    def train(self) -> Any:
        return stream(shard("train", 27, 2), seed=5)


if __name__ == "__main__":
    main(NEEDS, [InOrder(), Shuffled()])
