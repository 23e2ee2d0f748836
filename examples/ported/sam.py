"""Sharpness-aware minimization: each gradient is that of weights which a step uphill has moved. A plugin does it.

Source: Foret, Kleiner, Mobahi, Neyshabur 2021, "Sharpness-Aware Minimization for Efficiently Improving Generalization",
algorithm 1.
"""

import torch
from both import digits, train_twice
from loopkit_recipes import SAM
from torch import nn
from torch.nn.functional import cross_entropy

from loopkit import Learner
from loopkit.data import TensorLoader

RHO = 0.1


def make():
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))


def data(steps=10):
    x, y = digits()
    return TensorLoader(x[: 50 * steps], y[: 50 * steps], batch_size=50, shuffle=True)


def sgd(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def by_hand(model, data, epochs):
    params = list(model.parameters())
    optimizer = sgd(params)
    for _ in range(epochs):
        for x, y in data:
            grads = torch.autograd.grad(cross_entropy(model(x), y), params)
            factor = RHO / (torch.nn.utils.get_total_norm(grads) + 1e-12)
            kept = [p.detach().clone() for p in params]
            with torch.no_grad():
                for p, grad in zip(params, grads, strict=True):
                    p.add_(grad * factor)
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            with torch.no_grad():
                for p, before in zip(params, kept, strict=True):
                    p.copy_(before)
            optimizer.step()


def with_loopkit(model, data, epochs, *plugins):
    Learner(model, cross_entropy, sgd, plugins=[SAM(RHO), *plugins]).fit(data, epochs=epochs)


def sharpness(model, x, y):
    """By how much the loss rises in a step of a fixed length uphill."""
    params = list(model.parameters())
    loss = cross_entropy(model(x), y)
    grads = torch.autograd.grad(loss, params)
    factor = 0.5 / torch.nn.utils.get_total_norm(grads)
    moved = {name: p + grad * factor for (name, p), grad in zip(model.named_parameters(), grads, strict=True)}
    return (cross_entropy(torch.func.functional_call(model, moved, x), y) - loss).item()


def main():
    x, y = digits()
    model = train_twice(make, data, by_hand, with_loopkit, epochs=40)
    torch.manual_seed(0)
    plain = make()
    Learner(plain, cross_entropy, sgd, standard=False).fit(data(), epochs=40)
    for name, each in {"SGD": plain, "SAM": model}.items():
        right = (each(x[500:]).argmax(1) == y[500:]).float().mean()
        print(f"{name}: {right:.3f} of held-out images are right; sharpness {sharpness(each, x[:500], y[:500]):.4f}")


if __name__ == "__main__":
    main()
