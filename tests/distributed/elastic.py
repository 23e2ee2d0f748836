"""A script for torchrun: it trains, and the process of one rank is killed once, in the middle of an epoch."""

import hashlib
import os
import signal
import sys
from pathlib import Path

import torch
from torch import nn

from loopkit import Learner, every, hookimpl
from loopkit.data import TensorLoader
from loopkit.plugins import DDP, Checkpoint, Metrics

EPOCHS, STEPS = 3, 6


class Dies:
    """Kills this process, if it has the rank and was not started again."""

    def __init__(self, rank):
        self.rank = rank

    @hookimpl
    def step_end(self, learner, phase):
        first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        here = phase.training and learner.world.rank == self.rank and learner.progress.steps == STEPS + 3
        if first and here:
            os.kill(os.getpid(), signal.SIGKILL)


def main(victim, directory):
    torch.manual_seed(0)
    size = int(os.environ["WORLD_SIZE"])
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(12 * STEPS, 5, generator=generator)
    data = TensorLoader(inputs, inputs[:, :1].sin(), batch_size=12 // size, shuffle=True)
    model = nn.Sequential(nn.Linear(5, 7), nn.Dropout(0.1), nn.Tanh(), nn.Linear(7, 1))
    saver = Checkpoint(directory, save=every(updates=2), resume="auto")
    learner = Learner(
        model,
        nn.MSELoss(),
        lambda params: torch.optim.AdamW(params, lr=0.05),
        plugins=[DDP(timeout=30), Metrics(), saver, Dies(victim)],
        standard=False,
    )
    learner.fit(data, epochs=EPOCHS)
    bits = b"".join(p.detach().numpy().tobytes() for p in learner.model.parameters())
    said = f"{hashlib.sha256(bits).hexdigest()} {os.environ['TORCHELASTIC_RESTART_COUNT']} {learner.progress.steps}"
    Path(directory, f"end-{learner.world.rank}").write_text(said)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
