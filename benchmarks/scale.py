"""Whether costs grow in proportion: plugins, parameter tensors, tensors of a batch; what a long run keeps; loaders.

    python benchmarks/scale.py [--only PART] [--json FILE]

Figures are the least processor time of several rounds, so that other work on the machine hardly moves them.
"""

from __future__ import annotations

import argparse
import datetime
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from loopkit_data import Tokens
from overhead import Listener, Nothing
from sides import BATCH, interleaved, machine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from loopkit import Learner, Phase, TrainingPhase, checkpoint, every
from loopkit.data import TensorLoader
from loopkit.plugins import Checkpoint, ClipGradNorm, History, LogTo, ToDevice, WeightAverage

Figures = dict[str, Any]


def least(work: Callable[[], object], rounds: int) -> float:
    """Seconds of processor time, the least of several rounds; after a first one, whose time does not count."""
    return min(interleaved({"work": work}, rounds, time.thread_time)["work"])


def tiny() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(1, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def plugins() -> Figures:
    """Plugins that listen to the end of each step and do nothing."""
    found = {}
    batches = [torch.ones(1, 1)] * 5000
    for count in (1, 10, 100):
        model, optimizer = tiny()

        def make(count: int = count, model: Any = model, optimizer: Any = optimizer) -> Learner:
            listeners = [Listener(number) for number in range(count)]
            return Learner(model, None, optimizer, plugins=listeners, phases=[Nothing()], standard=False)

        def first(make: Callable[[], Learner] = make) -> None:
            make().run("nothing", batches[:1])

        learner = make()
        found[str(count)] = {
            "us of a step": least(lambda it=learner: it.run("nothing", batches), 7) / len(batches) * 1e6,
            "ms until the first step has ended": least(first, 5) * 1e3,
        }
    return found


class Many(nn.Module):
    """So many parameters of eight numbers."""

    def __init__(self, count: int) -> None:
        super().__init__()
        for number in range(count):
            self.register_parameter(f"p{number}", nn.Parameter(torch.full((8,), 0.1)))
        self.all = list(self.parameters())


class Shrink(TrainingPhase):
    """The loss is the sum of the squares of all parameters."""

    def step(self, learner: Any, step: Any) -> None:
        step.loss = torch.cat(learner.model.all).square().sum()
        step.backward(step.loss)
        step.update()


def tensors() -> Figures:
    """Parameter tensors: a step with clipping and with an average, and by hand; a checkpoint on a disk."""
    found = {}
    for count in (10, 1000, 100_000):
        rounds = {10: 200, 1000: 20, 100_000: 1}[count]
        model = Many(count)

        def learner(*given: Any, model: Any = model) -> Learner:
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9, foreach=True)
            return Learner(model, None, optimizer, phases=[Shrink()], plugins=given, standard=False)

        by_hand = torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9, foreach=True)

        def raw(model: Any = model, optimizer: Any = by_hand, clip: bool = False, average: Any = None) -> None:
            optimizer.zero_grad()
            torch.cat(model.all).square().sum().backward()
            if clip:
                nn.utils.clip_grad_norm_(model.all, 1.0)
            optimizer.step()
            if average is not None:
                average.update_parameters(model)

        plain, clipping, averaging = learner(), learner(ClipGradNorm(1.0)), learner(WeightAverage(0.9))
        multi = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=multi)
        batches = [torch.ones(1)] * max(1, 1000 // count)
        sides: dict[str, Callable[[], object]] = {
            "step": lambda it=plain, data=batches: it.run("train", data),
            "step by hand": lambda raw=raw, data=batches: [raw() for _ in data],
            "step that clips": lambda it=clipping, data=batches: it.run("train", data),
            "step that clips by hand": lambda raw=raw, data=batches: [raw(clip=True) for _ in data],
            "step with an average": lambda it=averaging, data=batches: it.run("train", data),
            "step with an average by hand": lambda raw=raw, it=average, data=batches: [raw(average=it) for _ in data],
        }
        seconds = interleaved(sides, rounds, time.thread_time)
        row = {name: min(each) / len(batches) for name, each in seconds.items()}
        with tempfile.TemporaryDirectory() as folder:
            row["checkpoint saved"] = least(lambda it=plain, to=folder: checkpoint.save(it, to), 1)
            row["checkpoint loaded"] = least(lambda it=plain, to=folder: checkpoint.load(it, to), 1)
            row["torch.save of the same"] = least(
                lambda it=plain, to=folder: torch.save([it.model.state_dict(), it.optimizer.state_dict()], to + ".pt"),
                1,
            )
            Path(folder + ".pt").unlink()
        found[str(count)] = {f"us of a {name}": value * 1e6 for name, value in row.items()}
    return found


class Look(Phase):
    """Asks for one tensor of a batch."""

    name = "look"
    training = True

    def step(self, learner: Any, step: Any) -> None:
        step.inputs = step.batch["part0"]["t0"]


def nested() -> Figures:
    """Batches of nested dicts: the step as it is, and with a plugin that moves what is there already."""
    found = {}
    for count in (10, 1000):
        each = {f"part{i}": {f"t{j}": torch.ones(4, 2) for j in range(10)} for i in range(count // 10)}
        batches = [each] * 200
        model, optimizer = tiny()
        plain = Learner(model, None, optimizer, phases=[Look()], standard=False)
        moving = Learner(model, None, optimizer, phases=[Look()], plugins=[ToDevice("cpu")], standard=False)
        found[str(count)] = {
            "us of a step": least(lambda it=plain, data=batches: it.run("look", data), 7) / 200 * 1e6,
            "us of a step with ToDevice": least(lambda it=moving, data=batches: it.run("look", data), 7) / 200 * 1e6,
        }
    return found


class Cheap(Nothing):
    """Logs one number in each thousandth step."""

    name = "train"

    def step(self, learner: Any, step: Any) -> None:
        if step.index % 1000 == 0:
            learner.log("value", 0.5)


def long_run() -> Figures:
    """Ten million steps that do nothing, in a thousand epochs: what the process and the disk hold, by million."""
    batches = [torch.ones(1, 1)] * 10_000
    model, optimizer = tiny()
    process, rows = psutil.Process(), {}
    with tempfile.TemporaryDirectory() as folder:
        saver = Checkpoint(folder, save=every(epochs=50), keep=2)
        history, log = History(), LogTo(Path(folder) / "log.jsonl")
        learner = Learner(model, None, optimizer, phases=[Cheap()], plugins=[history, log, saver], standard=False)
        started = time.thread_time()
        for million in range(1, 11):
            learner.fit(batches, epochs=100)
            saved = [each for each in Path(folder).iterdir() if each.is_dir() and each.name[0] != "."]
            sizes = [sum(file.stat().st_size for file in each.rglob("*") if file.is_file()) for each in saved]
            rows[str(million * 10**6)] = {
                "MiB of memory": process.memory_info().rss / 2**20,
                "KiB of the log": (Path(folder) / "log.jsonl").stat().st_size / 1024,
                "checkpoints": len(saved),
                "KiB of the largest one": max(sizes, default=0) / 1024,
                "us of a step": (time.thread_time() - started) / million,
            }
    return {steps: rows[steps] for steps in ("1000000", "2000000", "5000000", "10000000")}


def loaders() -> Figures:
    """Samples a second of an epoch, in thousands, against the best loop by hand; seconds on the clock."""
    x, y = torch.randn(100_000, 64), torch.randint(0, 10, (100_000,))

    def by_index() -> None:
        order = torch.randperm(len(x))
        for at in range(0, len(x), BATCH):
            chosen = order[at : at + BATCH]
            _ = x[chosen], y[chosen]

    def by_blocks() -> None:
        order = torch.randperm(len(x))
        for at in range(0, len(x), 512):
            chosen = order[at : at + 512]
            for _ in zip(x[chosen].split(BATCH), y[chosen].split(BATCH), strict=True):
                pass

    ours = TensorLoader(x, y, batch_size=BATCH, shuffle=True)
    workers = DataLoader(TensorDataset(x[:20_000], y[:20_000]), batch_size=BATCH, num_workers=1)
    model, optimizer = tiny()

    class Drain(Nothing):
        name = "drain"

    learner = Learner(model, None, optimizer, phases=[Drain()], standard=False)

    def rate(sides: dict[str, Callable[[], object]], samples: int, rounds: int) -> dict[str, float]:
        seconds = interleaved(sides, rounds)
        return {f"thousand a second: {name}": samples / min(each) / 1e3 for name, each in seconds.items()}

    def drained(loader: Any) -> Callable[[], object]:
        return lambda: sum(1 for _ in loader)

    found = {
        "TensorLoader": rate(
            {"ours": drained(ours), "indexing by hand": by_index, "blocks by hand": by_blocks}, len(x), 5
        ),
        "DataLoader, one worker": rate(
            {"in a learner": lambda: learner.run("drain", workers), "by hand": drained(workers)}, 20_000, 3
        ),
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokens.bin"
        np.random.default_rng(0).integers(0, 50_000, 2_000_000, dtype=np.uint16).tofile(path)
        block, size = 256, 32
        tokens = Tokens(path, block=block, batch_size=size)
        count = len(tokens)

        def by_map() -> None:  # as nanoGPT does
            for _ in range(count):
                data = np.memmap(path, dtype=np.uint16, mode="r")
                places = torch.randint(len(data) - block, (size,)).tolist()
                torch.stack([torch.from_numpy(data[i : i + block].astype(np.int64)) for i in places])
                torch.stack([torch.from_numpy(data[i + 1 : i + 1 + block].astype(np.int64)) for i in places])

        kept = np.memmap(path, dtype=np.uint16, mode="r")
        reach = np.arange(block + 1)

        def by_gather() -> None:
            for _ in range(count):
                places = np.random.default_rng(0).integers(0, len(kept) - block, size)
                both = torch.from_numpy(kept[places[:, None] + reach].astype(np.int64))
                _ = both[:, :-1], both[:, 1:]

        sides = {"ours": drained(tokens), "slices by hand": by_map, "a gather by hand": by_gather}
        found["Tokens, blocks"] = rate(sides, count * size, 5)
    return found


PARTS = (plugins, tensors, nested, long_run, loaders)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=[part.__name__ for part in PARTS])
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{datetime.date.today()}, {machine()}")
    figures = {}
    for part in PARTS:
        if arguments.only in (None, part.__name__):
            figures[part.__name__] = part()
            print(f"\n{part.__name__}")
            for what, row in figures[part.__name__].items():
                for name, value in row.items():
                    print(f"  {what:>24} {name:48} {value:12.3f}", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps({"about": machine(), "figures": figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
