"""A siamese network says whether two images show the same digit: a model of pairs, and a loader that makes them.

Source: Koch, Zemel, Salakhutdinov 2015, "Siamese Neural Networks for One-shot Image Recognition".
"""

import torch
from both import digits, train_twice
from torch import nn

from loopkit import Learner
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

    def forward(self, pair):
        one, other = map(self.encoder, pair)
        return self.head((one - other).abs()).squeeze(1)


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
        for pair, same in train:
            optimizer.zero_grad()
            loss_fn(model(pair), same).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            rights = torch.cat([right(model(pair), same) for pair, same in val])
        print(f"epoch {epoch + 1}  val/right {rights.mean():.4f}")


def with_loopkit(model, data, epochs, *plugins):
    Learner(model, loss_fn, adam, plugins=[Metrics(right), *plugins]).fit(*data, epochs=epochs)


def main():
    model = train_twice(make, data, by_hand, with_loopkit, epochs=12)
    pair, same = next(iter(data()[1]))
    print(f"right about {right(model(pair), same).mean():.3f} of pairs of images that it has not seen")


if __name__ == "__main__":
    main()
