"""A real training that takes its time: ``python trainer.py FOLDER EPOCHS``. It goes on from its checkpoint."""

import sys
import time

import torch
from torch import nn

from loopkit import Learner, every, hookimpl
from loopkit.plugins import Checkpoint, LogMetrics, LogTo


class Slow:
    @hookimpl
    def step_end(self):
        time.sleep(0.01)


def main(folder, epochs):
    torch.manual_seed(0)
    batches = [(torch.randn(8, 4), torch.randn(8, 1)) for _ in range(25)]
    model = nn.Linear(4, 1)
    plugins = [
        LogTo(folder, every=2),
        LogMetrics(every=1),
        Checkpoint(f"{folder}/checkpoints", save=every(updates=20), resume="auto"),
        Slow(),
    ]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    Learner(model, nn.MSELoss(), optimizer, plugins=plugins, standard=False).fit(batches, epochs=int(epochs))


if __name__ == "__main__":
    main(*sys.argv[1:])
