"""torchmetrics: its metrics given to Metrics as they are, against a loop that updates them by hand."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
import torchmetrics
from checks import Dies, Program, main, seed, stop, stopped, worst
from torch import Tensor, nn
from torch.nn import functional

from loopkit import Learner, every
from loopkit.plugins import Checkpoint, Metrics

NEEDS = ["torchmetrics==1.9.0"]


class Classes(Program):
    """Three classes, measured by several metrics of each kind."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))

    def unpack(self, batch: Any) -> tuple[Any, Any]:
        return batch[0], (batch[1][:, 0] > 0).long() + (batch[1][:, 1] > 1).long()

    def loss(self, outputs: Any, targets: Any) -> Tensor:
        return functional.cross_entropy(outputs, targets)

    def metrics(self) -> dict[str, Any]:
        """New ones."""
        return {
            "accuracy": torchmetrics.classification.MulticlassAccuracy(3),
            "f1": torchmetrics.classification.MulticlassF1Score(3, average="micro"),
            "auroc": torchmetrics.classification.MulticlassAUROC(3),
            "calibration": torchmetrics.classification.MulticlassCalibrationError(3),
        }

    def measured_by_hand(self, model: nn.Module) -> dict[str, float]:
        """The metrics of a loop over the validation data."""
        made = self.metrics()
        model.eval()
        with torch.no_grad():
            for batch in self.val():
                inputs, targets = self.unpack(batch)
                for metric in made.values():
                    metric.update(model(inputs), targets)
        return {f"val/{name}": metric.compute().item() for name, metric in made.items()}

    def learner(self, model: nn.Module, optimizer: Any, *plugins: Any, **options: Any) -> Learner:
        stack = [Metrics(**self.metrics()), *plugins]
        return Learner(model, None, optimizer, plugins=stack, phases=self.phases(), standard=False, **options)

    def check_metrics(self) -> float:
        """The metrics of the last validation."""
        seed()
        model = self.model()
        learner = self.learner(model, self.optimizer(model))
        learner.fit(self.train(), self.val(), epochs=2)
        hand = self.measured_by_hand(model)
        return worst(hand, {name: learner.metrics[name] for name in hand}, "metrics")

    def check_metrics_resumed(self) -> float:
        """The training metrics of an epoch that was stopped in its middle and resumed."""

        def train(*plugins: Any) -> dict[str, float]:
            seed()
            model = self.model()
            learner = self.learner(model, self.optimizer(model), *plugins)
            learner.fit(self.train(), epochs=1)
            return dict(learner.metrics)

        with tempfile.TemporaryDirectory() as folder:
            saving = lambda: Checkpoint(folder, save=every(updates=1), resume="auto")  # noqa: E731
            stopped(lambda: train(saving(), Dies(4, stop)))
            return worst(train(), train(saving()), "metrics")


if __name__ == "__main__":
    main(NEEDS, [Classes()])
