"""The forward-forward algorithm: each layer learns by itself, with an optimizer of its own and no gradient from above.

An image with its label in it is positive, with a wrong one negative. A layer learns large outputs for the former.

Source: Hinton 2022, "The Forward-Forward Algorithm: Some Preliminary Investigations", sections 2 and 3.3.
"""

import torch
from both import digits, train_twice
from torch import nn
from torch.nn.functional import normalize, one_hot, softplus

from loopkit import Learner, Phase
from loopkit.data import TensorLoader

THRESHOLD = 2.0


def make():
    return {"first": nn.Linear(74, 400), "second": nn.Linear(400, 400)}


def data(steps=28):
    x, y = digits()
    return TensorLoader(x[: 50 * steps], y[: 50 * steps], batch_size=50, shuffle=True)


def adam(params):
    return torch.optim.Adam(params, lr=3e-3)


def marked(x, labels):
    return torch.cat([x, one_hot(labels, 10).float()], 1)


def outputs(layer, x):
    """The length of what a layer gets tells nothing, so the next one cannot go by what this one has learned."""
    return layer(normalize(x) * x.shape[1] ** 0.5).relu()


def loss(positive, negative):
    good, bad = positive.square().mean(1), negative.square().mean(1)
    return (softplus(THRESHOLD - good) + softplus(bad - THRESHOLD)).mean()


def by_hand(layers, data, epochs):
    optimizers = {name: adam(layer.parameters()) for name, layer in layers.items()}
    for _ in range(epochs):
        for x, y in data:
            wrong = (y + torch.randint(1, 10, y.shape)) % 10
            positive, negative = marked(x, y), marked(x, wrong)
            for name, layer in layers.items():
                positive, negative = outputs(layer, positive.detach()), outputs(layer, negative.detach())
                optimizers[name].zero_grad()
                loss(positive, negative).backward()
                optimizers[name].step()


class ForwardForward(Phase):
    name, training = "train", True

    def step(self, learner, step):
        x, y = step.batch
        wrong = (y + torch.randint(1, 10, y.shape)) % 10
        positive, negative = marked(x, y), marked(x, wrong)
        for name, layer in learner.models.items():
            positive, negative = outputs(layer, positive.detach()), outputs(layer, negative.detach())
            step.loss = loss(positive, negative)
            step.backward(step.loss, name)
            step.update(name)


def with_loopkit(layers, data, epochs, *plugins):
    learner = Learner(layers, optimizer=dict.fromkeys(layers, adam), phases=[ForwardForward()], plugins=plugins)
    learner.fit(data, epochs=epochs)


def main():
    layers = train_twice(make, data, by_hand, with_loopkit, epochs=30)
    x, y = (each[1400:] for each in digits())
    goodness = []
    for label in range(10):
        hidden, total = marked(x, torch.full_like(y, label)), 0.0
        for layer in layers.values():
            hidden = outputs(layer, hidden)
            total = total + hidden.square().mean(1)
        goodness.append(total)
    right = torch.stack(goodness).argmax(0) == y
    print(f"the label of the largest outputs is right for {right.float().mean():.3f} of held-out images")


if __name__ == "__main__":
    main()
