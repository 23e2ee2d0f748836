"""LeNet on scikit-learn's digits: two convolutions with average pooling, three layers, tanh between all."""

import torch
from sklearn.datasets import load_digits
from torch import nn

from loopkit import Learner, data, metrics, plugins
from loopkit.schedules import one_cycle

torch.manual_seed(0)
images, labels = map(torch.as_tensor, load_digits(return_X_y=True))
order = torch.randperm(len(images))
x, y = images[order].float().reshape(-1, 1, 8, 8) / 8 - 1, labels[order]
train = data.TensorLoader(x[:1400], y[:1400], batch_size=50, shuffle=True)
val = data.TensorLoader(x[1400:], y[1400:], batch_size=397)

model = nn.Sequential(
    nn.Conv2d(1, 6, 3, padding=1), nn.Tanh(), nn.AvgPool2d(2),
    nn.Conv2d(6, 16, 3, padding=1), nn.Tanh(), nn.AvgPool2d(2),
    nn.Flatten(),
    nn.Linear(64, 120), nn.Tanh(),
    nn.Linear(120, 84), nn.Tanh(),
    nn.Linear(84, 10),
)  # fmt: skip
learner = Learner(
    model,
    nn.CrossEntropyLoss(label_smoothing=0.1),
    lambda params: torch.optim.AdamW(params, lr=5e-3, weight_decay=0.1),
    plugins=[plugins.Metrics(metrics.Accuracy()), plugins.Schedule(one_cycle())],
)
result = learner.fit(train, val, epochs=20)
print(result)

assert result.metrics["val/accuracy"] > 0.95, "LeNet should be right about more than 95 % of held-out images"
