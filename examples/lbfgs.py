"""LBFGS, an optimizer that evaluates the loss several times in one update: it gets a closure.

Logistic regression on scikit-learn's digits has one optimum, so the result can be compared with scikit-learn's.
"""

import torch
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from torch import nn

from loopkit import Learner, TrainingPhase, hookimpl, metrics, plugins
from loopkit.events import ForwardBegin, LossBegin

torch.manual_seed(0)
images, labels = map(torch.as_tensor, load_digits(return_X_y=True))
order = torch.randperm(len(images))
x, y = images[order] / 16, labels[order]
train, val = (x[:1400], y[:1400]), (x[1400:], y[1400:])


class WithClosure(TrainingPhase):
    """Full-batch training. The loss has scikit-learn's penalty, half the weights' squared norm for all samples."""

    def loss(self, learner, outputs, targets):
        penalty = learner.model.weight.square().sum() / 2
        return super().loss(learner, outputs, targets) + penalty / len(targets)

    def step(self, learner, step):
        step.inputs, step.targets = self.unpack(step.batch)
        step.emit(ForwardBegin)

        def closure():
            step.outputs = self.forward(learner, step.inputs)
            step.emit(LossBegin)
            step.loss = self.loss(learner, step.outputs, step.targets)
            step.backward(step.loss)
            return step.loss

        step.update(closure=closure)


class Evaluations:
    """How often the optimizer has evaluated the loss: with a closure, ``update_begin`` comes after each time."""

    def __init__(self):
        self.count = 0

    @hookimpl
    def update_begin(self):
        self.count += 1


evaluations = Evaluations()
learner = Learner(
    nn.Linear(64, 10, dtype=torch.float64),
    nn.CrossEntropyLoss(),
    lambda params: torch.optim.LBFGS(params, line_search_fn="strong_wolfe"),
    phases=[WithClosure()],
    plugins=[evaluations, plugins.Metrics(metrics.Accuracy())],
)
result = learner.fit([train], [val], epochs=8)
print(result)

# The same loss where scikit-learn's solver ends
reference = LogisticRegression(tol=1e-10, max_iter=10_000).fit(*train)
expected = nn.functional.cross_entropy(torch.as_tensor(reference.decision_function(x[:1400])), y[:1400]).item()
expected += (reference.coef_**2).sum() / 2 / 1400
loss = result.metrics["train/loss"]
print(f"{evaluations.count} evaluations in {result.updates} updates; loss {loss:.8f}, scikit-learn's {expected:.8f}")
assert abs(loss - expected) < 1e-6, "both should end at the one optimum"
assert result.updates == 8
assert evaluations.count > 8
