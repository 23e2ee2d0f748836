"""What local training loses where one process is slower: two processes, one slowed down threefold.

    PYTHONPATH=benchmarks python plugins/loopkit-local/benchmarks/cadence.py [--rounds 6] [--json FILE]

The work is that of ``benchmarks/distributed.py``, slowed by sleeps of 5 and 15 ms a step. The figure is the time of an
epoch of `AverageParameters`, against that of processes that share the steps out by their speed and lose nothing else.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from distributed import BATCH, CLASSES, FEATURES, data, figure, problem, report, taken

from loopkit import Learner, hookimpl, launch
from loopkit.data import TensorLoader
from loopkit.distributed import join
from loopkit_local import AverageParameters, Cadence, EverySteps

IDEAL = 1.15
"""The highest ratio, with `Cadence`."""
PACES, SHARED = (5.0, 15.0), 480
"""Milliseconds that the steps of each process take at least, and steps of an epoch of both."""


class Pace:
    """Makes each step take longer."""

    def __init__(self, ms: float) -> None:
        self.ms = ms

    @hookimpl
    def step_begin(self) -> None:
        time.sleep(1e-3 * self.ms)


def unequal(rounds: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    rank = join("gloo").rank
    samples = torch.randn(SHARED * BATCH, FEATURES), torch.randint(CLASSES, (SHARED * BATCH,))
    figures: dict[str, Any] = {}
    for name, when, bound in (("Cadence()", Cadence(), IDEAL), ("EverySteps(8)", EverySteps(8), None)):
        model, optimizer, loss_fn = problem()
        averages = AverageParameters(when)
        pace = Pace(PACES[rank])
        learner = Learner(model, loss_fn, optimizer, plugins=[averages, pace], standard=False)
        loader = TensorLoader(*samples, batch_size=BATCH)
        other, its_optimizer, _ = problem()
        alone = Learner(other, loss_fn, its_optimizer, plugins=[pace], standard=False)
        seconds, ideals, shares = [], [], []
        with learner.rounds():
            learner.run("train", loader)  # calibrates
            for _ in range(rounds):
                batches = data(rank)[:40]
                dist.barrier()
                mine = taken(lambda: alone.run("train", batches)) / len(batches)  # noqa: B023 - called at once
                steps = learner.progress.steps
                dist.barrier()
                seconds.append(taken(lambda: learner.run("train", loader)))  # noqa: B023 - called at once
                told = learner.world.gather((mine, learner.progress.steps - steps))
                ideals.append(SHARED / sum(1 / each for each, _ in told))
                shares.append([count for _, count in told])
        figures[name] = {**figure(seconds, ideals, SHARED), "bound": bound, "steps": shares[-1]}
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description="measure what local training loses where one process is slower")
    parser.add_argument("--rounds", type=int, default=6, help="epochs of each kind")
    parser.add_argument("--json", type=Path, help="write the figures to a file")
    given = parser.parse_args()
    first, _ = launch(unequal, given.rounds, processes=2)
    report({f"AverageParameters({name}), one slowed 3x / ideal": found for name, found in first.items()}, given.json)


if __name__ == "__main__":
    main()
