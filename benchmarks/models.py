"""Ten models against two loops by hand, by loopkit and by other trainers: ratios of the time of an epoch.

    python benchmarks/models.py [--size cpu|gpu] [--device cpu|cuda] [--seconds 360]
        [--only MODEL ...] [--sides SIDE ...] [--json FILE]
    python benchmarks/models.py --quality [--seeds 5]
    python benchmarks/models.py --markdown FILE.json

All sides of a model take turns in one process, an epoch at a time, on the same batches, which are cut beforehand and
lie on the device, which for ``--size gpu`` is a GPU, if there is one. The sides:

    idiomatic    Adam as torch makes it (not fused), ``loss.item()`` after each batch
    strong       fused Adam, ``p.grad = None``, nothing read
    default      loopkit with its standard plugins and the optimizer of the idiomatic loop
    fused        loopkit with its standard plugins, ``auto_fused`` and a `TensorLoader`, which cuts the batches itself
    whole_step   the same with ``WholeStep``, where loopkit-whole-step is installed
    and others, as ``requirements-peers.txt`` installs them, and fastai, which needs torchvision; with the optimizer of
    the strong loop (Keras has its own), and with a new run of the trainer for each epoch, if it has no other way

``--quality`` measures the time of training until the loss on held-out data is at most a quarter of that of
the best constant answer, for several seeds, and in processes of their own the peak of memory and the time of the first
step.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import importlib.util
import json
import math
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from peers import MAKERS, Batches, found
from sides import Screen, Work, interleaved, machine
from ten import TASKS, Task
from torch import nn

from loopkit import Learner
from loopkit.data import TensorLoader
from loopkit.groups import auto_fused
from loopkit.plugins import Progress

OURS = ("default", "fused", "whole_step")
SIDES = ("idiomatic", "strong", *OURS)
QUALITY = 0.25
"""How much of the loss of the best constant answer is good enough."""
MOST_EPOCHS = 200


class Problem:
    """A task, of which each side gets a model of its own with the same numbers, and the same batches.

    Args:
        task: What to train.
        size: Of the model, ``"cpu"`` or ``"gpu"``.
        device: Where it lies.
        count: The number of batches of an epoch.
        seed: Makes model and data; an eighth of the data is held out.
    """

    def __init__(self, task: Task, size: str, device: str, count: int, seed: int = 0) -> None:
        self.task, self.device = task, torch.device(device)
        held = math.ceil(count / 8)
        (self.fresh, inputs, targets), self.batch = task.build(size, count + held, seed)
        inputs, targets = inputs.to(self.device), targets.to(self.device)
        split = count * self.batch
        self.inputs, self.targets = inputs[:split], targets[:split]
        self.held = inputs[split:], targets[split:]
        cut = zip(self.inputs.split(self.batch), self.targets.split(self.batch), strict=True)
        self.batches: Batches = list(cut)

    def model(self) -> nn.Module:
        return copy.deepcopy(self.fresh).to(self.device)

    @property
    def bar(self) -> float:
        return QUALITY * self.task.constant(self.held[1])

    def loss(self, model: nn.Module) -> float:
        """The loss on the data that was held out."""
        model.eval()
        with torch.no_grad():
            loss = self.task.loss_fn(model(self.held[0]), self.held[1])
        model.train()
        return loss.item()

    def side(self, name: str) -> tuple[nn.Module, Work]:
        """A model, and what trains it for an epoch."""
        model, task = self.model(), self.task
        if name in OURS:
            return model, by_loopkit(name, model, self)
        if name == "idiomatic":
            return model, idiomatic(model, torch.optim.Adam(model.parameters(), task.lr), task.loss_fn, self.batches)
        optimizer = torch.optim.Adam(model.parameters(), task.lr, fused=True)
        make = strong if name == "strong" else MAKERS[name]
        return model, make(model, optimizer, task.loss_fn, self.batches)


def idiomatic(model: nn.Module, optimizer: torch.optim.Optimizer, loss_fn: nn.Module, batches: Batches) -> Work:
    def epoch() -> float:
        total = 0.0
        for inputs, targets in batches:
            optimizer.zero_grad()
            loss = loss_fn(model(inputs), targets)
            loss.backward()
            optimizer.step()
            total += loss.item()
        return total / len(batches)

    return epoch


def strong(model: nn.Module, optimizer: torch.optim.Optimizer, loss_fn: nn.Module, batches: Batches) -> Work:
    params = list(model.parameters())

    def epoch() -> None:
        for inputs, targets in batches:
            for p in params:
                p.grad = None
            loss_fn(model(inputs), targets).backward()
            optimizer.step()

    return epoch


def by_loopkit(name: str, model: nn.Module, problem: Problem) -> Work:
    plugins: list[Any] = [Progress(file=Screen())]
    if name == "whole_step":
        from loopkit_whole_step import WholeStep

        plugins.append(WholeStep(when="always", show=False))
    lr, data = problem.task.lr, problem.batches
    optimizer: Any = auto_fused(torch.optim.Adam, lr=lr)
    if name == "default":
        optimizer = torch.optim.Adam(model.parameters(), lr)
    else:
        data = TensorLoader(problem.inputs, problem.targets, batch_size=problem.batch)
    learner = Learner(model, problem.task.loss_fn, optimizer, plugins=plugins)
    return lambda: learner.run("train", data)


def available(names: Sequence[str] | None) -> list[str]:
    """These sides, or all, without those that are not installed."""
    wanted = [*SIDES, *MAKERS] if names is None else list(names)
    if "whole_step" in wanted and importlib.util.find_spec("loopkit_whole_step") is None:
        print("loopkit-whole-step is not installed: skipped")
        wanted.remove("whole_step")
    here = found([name for name in wanted if name in MAKERS])
    return [name for name in wanted if name not in MAKERS or name in here]


def finished(work: Work, device: torch.device) -> Work:
    """The work, until the device has done it, too."""
    if device.type != "cuda":
        return work

    def whole() -> None:
        work()
        torch.cuda.synchronize()

    return whole


def epochs(problem: Problem, sides: Sequence[str], seconds: float, clock: Callable[[], float]) -> dict[str, Any]:
    """Seconds of each side's epochs, as many as there is time for, and of its first one."""
    start, works, first = time.perf_counter(), {}, {}
    for name in sides:
        begun = time.perf_counter()
        try:
            works[name] = finished(problem.side(name)[1], problem.device)
            works[name]()
        except Exception as error:  # another trainer's failure is a gap in the table, not the end of it
            if name in SIDES:
                raise
            print(f"{name} cannot train it: {type(error).__name__}: {error}".splitlines()[0])
            works.pop(name, None)
            continue
        first[name] = time.perf_counter() - begun
    one = sum(sum(each) for each in interleaved(works, 1).values())
    left = seconds - (time.perf_counter() - start) - one  # which `interleaved` takes to warm up
    return {"seconds": interleaved(works, max(3, round(left / one)), clock), "first": first}


