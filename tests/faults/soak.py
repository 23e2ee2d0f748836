"""Fit for very many steps and show that nothing grows: memory, open files, threads, tracked objects.

    python tests/faults/soak.py --steps 1000000

The learner has the standard plugins, with bars, plus clipping, a schedule, averaged weights, metrics and the loss of
every step in the history. It is fitted again and again, `EPOCHS` short epochs at a time, with a validation after each,
so that what a step, an epoch, a pass or a fit would leave behind shows.

What grows by right is taken out: History keeps a row for each pass and, here, for each step, as long as the run
lasts. The program empties both lists after each fit and checks that they held what they must; a run that streams its
metrics elsewhere would do the same.

The figures are taken between fits, after a garbage collection, at equal distances. Those of the first tenth of the
steps are left out: allocators and caches fill up then.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import threading
import time
import warnings
from array import array
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from loopkit import Learner
from loopkit.metrics import Accuracy
from loopkit.plugins import ClipGradNorm, History, Metrics, Progress, Schedule, WeightAverage
from loopkit.schedules import cosine, warmup

STEPS, EPOCHS = 50, 4
"""Steps of an epoch, and epochs of a fit."""
VALIDATION_STEPS = 2
MIB = 1 << 20


@dataclass(frozen=True)
class Figures:
    """What is in use after so many steps."""

    steps: int
    rss: int
    """Resident memory, bytes."""
    files: int
    threads: int
    objects: int
    """Objects that the garbage collector tracks."""


def resident() -> int:
    """Resident memory of this process, in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measure(steps: int) -> tuple[int, ...]:
    """The fields of `Figures` now, after a garbage collection."""
    gc.collect()
    threads = len(os.listdir("/proc/self/task"))
    assert threads >= threading.active_count()
    return steps, resident(), len(os.listdir("/proc/self/fd")), threads, len(gc.get_objects())


def data(count: int) -> list[tuple[Tensor, Tensor]]:
    """Batches of inputs ``(4, 8)`` and classes ``(4,)``."""
    generator = torch.Generator().manual_seed(count)
    inputs = torch.randn(count, 4, 8, generator=generator)
    return [(x, (x[:, 0] > 0).long()) for x in inputs]


def make_learner(output: Any, *more: Any) -> tuple[Learner, History]:
    """The learner under test, and its history."""
    history = History(steps=True)
    plugins = [
        Metrics(Accuracy()),
        ClipGradNorm(1.0),
        Schedule(warmup(10, then=cosine())),
        WeightAverage(0.99),
        Progress(bar=True, file=output),
        history,
        *more,
    ]
    make = lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9)  # noqa: E731
    return Learner(nn.Linear(8, 2), nn.CrossEntropyLoss(), make, plugins=plugins, seed=0), history


def soak(steps: int, samples: int = 20) -> list[Figures]:
    """Fit for this many steps, or a few more, and measure ``samples`` times and once at the start."""
    rounds = -(-steps // (STEPS * EPOCHS))
    train, val = data(STEPS), data(VALIDATION_STEPS)
    gc.freeze()  # what the imports have made: collections need not look at it, nor is it counted
    figures = array("q")  # nothing in it is tracked, so it adds nothing to what it holds
    marks = {round(rounds * i / samples) for i in range(samples + 1)}
    with open(os.devnull, "w") as output:
        learner, history = make_learner(output)
        for done in range(rounds + 1):
            if done in marks:
                figures.extend(measure(learner.progress.steps))
            if done < rounds:
                result = learner.fit(train, val, epochs=EPOCHS)
                assert len(history.rows) == len(result.history) == 2 * EPOCHS
                assert len(history.step_rows) == (STEPS + VALIDATION_STEPS) * EPOCHS
                assert 0 <= result.metrics["val/accuracy"] <= 1
                history.rows.clear()
                history.step_rows.clear()
                result.history.clear()
    width = len(fields(Figures))
    return [Figures(*figures[i : i + width]) for i in range(0, len(figures), width)]


def growth(figures: list[Figures]) -> dict[str, int]:
    """By how much each figure is higher at the end than it ever was by the end of the first tenth."""
    early = [each for each in figures if each.steps * 10 <= figures[-1].steps]
    late = asdict(figures[-1])
    return {name: late[name] - max(asdict(each)[name] for each in early) for name in late if name != "steps"}


def problems(grown: dict[str, int]) -> list[str]:
    """What has grown by more than it may."""
    allowed = {"rss": MIB, "files": 0, "threads": 0, "objects": 0}
    over = {name: most for name, most in allowed.items() if grown[name] > most}
    return [f"{name} grew by {grown[name]:,}, allowed are {most:,}" for name, most in over.items()]


def main() -> int:
    """Run, print the figures, and say by the exit status whether they are flat."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--json", action="store_true", help="print the figures as one line of JSON")
    arguments = parser.parse_args()
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    started = time.monotonic()
    figures = soak(arguments.steps)
    seconds = time.monotonic() - started
    grown = growth(figures)
    wrong = problems(grown)
    if arguments.json:
        print(json.dumps({"figures": [asdict(each) for each in figures], "growth": grown, "problems": wrong}))
    else:
        print(f"{'steps':>9} {'MiB':>8} {'files':>5} {'threads':>7} {'objects':>9}")
        for each in figures:
            print(f"{each.steps:>9,} {each.rss / MIB:>8.2f} {each.files:>5} {each.threads:>7} {each.objects:>9,}")
        print(f"{figures[-1].steps / seconds:,.0f} steps per second; growth after the first tenth: {grown}")
        print("\n".join(wrong) or "flat")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
