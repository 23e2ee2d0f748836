"""CutMix as a plugin: a box of each image is that of another one of its batch, and the labels share by area.

Source: Yun et al. 2019, "CutMix: regularization strategy to train strong classifiers with localizable features".
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.distributions import Beta

from loopkit import Learner, hookimpl, metrics, plugins
from loopkit.data import TensorLoader


class CutMix:
    """Images ``(batch, channels, height, width)``; a box of about the share 1 - a, with ``a`` from Beta(alpha, alpha).

    The loss takes probabilities as targets, as ``nn.CrossEntropyLoss`` does. Once it is computed, the targets are the
    labels again: metrics compare with those.
    """

    def __init__(self, classes, alpha=1.0):
        self.classes, self.alpha = classes, alpha

    @hookimpl(phase="training", updates=("inputs", "targets", "rng"), writes=("step.labels",))
    def forward_begin(self, step):
        x, step.labels = step.inputs, step.targets
        height, width = x.shape[-2:]
        side = (1 - Beta(self.alpha, self.alpha).sample().item()) ** 0.5
        (top, bottom), (left, right) = span(height, side), span(width, side)
        other = torch.randperm(len(x), device=x.device)
        y = nn.functional.one_hot(step.labels, self.classes).to(x.dtype)
        step.inputs = x.clone()
        step.inputs[..., top:bottom, left:right] = x[other, ..., top:bottom, left:right]
        share = 1 - (bottom - top) * (right - left) / (height * width)
        step.targets = share * y + (1 - share) * y[other]

    @hookimpl(reads=("step.labels",), updates=("targets",))
    def backward_begin(self, step):
        step.targets = step.labels


def span(length, share):
    """Begin and end of a part of the length, around any place; what would stand out is cut off."""
    middle, half = torch.randint(length, ()).item(), int(length * share) // 2
    return max(middle - half, 0), min(middle + half, length)


if __name__ == "__main__":
    torch.manual_seed(0)
    x, y = map(torch.as_tensor, load_digits(return_X_y=True))
    order = torch.randperm(len(x))
    x, y = x[order].reshape(-1, 1, 8, 8).float() / 16, y[order]
    learner = Learner(
        nn.Sequential(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Flatten(), nn.Linear(1152, 10)),
        nn.CrossEntropyLoss(),
        lambda params: torch.optim.Adam(params, lr=5e-3),
        plugins=[CutMix(classes=10), plugins.Metrics(metrics.Accuracy())],
    )
    train, val = TensorLoader(x[:1400], y[:1400], batch_size=32, shuffle=True), [(x[1400:], y[1400:])]
    result = learner.fit(train, val, epochs=4)
    print(result)
    assert result.metrics["val/accuracy"] > 0.93
