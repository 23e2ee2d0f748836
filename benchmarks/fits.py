"""Whole fits with `WholeStep` against the same fits without, compiling included.

    pip install -e . -e plugins/loopkit-whole-step
    python benchmarks/fits.py [--model MODEL] [--steps 8000 40000] [--runs 1] [--short] [--no-wait] [--json FILE]

All fits in one process, in turn, torch on one thread: without, with nothing cached, without, with the library that was
kept, without. A ratio is that of a fit's wall time to the mean of its neighbours without. The compiler works in another
process, so that a second core counts. ``--short`` compares only fits with nothing cached, by the processor time of the
training's thread, for fits that are too short to be compiled. By default the model is an MLP 64-256-256-10 on batches
of 32; others are those of ``whole_step.py``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from sides import machine
from torch import nn
from whole_step import MODELS, learner_of

DISTINCT = 1000
"""So many batches are distinct, since a loss of 0 is nothing but rounding, which a graph does in another way."""


def wide() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))


def fit(model: str, batches: list[Any], epochs: int, *plugins: Any) -> dict[str, Any]:
    make, _, loss_fn, accuracy, _ = MODELS[model]
    torch.manual_seed(1)
    learner = learner_of(wide() if model == "MLP" else make(), loss_fn, accuracy, *plugins)
    started, processor = time.perf_counter(), time.thread_time()
    learner.fit(batches, epochs=epochs)
    processor = time.thread_time() - processor
    shapes = [shape for plugin in plugins for shape in plugin.shapes.values()]
    said = [{"mode": each.mode, "reason": each.reason, "takes": each.takes, "waited": each.waited} for each in shapes]
    return {"seconds": time.perf_counter() - started, "processor": processor, "shapes": said}


def batches_of(model: str, count: int) -> list[Any]:
    torch.manual_seed(0)
    return [MODELS[model][1]() for _ in range(count)]


def measured(model: str, steps: int, wait: bool) -> dict[str, Any]:
    """The fits of so many steps, and their ratios."""
    from loopkit_whole_step import WholeStep

    one_epoch = min(steps, DISTINCT)
    batches = batches_of(model, one_epoch)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=folder):
        for name in ("without", "first", "without again", "second", "without at last"):
            if name == "second":  # also where the first one was too short to be compiled
                fit(model, batches[:20], 1, WholeStep("always", show=False))
            plugins = [] if "without" in name else [WholeStep(wait=wait, show=False)]
            found[name] = fit(model, batches, steps // one_epoch, *plugins)
    seconds = [each["seconds"] for each in found.values()]
    found["ratios"] = {
        "first": 2 * seconds[1] / (seconds[0] + seconds[2]),
        "second": 2 * seconds[3] / sum(seconds[2::2]),
    }
    return found


def short(model: str, steps: int, runs: int) -> float:
    """The ratio of fits with nothing cached, by the time of the training's thread."""
    from loopkit_whole_step import WholeStep

    batches, ratios = batches_of(model, steps), []
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=folder):
        fit(model, batches[:20], 1)
        for _ in range(runs):
            stacks: list[list[Any]] = [[], [WholeStep(show=False)], []]
            one, with_it, other = (fit(model, batches, 1, *plugins)["processor"] for plugins in stacks)
            ratios.append(2 * with_it / (one + other))
    return statistics.median(ratios)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, action="append")
    parser.add_argument("--steps", type=int, nargs="+", default=[8_000, 40_000])
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--no-wait", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    figures: dict[str, Any] = {}
    for model in arguments.model or ["MLP"]:
        for steps in arguments.steps:
            if arguments.short:
                figures[f"{model}, {steps} steps"] = short(model, steps, arguments.runs)
                print(f"{model}, {steps} steps: {figures[f'{model}, {steps} steps']:.2f}", flush=True)
                continue
            runs = [measured(model, steps, not arguments.no_wait) for _ in range(arguments.runs)]
            first, second = (statistics.median(run["ratios"][which] for run in runs) for which in ("first", "second"))
            figures[f"{model}, {steps} steps"] = runs
            print(f"{model}, {steps} steps: {first:.2f} with nothing cached, {second:.2f} with that library")
            print(f"  {runs[0]['first']['seconds']:.1f} s: {runs[0]['first']['shapes']}")
            print(f"  {runs[0]['second']['seconds']:.1f} s: {runs[0]['second']['shapes']}", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps({"about": machine(), "figures": figures}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