def against(seconds: dict[str, list[float]], base: str) -> dict[str, float]:
    """Each side's ratio to a base: the median over the rounds."""
    return {
        name: statistics.median(one / other for one, other in zip(each, seconds[base], strict=True))
        for name, each in seconds.items()
        if name != base
    }


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def ratio_table(figures: dict[str, Any], base: str) -> str:
    """A row for each model, and the geometric mean."""
    ratios = {model: against(each["seconds"], base) for model, each in figures.items() if base in each["seconds"]}
    sides = [name for name in (*SIDES, *MAKERS) if any(name in each for each in ratios.values())]
    rows = [[model, *(f"{each[name]:.2f}" if name in each else "" for name in sides)] for model, each in ratios.items()]
    mean = ["geometric mean"]
    for name in sides:
        known = [each[name] for each in ratios.values() if name in each]
        mean.append(f"{statistics.geometric_mean(known):.2f}" + ("" if len(known) == len(ratios) else " (of fewer)"))
    return table([f"against {base}", *sides], [*rows, mean])


def to_quality(problem: Callable[[int], Problem], name: str, seeds: int) -> list[float | None]:
    """Seconds of training until the bar was met, for each seed; None: not within 200 epochs."""
    found: list[float | None] = []
    for seed in range(seeds):
        it, seconds = problem(seed), 0.0
        bar = it.bar
        model, work = it.side(name)
        work = finished(work, it.device)
        for _ in range(MOST_EPOCHS):
            start = time.perf_counter()
            work()
            seconds += time.perf_counter() - start
            if it.loss(model) <= bar:
                found.append(seconds)
                break
        else:
            found.append(None)
    return found


