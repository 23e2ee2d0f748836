"""What logging adds to a training step: 20 scalars in every step, against the same step without.

    python benchmarks/log_overhead.py [--rounds 20] [--runs 10] [--json FILE] [--tensorboard]

The sides take turns in one process, in blocks of an epoch. The work: digits in batches of 32 that are cut beforehand,
an MLP 64-256-256-10, SGD with momentum, torch on one thread: a step of about 0.6 ms. The values are floats, or tensors
that the step computes, in the step without logging, too. ``kept`` records them and gives them to a backend that drops
them at the end of each epoch, by one call of ``log`` or, ``one by one``, by twenty; ``written`` writes
them as JSON lines after every tenth step, ``written to both`` also to TensorBoard's event files.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import statistics
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from sides import digit_batches, machine, measure, wide_problem
from torch import nn

from loopkit import Learner, TrainingPhase
from loopkit.logs import Backend, Record
from loopkit.plugins import LogTo

SCALARS = 20
BOUNDS = {
    "floats": {"kept": 18, "kept, one by one": 30, "written": 42, "written to both": 55},
    "tensors": {"kept": 24, "kept, one by one": 36, "written": 48, "written to both": 60},
}
"""Microseconds that a step of `STEP` may take more."""
STEP = 350
"""Microseconds of a step without logging, on the machine of these bounds; a slower one may take as much longer."""
Log = Callable[[Learner, dict[str, Any]], None]


class Nowhere(Backend):
    """Takes records and drops them."""

    def write(self, records: Sequence[Record]) -> None:
        pass


class LoggingPhase(TrainingPhase):
    """Training with 20 values in every step.

    Args:
        tensors: Scalars that the step computes, mean and deviation of each of the ten outputs; else the same floats.
        log: Called with the learner and the values, by name.
    """

    def __init__(self, tensors: bool, log: Log) -> None:
        super().__init__()
        self.tensors, self.log = tensors, log
        self.names = [f"train/value_{i}" for i in range(SCALARS)]
        self.floats = dict(zip(self.names, torch.rand(SCALARS).tolist(), strict=True))

    def step(self, learner: Learner, step: Any) -> None:
        super().step(learner, step)
        values: dict[str, Any] = self.floats
        if self.tensors:
            outputs = step.outputs.detach()
            values = dict(zip(self.names, (*outputs.mean(0).unbind(), *outputs.std(0).unbind()), strict=True))
        self.log(learner, values)


def nothing(learner: Learner, values: dict[str, Any]) -> None:
    """The step alone."""


def at_once(learner: Learner, values: dict[str, Any]) -> None:
    learner.log(values)


def one_by_one(learner: Learner, values: dict[str, Any]) -> None:
    for name, value in values.items():
        learner.log(name, value)


def make(plugins: Sequence[Any], phase: TrainingPhase) -> Learner:
    model, optimizer = wide_problem()
    return Learner(model, nn.CrossEntropyLoss(), optimizer, plugins=plugins, phases=[phase], standard=False)


def tensorboard(directory: str) -> Any:
    """TensorBoard's backend, if it is installed."""
    if importlib.util.find_spec("loopkit_tensorboard") is None:
        raise SystemExit(
            "--tensorboard needs the distribution loopkit-tensorboard: pip install -e plugins/loopkit-tensorboard"
        )
    from loopkit_tensorboard import TensorBoard

    return TensorBoard(directory)


def run(tensors: bool, board: bool, batches: Sequence[Any], rounds: int) -> tuple[float, dict[str, list[float]]]:
    """Microseconds of a step without logging, and the ratio of each side to it, of learners of their own."""
    with tempfile.TemporaryDirectory() as place, ExitStack() as fits:
        learners = {
            "without": make([], LoggingPhase(tensors, nothing)),
            "kept": make([LogTo(Nowhere())], LoggingPhase(tensors, at_once)),
            "kept, one by one": make([LogTo(Nowhere())], LoggingPhase(tensors, one_by_one)),
            "written": make([LogTo(f"{place}/a", every=10)], LoggingPhase(tensors, at_once)),
        }
        if board:
            both = LogTo(f"{place}/b", tensorboard(f"{place}/board"), every=10)
            learners["written to both"] = make([both], LoggingPhase(tensors, at_once))
        for learner in learners.values():
            fits.enter_context(learner.rounds(on_interrupt=None))
        return measure(learners, batches, rounds, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, help="rounds of each run")
    parser.add_argument(
        "--runs", type=int, default=10, help="runs of which the median is taken, each with learners of its own"
    )
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--tensorboard", action="store_true", help="also measure writing to TensorBoard")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    batches, about = digit_batches(), machine()
    print(f"{datetime.date.today()}, {about}; {arguments.runs} runs of {arguments.rounds} rounds\n")
    figures: dict[str, Any] = {}
    for kind in ("floats", "tensors"):
        steps: list[float] = []
        ratios: dict[str, list[float]] = {}
        for _ in range(arguments.runs):
            step, found = run(kind == "tensors", arguments.tensorboard, batches, arguments.rounds)
            steps.append(step)
            for name, (ratio,) in found.items():
                ratios.setdefault(name, []).append(ratio)
        step = statistics.median(steps)
        print(f"{f'a step with 20 {kind}':30} {step:7.1f} us")
        for name, each in ratios.items():
            median, bound = statistics.median(each), BOUNDS[kind][name]
            added, most = (median - 1) * step, bound * step / STEP
            print(f"{name:30} {added:+7.1f} us a step  (at most {most:.0f}; ratio {median:.3f}, worst {max(each):.3f})")
            figures[f"{name}, {kind}"] = {"us": added, "bound_us": most, "ratios": each, "step_us": step}
        print()
    if arguments.json:
        arguments.json.write_text(json.dumps({"about": about, "figures": figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
