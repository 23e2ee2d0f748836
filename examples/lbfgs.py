"""LBFGS, which evaluates the loss several times in one update: it gets a closure.

Logistic regression on scikit-learn's digits has one optimum, so the result can be compared with scikit-learn's.
"""

import torch
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from torch import nn

from loopkit import Learner, TrainingPhase, data, metrics, plugins
from loopkit.events import LossBegin

torch.manual_seed(0)
images, labels = map(torch.as_tensor, load_digits(return_X_y=True))
order = torch.randperm(len(images))
x, y = images[order] / 16, labels[order]
train = data.TensorLoader(x[:1400], y[:1400], batch_size=1400)
val = data.TensorLoader(x[1400:], y[1400:], batch_size=397)


class LogisticPhase(TrainingPhase):
    """The loss, as in scikit-learn, with an L2 penalty of the weights; and the closure."""

    def loss(self, learner, outputs, targets):
        return learner.loss_fn(outputs, targets) + learner.model.weight.square().sum() / 2 / len(targets)

    def step(self, learner, step):
        step.inputs, step.targets = self.unpack(step.batch)

        def closure():
            step.outputs = self.forward(learner, step.inputs)
            step.emit(LossBegin)
            step.loss = self.loss(learner, step.outputs, step.targets)
            step.backward(step.loss)
            return step.loss

        step.update(closure=closure)


class Evaluations:
    ...


learner = Learner(
    nn.Linear(64, 10, dtype=torch.float64),
    nn.CrossEntropyLoss(),
    lambda params: torch.optim.LBFGS(params, line_search_fn="strong_wolfe"),
    phases=[LogisticPhase()],
    plugins=[plugins.Metrics(metrics.Accuracy())],
)
result = learner.fit(train, val, epochs=10)
print(result)
reference = LogisticRegression(tol=1e-10, max_iter=10_000).fit(x[:1400], y[:1400])
