"""Distillation: a student learns a digit that it has never seen, from its teacher's probabilities.

The teacher knows all ten of scikit-learn's digits. The student gets no image of a 3; what it learns of them is how
much the teacher takes other digits for one. Source: Hinton, Vinyals and Dean 2015, section 3.
"""

import sys
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

from loopkit import Learner, TrainingPhase, data, metrics, plugins
from loopkit.plugins.schedule import Schedule
from loopkit.schedules import cosine

TEMPERATURE, SHARE = 4.0, float(sys.argv[2])
S=int(sys.argv[1])

torch.manual_seed(S)
images, labels = map(torch.as_tensor, load_digits(return_X_y=True))
order = torch.randperm(len(images))
x, y = images[order].float() / 16, labels[order]
val = data.TensorLoader(x[1400:], y[1400:], batch_size=397)


class Distillation(TrainingPhase):
    """The loss is, for the most part, how far the student's probabilities are from the teacher's."""

    def __init__(self, teacher):
        super().__init__()
        self.teacher = teacher.eval()

    def step(self, learner, step):
        with torch.no_grad():
            self.soft = F.softmax(self.teacher(step.batch[0]) / TEMPERATURE, dim=1)
        super().step(learner, step)

    def loss(self, learner, outputs, targets):
        soft_loss = F.cross_entropy(outputs / TEMPERATURE, self.soft) * TEMPERATURE**2
        return SHARE * soft_loss + (1 - SHARE) * learner.loss_fn(outputs, targets)


def accuracy_of_threes(outputs, targets):
    threes = targets == 3
    return (outputs.argmax(1) == 3)[threes].float()


def fit(model, samples, epochs, phases=()):
    learner = Learner(
        model,
        nn.CrossEntropyLoss(),
        lambda params: torch.optim.Adam(params, lr=3e-3),
        phases=phases,
        plugins=[plugins.Metrics(metrics.Accuracy()), Schedule(cosine())],
        standard=False,
    )
    train = data.TensorLoader(x[samples], y[samples], batch_size=50, shuffle=True)
    learner.fit(train, val, epochs=epochs)
    predicted = learner.predict(val).argmax(1)
    right = predicted.eq(y[1400:])
    return right.double().mean().item(), right[y[1400:] == 3].double().mean().item()


everything = torch.arange(1400)
torch.manual_seed(S)
teacher = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Dropout(), nn.Linear(512, 512), nn.ReLU(), nn.Dropout(), nn.Linear(512, 10))
print("teacher", fit(teacher, everything, 15))
for phases in (), [Distillation(teacher)]:
    torch.manual_seed(S)
    student = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    print(fit(student, everything[y[:1400] != 3], 40, phases))
