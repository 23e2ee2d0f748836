"""mosaicml-streaming: shuffled shards, and a loader with a state."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, ClassVar

import torch

# torchvision beside a build of torch that has not its operators: no images here
OPERATORS = torch.library.Library("torchvision", "DEF")
for operator in ("nms", "qnms", "deform_conv2d", "roi_align", "ps_roi_align", "roi_pool", "ps_roi_pool"):
    OPERATORS.define(f"{operator}(Tensor a) -> Tensor")

from checks import Program, main, pairs
from streaming import MDSWriter, StreamingDataLoader, StreamingDataset

NEEDS = ["mosaicml-streaming==0.13.0"]
FOLDER = tempfile.TemporaryDirectory()


def shards(name: str, count: int, seed: int) -> str:
    """The folder of shards of random numbers, which are written if they are not there."""
    folder = Path(FOLDER.name) / name
    if not folder.exists():
        columns = {"x": "ndarray:float32", "y": "ndarray:float32"}
        with MDSWriter(out=str(folder), columns=columns) as writer:
            for inputs, targets in zip(*pairs((count,), seed)[0], strict=True):
                writer.write({"x": inputs.numpy(), "y": targets.numpy()})
    return str(folder)


class Shards(Program):
    known: ClassVar[dict[str, str]] = {
        "resume": "in its second epoch, its state at the epoch's begin is the end of the first: loopkit raises"
    }

    def data(self, name: str, count: int, seed: int) -> Any:
        folder = shards(name, count, seed)
        stream = StreamingDataset(local=folder, batch_size=4, shuffle=name == "train", shuffle_seed=5)
        return StreamingDataLoader(stream, batch_size=4)

    def train(self) -> Any:
        return self.data("train", 28, 2)

    def val(self) -> Any:
        return self.data("val", 4, 9)

    def unpack(self, batch: Any) -> tuple[Any, Any]:
        return torch.as_tensor(batch["x"]), torch.as_tensor(batch["y"])

    def samples(self, batch: Any) -> int:
        return len(batch["x"])


if __name__ == "__main__":
    main(NEEDS, [Shards()])
