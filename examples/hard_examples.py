"""Hard-example mining: the images that a network gets wrong come more often in the next epoch.

`HardExamples` notes the loss of each sample, and draws the next epoch's samples by it. The losses are saved with the
plugin, and the drawn samples with the loader's position: a run that is stopped anywhere goes on exactly.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn

from loopkit import Learner, hookimpl, metrics, plugins
from loopkit.data import TensorLoader


class HardExamples:
    """Draw the samples of the next epoch with a chance that grows with the last loss of each, from ``least`` on."""

    def __init__(self, loader, least=0.5, seed=0):
        self.loader, self.least, self.seed = loader, least, seed
        self.losses = torch.ones(loader.samples)
        self.seen = torch.full((loader.samples,), torch.nan)  # in this epoch, by this process

    @hookimpl(phase="training", reads=("outputs", "targets"))
    def step_end(self, step):
        loss = nn.functional.cross_entropy(step.outputs.detach(), step.targets, reduction="none")
        self.seen[step.indices] = loss.float().cpu()

    @hookimpl(phase="training", updates=("data",))
    def phase_end(self, learner):
        for seen in learner.world.gather(self.seen):
            self.losses = torch.where(seen.isnan(), self.losses, seen)
        self.seen = torch.full_like(self.losses, torch.nan)
        chance = self.least + (1 - self.least) * self.losses / self.losses.mean()
        generator = torch.Generator().manual_seed(self.seed + learner.progress.steps)
        self.loader.set_indices(torch.multinomial(chance, len(chance), replacement=True, generator=generator))

    def state_dict(self):
        return {"losses": self.losses, "seen": self.seen}

    def load_state_dict(self, state):
        self.losses, self.seen = state["losses"].clone(), state["seen"].clone()

    def reshard(self, states, rank, size):
        """What each process has seen goes on in the process of its rank; of those that are gone, in the first."""
        mine = states[rank]["seen"] if rank < len(states) else torch.full_like(self.losses, torch.nan)
        for other in states[size:] if rank == 0 else ():
            mine = torch.where(other["seen"].isnan(), mine, other["seen"])
        return {"losses": states[0]["losses"], "seen": mine}


if __name__ == "__main__":
    torch.manual_seed(0)
    x, y = map(torch.as_tensor, load_digits(return_X_y=True))
    order = torch.randperm(len(x))
    x, y = x[order].float() / 16, y[order]
    train = TensorLoader(x[:1400], y[:1400], batch_size=32, shuffle=True)
    learner = Learner(
        nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)),
        nn.CrossEntropyLoss(),
        lambda params: torch.optim.Adam(params, lr=3e-3),
        plugins=[HardExamples(train), plugins.Metrics(metrics.Accuracy())],
    )
    result = learner.fit(train, [(x[1400:], y[1400:])], epochs=5)
    print(result)
    assert result.metrics["val/accuracy"] > 0.93
