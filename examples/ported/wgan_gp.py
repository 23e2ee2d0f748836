"""A Wasserstein GAN with gradient penalty on eight Gaussians: a gradient in the loss, and five critics' turns to one.

Source: Gulrajani, Ahmed, Arjovsky, Dumoulin, Courville 2017, "Improved Training of Wasserstein GANs", algorithm 1.
"""

import math
from functools import partial

import torch
from both import train_twice
from torch import nn

from loopkit import Learner, Phase
from loopkit.data import from_function

NOISE, TURNS, PENALTY = 4, 5, 0.1
adam = partial(torch.optim.Adam, lr=2e-3, betas=(0.5, 0.9))


def net(one, two, three, four):
    return nn.Sequential(nn.Linear(one, two), nn.ReLU(), nn.Linear(two, three), nn.ReLU(), nn.Linear(three, four))


def make():
    return {"generator": net(NOISE, 64, 64, 2), "critic": net(2, 64, 64, 1)}


def points(index, generator):
    angle = torch.randint(8, (128,), generator=generator) * math.pi / 4
    return torch.stack([angle.cos(), angle.sin()], 1) + 0.05 * torch.randn(128, 2, generator=generator)


def data(steps=500):
    return from_function(steps, points, seed=1)


def distance(critic, real, fake):
    """What the critic minimizes: how much better fake points are for it, and how far its slope is from 1."""
    share = torch.rand(len(real), 1)
    between = (share * real + (1 - share) * fake).requires_grad_()
    (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    return critic(fake).mean() - critic(real).mean() + PENALTY * (slope.norm(dim=1) - 1).square().mean()


def by_hand(models, data, epochs):
    generator, critic = models["generator"], models["critic"]
    of_generator, of_critic = adam(generator.parameters()), adam(critic.parameters())
    for _ in range(epochs):
        for index, real in enumerate(data):
            fake = generator(torch.randn(len(real), NOISE)).detach()
            of_critic.zero_grad()
            distance(critic, real, fake).backward()
            of_critic.step()
            if index % TURNS == TURNS - 1:
                of_generator.zero_grad()
                (-critic(generator(torch.randn(len(real), NOISE))).mean()).backward()
                of_generator.step()


class WGAN(Phase):
    name, training = "train", True

    def step(self, learner, step):
        generator, critic = learner.models["generator"], learner.models["critic"]
        fake = generator(torch.randn(step.samples, NOISE)).detach()
        step.loss = distance(critic, step.batch, fake)
        step.backward(step.loss, "critic")
        step.update("critic")
        if step.index % TURNS == TURNS - 1:
            step.backward(-critic(generator(torch.randn(step.samples, NOISE))).mean(), "generator")
            step.update("generator")


def with_loopkit(models, data, epochs, *plugins):
    optimizers = {"generator": adam, "critic": adam}
    Learner(models, optimizer=optimizers, phases=[WGAN()], plugins=plugins).fit(data, epochs=epochs)


def main():
    generator = train_twice(make, data, by_hand, with_loopkit, epochs=4)["generator"]
    angles = torch.arange(8) * math.pi / 4
    far, nearest = torch.cdist(generator(torch.randn(2000, NOISE)), torch.stack([angles.cos(), angles.sin()], 1)).min(1)
    print(
        f"{(far < 0.25).float().mean():.2f} of the samples are near a Gaussian, {len(nearest.unique())} of 8 are found"
    )


if __name__ == "__main__":
    main()