def memory(key: str) -> float:
    """MiB of this process, from what the system knows of it."""
    found = re.search(key + r":\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


def probe(model: str, size: str, device: str, side: str) -> dict[str, float]:
    """What a process that trains nothing else needs: the time until the first step is over, and the peak of memory."""
    one = Problem(TASKS[model], size, device, 1)
    start = time.perf_counter()
    finished(one.side(side)[1], one.device)()
    first = time.perf_counter() - start
    many = Problem(TASKS[model], size, device, 32)
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # from here on VmHWM is the peak
    work = finished(many.side(side)[1], many.device)
    for _ in range(3):
        work()
    peak = torch.cuda.max_memory_allocated() / 2**20 if device == "cuda" else memory("VmHWM") - before
    return {"first_step_ms": first * 1e3, "peak_mib": peak}


def probed(*options: str) -> dict[str, float]:
    command = [sys.executable, __file__, "--probe", *options]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return dict(json.loads(said.splitlines()[-1]))


def quality_table(figures: dict[str, Any]) -> str:
    rows = []
    for model, sides in figures.items():
        for side, each in sides.items():
            met = [seconds for seconds in each["seconds"] if seconds is not None]
            said = "not met" if not met else f"{statistics.median(met):.2f} ({min(met):.2f} to {max(met):.2f})"
            if met and len(met) < len(each["seconds"]):
                said += f", {len(met)} of {len(each['seconds'])} seeds"
            rows.append([model, side, said, f"{each['peak_mib']:.1f}", f"{each['first_step_ms']:.1f}"])
    return table(["model", "side", "seconds to the quality", "peak, MiB", "first step, ms"], rows)


def markdown(said: dict[str, Any]) -> str:
    """The tables of what was written by ``--json``."""
    parts = [
        f"{said['date']}, {said['about']}, {said['device']}; {said['clock']}; load of the machine "
        f"{said['load'][0]:.1f} to {said['load'][1]:.1f}."
    ]
    for threads, figures in said["epochs"].items():
        rounds = [len(next(iter(each["seconds"].values()))) for each in figures.values()]
        many = "thread" if threads == "1" else "threads"
        parts.append(f"Size `{said['size']}`, {threads} {many}, {min(rounds)} to {max(rounds)} rounds:")
        measured = next(iter(figures.values()))["seconds"]
        parts += [ratio_table(figures, base) for base in ("idiomatic", "strong") if base in measured]
    if said["quality"]:
        parts.append(quality_table(said["quality"]))
    return "\n\n".join(parts)


def load() -> float:
    return float(Path("/proc/loadavg").read_text().split()[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=["cpu", "gpu"], default="cpu")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="by default a GPU for its size, if there is one")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--seconds", type=float, default=360, help="for all models, beside the compiling of graphs")
    parser.add_argument("--processor-time", action="store_true", help="instead of seconds: on a busy machine")
    parser.add_argument("--batches", type=int, default=32, help="of an epoch")
    parser.add_argument("--only", nargs="+", choices=list(TASKS), default=list(TASKS), metavar="MODEL")
    parser.add_argument("--sides", nargs="+", choices=[*SIDES, *MAKERS], metavar="SIDE")
    parser.add_argument("--quality", action="store_true", help="time to a quality, memory and start-up instead")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="also write the figures here, beside those of other runs")
    parser.add_argument("--markdown", type=Path, metavar="FILE.json", help="print the tables of these figures alone")
    parser.add_argument("--probe", nargs=4, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.markdown:
        print(markdown(json.loads(given.markdown.read_text())))
        return
    if given.probe:
        torch.set_num_threads(1)
        print(json.dumps(probe(*given.probe)))
        return
    device = given.device or ("cuda" if given.size == "gpu" and torch.cuda.is_available() else "cpu")
    clock = time.process_time if given.processor_time else time.perf_counter
    said: dict[str, Any] = {
        "date": str(datetime.date.today()),
        "about": machine(),
        "size": given.size,
        "device": device,
        "clock": clock.__name__,
        "load": [load()],
        "epochs": {},
        "quality": {},
    }
    if given.quality:
        torch.set_num_threads(given.threads[0])
        for model in given.only:
            said["quality"][model] = {}
            for side in available(given.sides or SIDES):

                def problem(seed: int, model: str = model) -> Problem:
                    return Problem(TASKS[model], given.size, device, given.batches, seed)

                figures = {"seconds": to_quality(problem, side, given.seeds), **probed(model, given.size, device, side)}
                said["quality"][model][side] = figures
            print(quality_table({model: said["quality"][model]}), flush=True)
    else:
        sides = available(given.sides)
        each = given.seconds / len(given.only) / len(given.threads)
        for threads in given.threads:
            torch.set_num_threads(threads)
            figures = said["epochs"][str(threads)] = {}
            for model in given.only:
                figures[model] = epochs(Problem(TASKS[model], given.size, device, given.batches), sides, each, clock)
                print(ratio_table({model: figures[model]}, sides[0]), flush=True)
    said["load"].append(load())
    if given.json and given.json.exists():  # the other runs of the same tables
        kept = json.loads(given.json.read_text())
        if other := [key for key in ("about", "size", "device", "clock") if kept[key] != said[key]]:
            sys.exit(f"{given.json} is of another {' and '.join(other)}: give another file, or remove it")
        for threads, models in kept["epochs"].items():  # the sides of a model have taken turns: all of them or none
            said["epochs"][threads] = models | said["epochs"].get(threads, {})
        for model, sides in kept["quality"].items():
            said["quality"][model] = sides | said["quality"].get(model, {})
    print("\n" + markdown(said))
    if given.json:
        given.json.write_text(json.dumps(said, indent=1) + "\n")


if __name__ == "__main__":
    main()
