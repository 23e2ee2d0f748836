"""monai: networks, losses and transforms for medical images, and its loader."""

from __future__ import annotations

from typing import Any

import torch
from checks import Program, main
from monai.data import DataLoader, Dataset
from monai.losses import DiceCELoss
from monai.networks.nets import UNet
from monai.transforms import Compose, RandFlipd, RandGaussianNoised, RandRotate90d
from torch import Tensor, nn

NEEDS = ["monai==1.6.1"]


def images(count: int, seed: int) -> list[dict[str, Tensor]]:
    """Images of noise, and masks of their bright parts."""
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(1, 16, 16, generator=generator) for _ in range(count)]
    return [{"image": each, "label": (each > 0).float()} for each in made]


class Segmentation(Program):
    def model(self) -> nn.Module:
        return UNet(2, 1, 1, channels=(4, 8), strides=(2,), num_res_units=1, dropout=0.1)

    def train(self) -> Any:
        return DataLoader(Dataset(images(14, 2)), batch_size=2, shuffle=True)

    def val(self) -> Any:
        return DataLoader(Dataset(images(3, 9)), batch_size=2)

    def unpack(self, batch: Any) -> tuple[Any, Any]:
        return batch["image"], batch["label"]

    def loss(self, outputs: Any, targets: Any) -> Tensor:
        return DiceCELoss(sigmoid=True)(outputs, targets)

    def samples(self, batch: Any) -> int:
        return len(batch["image"])


class Augmented(Segmentation):
    """Random transforms draw from generators of their own."""

    def train(self) -> Any:
        keys = ["image", "label"]
        transform = Compose(
            [RandFlipd(keys, prob=0.5), RandRotate90d(keys, prob=0.5), RandGaussianNoised(["image"], prob=0.5)]
        )
        transform.set_random_state(5)
        return DataLoader(Dataset(images(14, 2), transform), batch_size=2, shuffle=True)


if __name__ == "__main__":
    main(NEEDS, [Segmentation(), Augmented()])
