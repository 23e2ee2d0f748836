"""A convolutional GAN draws digits: two models, two optimizers, and three backwards in a step.

Source: Radford, Metz, Chintala 2016, "Unsupervised Representation Learning with Deep Convolutional Generative
Adversarial Networks".
"""

from functools import partial

import torch
from both import digits, train_twice
from torch import nn
from torch.nn.functional import softplus

from loopkit import Learner, Phase
from loopkit.data import TensorLoader
from loopkit.metrics import Mean
from loopkit.plugins import Metrics

NOISE = 16
adam = partial(torch.optim.Adam, lr=1e-3, betas=(0.5, 0.999))


def make():
    generator = nn.Sequential(
        *(nn.ConvTranspose2d(NOISE, 64, 4), nn.BatchNorm2d(64), nn.ReLU()),
        *(nn.Conv2d(64, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU()),
        *(nn.ConvTranspose2d(64, 1, 4, stride=2, padding=1), nn.Tanh()),
    )
    critic = nn.Sequential(
        *(nn.Conv2d(1, 32, 4, stride=2, padding=1), nn.LeakyReLU(0.2), nn.Dropout(0.3)),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.LeakyReLU(0.2), nn.Dropout(0.3)),
        nn.Conv2d(64, 1, 4),
    )
    return {"generator": generator, "critic": critic}


def data(steps=21):
    images = digits()[0].view(-1, 1, 8, 8) * 2 - 1
    return TensorLoader(images[: 64 * steps], batch_size=64, shuffle=True)


def noise(count):
    return torch.randn(count, NOISE, 1, 1)


def by_hand(models, data, epochs):
    generator, critic = models["generator"], models["critic"]
    of_generator, of_critic = adam(generator.parameters()), adam(critic.parameters())
    for _ in range(epochs):
        for real in data:
            fake = generator(noise(len(real)))
            of_critic.zero_grad()
            softplus(-critic(real)).mean().backward()
            softplus(critic(fake.detach())).mean().backward()
            of_critic.step()
            of_generator.zero_grad()
            softplus(-critic(fake)).mean().backward()
            of_generator.step()


class DCGAN(Phase):
    name, training = "train", True

    def step(self, learner, step):
        generator, critic = learner.models["generator"], learner.models["critic"]
        real, fake = step.batch, generator(noise(step.samples))
        step.real_loss, step.fake_loss = softplus(-critic(real)).mean(), softplus(critic(fake.detach())).mean()
        step.backward(step.real_loss, "critic")
        step.backward(step.fake_loss, "critic")
        step.update("critic")
        step.loss = softplus(-critic(fake)).mean()
        step.backward(step.loss, "generator")
        step.update("generator")


def with_loopkit(models, data, epochs, *plugins):
    optimizers = {"generator": adam, "critic": adam}
    metrics = Metrics(Mean("real_loss"), Mean("fake_loss"))
    Learner(models, optimizer=optimizers, phases=[DCGAN()], plugins=[metrics, *plugins]).fit(data, epochs=epochs)


def main():
    generator = train_twice(make, data, by_hand, with_loopkit, epochs=12)["generator"].eval()
    real = digits()[0] * 2 - 1
    mixed = real.flatten()[torch.randperm(real.numel())].view_as(real)
    far = [torch.cdist(each.flatten(1), real).amin(1).mean() for each in (generator(noise(500)), mixed[:500])]
    print("to the nearest real image: {:.2f} from samples, {:.2f} from mixed pixels".format(*far))


if __name__ == "__main__":
    main()
