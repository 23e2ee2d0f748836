"""Train on digits in the folder that is given: the script of README's recording."""

import sys

import torch
from sklearn.datasets import load_digits
from torch import nn

from loopkit import Learner, data, metrics, plugins, schedules

torch.manual_seed(0)
torch.set_num_threads(1)
images, labels = map(torch.as_tensor, load_digits(return_X_y=True))
x, y = images.float() / 16, labels
train = data.TensorLoader(x[:1400], y[:1400], batch_size=4, shuffle=True)
val = data.TensorLoader(x[1400:], y[1400:], batch_size=200)
model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Dropout(0.2), nn.Linear(512, 10))
learner = Learner(
    model,
    nn.CrossEntropyLoss(),
    torch.optim.AdamW(model.parameters(), lr=1e-3),
    plugins=[
        plugins.Metrics(metrics.Accuracy()),
        plugins.Schedule(schedules.cosine()),
        plugins.ClipGradNorm(1.0),
        plugins.Checkpoint(sys.argv[1], resume="auto"),
    ],
)
print(learner.fit(train, val, epochs=6))
