"""What loopkit adds to data parallel training: two processes, each of which runs both sides in turn.

    python benchmarks/distributed.py [--rounds 40] [--only two|three|alone] [--json FILE]

The work: an MLP 256-512-512-10 on batches of 64 in each process, SGD with momentum, torch on one thread, Gloo on
loopback. The other side is the loop that is written by hand with PyTorch's ``DistributedDataParallel``. Both sides live
in the same two processes and take turns by blocks of 200 steps; the figure is the median, over the rounds, of the ratio
of the two blocks of one round, in the process of rank 0. Of three processes, both sides are loopkit's.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import os
import platform
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch reads it when it is imported
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from loopkit import Learner, Step, TrainingPhase, launch
from loopkit.distributed import join
from loopkit.metrics import Accuracy
from loopkit.plugins import DDP, ClipGradNorm, Metrics

BATCH, FEATURES, WIDTH, CLASSES = 64, 256, 512, 10
BLOCK = 200
BOUND, ALONE = 1.03, 1.01
"""The highest ratio: of two processes, and of one with the plugin against one without."""
COLLECTIVES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_reduce",
    "barrier",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "scatter",
)
Batches = list[tuple[Tensor, Tensor]]
Work = Callable[[], object]


class OwnPhase(TrainingPhase):
    """A step of one's own."""

    def step(self, learner: Learner, step: Step) -> None:
        inputs, targets = step.batch
        step.loss = learner.loss_fn(learner.model(inputs), targets)
        step.backward(step.loss)
        step.update()


def problem() -> tuple[nn.Module, torch.optim.Optimizer, nn.Module]:
    torch.manual_seed(0)
    layers = [nn.Linear(FEATURES, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES)]
    model = nn.Sequential(*layers)
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), nn.CrossEntropyLoss()


def data(rank: int) -> Batches:
    generator = torch.Generator().manual_seed(rank)
    return [
        (
            torch.randn(BATCH, FEATURES, generator=generator),
            torch.randint(CLASSES, (BATCH,), generator=generator),
        )
        for _ in range(BLOCK)
    ]


def by_hand(batches: Batches, *, clip: bool = False, metrics: bool = False) -> Work:
    """An epoch of the loop over `DistributedDataParallel`."""
    model, optimizer, loss_fn = problem()
    params = list(model.parameters())
    parallel = DistributedDataParallel(model)

    def epoch() -> list[float]:
        total, correct, count = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.long), 0
        for inputs, targets in batches:
            optimizer.zero_grad()
            outputs = parallel(inputs)
            loss = loss_fn(outputs, targets)
            loss.backward()
            if clip:
                nn.utils.clip_grad_norm_(params, 1.0)
            optimizer.step()
            if metrics:
                total += loss.detach() * len(targets)
                correct += (outputs.argmax(1) == targets).sum()
                count += len(targets)
        if not metrics:
            return []
        sums = torch.stack([total, correct.double(), torch.tensor(count, dtype=torch.float64)])
        dist.all_reduce(sums)
        return (sums[:2] / sums[2]).tolist()

    return epoch


@contextmanager
def by_loopkit(
    batches: Batches, *, clip: bool = False, metrics: bool = False, own: bool = False, ddp: Any = None
) -> Iterator[Work]:
    """An epoch of the learner, within a fit; the data is this process's own already."""
    model, optimizer, loss_fn = problem()
    plugins: list[Any] = [] if ddp is None else [ddp]
    plugins += [ClipGradNorm(1.0)] if clip else []
    plugins += [Metrics(Accuracy())] if metrics else []
    phases = [OwnPhase("train")] if own else []
    learner = Learner(model, loss_fn, optimizer, plugins=plugins, phases=phases, standard=False)
    with learner.rounds():
        yield lambda: learner.run("train", batches)


