"""Distillation: a student learns a digit that it has never seen, from its teacher's probabilities.

The teacher knows all ten of scikit-learn's digits. The student gets no image of a 3: all that it learns of them is how
much the teacher takes images of other digits for one. Source: Hinton, Vinyals and Dean 2015, section 3.
"""

import torch
from both import digits, train_twice
from torch import nn
from torch.nn.functional import cross_entropy, softmax

from loopkit import Learner, TrainingPhase
from loopkit.data import TensorLoader
from loopkit.plugins import Schedule
from loopkit.schedules import cosine

TEMPERATURE, SHARE, RATE = 8.0, 0.9, 3e-3


def adam(params):
    return torch.optim.Adam(params, lr=RATE)


def teach(x, y, epochs):
    """A network that has seen all ten digits."""
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Dropout(), nn.Linear(512, 10))
    Learner(teacher, cross_entropy, adam, standard=False).fit(TensorLoader(x, y, batch_size=50), epochs=epochs)
    return teacher.eval()


def make():
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def data(steps=25):
    """The teacher, and batches in which there is no 3."""
    x, y = (each[: 55 * steps] for each in digits())
    teacher = teach(x, y, epochs=steps)
    seen = y != 3
    return teacher, TensorLoader(x[seen], y[seen], batch_size=50, shuffle=True)


def by_hand(student, data, epochs):
    teacher, train = data
    optimizer = adam(student.parameters())
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * len(train))
    for _ in range(epochs):
        for x, y in train:
            with torch.no_grad():
                soft_targets = softmax(teacher(x) / TEMPERATURE, dim=1)
            outputs = student(x)
            soft_loss = cross_entropy(outputs / TEMPERATURE, soft_targets) * TEMPERATURE**2
            optimizer.zero_grad()
            (SHARE * soft_loss + (1 - SHARE) * cross_entropy(outputs, y)).backward()
            optimizer.step()
            schedule.step()


class Distillation(TrainingPhase):
    """The loss is, for the most part, how far the student's probabilities are from the teacher's."""

    def __init__(self, teacher):
        super().__init__()
        self.teacher = teacher

    def unpack(self, batch):
        x, y = batch
        with torch.no_grad():
            return x, (softmax(self.teacher(x) / TEMPERATURE, dim=1), y)

    def loss(self, learner, outputs, targets):
        soft_targets, y = targets
        soft_loss = cross_entropy(outputs / TEMPERATURE, soft_targets) * TEMPERATURE**2
        return SHARE * soft_loss + (1 - SHARE) * super().loss(learner, outputs, y)


def with_loopkit(student, data, epochs, *plugins):
    teacher, train = data
    learner = Learner(
        student, cross_entropy, adam, phases=[Distillation(teacher)], plugins=[Schedule(cosine()), *plugins]
    )
    learner.fit(train, epochs=epochs)


def main():
    distilled = train_twice(make, data, by_hand, with_loopkit, epochs=50)
    torch.manual_seed(0)
    alone, (teacher, train) = make(), data()
    Learner(alone, cross_entropy, adam, plugins=[Schedule(cosine())], standard=False).fit(train, epochs=50)
    x, y = (each[1375:] for each in digits())
    for name, model in {"teacher": teacher, "student alone": alone, "distilled": distilled}.items():
        right = (model(x).argmax(1) == y).float()
        print(f"{name}: {right.mean():.3f} of the held-out images are right, {right[y == 3].mean():.3f} of the threes")


if __name__ == "__main__":
    main()
