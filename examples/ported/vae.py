"""A variational autoencoder of digits: a training and a validation phase that share what differs from supervision.

Source: Kingma and Welling 2014, "Auto-Encoding Variational Bayes", appendix B.
"""

import torch
from both import digits, train_twice
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

from loopkit import Learner, TrainingPhase, ValidationPhase
from loopkit.data import TensorLoader
from loopkit.losses import summed

CODE = 8


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 2 * CODE))
        self.decoder = nn.Sequential(nn.Linear(CODE, 128), nn.ReLU(), nn.Linear(128, 64))

    def forward(self, x):
        mean, log_variance = self.encoder(x).chunk(2, 1)
        code = mean + (0.5 * log_variance).exp() * torch.randn_like(mean)
        return self.decoder(code), mean, log_variance


make = VAE


def data(steps=28):
    x = digits()[0]
    return TensorLoader(x[: 50 * steps], batch_size=50, shuffle=True), TensorLoader(x[1400:], batch_size=397)


def bound(outputs, x):
    """The negative evidence lower bound, summed over the batch."""
    pixels, mean, log_variance = outputs
    divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum()
    return binary_cross_entropy_with_logits(pixels, x, reduction="sum") + divergence


def by_hand(model, data, epochs):
    train, val = data
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for epoch in range(epochs):
        model.train()
        for x in train:
            optimizer.zero_grad()
            bound(model(x), x).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            total = sum(bound(model(x), x).item() for x in val)
        print(f"epoch {epoch + 1}  val/loss {total / val.shares.samples:.2f}")


class Itself:
    """The target of an image is the image."""

    def unpack(self, batch):
        return batch, batch


class Train(Itself, TrainingPhase):
    pass


class Validate(Itself, ValidationPhase):
    pass


def with_loopkit(model, data, epochs, *plugins):
    def adam(params):
        return torch.optim.Adam(params, lr=2e-3)

    learner = Learner(model, summed(bound), adam, phases=[Train(), Validate()], plugins=plugins)
    learner.fit(*data, epochs=epochs)


def main():
    model = train_twice(make, data, by_hand, with_loopkit, epochs=20)
    x = digits()[0][1400:]
    restored = model.decoder(model.encoder(x)[:, :CODE]).sigmoid()
    errors = [(x - guess).square().mean() for guess in (x.mean(0), restored)]
    print("squared error of held-out pixels: {:.4f} of the mean image, {:.4f} restored".format(*errors))


if __name__ == "__main__":
    main()
