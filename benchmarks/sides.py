"""What the benchmarks that compare sides in one process share: the work, the turns that the sides take, the report."""

from __future__ import annotations

import argparse
import gc
import io
import json
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn

BATCH = 32
Work = Callable[[], object]


class Screen(io.StringIO):
    """Takes what a progress bar writes, like a terminal."""

    def isatty(self) -> bool:
        return True


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    X, y = load_digits(return_X_y=True)
    return torch.as_tensor(X / 16).float(), torch.as_tensor(y)


def digit_batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The digits in batches that are cut beforehand."""
    images, labels = digits()
    return list(zip(images.split(BATCH), labels.split(BATCH), strict=True))


def wide_problem() -> tuple[nn.Module, torch.optim.Optimizer]:
    """An MLP 64-256-256-10 with SGD and momentum: a step of about 0.6 ms."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def interleaved(
    sides: Mapping[str, Work], rounds: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    """Seconds of each side in each round; the order within a round changes from round to round."""
    for work in sides.values():
        work()
    names = list(sides)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    gc.collect()
    for number in range(rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            start = clock()
            sides[name]()
            seconds[name].append(clock() - start)
    return seconds


def measure(
    learners: Mapping[str, Any], batches: Sequence[Any], rounds: int, runs: int
) -> tuple[float, dict[str, list[float]]]:
    """Microseconds of processor time of the first one's step, and each other's ratios to it, one for each run."""
    sides = {name: (lambda it=learner: it.run("train", batches)) for name, learner in learners.items()}
    first, *others = sides
    steps, ratios = [], {name: [] for name in others}
    for _ in range(runs):
        seconds = interleaved(sides, rounds, time.thread_time)
        base = seconds[first]
        steps.append(statistics.median(base) / len(batches) * 1e6)
        for name, found in ratios.items():
            found.append(statistics.median(one / other for one, other in zip(seconds[name], base, strict=True)))
    return statistics.median(steps), ratios


def machine() -> str:
    """Processor and versions."""
    return (
        f"{platform.processor() or platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}"
    )


def report(
    title: str,
    step: float,
    ratios: Mapping[str, list[float]],
    bounds: Mapping[str, float],
    arguments: argparse.Namespace,
    digits: int = 3,
) -> None:
    """Print the step and the median and worst ratios beside their bounds; write them to ``--json``."""
    print(f"{title:24} {step:7.1f} us")
    figures = {}
    for name, found in ratios.items():
        median, bound = statistics.median(found), bounds[name]
        print(f"{name:24} {median:7.{digits}f}  (worst run {max(found):.{digits}f}; at most {bound:.2f})")
        figures[name] = {"median": median, "runs": found, "bound": bound}
    if arguments.json:
        said = {"about": machine(), "step_us": step, "figures": figures}
        arguments.json.write_text(json.dumps(said, indent=1) + "\n")