def taken(work: Work) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def compare(ours: Work, theirs: Work, rounds: int, meet: Work) -> tuple[list[float], list[float]]:
    """Seconds of both sides in each round; the order changes from round to round."""
    for work in (ours, theirs):
        work()
    gc.collect()
    seconds: dict[Work, list[float]] = {ours: [], theirs: []}
    for number in range(rounds):
        for work in (ours, theirs) if number % 2 else (theirs, ours):
            meet()
            seconds[work].append(taken(work))
    return seconds[ours], seconds[theirs]


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """How often collectives are called; those in C++, which PyTorch's reducer makes itself, are not among them."""
    calls: Counter[str] = Counter()
    before = {name: getattr(dist, name) for name in COLLECTIVES}
    inside = sys.modules["torch.distributed.distributed_c10d"]

    def counting(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return before[name](*args, **kwargs)

        return call

    for module in (dist, inside):  # objects are sent by functions inside
        for name in COLLECTIVES:
            setattr(module, name, counting(name))
    try:
        yield calls
    finally:
        for module in (dist, inside):
            for name, function in before.items():
                setattr(module, name, function)


def collectives(work: Work) -> dict[str, int]:
    """All collectives of an epoch of ``BLOCK`` steps: from Python by name, and the reducer's buckets."""
    with counted() as calls, torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        work()
    inside = sum(event.count for event in profile.key_averages() if event.key in ("gloo:all_reduce", "gloo:broadcast"))
    outside = calls["all_reduce"] + calls["broadcast"]
    return {**calls, "by the reducer": max(0, inside - outside)}


def two_processes(rounds: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    rank = join("gloo").rank
    batches = data(rank)
    figures: dict[str, Any] = {}
    kinds: dict[str, dict[str, bool]] = {
        "bare": {},
        "clip and metrics": {"clip": True, "metrics": True},
        "a phase of one's own": {"own": True},
    }
    for name, options in kinds.items():
        theirs = by_hand(batches, **{key: value for key, value in options.items() if key != "own"})
        with by_loopkit(batches, **options, ddp=DDP(shard=False, weighted=False)) as ours:
            figures[name] = {
                **figure(*compare(ours, theirs, rounds, dist.barrier)),
                "bound": BOUND,
                "collectives": {"ours": collectives(ours), "theirs": collectives(theirs)},
            }
    return figures


def three_processes(rounds: int) -> dict[str, Any]:
    """What exact resumes cost: buckets that keep their order against PyTorch's, which are laid out anew."""
    torch.set_num_threads(1)
    batches = data(join("gloo").rank)
    with ExitStack() as fits:
        sides = [DDP(shard=False, weighted=False, fixed_buckets=fixed) for fixed in (True, False)]
        fixed, free = (fits.enter_context(by_loopkit(batches, ddp=ddp)) for ddp in sides)
        return {"fixed buckets": {**figure(*compare(fixed, free, rounds, dist.barrier)), "bound": None}}


def alone(rounds: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    batches = data(0)
    with ExitStack() as fits:
        present, absent = (fits.enter_context(by_loopkit(batches, ddp=ddp)) for ddp in (DDP(), None))
        return {"present, alone": {**figure(*compare(present, absent, rounds, lambda: None)), "bound": ALONE}}


def figure(ours: list[float], theirs: list[float], steps: int = BLOCK) -> dict[str, Any]:
    ratios = [our / their for our, their in zip(ours, theirs, strict=True)]
    quarters = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else [ratios[0]] * 3
    return {
        "median": statistics.median(ratios),
        "quartiles": [quarters[0], quarters[2]],
        "rounds": len(ratios),
        "ms": {"ours": 1e3 * statistics.median(ours) / steps, "theirs": 1e3 * statistics.median(theirs) / steps},
        "ratios": ratios,
    }


def show(title: str, found: dict[str, Any]) -> None:
    low, high = found["quartiles"]
    bound = f"at most {found['bound']:.2f}; " if found["bound"] else ""
    print(
        f"{title:58} {found['median']:6.3f}  (quartiles {low:.3f} to {high:.3f}; {bound}"
        f"{found['ms']['theirs']:.2f} ms a step by the other)"
    )
    if "steps" in found:
        print(f"    steps of each process in an epoch: {found['steps']}")
    for side, calls in found.get("collectives", {}).items():
        listed = ", ".join(f"{count} {name}" for name, count in sorted(calls.items()))
        print(f"    collectives of {side} in {BLOCK} steps and the ends of a pass: {listed}")


def report(figures: dict[str, Any], path: Path | None) -> None:
    """Print the figures, and write them to a file if there is a path."""
    for title, found in figures.items():
        show(title, found)
    if path is not None:
        machine = {
            "date": datetime.date.today().isoformat(),
            "machine": platform.machine(),
            "cores": psutil.cpu_count(),
            "python": platform.python_version(),
            "torch": torch.__version__,
        }
        path.write_text(json.dumps({"about": machine, "figures": figures}, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="measure what loopkit adds to data parallel training")
    parser.add_argument("--rounds", type=int, default=40, help="blocks of each side")
    parser.add_argument("--only", choices=["two", "three", "alone"], help="run one part")
    parser.add_argument("--json", type=Path, help="write the figures to a file")
    given = parser.parse_args()
    figures: dict[str, Any] = {}
    if given.only in (None, "two"):
        first, _ = launch(two_processes, given.rounds, processes=2)
        for name, found in first.items():
            figures[f"DDP, {name} / DistributedDataParallel by hand"] = found
    if given.only in (None, "three"):
        for name, found in launch(three_processes, given.rounds, processes=3)[0].items():
            figures[f"DDP of three processes, {name} / free ones"] = found
    if given.only in (None, "alone"):
        for name, found in alone(given.rounds).items():
            figures[f"DDP {name} / no plugin"] = found
    report(figures, given.json)


if __name__ == "__main__":
    main()
