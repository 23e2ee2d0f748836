"""A GAN on scikit-learn's digits: two models, two optimizers, and an event of its own between their turns."""

from functools import partial

import torch
from sklearn.datasets import load_digits
from sklearn.neighbors import KNeighborsClassifier
from torch import nn
from torch.nn.functional import softplus

from loopkit import Event, Learner, Phase, data, hookimpl, metrics, plugins

NOISE = 16

torch.manual_seed(0)
images, labels = map(torch.as_tensor, load_digits(return_X_y=True))
order = torch.randperm(len(images))
x, y = images[order].float() / 8 - 1, labels[order]
real, held_out = x[:1400], x[1400:]
train = data.TensorLoader(real, batch_size=64, shuffle=True, drop_last=True)


class GeneratorBegin(Event):
    """The critic is updated, the generator is not. step.real and step.fake are images."""


class GAN(Phase):
    name = "train"
    training = True
    emits = (GeneratorBegin,)

    def step(self, learner, step):
        generator, critic = learner.model["generator"], learner.model["critic"]
        step.real = step.batch
        step.fake = generator(torch.randn(len(step.real), NOISE))

        step.critic_loss = (softplus(-critic(step.real)) + softplus(critic(step.fake.detach()))).mean()
        step.backward(step.critic_loss, "critic")
        step.update("critic")

        step.emit(GeneratorBegin)
        step.loss = softplus(-critic(step.fake)).mean()
        step.backward(step.loss, "generator")
        step.update("generator")


class CriticAccuracy:
    """Put on the step how often the critic tells real images from the generator's."""

    @hookimpl(reads=("step.real", "step.fake"), writes=("step.critic_accuracy",))
    def generator_begin(self, learner, step):
        with torch.no_grad():
            real, fake = learner.model["critic"](step.real), learner.model["critic"](step.fake)
        step.critic_accuracy = torch.cat([real > 0, fake < 0]).float().mean()


generator = nn.Sequential(
    *(nn.Linear(NOISE, 256), nn.BatchNorm1d(256), nn.ReLU()),
    *(nn.Linear(256, 256), nn.BatchNorm1d(256), nn.ReLU()),
    *(nn.Linear(256, 64), nn.Tanh()),
)
critic = nn.Sequential(
    *(nn.Linear(64, 256), nn.LeakyReLU(0.2), nn.Dropout(0.3)),
    *(nn.Linear(256, 256), nn.LeakyReLU(0.2), nn.Dropout(0.3)),
    nn.Linear(256, 1),
)
adam = partial(torch.optim.Adam, lr=1e-3, betas=(0.5, 0.999))
learner = Learner(
    {"generator": generator, "critic": critic},
    optimizer={"generator": adam, "critic": adam},
    phases=[GAN()],
    plugins=[CriticAccuracy(), plugins.Metrics(metrics.Mean("critic_loss"), metrics.Mean("critic_accuracy"))],
)
print(learner.fit(train, epochs=60))

# Samples should be near to real images, and there should be some near to each held-out image
samples = generator.eval()(torch.randn(1400, NOISE)).detach()
noise = real.flatten()[torch.randperm(real.numel())].view_as(real)  # pixels of real images in random places


def distance(images, others):
    return torch.cdist(images, others).amin(1).mean().item()


far = distance(samples, real), distance(noise, real)
back = distance(held_out, samples), distance(held_out, noise)
print("to the nearest real image: {:.2f} from samples, {:.2f} from noise".format(*far))
print("from held-out images: {:.2f} to the nearest sample, {:.2f} to noise".format(*back))
digits = KNeighborsClassifier().fit(real, y[:1400]).predict(samples)
shares = torch.bincount(torch.as_tensor(digits), minlength=10) / len(samples)
print("shares of the digits:", " ".join(f"{share:.2f}" for share in shares))
assert far[0] < 0.5 * far[1], "samples should look like digits"
assert back[0] < 0.6 * back[1], "samples should cover the real images"
assert shares.min() > 0.01, "each digit should be among the samples"
