"""A residual network on scikit-learn's digits: one-cycle schedule, averaged weights, distorted images."""

import torch
from sklearn.datasets import load_digits
from torch import nn

from loopkit import Learner, data, metrics, plugins
from loopkit.schedules import one_cycle

torch.manual_seed(0)
digits = load_digits()
order = torch.randperm(len(digits.images))
x = torch.as_tensor(digits.images).float()[order].unsqueeze(1) / 16
y = torch.as_tensor(digits.target)[order]


def distort(batch, generator):
    """Turn, scale, stretch and shift each image a little."""
    inputs, targets = batch
    change = 0.15 * torch.randn(len(inputs), 2, 3, generator=generator)
    grid = nn.functional.affine_grid(torch.eye(2, 3) + change, inputs.shape, align_corners=False)
    return nn.functional.grid_sample(inputs, grid, align_corners=False), targets


def convolution(channels, out, stride=1):
    return nn.Sequential(nn.Conv2d(channels, out, 3, stride, padding=1, bias=False), nn.BatchNorm2d(out))


class Residual(nn.Module):
    def __init__(self, channels, out, stride):
        super().__init__()
        self.body = nn.Sequential(convolution(channels, out, stride), nn.ReLU(), convolution(out, out))
        self.skip = nn.Conv2d(channels, out, 1, stride, bias=False)

    def forward(self, x):
        return nn.functional.relu(self.skip(x) + self.body(x))


model = nn.Sequential(
    *(convolution(1, 24), nn.ReLU()),
    *(Residual(24, 24, 1), Residual(24, 48, 2), Residual(48, 96, 2)),
    *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(96, 10)),
)
learner = Learner(
    model,
    nn.CrossEntropyLoss(label_smoothing=0.1),
    lambda params: torch.optim.SGD(params, lr=0.2, momentum=0.9, nesterov=True, weight_decay=5e-4),
    plugins=[
        plugins.Metrics(metrics.Accuracy()),
        plugins.Schedule(one_cycle()),
        plugins.WeightAverage(0.98, warmup=True, use_buffers=True),
    ],
)
train = data.TensorLoader(x[:1400], y[:1400], batch_size=50, shuffle=True).map(distort, seed=1)
val = data.TensorLoader(x[1400:], y[1400:], batch_size=397)
result = learner.fit(train, val, epochs=15)
print(result)

assert result.metrics["val/accuracy"] > 0.985, "the network should be right about more than 98.5 % of held-out images"
