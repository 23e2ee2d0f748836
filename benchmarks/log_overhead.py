"""What logging adds to a training step: 20 scalars in every step, against the same step without.

    python benchmarks/log_overhead.py [--rounds 40] [--runs 5] [--json FILE] [--tensorboard]

The sides take turns in one process, in blocks of an epoch. The work: digits in batches of 32 that are cut beforehand,
an MLP 64-256-256-10, SGD with momentum, torch on one thread: a step of about 0.6 ms. ``kept`` records the values and
gives them to a backend that drops them at the end of each epoch; ``written`` writes them as JSON lines after every
tenth step; ``tensorboard`` writes JSON lines and TensorBoard's event files then.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import statistics
import tempfile
from collections.abc import Sequence
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
BOUNDS = {"kept": 1.03, "written": 1.10, "tensorboard": 1.10}


class Nowhere(Backend):
    """Takes records and drops them."""

    def write(self, records: Sequence[Record]) -> None:
        pass


class LoggingPhase(TrainingPhase):
    """Training that logs the same 20 values in every step, at once or, ``one_by_one``, each by its own call."""

    def __init__(self, values: Sequence[torch.Tensor | float], one_by_one: bool = False) -> None:
        super().__init__()
        self.one_by_one = one_by_one
        self.named = {f"train/value_{i}": value for i, value in enumerate(values)}

    def step(self, learner: Learner, step: Any) -> None:
        super().step(learner, step)
        if not self.one_by_one:
            learner.log_values(self.named)
            return
        for name, value in self.named.items():
            learner.log(name, value)


def make(plugins: Sequence[Any], phase: TrainingPhase | None = None) -> Learner:
    model, optimizer = wide_problem()
    phases = [] if phase is None else [phase]
    return Learner(model, nn.CrossEntropyLoss(), optimizer, plugins=plugins, phases=phases, standard=False)


def tensorboard(directory: str) -> Any:
    """TensorBoard's backend, if it is installed."""
    if importlib.util.find_spec("loopkit_tensorboard") is None:
        raise SystemExit("--tensorboard needs the distribution loopkit-tensorboard: pip install loopkit-tensorboard")
    from loopkit_tensorboard import TensorBoard

    return TensorBoard(directory)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40, help="rounds of each run")
    parser.add_argument("--runs", type=int, default=5, help="runs of which the median is taken")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--tensorboard", action="store_true", help="also measure writing to TensorBoard")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    batches = digit_batches()
    values = {"tensors": list(torch.rand(SCALARS).unbind()), "floats": torch.rand(SCALARS).tolist()}
    about = machine()
    print(f"{datetime.date.today()}, {about}; {arguments.runs} runs of {arguments.rounds} rounds\n")
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as directory, ExitStack() as fits:
        learners = {("without", ""): make([])}
        for what, given in values.items():
            learners["kept", what] = make([LogTo(Nowhere())], LoggingPhase(given))
            learners["kept", f"{what}, one by one"] = make([LogTo(Nowhere())], LoggingPhase(given, one_by_one=True))
            path = Path(directory) / what / "log.jsonl"
            learners["written", what] = make([LogTo(path, every=10)], LoggingPhase(given))
            if arguments.tensorboard:
                backend = tensorboard(f"{directory}/board-{what}")
                path = Path(directory) / f"both-{what}" / "log.jsonl"
                learners["tensorboard", what] = make([LogTo(path, backend, every=10)], LoggingPhase(given))
        for learner in learners.values():
            fits.enter_context(learner.fitting(on_signal=None))
        named = {" ".join(key): learner for key, learner in learners.items()}
        step, ratios = measure(named, batches, arguments.rounds, arguments.runs)
    print(f"{'a step without logging':34} {step:7.1f} us")
    for name, found in ratios.items():
        bound = None if "one by one" in name else BOUNDS[name.split()[0]]
        median = statistics.median(found)
        most = "" if bound is None else f"at most {bound:.2f}; "
        print(f"{name:34} {median:7.3f}  (worst run {max(found):.3f}; {most}{(median - 1) * step:+.1f} us a step)")
        figures[name] = {"median": median, "runs": found, "bound": bound}
    if arguments.json:
        arguments.json.write_text(json.dumps({"about": about, "step_us": step, "figures": figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
