"""tensordict: batches that are TensorDicts, and modules that read and write them."""

from __future__ import annotations

from typing import Any

import torch
from checks import Program, main
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn

NEEDS = ["tensordict==0.15.3"]


def batches(sizes: tuple[int, ...], seed: int, sized: bool = True) -> list[TensorDict]:
    """TensorDicts of these sizes, with a batch size or without one."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    made = [{"x": draw(size, 5), "y": draw(size, 2)} for size in sizes]
    return [TensorDict(each, batch_size=[len(each["x"])] if sized else []) for each in made]


class Batches(Program):
    sized = True

    def train(self) -> Any:
        return batches((4, 4, 4, 4, 4, 4, 3), 2, self.sized)

    def val(self) -> Any:
        return batches((4, 2), 9, self.sized)

    def unpack(self, batch: Any) -> tuple[Any, Any]:
        return batch["x"], batch["y"]

    def samples(self, batch: Any) -> int:
        return len(batch["x"])


class WithoutBatchSize(Batches):
    sized = False


class Modules(Batches):
    def model(self) -> nn.Module:
        hidden = TensorDictModule(nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.2)), in_keys=["x"], out_keys=["hidden"])
        return TensorDictSequential(hidden, TensorDictModule(nn.Linear(8, 2), in_keys=["hidden"], out_keys=["out"]))

    def unpack(self, batch: Any) -> tuple[Any, Any]:
        return batch, batch["y"]

    def forward(self, model: nn.Module, inputs: Any) -> Any:
        return model(inputs.copy())["out"]


if __name__ == "__main__":
    main(NEEDS, [Batches(), WithoutBatchSize(), Modules()])
