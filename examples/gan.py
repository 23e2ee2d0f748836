"""A GAN on scikit-learn's digits: two models, two optimizers, and an event of its own between their turns."""

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
train = data.TensorLoader(x[:1400], batch_size=64, shuffle=True, drop_last=True)


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
    nn.Linear(NOISE, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, 256), nn.BatchNorm1d(256), nn.ReLU(),
    nn.Linear(256, 64), nn.Tanh(),
)
critic = nn.Sequential(
    nn.Linear(64, 256), nn.LeakyReLU(0.2), nn.Dropout(0.3), nn.Linear(256, 256), nn.LeakyReLU(0.2), nn.Dropout(0.3), nn.Linear(256, 1)
)
learner = Learner(
    {"generator": generator, "critic": critic},
    optimizer={
        "generator": lambda params: torch.optim.Adam(params, lr=4e-4, betas=(0.5, 0.999)),
        "critic": lambda params: torch.optim.Adam(params, lr=4e-4, betas=(0.5, 0.999)),
    },
    phases=[GAN()],
    plugins=[CriticAccuracy(), plugins.Metrics(metrics.Mean("critic_loss"), metrics.Mean("critic_accuracy"))],
)
print(learner.fit(train, epochs=150))

fake = generator.eval()(torch.randn(1000, NOISE)).detach()
noise = x[:1400].flatten()[torch.randint(1400 * 64, (1000, 64))]
held_out = x[1400:]
def distance(a): return torch.cdist(a, x[:1400]).min(1).values.mean().item()
def coverage(a): return torch.cdist(held_out, a).min(1).values.mean().item()
judge = KNeighborsClassifier(5).fit(x[:1400], y[:1400])
p = judge.predict_proba(fake)
print("dist real", distance(held_out), "fake", distance(fake), "noise", distance(noise))
print("cov train", coverage(x[:1000]), "fake", coverage(fake), "noise", coverage(noise))
print("conf fake", p.max(1).mean(), "noise", judge.predict_proba(noise).max(1).mean(), "real", judge.predict_proba(held_out).max(1).mean())
print(torch.bincount(torch.as_tensor(p.argmax(1)), minlength=10))
