"""timm: image models, with drop path and batch norm, and its optimizers."""

from __future__ import annotations

from typing import Any

import torch

# torchvision beside a build of torch that has not its operators: timm's models need none of them
OPERATORS = torch.library.Library("torchvision", "DEF")
for operator in ("nms", "qnms", "deform_conv2d", "roi_align", "ps_roi_align", "roi_pool", "ps_roi_pool"):
    OPERATORS.define(f"{operator}(Tensor a) -> Tensor")

import timm
import timm.optim
from checks import Program, main
from torch import Tensor, nn
from torch.nn import functional

NEEDS = ["timm==1.0.31"]


class ResNet(Program):
    def model(self) -> nn.Module:
        return timm.create_model("test_resnet", num_classes=3, drop_path_rate=0.1)

    def images(self, sizes: tuple[int, ...], seed: int) -> list[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(seed)
        return [
            (
                torch.randn(size, 3, 32, 32, generator=generator),
                torch.randint(3, (size,), generator=generator),
            )
            for size in sizes
        ]

    def train(self) -> Any:
        return self.images((4, 4, 4, 4, 4, 4, 3), 2)

    def val(self) -> Any:
        return self.images((4, 2), 9)

    def loss(self, outputs: Any, targets: Any) -> Tensor:
        return functional.cross_entropy(outputs, targets)


class VisionTransformer(ResNet):
    def model(self) -> nn.Module:
        return timm.create_model("test_vit", num_classes=3, img_size=32, drop_path_rate=0.1)

    def optimizer(self, model: nn.Module) -> Any:
        return timm.optim.create_optimizer_v2(model, opt="lamb", lr=1e-3, weight_decay=0.05)


class Lookahead(ResNet):
    def optimizer(self, model: nn.Module) -> Any:
        return timm.optim.create_optimizer_v2(model, opt="lookahead_nadamw", lr=1e-3)


if __name__ == "__main__":
    main(NEEDS, [ResNet(), VisionTransformer(), Lookahead()])
