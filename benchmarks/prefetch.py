"""What `loopkit.data.Prefetch` saves on the CPU, where its thread alone works ahead.

    python benchmarks/prefetch.py [--rounds 15] [--json FILE]

Two loaders feed an MLP 256-512-512-10, batches of 64, torch on one thread: one waits 2 ms for each batch, as
for a disk; one computes with the inputs. The figure is the median ratio of an epoch of 100 steps with `Prefetch` to one
without, of the same round. A wait can be hidden behind a step; what computes needs a core of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from loopkit import Learner
from loopkit.data import Loader, Prefetch, TensorLoader

BATCH, STEPS, WAIT = 64, 100, 0.002
Sample = tuple[Tensor, Tensor]


def waits(batch: Sample) -> Sample:
    """Come late, while nothing is computed."""
    time.sleep(WAIT)
    return batch


def computes(batch: Sample) -> Sample:
    """Take a processor: two transforms of the inputs."""
    inputs, targets = batch
    return torch.fft.irfft(torch.fft.rfft(inputs.double())).float(), targets


def loader(make: Callable[[Sample], Sample]) -> Loader:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(BATCH * STEPS, 256, generator=generator)
    targets = torch.randint(10, (BATCH * STEPS,), generator=generator)
    return TensorLoader(inputs, targets, batch_size=BATCH).map(make)


def learner() -> Learner:
    torch.manual_seed(0)
    layers = [nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)]
    return Learner(nn.Sequential(*layers), nn.CrossEntropyLoss(), torch.optim.SGD, standard=False)


def seconds(trained: Learner, data: Loader) -> float:
    start = time.perf_counter()
    trained.fit(data, epochs=1)
    return time.perf_counter() - start


def measure(make: Callable[[Sample], Sample], rounds: int) -> dict[str, Any]:
    trained, plain = learner(), loader(make)
    ahead = Prefetch(loader(make), "cpu")
    for data in (plain, ahead):
        seconds(trained, data)
    pairs = [(seconds(trained, ahead), seconds(trained, plain)) for _ in range(rounds)]
    ratios = sorted(one / other for one, other in pairs)
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {"median": middle, "quartiles": [low, high], "ms": 1e3 * statistics.median(b for _, b in pairs) / STEPS}


def main() -> None:
    parser = argparse.ArgumentParser(description="measure what Prefetch saves on the CPU")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, help="write the figures to a file")
    given = parser.parse_args()
    torch.set_num_threads(1)
    figures = {make.__name__: measure(make, given.rounds) for make in (waits, computes)}
    for name, found in figures.items():
        low, high = found["quartiles"]
        print(f"loader that {name}: {found['median']:.2f} ({low:.2f} to {high:.2f}; {found['ms']:.1f} ms a step)")
    if given.json is not None:
        about = f"{os.cpu_count()} cores, Python {platform.python_version()}, torch {torch.__version__}"
        given.json.write_text(json.dumps({"about": about, "figures": figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
