"""The processor time of compiling a step: in the training's process, beside it, and in a second process.

    pip install -e . -e plugins/loopkit-whole-step
    python benchmarks/compiling.py [--only MODEL] [--rate] [--json FILE]

Each form is a process of its own with empty caches, except the last, which has those of the one before. ``here`` is
inductor as it is: in the training's process, with a precompiled header, and with all vector units tried. Figures are
seconds of the processor for recording and compiling, those of all processes that were started included.

``--rate`` compares the eager steps of a training while the compiler works beside it with those while the compiler is
stopped (SIGSTOP), in turn, 100 steps each: steps a second by wall time, and by the processor time of a step.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from loopkit import hookimpl

FORMS = ("here", "beside", "again")


def seconds() -> float:
    """Of the processor, in this process and those that it has waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def measure(form: str, model: str) -> None:
    """Print the seconds that the first compiled steps take beyond eager ones."""
    import torch
    from loopkit_whole_step import WholeStep, private
    from whole_step import MODELS, learner_of

    torch.set_num_threads(1)
    make, batch, loss_fn, accuracy, _ = MODELS[model]
    backend: Any = in_this_process(private) if form == "here" else "inductor"
    learner = learner_of(make(), loss_fn, accuracy, WholeStep("always", backend=backend, show=False))
    batches = [batch() for _ in range(3)]
    learner.run("train", batches)
    started = seconds()
    learner.run("train", batches[:1])
    (shape,) = learner.plugins["whole_step"].shapes.values()
    print(json.dumps({"seconds": seconds() - started, "mode": shape.mode}))


def in_this_process(private: Any) -> Callable[..., Any]:
    def compiled(graph: Any, inputs: Any) -> Any:
        from torch._inductor import config
        from torch._inductor.compile_fx import compile_fx

        config.cpp_wrapper, config.fallback_random, config.size_asserts = True, True, False
        private.draw_in_memory_order(graph.graph)
        private.compute_once(graph.graph, private.memory_of_its_own())
        graph.recompile()
        return compile_fx(graph, list(inputs))

    return compiled


def rate(model: str) -> None:
    """Print how fast eager steps are while the compiler works, as a part of their speed while it is stopped."""
    import torch
    from loopkit_whole_step import WholeStep
    from whole_step import MODELS, learner_of

    torch.set_num_threads(1)
    make, batch, loss_fn, accuracy, _ = MODELS[model]
    batches = [batch() for _ in range(10)] * 10
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=folder):
        plugin = WholeStep(eager_steps=10**9, show=False)
        learner = learner_of(make(), loss_fn, accuracy, plugin)
        timed = Timed(plugin)
        learner.add(timed)
        learner.fit(batches, epochs=10**6)
    for clock, working, stopped in zip(("wall time", "processor"), *map(timed.medians, (True, False)), strict=True):
        print(f"{model}: {stopped / working:.2f} of the steps a second, by {clock}, {len(timed.turns)} turns")


class Timed:
    """Times the epochs of a training while the compiler works and while it is stopped, and ends it with the compiler.

    Args:
        plugin: Started the compiler.
    """

    name = "timed"

    def __init__(self, plugin: Any) -> None:
        self.plugin, self.works, self.since = plugin, True, (0.0, 0.0)
        self.turns: list[tuple[bool, float, float]] = []

    def medians(self, works: bool) -> tuple[float, float]:
        """Of the turns: seconds of wall time and of the processor."""
        turns = [each[1:] for each in self.turns[2:] if each[0] is works]
        wall, processor = (statistics.median(each) for each in zip(*turns, strict=True))
        return wall, processor

    @hookimpl
    def epoch_begin(self, epoch: Any) -> None:
        self.since = time.perf_counter(), time.thread_time()

    @hookimpl
    def epoch_end(self, learner: Any, epoch: Any) -> None:
        (shape,) = self.plugin.shapes.values()
        self.turns.append((self.works, time.perf_counter() - self.since[0], time.thread_time() - self.since[1]))
        group = int(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()[0])
        if (shape.build.folder / "said.json").exists():
            learner.stop("compiled", "benchmark")
        self.works = not self.works
        os.killpg(group, signal.SIGCONT if self.works else signal.SIGSTOP)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append")
    parser.add_argument("--rate", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--form", choices=FORMS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    models = arguments.only or ["MLP", "GPT"]
    if arguments.form:
        measure(arguments.form, models[0])
        return
    if arguments.rate:
        for model in models:
            rate(model)
        return
    figures = {model: forms(model) for model in models}
    for model, each in figures.items():
        here = each["here"]["seconds"]
        print(f"{model}: {here:.1f} s in the training's process, all else as a part of that")
        for form in FORMS[1:]:
            print(f"  {form:8} {each[form]['seconds'] / here:.2f}  ({each[form]['mode']})")
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")


def forms(model: str) -> dict[str, Any]:
    found = {}
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        for form in FORMS:
            folder = one if form == "here" else other
            places = {"TMPDIR": folder, "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "OMP_NUM_THREADS": "1"}
            command = [sys.executable, __file__, "--form", form, "--only", model]
            done = subprocess.run(command, env={**os.environ, **places}, check=True, capture_output=True, text=True)
            found[form] = json.loads(done.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    main()
