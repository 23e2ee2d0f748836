"""Distillation: a student learns a digit that it has never seen, from its teacher's probabilities.

The teacher knows all ten of scikit-learn's digits. The student gets no image of a 3: all that it learns of them is how
much the teacher takes images of other digits for one. Source: Hinton, Vinyals and Dean 2015, section 3.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn

from loopkit import Learner, TrainingPhase, data, metrics, plugins
from loopkit.schedules import cosine

TEMPERATURE, SHARE = 8.0, 0.9

torch.manual_seed(0)
images, labels = map(torch.as_tensor, load_digits(return_X_y=True))
order = torch.randperm(len(images))
x, y = images[order].float() / 16, labels[order]
held_out_x, held_out_y = x[1400:], y[1400:]
x, y = x[:1400], y[:1400]


class Distillation(TrainingPhase):
    """The loss is, for the most part, how far the student's probabilities are from the teacher's."""

    def __init__(self, teacher):
        super().__init__()
        self.teacher = teacher.eval()

    def step(self, learner, step):
        with torch.no_grad():
            self.soft_targets = nn.functional.softmax(self.teacher(step.batch[0]) / TEMPERATURE, dim=1)
        super().step(learner, step)

    def loss(self, learner, outputs, targets):
        soft_loss = nn.functional.cross_entropy(outputs / TEMPERATURE, self.soft_targets) * TEMPERATURE**2
        return SHARE * soft_loss + (1 - SHARE) * super().loss(learner, outputs, targets)


def fit(model, x, y, epochs, phases=()):
    learner = Learner(
        model,
        nn.CrossEntropyLoss(),
        lambda params: torch.optim.Adam(params, lr=3e-3),
        phases=phases,
        plugins=[plugins.Metrics(metrics.Accuracy()), plugins.Schedule(cosine())],
    )
    print(learner.fit(data.TensorLoader(x, y, batch_size=50, shuffle=True), epochs=epochs))
    right = learner.predict(data.TensorLoader(held_out_x, batch_size=200)).argmax(1) == held_out_y
    return right.float().mean().item(), right[held_out_y == 3].float().mean().item()


def student():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


teacher = nn.Sequential(
    nn.Linear(64, 512), nn.ReLU(), nn.Dropout(), nn.Linear(512, 512), nn.ReLU(), nn.Dropout(), nn.Linear(512, 10)
)  # fmt: skip
of_teacher = fit(teacher, x, y, epochs=15)
seen = y != 3
alone = fit(student(), x[seen], y[seen], epochs=50)
distilled = fit(student(), x[seen], y[seen], epochs=50, phases=[Distillation(teacher)])
for name, (accuracy, threes) in {"teacher": of_teacher, "student alone": alone, "distilled": distilled}.items():
    print(f"{name}: {accuracy:.3f} of the held-out images are right, {threes:.3f} of the threes")
assert distilled[0] > alone[0] + 0.02, "the distilled student should be the better one"
assert distilled[1] > 0.3, "the distilled student should recognise threes"
