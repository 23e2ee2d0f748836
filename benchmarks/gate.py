"""Whether the promised figures still hold: fails if one is beyond 1.15 of its bound in three tries.

    python benchmarks/gate.py [--rounds 40] [--results [FILE]]

These are the ratios of ``overhead.py``, of ``log_overhead.py``, and of the MLPs of ``whole_step.py``, ``fits.py`` and
``evaluation.py --compiled``: both sides of each run in this process, in turn. What needs a disk or a server is not
among them. ``--results`` appends a line of JSON to a file, by default to ``benchmarks/results/gate.jsonl``, from which
``docs/make_gate_plot.py`` draws its picture.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import evaluation
import fits
import log_overhead
import overhead
import torch
import whole_step
from sides import Work, digit_batches, interleaved, machine

SLACK = 1.15
TRIES = 3
COMPILED = 0.45
"""``whole_step.py`` has 0.40; the faster the machine, the more the calls around so small a graph weigh."""
KEPT, SHORT, AGAIN = (
    "a fit of 4,000 steps with a library that was kept / without WholeStep",
    "a fit of 500 steps with WholeStep / without",
    "processor time of a step with a library that was kept / compiled first",
)
FITS = {KEPT: 0.70, SHORT: 1.03, AGAIN: 0.08}
"""``fits.py`` has 0.55 for 8,000 steps; the shorter the fit, the more its recording weighs."""
EVALUATED = 0.95
"""``evaluation.py --compiled`` has 0.88."""
RESULTS = Path(__file__).parent / "results" / "gate.jsonl"
Measure = Callable[[Mapping[str, Work], int], dict[str, list[float]]]


class Gate(overhead.Report):
    """A report that takes a ratio again if it is beyond its bound, and knows which ones stayed there."""

    def __init__(self, rounds: int, measure: Measure = interleaved) -> None:
        super().__init__(rounds, 1)
        self.measure = measure

    def ratio(self, title: str, ours: Work, theirs: Work, bound: float, steps: int) -> None:
        sides = {"ours": ours, "theirs": theirs}
        self.hold({title: bound}, lambda: {title: overhead.ratio_of_medians(self.measure(sides, self.rounds))})

    def hold(self, bounds: Mapping[str, float], take: Callable[[], Mapping[str, float]]) -> None:
        """Take these ratios until each was within its bound and the slack once, three times at most."""
        least = dict.fromkeys(bounds, float("inf"))
        tries = 0
        while tries < TRIES and any(ratio > SLACK * bounds[title] for title, ratio in least.items()):
            taken, tries = take(), tries + 1
            least = {title: min(ratio, taken[title]) for title, ratio in least.items()}
        for title, ratio in least.items():
            beyond = ratio > SLACK * bounds[title]
            self.figures[title] = {"ratio": round(ratio, 4), "bound": bounds[title], "tries": tries, "beyond": beyond}
            again = "" if tries == 1 else f", the least of {tries}"
            verdict = f"  BEYOND {SLACK * bounds[title]:.3f}" if beyond else ""
            print(f"{title:62} {ratio:6.3f}  (at most {bounds[title]:.3g}{again}){verdict}", flush=True)

    @property
    def beyond(self) -> list[str]:
        """The titles of the ratios that did not hold."""
        return [title for title, figure in self.figures.items() if figure["beyond"]]


def logging(gate: Gate, batches: list[Any]) -> None:
    for kind in ("floats", "tensors"):
        bounds = {name: bound for name, bound in log_overhead.BOUNDS[kind].items() if name != "written to both"}

        def take(kind: str = kind, names: tuple[str, ...] = tuple(bounds)) -> dict[str, float]:
            _, found = log_overhead.run(kind == "tensors", False, batches, max(gate.rounds // 2, 1))
            return {f"20 {kind} a step, {name}: share of the step": found[name][0] - 1 for name in names}

        shares = {name: bound / log_overhead.STEP for name, bound in bounds.items()}
        gate.hold({f"20 {kind} a step, {name}: share of the step": share for name, share in shares.items()}, take)


def compiled(gate: Gate, batches: list[Any]) -> None:
    sides = whole_step.Sides("MLP")
    sides.compile()
    gate.ratio("MLP as one compiled graph / strong loop", sides.epochs["whole"], sides.epochs["strong"], COMPILED, 100)


def whole_fits(gate: Gate, batches: list[Any]) -> None:
    """Fits with `WholeStep`, compiling included, after a fit of the same model has kept its library."""
    from loopkit_whole_step import WholeStep

    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=folder):
        small = fits.batches_of("MLP", 500)
        started = time.process_time() + sum(os.times()[2:4])
        fits.fit("MLP", small[:10], 1, WholeStep("always", show=False))
        first = time.process_time() + sum(os.times()[2:4]) - started

        def take() -> dict[str, float]:
            started = time.process_time()
            fits.fit("MLP", small[:10], 1, WholeStep("always", show=False))
            again = time.process_time() - started
            plain, with_library = (
                fits.fit("MLP", small, 8, *more)["seconds"] for more in ([], [WholeStep(show=False)])
            )
            short, short_with = (fits.fit("MLP", small, 1, *more)["seconds"] for more in ([], [WholeStep(show=False)]))
            return {KEPT: with_library / plain, SHORT: short_with / short, AGAIN: again / first}

        gate.hold(FITS, take)


def compiled_evaluation(gate: Gate, batches: list[Any]) -> None:
    eager, whole = evaluation.learners_of("MLP")
    epoch = fits.batches_of("MLP", 60)
    ours, theirs = (lambda: whole.evaluate(epoch)), (lambda: eager.evaluate(epoch))
    gate.ratio("MLP evaluated as one compiled graph / eager", ours, theirs, EVALUATED, 60)


PARTS = (
    overhead.bare,
    overhead.with_metrics,
    overhead.standard_stack,
    overhead.evaluation,
    overhead.loaders,
    logging,
    compiled,
    whole_fits,
    compiled_evaluation,
)


def append(path: Path, gate: Gate, seconds: float) -> None:
    """Add what was measured as one line."""
    said = {"date": str(datetime.date.today()), "about": machine(), "seconds": round(seconds), "ratios": gate.figures}
    with path.open("a") as file:
        file.write(json.dumps(said) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40, help="rounds of each try")
    parser.add_argument("--results", type=Path, nargs="?", const=RESULTS, help="append the ratios to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    gate, start, batches = Gate(arguments.rounds), time.monotonic(), digit_batches()
    for part in PARTS:
        part(gate, batches)
    seconds = time.monotonic() - start
    print(f"{len(gate.figures)} ratios in {seconds:.0f} s")
    if arguments.results:
        append(arguments.results, gate, seconds)
    if gate.beyond:
        sys.exit("beyond 1.15 of the bound in three tries: " + "; ".join(gate.beyond))


if __name__ == "__main__":
    main()
