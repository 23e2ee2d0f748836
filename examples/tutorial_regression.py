"""Tutorial: regression. The text is docs/tutorial-regression.md."""

import torch
from sklearn.datasets import load_diabetes
from torch import nn

from loopkit import Learner, data, plugins, seed_everything

seed_everything(0)
table, progress = load_diabetes(return_X_y=True)
x = torch.as_tensor(table, dtype=torch.float32)
y = torch.as_tensor(progress, dtype=torch.float32).unsqueeze(1)
x = (x - x[:350].mean(0)) / x[:350].std(0)
mean, std = y[:350].mean(), y[:350].std()

train = data.TensorLoader(x[:350], (y[:350] - mean) / std, batch_size=32, shuffle=True)
val = data.TensorLoader(x[350:], (y[350:] - mean) / std, batch_size=92)

def absolute_error(outputs, targets):
    """In the units of the table."""
    return (outputs - targets).abs().mean() * std


learner = Learner(
    nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 1)),
    nn.MSELoss(),
    lambda params: torch.optim.AdamW(params, lr=3e-3, weight_decay=0.1),
    plugins=[plugins.Metrics(absolute_error), plugins.EarlyStopping("val/loss", patience=5, restore_best=True)],
)
result = learner.fit(train, val, epochs=40)
print(result)

predicted = learner.predict(val) * std + mean
print(predicted[:3].squeeze(1), y[350:353].squeeze(1))
