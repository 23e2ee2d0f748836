"""A siamese network says whether two images show the same digit: a model of two inputs, and pairs made by the loader.

Source: Koch, Zemel, Salakhutdinov 2015, "Siamese Neural Networks for One-shot Image Recognition".
"""

import torch
from both import digits, train_twice
from torch import nn

from loopkit import Learner, TrainingPhase, ValidationPhase
from loopkit.data import TensorLoader
from loopkit.plugins import Metrics


class Siamese(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(
            *(nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.ReLU()),
            *(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 64)),
        )
        self.head = nn.Linear(64, 1)

    def forward(self, one, other):
        return self.head((self.encoder(one) - self.encoder(other)).abs()).squeeze(1)


make = Siamese


def data(steps=28):
    x, y = digits()

    def partners(low, high):
        """Two images of each digit in turn, or an image and any other one."""
        rows = [(y[low:high] == digit).nonzero().squeeze(1) + low for digit in range(10)]

        def pair(batch, generator):
            first, labels = batch
            same = torch.rand(len(labels), generator=generator) < 0.5
            places = torch.rand(len(labels), generator=generator)
            chosen = [rows[label][int(place * len(rows[label]))] for label, place in zip(labels, places, strict=True)]
            others = torch.randint(low, high, (len(labels),), generator=generator)
            second = torch.where(same, torch.stack(chosen), others)
            return (first, x[second]), (labels == y[second]).float()

        return pair

    train = TensorLoader(x[: 50 * steps], y[: 50 * steps], batch_size=50, shuffle=True)
    val = TensorLoader(x[1400:], y[1400:], batch_size=397)
    return train.map(partners(0, 1400), seed=1), val.map(partners(1400, 1797), seed=2)


def adam(params):
    return torch.optim.Adam(params, lr=2e-3)


loss_fn = nn.BCEWithLogitsLoss()


def right(outputs, targets):
    return ((outputs > 0) == (targets > 0.5)).float()


def by_hand(model, data, epochs):
    train, val = data
    optimizer = adam(model.parameters())
    for epoch in range(epochs):
        model.train()
        for (one, other), same in train:
            optimizer.zero_grad()
            loss_fn(model(one, other), same).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            rights = torch.cat([right(model(*pair), same) for pair, same in val])
        print(f"epoch {epoch + 1}  val/right {rights.mean():.4f}")


class Pairs:
    def forward(self, learner, inputs):
        return learner.model(*inputs)


class Train(Pairs, TrainingPhase):
    pass


class Validate(Pairs, ValidationPhase):
    pass


def with_loopkit(model, data, epochs, *plugins):
    learner = Learner(model, loss_fn, adam, phases=[Train(), Validate()], plugins=[Metrics(right), *plugins])
    learner.fit(*data, epochs=epochs)


def main():
    model = train_twice(make, data, by_hand, with_loopkit, epochs=12)
    ((one, other), same) = next(iter(data()[1]))
    print(f"right about {right(model(one, other), same).mean():.3f} of pairs of images that it has not seen")


if __name__ == "__main__":
    main()
