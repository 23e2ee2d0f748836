"""Train on digits, be killed in the middle of an epoch, go on: the result is equal, bit for bit.

python examples/resume.py
"""

import os
import signal
import subprocess
import sys
import tempfile

import torch
from sklearn.datasets import load_digits
from torch import nn

from loopkit import FitResult, Learner, every, metrics, seed_everything
from loopkit.data import TensorLoader
from loopkit.events import StepEnd
from loopkit.plugins import Checkpoint, Metrics, Schedule, WeightAverage, call_on
from loopkit.schedules import cosine, warmup


def train(*plugins: object) -> tuple[Learner, FitResult]:
    torch.set_num_threads(1)
    seed_everything(0)
    images, labels = map(torch.as_tensor, load_digits(return_X_y=True))
    x, y = images.float() / 16, labels
    data = TensorLoader(x[:1400], y[:1400], batch_size=32, shuffle=True)
    val = TensorLoader(x[1400:], y[1400:], batch_size=200)
    model = nn.Sequential(nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 10))
    stack = [Schedule(warmup(20, then=cosine())), WeightAverage(0.9), Metrics(metrics.Accuracy())]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    learner = Learner(model, nn.CrossEntropyLoss(), optimizer, plugins=[*stack, *plugins], accumulate=3)
    return learner, learner.fit(data, val, epochs=6)


def killed_at(steps: int, directory: str) -> None:
    """Train with checkpoints, in a process that gets SIGKILL after some steps."""
    taken = iter(range(1, steps + 1))
    kill = call_on(StepEnd, lambda step: next(taken) == steps and os.kill(os.getpid(), signal.SIGKILL), name="kill")
    train(Checkpoint(directory, save=every(updates=10)), kill)


def main() -> None:
    whole, result = train()
    with tempfile.TemporaryDirectory() as directory:
        child = subprocess.run([sys.executable, __file__, directory], stdout=subprocess.DEVNULL)
        print(f"a process that trained the same was killed: exit code {child.returncode}")
        resumed, again = train(Checkpoint(directory, save=every(updates=10), resume="auto"))
    print(f"uninterrupted: {result.updates} updates, val/accuracy {result.metrics['val/accuracy']:.4f}")
    print(f"resumed:       {again.updates} updates, val/accuracy {again.metrics['val/accuracy']:.4f}")
    pairs = zip(whole.model.parameters(), resumed.model.parameters(), strict=True)
    assert all(torch.equal(p, q) for p, q in pairs)
    assert result.metrics == again.metrics
    assert result.metrics["val/accuracy"] > 0.9
    print("all parameters and metrics are equal, bit for bit")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        killed_at(130, sys.argv[1])
    else:
        main()
