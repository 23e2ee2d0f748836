"""A residual network on scikit-learn's digits: one-cycle schedule, averaged weights, shifted images."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

from loopkit import Learner, data, metrics, plugins
from loopkit.plugins.schedule import Schedule
from loopkit.schedules import one_cycle

import sys
torch.manual_seed(int(sys.argv[1]))
digits = load_digits()
order = torch.randperm(len(digits.images))
x = torch.as_tensor(digits.images).float()[order].unsqueeze(1) / 16
y = torch.as_tensor(digits.target)[order]


def shift(batch, generator):
    """Each image moved by up to one pixel in each direction."""
    inputs, targets = batch
    padded = F.pad(inputs, (1, 1, 1, 1))
    rows, columns = torch.randint(3, (2, len(inputs), 1), generator=generator) + torch.arange(8)
    return padded[torch.arange(len(inputs))[:, None, None], :, rows[:, :, None], columns[:, None, :]].movedim(3, 1), targets


class Residual(nn.Module):
    def __init__(self, channels, out, stride):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, out, 3, stride, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU(),
            nn.Conv2d(out, out, 3, padding=1, bias=False), nn.BatchNorm2d(out),
        )  # fmt: skip
        self.skip = nn.Conv2d(channels, out, 1, stride, bias=False) if stride != 1 or channels != out else nn.Identity()

    def forward(self, x):
        return F.relu(self.body(x) + self.skip(x))


model = nn.Sequential(
    nn.Conv2d(1, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(),
    Residual(32, 32, 1), Residual(32, 64, 2), Residual(64, 128, 2),
    nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10),
)  # fmt: skip
learner = Learner(
    model,
    nn.CrossEntropyLoss(label_smoothing=0.1),
    lambda params: torch.optim.SGD(params, lr=0.2, momentum=0.9, nesterov=True, weight_decay=5e-4),
    plugins=[plugins.Metrics(metrics.Accuracy()), Schedule(one_cycle())],
)
train = data.TensorLoader(x[:1400], y[:1400], batch_size=50, shuffle=True).map(shift, seed=1)
val = data.TensorLoader(x[1400:], y[1400:], batch_size=397)
result = learner.fit(train, val, epochs=15)
print(result)
