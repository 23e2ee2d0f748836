"""albumentations: random augmentations in the data, whose generators are the package's own."""

from __future__ import annotations

from typing import Any

import albumentations
import numpy as np
import torch
from checks import Program, main
from torch import nn
from torch.utils.data import DataLoader, Dataset

NEEDS = ["albumentations==2.0.8"]


class Images(Dataset[Any]):
    """Images of random numbers, augmented in another way each time."""

    def __init__(self, count: int, augment: Any = None) -> None:
        draw = np.random.default_rng(count)
        self.images = draw.integers(0, 255, (count, 4, 4, 3), dtype=np.uint8)
        self.targets = draw.normal(size=(count, 2)).astype(np.float32)
        self.augment = augment

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        image = self.images[index]
        if self.augment is not None:
            image = self.augment(image=image)["image"]
        return torch.from_numpy(image.astype(np.float32) / 255), torch.from_numpy(self.targets[index])


class Augmented(Program):
    """A pipeline with a seed, in the process of the training."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(48, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 2))

    def train(self) -> Any:
        kinds = [albumentations.HorizontalFlip, albumentations.GaussNoise, albumentations.CoarseDropout]
        some = albumentations.OneOf([kind(p=1.0) for kind in kinds], p=0.7)
        augment = albumentations.Compose([some, albumentations.RandomBrightnessContrast(p=0.5)], seed=3)
        return DataLoader(Images(27, augment), batch_size=4, shuffle=True)

    def val(self) -> Any:
        return DataLoader(Images(6), batch_size=4)


if __name__ == "__main__":
    main(NEEDS, [Augmented()])
