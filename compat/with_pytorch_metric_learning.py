"""pytorch-metric-learning: losses with parameters of their own, miners, and a memory of past batches."""

from __future__ import annotations

from typing import Any, ClassVar

from checks import Program, main
from pytorch_metric_learning import losses, miners
from torch import Tensor, nn

NEEDS = ["pytorch-metric-learning==2.9.0"]


class WithLoss(nn.Module):
    """A model that holds its loss, so that its proxies are trained and saved."""

    def __init__(self, loss: nn.Module) -> None:
        super().__init__()
        self.body, self.loss = nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.2), nn.Linear(8, 4)), loss

    def forward(self, inputs: Tensor) -> Any:
        return self.body(inputs), self.loss


class ProxyAnchor(Program):
    def model(self) -> nn.Module:
        return WithLoss(losses.ProxyAnchorLoss(num_classes=3, embedding_size=4))

    def unpack(self, batch: Any) -> tuple[Any, Any]:
        return batch[0], (batch[1][:, 0] > 0).long() + (batch[1][:, 1] > 1).long()

    def loss(self, outputs: Any, targets: Any) -> Tensor:
        embeddings, loss = outputs
        return loss(embeddings, targets)


class ArcFace(ProxyAnchor):
    def model(self) -> nn.Module:
        return WithLoss(losses.ArcFaceLoss(num_classes=3, embedding_size=4))


class MinedTriplets(ProxyAnchor):
    """A miner beside a loss without parameters."""

    def model(self) -> nn.Module:
        return WithLoss(losses.TripletMarginLoss())

    def loss(self, outputs: Any, targets: Any) -> Tensor:
        embeddings, loss = outputs
        return loss(embeddings, targets, miners.MultiSimilarityMiner()(embeddings, targets))


class Memory(ProxyAnchor):
    """A queue of embeddings of past batches, in buffers."""

    known: ClassVar[dict[str, str]] = {
        "resume": "the place in its queue is a plain attribute, which is in no state; a warning names it",
        "average": "it writes into its queue in validations, too: by hand into a copy",
        "best": "it writes into its queue in validations, too: another one measures another loss",
    }

    def model(self) -> nn.Module:
        return WithLoss(losses.CrossBatchMemory(losses.ContrastiveLoss(), embedding_size=4, memory_size=16))


if __name__ == "__main__":
    main(NEEDS, [ProxyAnchor(), ArcFace(), MinedTriplets(), Memory()])
