"""Bootstrap your own latent: features without labels and without negative pairs. A plugin moves the target network.

Source: Grill et al. 2020, "Bootstrap Your Own Latent: A New Approach to Self-Supervised Learning", equations 1 to 3.
"""

import copy

import torch
from both import digits, train_twice
from torch import nn
from torch.nn.functional import affine_grid, cosine_similarity, grid_sample

from loopkit import Learner, Phase, hookimpl
from loopkit.data import TensorLoader

DECAY = 0.95


def make():
    online = nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten()),
        *(nn.Linear(512, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 32)),
    )
    predictor = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 32))
    return {"online": online, "predictor": predictor, "target": copy.deepcopy(online).requires_grad_(False)}


def data(steps=14):
    return TensorLoader(digits()[0][: 100 * steps].view(-1, 1, 8, 8), batch_size=100, shuffle=True)


def adam(params):
    return torch.optim.AdamW(params, lr=5e-3)


def view(images):
    """Each image turned, scaled, stretched and shifted a little, with another contrast."""
    change = torch.eye(2, 3) + 0.15 * torch.randn(len(images), 2, 3)
    moved = grid_sample(images, affine_grid(change, images.shape, align_corners=False), align_corners=False)
    return moved * torch.empty(len(images), 1, 1, 1).uniform_(0.7, 1.3)


def loss(models, images):
    """How far the prediction from each view is from the target network's projection of the other one."""
    one, other = view(images), view(images)
    pairs = [(models["predictor"](models["online"](a)), models["target"](b)) for a, b in ((one, other), (other, one))]
    return sum((2 - 2 * cosine_similarity(guess, target.detach())).mean() for guess, target in pairs)


@torch.no_grad()
def follow(models):
    for p, q in zip(models["target"].parameters(), models["online"].parameters(), strict=True):
        p.lerp_(q, 1 - DECAY)


def by_hand(models, data, epochs):
    optimizer = adam([*models["online"].parameters(), *models["predictor"].parameters()])
    for _ in range(epochs):
        for images in data:
            optimizer.zero_grad()
            loss(models, images).backward()
            optimizer.step()
            follow(models)


class BYOL(Phase):
    name, training = "train", True

    def step(self, learner, step):
        step.loss = loss(learner.models, step.batch)
        step.backward(step.loss)
        step.update()


class Follow:
    """The target follows after each update; so it does with accumulation, and not after one that was skipped."""

    @hookimpl(updates=("params",))
    def update_end(self, learner):
        follow(learner.models)


def with_loopkit(models, data, epochs, *plugins):
    Learner(models, optimizer=adam, phases=[BYOL()], plugins=[Follow(), *plugins]).fit(data, epochs=epochs)


def main():
    models = train_twice(make, data, by_hand, with_loopkit, epochs=30)
    encoder, (x, y) = models["online"][:10].eval(), digits()
    with torch.no_grad():
        learned = encoder(x.view(-1, 1, 8, 8))
    for name, features in {"pixels": x, "learned features": learned}.items():
        unit = nn.functional.normalize(features - features.mean(0))
        nearest = (unit[50:] @ unit[:50].T).argmax(1)
        right = (y[nearest] == y[50:]).float().mean()
        print(f"by the nearest of 50 labelled images, from {name}: {right:.3f} are right")


if __name__ == "__main__":
    main()
