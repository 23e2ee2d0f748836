"""Train on digits in one process or in several; the script is the same, and so is what it computes, but for rounding.

python examples/data_parallel.py
python examples/data_parallel.py --processes 2
torchrun --nproc-per-node 2 examples/data_parallel.py

With --checkpoints DIRECTORY it goes on from what it finds there, also with another number of processes.
"""

import argparse
import tempfile

import torch
from sklearn.datasets import load_digits
from torch import nn

import loopkit
from loopkit import Learner, data, metrics
from loopkit.distributed import join
from loopkit.plugins import DDP, Checkpoint, ClipGradNorm, Metrics, Schedule
from loopkit.schedules import cosine, warmup


def train(checkpoints: str, epochs: int) -> float:
    torch.manual_seed(0)
    images, labels = map(torch.as_tensor, load_digits(return_X_y=True))
    order = torch.randperm(len(images))
    x, y = images[order].float() / 16, labels[order]
    size = join().size  # processes share 32 samples; with batch_size=32 each would take 32, and batches would grow
    train_data = data.TensorLoader(x[:1400], y[:1400], batch_size=32 // size, shuffle=True)
    val_data = data.TensorLoader(x[1400:], y[1400:], batch_size=200 // size)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    stack = [
        DDP(),
        ClipGradNorm(1.0),
        Schedule(warmup(20, then=cosine())),
        Metrics(metrics.Accuracy()),
        Checkpoint(checkpoints, resume="auto"),
    ]
    learner = Learner(model, nn.CrossEntropyLoss(), optimizer, plugins=stack)
    result = learner.fit(train_data, val_data, epochs=epochs)
    if learner.world.rank == 0:
        print(result)
    return result.metrics["val/accuracy"]


def main() -> None:
    parser = argparse.ArgumentParser(description="train on digits in one process or in several")
    parser.add_argument("--processes", type=int, default=1, help="processes to start here; not with torchrun")
    parser.add_argument("--checkpoints", help="a directory; by default a temporary one")
    parser.add_argument("--epochs", type=int, default=10)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:  # one for each process of torchrun: that of rank 0 counts
        arguments = given.checkpoints or temporary, given.epochs
        if given.processes > 1:
            accuracies = loopkit.launch(train, *arguments, processes=given.processes)
        else:
            accuracies = [train(*arguments)]
    assert len(set(accuracies)) == 1, "every process should have the same accuracy"
    if given.epochs >= 10:
        assert accuracies[0] >= 0.96, "the classifier should reach 96 %"


if __name__ == "__main__":
    main()
