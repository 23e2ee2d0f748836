"""What `Cost` adds to a training step with the standard stack.

    PYTHONPATH=benchmarks python plugins/loopkit-insight/benchmarks/cost.py [--rounds 40] [--runs 5] [--json FILE]

The sides take turns in one process, in blocks of an epoch; what is compared is the processor time of its only thread,
which other processes disturb least, as the median of the rounds' ratios. The work: digits in batches of 32 that are cut
beforehand, an MLP 64-256-256-10, SGD with momentum, torch on one thread: a step of about 0.6 ms. The stack: loss,
accuracy, norm clipping, a cosine schedule, history, a progress bar, and the guards of the standard set. ``absent`` is a
second learner without `Cost`: the ratio that measuring nothing gives.
"""

from __future__ import annotations

import argparse
import datetime
import io
from pathlib import Path
from typing import Any

import torch
from sides import digit_batches, machine, measure, report, wide_problem
from torch import nn

from loopkit import Learner
from loopkit.metrics import Accuracy
from loopkit.plugins import ClipGradNorm, Metrics, Progress, Schedule
from loopkit.schedules import cosine
from loopkit_insight import Cost

BOUNDS = {"with Cost": 1.03, "absent": 1.01}


class Screen(io.StringIO):
    """Takes what a progress bar writes, like a terminal."""

    def isatty(self) -> bool:
        return True


def make(*plugins: Any) -> Learner:
    model, optimizer = wide_problem()
    stack = [Metrics(Accuracy()), ClipGradNorm(1.0), Schedule(cosine(10**6)), Progress(file=Screen())]
    return Learner(model, nn.CrossEntropyLoss(), optimizer, plugins=[*stack, *plugins])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40, help="rounds of each run")
    parser.add_argument("--runs", type=int, default=5, help="runs of which the median is taken")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{datetime.date.today()}, {machine()}; {arguments.runs} runs of {arguments.rounds} rounds\n")
    learners = {"without": make(), "with Cost": make(Cost(show=False)), "absent": make()}
    step, ratios = measure(learners, digit_batches(), arguments.rounds, arguments.runs)
    report("a step without Cost", step, ratios, BOUNDS, arguments)


if __name__ == "__main__":
    main()
