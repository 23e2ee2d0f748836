"""What saving and loading cost: each line runs both sides in this process, in alternating pairs.

    python benchmarks/checkpoint.py [--pairs 7] [--parameters 100] [--directory DIR] [--only PART] [--json FILE]

The state: 100 million parameters (MLP 4096-4096-...) with AdamW's moments, 1.2 GB; the page cache is warm, rotation is
outside the timed part. A save of loopkit is everything from the learner to the renamed directory, with SHA-256 of every
file; both sides call fsync.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from loopkit import Learner, checkpoint, every
from loopkit.checkpoint import storage
from loopkit.checkpoint.background import Snapshot
from loopkit.checkpoint.bundle import Contents, describe, read_state
from loopkit.plugins import Checkpoint, SaveOptions

WIDTH = 4096
Work = Callable[[], object]


class Bench:
    """A learner with its state, and the figures so far."""

    def __init__(self, directory: Path, parameters: float, pairs: int) -> None:
        self.directory, self.pairs = directory, pairs
        self.figures: dict[str, dict[str, Any]] = {}
        torch.manual_seed(0)
        layers = max(1, round(parameters * 1e6 / WIDTH**2))
        self.model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))
        self.batches = [(torch.randn(4, WIDTH), torch.randn(4, WIDTH))]
        self.learner = self.make()
        self.learner.fit(self.batches, epochs=1)
        self.count = 0

    def make(self, *plugins: Any) -> Learner:
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6)
        return Learner(self.model, nn.functional.mse_loss, optimizer, plugins=plugins, standard=False)

    def torch_state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.learner.optimizer.state_dict()}

    def new_path(self) -> Path:
        self.count += 1
        return self.directory / f"file-{self.count}"

    def report(self, name: str, ours: list[float], theirs: list[float], bound: float | None) -> None:
        ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
        seconds = f"{statistics.median(ours):.3f} s / {statistics.median(theirs):.3f} s"
        limit = "" if bound is None else f"  (bound {bound}{'' if ratio <= bound else ', EXCEEDED'})"
        print(f"{name:62} {ratio:6.2f}   {seconds}{limit}", flush=True)
        self.figures[name] = {"ratio": ratio, "bound": bound, "ours": ours, "theirs": theirs}


def pairs(ours: Work, theirs: Work, count: int, between: Work) -> tuple[list[float], list[float]]:
    """Seconds of each side, in pairs whose order alternates, after one pair that does not count."""
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(count + 1):
        sides = [(ours, times[0]), (theirs, times[1])]
        for work, seconds in sides if turn % 2 else reversed(sides):
            gc.collect()
            start = time.perf_counter()
            work()
            if turn:
                seconds.append(time.perf_counter() - start)
            between()
    return times


def save(bench: Bench) -> None:
    learner, target = bench.learner, bench.directory / "ours"

    def ours() -> None:
        contents = Contents.of(learner, learner.state_dict())
        storage.write(target, contents.files(), describe(learner, contents, "benchmark"))

    def theirs() -> None:
        with bench.new_path().open("wb") as file:
            torch.save(bench.torch_state(), file)
            file.flush()
            os.fsync(file.fileno())

    def clear() -> None:
        for path in bench.directory.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        os.sync()

    name = "synchronous save, hashed / torch.save + fsync"
    bench.report(name, *pairs(ours, theirs, bench.pairs, clear), 0.8)


def stall(bench: Bench) -> None:
    learner, snapshot = bench.learner, Snapshot()
    clones: list[Any] = []

    def ours() -> None:
        snapshot.take(Contents.of(learner, learner.state_dict()))

    def theirs() -> None:
        state = bench.torch_state()
        clones.append([value.clone() for value in state["model"].values()])
        moments = state["optimizer"]["state"].values()
        clones.append([value.clone() for each in moments for value in each.values()])

    name = "stall of a background save / clone of the state"
    bench.report(name, *pairs(ours, theirs, bench.pairs, clones.clear), 0.5)
    print(f"{'memory that the background save holds':62} {snapshot.nbytes / 1e9:6.2f} GB")


def while_writing(bench: Bench, threads: int, bound: float | None) -> None:
    """Steps of a plain loop beside a background write, and without one."""
    torch.set_num_threads(threads)
    writer = Checkpoint(bench.directory / "background", save=every(epochs=1), options=SaveOptions(background=True))
    learner = bench.make()
    learner.optimizer.load_state_dict(bench.learner.optimizer.state_dict())
    inputs, targets = bench.batches[0]

    def step() -> float:
        start = time.perf_counter()
        nn.functional.mse_loss(bench.model(inputs), targets).backward()
        learner.optimizer.step()
        learner.optimizer.zero_grad()
        return time.perf_counter() - start

    ours, theirs = [], []
    for turn in range(bench.pairs + 1):
        alone = statistics.median(step() for _ in range(8))
        contents = Contents.of(learner, learner.state_dict())
        about = describe(learner, contents, "benchmark")
        assert writer._snapshot is not None
        writer._snapshot.take(contents)
        writer._writer.start(partial(writer._write, contents, about, ()))
        beside = []
        while writer._writer.busy:
            beside.append(step())
        writer._writer.wait()
        if turn:
            ours.append(statistics.median(beside))
            theirs.append(alone)
    writer._remover.close()
    bench.report(f"step while writing / step, torch on {threads} thread{'s' * (threads > 1)}", ours, theirs, bound)
    torch.set_num_threads(1)
    shutil.rmtree(bench.directory / "background")


def load(bench: Bench) -> None:
    learner, path = bench.learner, bench.new_path()
    contents = Contents.of(learner, learner.state_dict())
    manifest = storage.write(bench.directory / "ours", contents.files(), describe(learner, contents, "benchmark"))
    torch.save(bench.torch_state(), path)
    os.sync()
    name = "verified load / torch.load(mmap=False)"
    sides = (lambda: read_state(manifest)), (lambda: torch.load(path, mmap=False))
    bench.report(name, *pairs(*sides, bench.pairs, lambda: None), 0.9)


def resume(bench: Bench) -> None:
    """From the directory to a learner that can go on, against the same by torch alone."""
    learner, path, target = bench.learner, bench.new_path(), bench.directory / "resumed"
    checkpoint.save(learner, target)
    torch.save(bench.torch_state(), path)
    os.sync()

    def theirs() -> None:
        state = torch.load(path, mmap=False)
        bench.model.load_state_dict(state["model"])
        learner.optimizer.load_state_dict(state["optimizer"])

    name = "resume of a learner, verified / torch.load and load_state_dict"
    bench.report(name, *pairs(lambda: checkpoint.load(learner, target), theirs, bench.pairs, lambda: None), 1.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--parameters", type=float, default=100, help="in millions")
    parser.add_argument("--directory", type=Path, help="where to write; a temporary one by default")
    parser.add_argument("--only", choices=["save", "stall", "while_writing", "load", "resume"])
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        bench = Bench(Path(directory), arguments.parameters, arguments.pairs)
        size = sum(p.numel() for p in bench.model.parameters())
        about = f"{os.cpu_count()} cores, Python {platform.python_version()}, torch {torch.__version__}"
        print(f"{datetime.date.today()}, {about}; {size / 1e6:.0f} million parameters; {bench.pairs} pairs\n")
        for part in (save, stall, load, resume):
            if arguments.only in (None, part.__name__):
                part(bench)
        if arguments.only in (None, "while_writing"):
            while_writing(bench, 1, 1.3)
            while_writing(bench, os.cpu_count() or 2, None)
    if arguments.json:
        arguments.json.write_text(json.dumps({"about": about, "figures": bench.figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
