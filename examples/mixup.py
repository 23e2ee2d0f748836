"""Mixup as a plugin: each image is mixed with another one of its batch, and so are the two labels.

Source: Zhang, Cisse, Dauphin and Lopez-Paz 2018, "mixup: beyond empirical risk minimization".
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.distributions import Beta

from loopkit import Learner, hookimpl, metrics, plugins
from loopkit.data import TensorLoader


class Mixup:
    """Inputs ``a x + (1 - a) x'``, targets the same of the one-hot labels. ``a`` is from Beta(alpha, alpha).

    The loss takes probabilities as targets, as ``nn.CrossEntropyLoss`` does. Once it is computed, the targets are the
    labels again: metrics compare with those.
    """

    def __init__(self, classes, alpha=0.2):
        self.classes, self.alpha = classes, alpha

    @hookimpl(phase="training", updates=("inputs", "targets", "rng"), writes=("step.labels",))
    def forward_begin(self, step):
        x, step.labels = step.inputs, step.targets
        share = Beta(self.alpha, self.alpha).sample().item()
        share = max(share, 1 - share)  # its own label is the larger part
        other = torch.randperm(len(x), device=x.device)
        y = nn.functional.one_hot(step.labels, self.classes).to(x.dtype)
        step.inputs = share * x + (1 - share) * x[other]
        step.targets = share * y + (1 - share) * y[other]

    @hookimpl(reads=("step.labels",), updates=("targets",))
    def backward_begin(self, step):
        step.targets = step.labels


if __name__ == "__main__":
    torch.manual_seed(0)
    x, y = map(torch.as_tensor, load_digits(return_X_y=True))
    order = torch.randperm(len(x))
    x, y = x[order].reshape(-1, 1, 8, 8).float() / 16, y[order]
    learner = Learner(
        nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)),
        nn.CrossEntropyLoss(),
        lambda params: torch.optim.Adam(params, lr=5e-3),
        plugins=[Mixup(classes=10), plugins.Metrics(metrics.Accuracy())],
    )
    train, val = TensorLoader(x[:1400], y[:1400], batch_size=32, shuffle=True), [(x[1400:], y[1400:])]
    result = learner.fit(train, val, epochs=4)
    print(result)
    assert result.metrics["val/accuracy"] > 0.93
