"""datasets of Hugging Face: tables and streams, in torch's loader and in torchdata's."""

from __future__ import annotations

from typing import Any

from checks import Program, main, pairs
from datasets import Dataset
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

NEEDS = ["datasets==5.2.0", "torchdata==0.11.0"]


def table(count: int, seed: int) -> Dataset:
    """A table of random numbers."""
    inputs, targets = pairs((count,), seed)[0]
    return Dataset.from_dict({"x": inputs.tolist(), "y": targets.tolist()}).with_format("torch")


class Table(Program):
    def train(self) -> Any:
        return DataLoader(table(27, 2), batch_size=4, shuffle=True)

    def val(self) -> Any:
        return DataLoader(table(6, 9), batch_size=4)

    def unpack(self, batch: Any) -> tuple[Any, Any]:
        return batch["x"], batch["y"]

    def samples(self, batch: Any) -> int:
        return len(batch["x"])


class TableWithState(Table):
    def train(self) -> Any:
        return StatefulDataLoader(table(27, 2), batch_size=4, shuffle=True)


class Stream(Table):
    def train(self) -> Any:
        return DataLoader(table(27, 2).to_iterable_dataset(), batch_size=4)


class StreamWithState(Table):
    def train(self) -> Any:
        return StatefulDataLoader(table(27, 2).to_iterable_dataset(), batch_size=4)


class ShuffledStream(Table):
    def train(self) -> Any:
        stream = table(27, 2).to_iterable_dataset(num_shards=3).shuffle(seed=5, buffer_size=10)
        return DataLoader(stream, batch_size=4)

    def begin_epoch(self, data: Any, epoch: int) -> None:
        data.dataset.set_epoch(epoch)


if __name__ == "__main__":
    main(NEEDS, [Table(), TableWithState(), Stream(), StreamWithState(), ShuffledStream()])
