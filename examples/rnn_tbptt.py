"""A recurrent network that keeps its state from step to step: truncated backpropagation through time.

The text is read in 64 places at once, 8 characters a step. The state goes on where the step before ended. Gradients
do not, since it is detached. The phases name the state in ``saved``, so a checkpoint holds it.
"""

from pydoc_data import topics

import torch
from torch import nn

from loopkit import Learner, TrainingPhase, ValidationPhase, data, plugins
from loopkit.schedules import cosine

PLACES, LENGTH = 64, 8

text = "\n".join(topics.topics.values())
vocabulary = sorted(set(text))
tokens = torch.tensor([vocabulary.index(character) for character in text])
cut = len(tokens) * 9 // 10


def reading(part):
    """Batches ``(inputs, targets)``, of shape (places, length); each goes on where the one before ended."""
    rows = part[: len(part) // PLACES * PLACES].view(PLACES, -1)

    def batch(index):
        begin, end = index * LENGTH, (index + 1) * LENGTH
        return rows[:, begin:end], rows[:, begin + 1 : end + 1]

    return data.from_function((rows.shape[1] - 1) // LENGTH, batch)


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(len(vocabulary), 64)
        self.gru = nn.GRU(64, 128, batch_first=True)
        self.head = nn.Linear(128, len(vocabulary))

    def forward(self, inputs, state):
        hidden, state = self.gru(self.embedding(inputs), state)
        return self.head(hidden), state


class Recurrent:
    """Each epoch begins without a state. With ``carry`` the steps hand it on, else each step begins without one."""

    saved = ("state",)
    state = None

    def __init__(self, carry):
        super().__init__()
        self.carry = carry

    def step(self, learner, step):
        if step.index == 0 or not self.carry:
            self.state = None
        super().step(learner, step)

    def forward(self, learner, inputs):
        outputs, state = learner.model(inputs, self.state)
        self.state = state.detach()
        return outputs


class Train(Recurrent, TrainingPhase):
    pass


class Validate(Recurrent, ValidationPhase):
    pass


def held_out_loss(carry):
    learner = Learner(
        Network(),
        lambda outputs, targets: nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten()),
        lambda params: torch.optim.Adam(params, lr=5e-3),
        phases=[Train(carry), Validate(carry)],
        plugins=[plugins.ClipGradNorm(1.0), plugins.Schedule(cosine())],
    )
    return learner.fit(reading(tokens[:cut]), reading(tokens[cut:]), epochs=1).metrics["val/loss"]


torch.manual_seed(0)
reset, carried = held_out_loss(carry=False), held_out_loss(carry=True)
print(f"held-out loss per character: {reset:.3f} with a new state in each step, {carried:.3f} with it carried on")
assert carried < reset - 0.1, "the network should make use of what it read in the steps before"
