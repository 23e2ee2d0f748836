"""Learn features of scikit-learn's digits without labels (SimCLR), and probe them with 50 labelled images.

Two distorted views of each image must find each other among all views of the batch.
"""

import torch
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from torch import nn

from loopkit import Learner, PredictionPhase, TrainingPhase, data, metrics, plugins
from loopkit.schedules import cosine, warmup

TEMPERATURE = 0.3

torch.manual_seed(0)
digits = load_digits()
order = torch.randperm(len(digits.images))
x = torch.as_tensor(digits.images).float()[order].unsqueeze(1) / 16
y = torch.as_tensor(digits.target)[order]


def view(images):
    """Each image turned, scaled, stretched and shifted a little, with another contrast."""
    change = 0.15 * torch.randn(len(images), 2, 3)
    grid = nn.functional.affine_grid(torch.eye(2, 3) + change, images.shape, align_corners=False)
    moved = nn.functional.grid_sample(images, grid, align_corners=False)
    return moved * torch.empty(len(images), 1, 1, 1).uniform_(0.7, 1.3)


class SimCLR(TrainingPhase):
    """Inputs: the views. Targets: the place of each one's partner. Outputs: similarities, as of a classifier."""

    def unpack(self, batch):
        n = len(batch)
        return torch.cat([view(batch), view(batch)]), torch.arange(2 * n).roll(n)

    def forward(self, learner, inputs):
        z = nn.functional.normalize(learner.model(inputs), dim=1)
        return (z @ z.T / TEMPERATURE).fill_diagonal_(-torch.inf)


class Features(PredictionPhase):
    def forward(self, learner, inputs):
        return learner.model[0](inputs)


encoder = nn.Sequential(
    nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
    nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.BatchNorm2d(64), nn.ReLU(),
    nn.Conv2d(64, 128, 3, stride=2, padding=1), nn.BatchNorm2d(128), nn.ReLU(),
    nn.Flatten(), nn.Linear(512, 128),
)  # fmt: skip
head = nn.Sequential(nn.ReLU(), nn.Linear(128, 64))
learner = Learner(
    nn.Sequential(encoder, head),
    nn.CrossEntropyLoss(),
    lambda params: torch.optim.AdamW(params, lr=2e-3, weight_decay=1e-2),
    phases=[SimCLR(), Features()],
    plugins=[plugins.Metrics(metrics.Accuracy()), plugins.Schedule(warmup(20, then=cosine()))],
)
print(learner.fit(data.TensorLoader(x[:1400], batch_size=200, shuffle=True), epochs=25))
features = learner.predict(data.TensorLoader(x, batch_size=500))


def probe(inputs, draws=10):
    """Held-out accuracy of a linear classifier that is given 50 labels, averaged over draws."""
    inputs = (inputs - inputs[:1400].mean(0)) / (inputs[:1400].std(0) + 1e-6)
    total = 0.0
    for draw in range(draws):
        chosen = torch.randperm(1400, generator=torch.Generator().manual_seed(draw))[:50]
        classifier = LogisticRegression(max_iter=1000).fit(inputs[chosen], y[chosen])
        total += classifier.score(inputs[1400:], y[1400:])
    return total / draws


raw, learned = probe(x.flatten(1)), probe(features)
print(f"accuracy with 50 labels: {raw:.3f} on pixels, {learned:.3f} on learned features")
assert learned > raw + 0.05, "features learned without labels should be worth more than pixels"
