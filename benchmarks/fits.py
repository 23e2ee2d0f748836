"""Whole fits with `WholeStep` against the same fits without, compiling included.

    pip install -e . -e plugins/loopkit-whole-step
    python benchmarks/fits.py [--steps 8000 40000] [--no-wait] [--json FILE]

An MLP 64-256-256-10 on batches of 32, torch on one thread, all fits in one process, in turn: without, with nothing
cached, without, with the library of the fit before. A ratio is that of a fit's wall time to the mean of its neighbours
without. The compiler works in another process, so that a second core counts.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from sides import machine
from torch import nn
from whole_step import classes, learner_of


def wide() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))


def fit(batches: list[Any], epochs: int, *plugins: Any) -> dict[str, Any]:
    torch.manual_seed(1)
    learner = learner_of(wide(), nn.CrossEntropyLoss(), True, *plugins)
    started = time.perf_counter()
    learner.fit(batches, epochs=epochs)
    shapes = [shape for plugin in plugins for shape in plugin.shapes.values()]
    said = [{"mode": each.mode, "reason": each.reason, "takes": each.takes, "waited": each.waited} for each in shapes]
    return {"seconds": time.perf_counter() - started, "shapes": said}


def measured(steps: int, wait: bool) -> dict[str, Any]:
    from loopkit_whole_step import WholeStep

    torch.manual_seed(0)
    batches = [classes(32, 64) for _ in range(10)] * 50
    epochs = steps // len(batches)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        for name in ("without", "first", "without again", "second", "without at last"):
            plugins = [] if "without" in name else [WholeStep(wait=wait, show=False)]
            found[name] = fit(batches, epochs, *plugins)
    seconds = [each["seconds"] for each in found.values()]
    found["ratios"] = {
        "first": 2 * seconds[1] / (seconds[0] + seconds[2]),
        "second": 2 * seconds[3] / sum(seconds[2::2]),
    }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, nargs="+", default=[8_000, 40_000])
    parser.add_argument("--no-wait", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    figures = {}
    for steps in arguments.steps:
        figures[steps] = measured(steps, not arguments.no_wait)
        ratios = figures[steps]["ratios"]
        print(f"{steps} steps: {ratios['first']:.2f} with nothing cached, {ratios['second']:.2f} with that library")
        print(f"  {figures[steps]['first']['shapes']}\n  {figures[steps]['second']['shapes']}", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps({"about": machine(), "figures": figures}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
