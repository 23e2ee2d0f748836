"""The processor time of compiling a step: in the training's process, beside it, and in a second process.

    pip install -e . -e plugins/loopkit-whole-step
    python benchmarks/compiling.py [--only MODEL] [--json FILE]

Each form is a process of its own with empty caches, except the last, which has those of the one before. ``here`` is
inductor as it is: in the training's process, with a precompiled header, and with all vector units tried. Figures are
seconds of the processor for recording and compiling, those of all processes that were started included.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--form", choices=FORMS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    models = arguments.only or ["MLP", "GPT"]
    if arguments.form:
        measure(arguments.form, models[0])
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
