"""Sine waves go on by themselves: an optimizer that evaluates the loss many times in an update gets a closure.

The network reads a wave point by point and says the next one; later it reads what it has said.

Source: Liu and Nocedal 1989, "On the limited memory BFGS method for large scale optimization".
"""

import torch
from both import train_twice
from torch import nn
from torch.nn.functional import mse_loss

from loopkit import Learner, TrainingPhase

LENGTH, EVALUATIONS = 60, 20


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = nn.LSTMCell(1, 24), nn.LSTMCell(24, 24), nn.Linear(24, 1)

    def forward(self, waves, more=0):
        one = two = None
        said, points = [], list(waves.split(1, 1))
        while len(said) < waves.shape[1] + more:
            one = self.first(points[len(said)] if len(said) < len(points) else said[-1], one)
            two = self.second(one[0], two)
            said.append(self.head(two[0]))
        return torch.cat(said, 1)


def make():
    return Reader().double()


def waves(count):
    begin = torch.rand(count, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(count)) * 20
    return ((begin + torch.arange(2 * LENGTH + 1)) / 4).sin()


def data(steps=6):
    train = waves(32)[:, : LENGTH + 1]
    return [(train[:, :-1], train[:, 1:])] * steps


def lbfgs(params):
    return torch.optim.LBFGS(params, lr=0.8, max_iter=EVALUATIONS)


def by_hand(model, data, epochs):
    optimizer = lbfgs(model.parameters())
    for _ in range(epochs):
        for inputs, targets in data:

            def closure(inputs=inputs, targets=targets):
                optimizer.zero_grad()
                loss = mse_loss(model(inputs), targets)
                loss.backward()
                return loss

            optimizer.step(closure)


class WithClosure(TrainingPhase):
    def step(self, learner, step):
        step.inputs, step.targets = self.unpack(step.batch)

        def closure():
            step.outputs = self.forward(learner, step.inputs)
            step.loss = self.loss(learner, step.outputs, step.targets)
            step.backward(step.loss)
            return step.loss

        step.update(closure=closure)


def with_loopkit(model, data, epochs, *plugins):
    Learner(model, mse_loss, lbfgs, phases=[WithClosure()], plugins=plugins).fit(data, epochs=epochs)


def main():
    model = train_twice(make, data, by_hand, with_loopkit, epochs=1)
    new = waves(8)
    with torch.no_grad():
        said = model(new[:, :LENGTH], more=LENGTH)
    ahead, still = ((wave - new[:, LENGTH + 1 :]).abs().mean() for wave in (said[:, LENGTH:], torch.zeros(())))
    print(f"{LENGTH} points ahead: a mean error of {ahead:.3f}; 0 everywhere would have {still:.3f}")


if __name__ == "__main__":
    main()
