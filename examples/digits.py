"""Train a classifier on scikit-learn's handwritten digits: 1,797 real images of 8 x 8 pixels."""

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

from loopkit import Learner, seed_everything
from loopkit.data import TensorLoader
from loopkit.metrics import Accuracy
from loopkit.plugins import Metrics

seed_everything(0)
images, labels = load_digits(return_X_y=True)
splits = train_test_split(images / 16, labels, test_size=0.25, random_state=0, stratify=labels)
x_train, x_val, y_train, y_val = (torch.as_tensor(split) for split in splits)

train = TensorLoader(x_train.float(), y_train, batch_size=32, shuffle=True)
val = TensorLoader(x_val.float(), y_val, batch_size=256)

learner = Learner(
    nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)),
    nn.CrossEntropyLoss(),
    lambda params: torch.optim.AdamW(params, lr=2e-3),
    plugins=[Metrics(Accuracy())],
)
result = learner.fit(train, val, epochs=20)

print(result)
assert result.metrics["val/accuracy"] >= 0.97, result.metrics
