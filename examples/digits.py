"""Train a classifier on scikit-learn's handwritten digits: 1,797 real images of 8 x 8 pixels."""

import torch
from sklearn.datasets import load_digits
from torch import nn

from loopkit import Learner, data, metrics, plugins

torch.manual_seed(0)
images, labels = map(torch.as_tensor, load_digits(return_X_y=True))
order = torch.randperm(len(images))
x, y = images[order].float() / 16, labels[order]
train = data.TensorLoader(x[:1400], y[:1400], batch_size=32, shuffle=True)
val = data.TensorLoader(x[1400:], y[1400:], batch_size=200)

model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
learner = Learner(model, nn.CrossEntropyLoss(), optimizer, plugins=[plugins.Metrics(metrics.Accuracy())])
result = learner.fit(train, val, epochs=20)
print(result)

assert result.metrics["val/accuracy"] >= 0.97, "the classifier should reach 97 %"
