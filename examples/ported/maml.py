"""Model-agnostic meta-learning: weights from which one step on ten points of an unknown sine is enough.

Source: Finn, Abbeel, Levine 2017, "Model-Agnostic Meta-Learning for Fast Adaptation of Deep Networks", algorithm 2.
"""

import math

import torch
from both import train_twice
from torch import nn
from torch.func import functional_call
from torch.nn.functional import mse_loss

from loopkit import Learner, TrainingPhase
from loopkit.data import from_function

TASKS, POINTS, RATE = 8, 10, 0.02


def make():
    return nn.Sequential(nn.Linear(1, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 1))


def tasks(index, generator):
    """Points of some sines to learn from, ``(tasks, points, 1)`` each, and points to test with."""
    height = 0.1 + 4.9 * torch.rand(TASKS, 1, 1, generator=generator)
    shift = math.pi * torch.rand(TASKS, 1, 1, generator=generator)
    x = torch.rand(TASKS, 2 * POINTS, 1, generator=generator) * 10 - 5
    y = height * (x - shift).sin()
    return (x[:, :POINTS], y[:, :POINTS]), (x[:, POINTS:], y[:, POINTS:])


def data(steps=600):
    return from_function(steps, tasks, seed=1)


def adam(params):
    return torch.optim.Adam(params, lr=2e-3)


def adapted(model, x, y):
    """The parameters after one step of gradient descent, through which gradients flow."""
    params = dict(model.named_parameters())
    grads = torch.autograd.grad(mse_loss(model(x), y), list(params.values()), create_graph=True)
    return {name: p - RATE * grad for (name, p), grad in zip(params.items(), grads, strict=True)}


def loss(model, learn, test):
    """The mean over tasks of the loss that is left after adapting."""
    losses = []
    for x, y, new_x, new_y in zip(*learn, *test, strict=True):
        losses.append(mse_loss(functional_call(model, adapted(model, x, y), new_x), new_y))
    return torch.stack(losses).mean()


def by_hand(model, data, epochs):
    optimizer = adam(model.parameters())
    for _ in range(epochs):
        for learn, test in data:
            optimizer.zero_grad()
            loss(model, learn, test).backward()
            optimizer.step()


class MAML(TrainingPhase):
    def forward(self, learner, inputs):
        return inputs

    def loss(self, learner, outputs, targets):
        return loss(learner.model, outputs, targets)


def with_loopkit(model, data, epochs, *plugins):
    Learner(model, optimizer=adam, phases=[MAML()], plugins=plugins).fit(data, epochs=epochs)


def main():
    model = train_twice(make, data, by_hand, with_loopkit, epochs=1)
    torch.manual_seed(0)
    for name, each in {"first": make(), "learned": model}.items():
        learn, test = tasks(0, torch.Generator().manual_seed(2))
        before = torch.stack([mse_loss(each(x), y) for x, y in zip(*test, strict=True)]).mean()
        print(f"new sines, {name} weights: loss {before:.2f} before one step, {loss(each, learn, test):.2f} after it")


if __name__ == "__main__":
    main()
