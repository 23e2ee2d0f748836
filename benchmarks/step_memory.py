"""The memory that a compiled step needs, against the loop by hand of ``whole_step.py``.

    pip install -e . -e plugins/loopkit-whole-step
    python benchmarks/step_memory.py [--only MODEL] [--runs 3] [--json FILE]

Each side is a process of its own. When the steps run as they will, memory that is free goes back to the system; the
figure is by how much the process's resident memory then grows at most over 20 steps. What compiling needs, and the
library, are not in it. The library is compiled by a process before.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

SIDES = ("strong", "whole")


def resident() -> dict[str, int]:
    """The process's memory in KiB: now, and the most since it was last counted."""
    lines = [line.split() for line in Path("/proc/self/status").read_text().splitlines() if "kB" in line]
    return {name.rstrip(":"): int(value) for name, value, _ in lines}


def growth(run: Callable[[], Any], parameters: list[Any]) -> int:
    """By how many KiB the process grows at most."""
    for p in parameters:
        p.grad = None
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = resident()["VmRSS"]
    run()
    return resident()["VmHWM"] - before


def measure(side: str, model: str) -> None:
    """Print the growth of one side."""
    import torch
    from loopkit_whole_step import WholeStep
    from whole_step import MODELS, learner_of, strong

    torch.set_num_threads(1)
    torch.manual_seed(0)
    make, batch, loss_fn, accuracy, _ = MODELS[model]
    batches, made = [batch() for _ in range(20)], make()
    if side == "strong":
        run = strong(made, loss_fn, batches, accuracy)
    else:
        learner = learner_of(made, loss_fn, accuracy, WholeStep("always", show=False))

        def run() -> Any:
            return learner.run("train", batches)

    for _ in range(5):  # the first epochs compare a step
        run()
    print(json.dumps(growth(run, list(made.parameters()))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    models = arguments.only or ["GPT", "conv autoencoder"]
    if arguments.side:
        measure(arguments.side, models[0])
        return
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": folder, "OMP_NUM_THREADS": "1"}
        for model in models:
            found: dict[str, list[int]] = {side: [] for side in SIDES}
            for number in range(arguments.runs + 1):
                for side in SIDES:
                    command = [sys.executable, __file__, "--side", side, "--only", model]
                    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
                    if number:  # the first run compiles
                        found[side].append(json.loads(done.stdout.splitlines()[-1]))
            ratio = statistics.median(found["whole"]) / statistics.median(found["strong"])
            figures[model] = {"ratio": ratio, "KiB": found}
            print(f"{model}: {ratio:.2f} of {statistics.median(found['strong']) / 1024:.1f} MiB", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
