"""Super-resolution: digits of 4 by 4 pixels become 8 by 8. A supervised fit needs no phase of its own.

Source: Shi et al. 2016, "Real-Time Single Image and Video Super-Resolution Using an Efficient Sub-Pixel Convolutional
Neural Network".
"""

import torch
from both import digits, train_twice
from torch import nn
from torch.nn.functional import avg_pool2d, interpolate, mse_loss

from loopkit import Learner
from loopkit.data import TensorLoader


def make():
    return nn.Sequential(
        *(nn.Conv2d(1, 64, 5, padding=2), nn.Tanh(), nn.Conv2d(64, 32, 3, padding=1), nn.Tanh()),
        *(nn.Conv2d(32, 4, 3, padding=1), nn.PixelShuffle(2)),
    )


def data(steps=28):
    large = digits()[0].view(-1, 1, 8, 8)
    small = avg_pool2d(large, 2)
    train = TensorLoader(small[: 50 * steps], large[: 50 * steps], batch_size=50, shuffle=True)
    return train, TensorLoader(small[1400:], large[1400:], batch_size=397)


def adam(params):
    return torch.optim.Adam(params, lr=2e-3)


def by_hand(model, data, epochs):
    train, val = data
    optimizer = adam(model.parameters())
    for epoch in range(epochs):
        model.train()
        for small, large in train:
            optimizer.zero_grad()
            mse_loss(model(small), large).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            losses = [mse_loss(model(small), large).item() for small, large in val]
        print(f"epoch {epoch + 1}  val/loss {sum(losses) / len(losses):.4f}")


def with_loopkit(model, data, epochs, *plugins):
    Learner(model, mse_loss, adam, plugins=plugins).fit(*data, epochs=epochs)


def decibels(one, other):
    """The ratio of the largest signal, 1, to the noise."""
    return -10 * mse_loss(one, other).log10()


def main():
    model = train_twice(make, data, by_hand, with_loopkit, epochs=15)
    small, large = next(iter(data()[1]))
    smooth = interpolate(small, scale_factor=2, mode="bicubic")
    print(f"{decibels(smooth, large):.2f} dB by interpolation, {decibels(model(small), large):.2f} dB by the network")


if __name__ == "__main__":
    main()
