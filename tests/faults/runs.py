"""The runs that are killed: a small classifier with everything that has a state."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import threading
import warnings
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from helpers import EVENTS
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from loopkit import Learner, every, hookimpl, schedules
from loopkit.checkpoint import disk
from loopkit.data import ResumableSampler, TensorLoader, seeded
from loopkit.metrics import Accuracy
from loopkit.plugins import (
    ClipGradNorm,
    History,
    Metrics,
    MixedPrecision,
    Plateau,
    SaveOptions,
    Schedule,
    WeightAverage,
)
from loopkit.plugins.checkpoint import Checkpoint

TAKEN_OVER = r".*\.lock was left by process"
SLOW = "checkpoints come less often than"


@dataclass(frozen=True)
class Run:
    """What a trial trains."""

    data: str = "tensors"
    """``tensors``: in memory; ``loader0``, ``loader2``: a DataLoader with that many workers."""
    background: bool = False
    accumulate: int = 1
    extra: str = "average"
    """``average``: with a schedule; ``float16``: too, and a scaler; ``plateau``: without either."""
    epochs: int = 3
    samples: int = 128
    batch_size: int = 16
    every_updates: int = 4

    def __str__(self) -> str:
        return f"{self.data}-{'background' if self.background else 'sync'}-{self.accumulate}-{self.extra}"


RUNS = tuple(
    Run(data, background, accumulate, extra)
    for data in ("tensors", "loader0", "loader2")
    for background in (False, True)
    for accumulate in (1, 3)
    for extra in ("average", "float16", "plateau")
)


class Journal:
    """A plugin that writes down what happens, a line each, in a file that outlives the process."""

    name = "journal"

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def write(self, line: str) -> None:
        """Write a line at once."""
        os.write(self._file, f"{line}\n".encode())

    @hookimpl(reads=("*",))
    def fit_begin(self, learner: Learner) -> None:
        """Where the fit begins."""
        self.write(f"fit_begin {learner.progress.steps} {learner.progress.updates}")

    @hookimpl(reads=("*",))
    def epoch_begin(self, learner: Learner, phase: Any) -> None:
        """A pass, and whether it had begun before."""
        self.write(f"epoch_begin {phase.name} {'again' if learner.current.epoch.resumed else 'new'}")

    @hookimpl(reads=("*",))
    def step_end(self, learner: Learner, phase: Any, step: Any) -> None:
        """A step, with the loss that says whether it was the same one."""
        counts = learner.progress
        self.write(f"step {phase.name} {counts.epochs} {step.index} {counts.updates} {float(step.loss.detach()).hex()}")

    @hookimpl(reads=("*",))
    def epoch_end(self, learner: Learner, phase: Any) -> None:
        """The end of a pass."""
        self.write(f"epoch_end {phase.name} {learner.progress.epochs}")

    @hookimpl(reads=("*",))
    def signal_begin(self, learner: Learner) -> None:
        """A signal that was answered."""
        self.write(f"signal_begin {learner.current.signal.name} {learner.progress.steps}")

    @hookimpl(reads=("*",))
    def fit_end(self, learner: Learner, result: Any) -> None:
        """How it ended."""
        self.write(f"fit_end {result.reason} {learner.progress.steps} {learner.progress.updates}")


def _noisy(sample: tuple[Tensor, Tensor], generator: torch.Generator) -> tuple[Tensor, Tensor]:
    return sample[0] + 0.1 * torch.randn(sample[0].shape, generator=generator), sample[1]


@cache
def _points() -> tuple[Tensor, Tensor]:
    """Points around ten centres, and which."""
    generator = torch.Generator().manual_seed(1)
    targets = torch.randint(10, (400,), generator=generator)
    centres = torch.randn(10, 64, generator=generator)
    return centres[targets] + torch.randn(400, 64, generator=generator), targets


def warm() -> None:
    """Do once what is slow the first time."""
    with tempfile.TemporaryDirectory() as directory:
        for run in (Run(), Run(extra="float16"), Run("loader2", extra="plateau")):
            finish(replace(run, epochs=1, samples=32), Path(directory) / str(run))
    assert threading.active_count() == 1


def make(run: Run, directory: Path, *plugins: Any, checkpoint: bool = True, **options: Any) -> tuple[Learner, Any, Any]:
    """A learner with its plugins, and the data for training and validation."""
    inputs, targets = _points()
    train = inputs[: run.samples], targets[: run.samples]
    val = inputs[-64:], targets[-64:]
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(64, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Dropout(0.2), nn.Linear(24, 10))
    parts: list[Any] = [ClipGradNorm(1.0), Metrics(Accuracy()), History(steps=True)]
    if run.extra == "plateau":
        parts.append(Plateau("val/loss", patience=0, factor=0.5, threshold=0.5))
    else:
        parts += [WeightAverage(0.9), Schedule(schedules.cosine())]
    if run.extra == "float16":
        parts.append(MixedPrecision("float16", init_scale=2.0**22, growth_interval=5))
    if checkpoint:
        saves = SaveOptions(background=run.background)
        given = {"save": every(updates=run.every_updates), "resume": "auto", "options": saves, **options}
        parts.append(Checkpoint(directory, **given))
    learner = Learner(
        model,
        nn.CrossEntropyLoss(),
        lambda params: torch.optim.AdamW(params, lr=0.01),
        plugins=[*parts, *plugins],
        accumulate=run.accumulate,
        seed=7,
    )
    if run.data == "tensors":
        loader: Any = TensorLoader(*train, batch_size=run.batch_size, shuffle=True, seed=3)
        return learner, loader.map(_augment, seed=5), TensorLoader(*val, batch_size=16)
    dataset = seeded(TensorDataset(*train), _noisy)
    workers = int(run.data[-1])
    sampler = ResumableSampler(dataset, seed=3)
    loader = DataLoader(dataset, batch_size=run.batch_size, sampler=sampler, num_workers=workers)
    return learner, loader, DataLoader(TensorDataset(*val), batch_size=16, num_workers=workers // 2)


def _augment(batch: tuple[Tensor, Tensor], generator: torch.Generator) -> tuple[Tensor, Tensor]:
    return _noisy(batch, generator)


def strict() -> None:
    """Let warnings be errors, but for the lock of a run that was killed."""
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", TAKEN_OVER, RuntimeWarning)
    warnings.filterwarnings("ignore", SLOW, UserWarning)


def finish(run: Run, directory: Path, *plugins: Any, **options: Any) -> Any:
    """Run to the end, from where the last one was; returns the final state, as plain values."""
    strict()
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    journal = Journal(directory / "journal")
    with open(directory / "begun", "w"):
        pass
    learner, train, val = make(run, directory / "checkpoints", journal, *plugins, **options)
    result = learner.fit(train, val, epochs=run.epochs)
    os.close(journal._file)
    return plain({"state": learner.state_dict(), "history": result.history, "metrics": result.metrics})


# ------------------------------------------------------------------------------------------------- comparing


def plain(value: Any, name: str = "") -> Any:
    """A value in which everything is told by ``==``: types, dtypes, strides, bits; measured seconds are left out."""
    if isinstance(value, Tensor):
        flat = value.detach().contiguous().reshape(-1)
        bits = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
        return "tensor", str(value.dtype), tuple(value.shape), value.stride(), bits
    if isinstance(value, dict):
        return {key: "measured" if key == "seconds" else plain(part, str(key)) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, *(plain(part) for part in value))
    if isinstance(value, float):
        return "float", value.hex()
    return type(value).__name__, value


def difference(one: Any, other: Any, path: str = "") -> str:
    """Where two plain values differ first, or nothing."""
    if isinstance(one, dict) and isinstance(other, dict):
        if list(one) != list(other):
            return f"{path}: the keys {list(one)} and {list(other)}"
        pairs = [(f"{path}.{key}", one[key], other[key]) for key in one]
    elif isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other) and one != other:
        pairs = [(f"{path}[{index}]", *both) for index, both in enumerate(zip(one, other, strict=True))]
    else:
        return "" if one == other else f"{path}: {str(one)[:300]} and {str(other)[:300]}"
    return next((found for pair in pairs if (found := difference(pair[1], pair[2], pair[0]))), "")


# ------------------------------------------------------------------------------------------------- dying in a call


class Deadly(disk.System):
    """The operating system, as a process sees it that is killed before, during or after a chosen call.

    Calls count from the moment that it is armed. Killed during a write means after half of its bytes.
    """

    def __init__(self, at: int, when: str) -> None:
        self.at, self.when = at, when
        self.armed = False
        self.calls: list[str] = []
        self._lock = threading.Lock()

    def reach(self, name: str) -> bool:
        """Count a call, and die before it if that is wanted; whether it is the chosen one."""
        with self._lock:
            if not self.armed:
                return False
            chosen = len(self.calls) == self.at
            self.calls.append(name)
        if chosen and self.when == "before":
            die()
        return chosen

    def write(self, file: int, data: memoryview) -> int:
        """Write, or half of it."""
        chosen = self.reach("write")
        if chosen and self.when == "during":
            super().write(file, data[: len(data) // 2])
            die()
        count = super().write(file, data)
        if chosen:
            die()
        return count


def _deadly(name: str) -> Any:
    call = getattr(disk.System, name)

    def method(self: Deadly, *given: Any, **options: Any) -> Any:
        chosen = self.reach("create" if name == "open" and given[1] & os.O_CREAT else name)
        result = call(self, *given, **options)
        if chosen:
            die()
        return result

    return method


CALLS = tuple(name for name in vars(disk.System) if not name.startswith("_"))
CHANGING = ("create", "write", "truncate", "mkdir", "rename", "unlink", "rmdir")
"""Calls after which another process finds other files; a kill, other than a loss of power, needs no fsync."""
for _name in CALLS:
    if _name != "write":
        setattr(Deadly, _name, _deadly(_name))


def die() -> None:
    """Be killed, as by the kernel."""
    os.kill(os.getpid(), signal.SIGKILL)
    threading.Event().wait()  # another thread than the one that the signal was given to may go on for a moment


class Arm:
    """A plugin that arms a `Deadly` at an update; at 0 from the start."""

    name = "arm"
    volatile = ("system",)

    def __init__(self, system: Deadly, update: int, until: int) -> None:
        self.system, self.update, self.until = system, update, until
        system.armed = update == 0

    @hookimpl(reads=("params",))
    def update_end(self, learner: Learner) -> None:
        """The save comes at the end of the step."""
        self.system.armed = self.update <= learner.progress.updates < self.until


class Signaller:
    """A plugin that sends its process a signal when events have come so often, the first of them being 0."""

    volatile = ("count",)

    def __init__(self, at: int, number: int) -> None:
        self.name = "signaller"
        self.at, self.number, self.count = at, number, 0
        for hook in EVENTS:
            if hook != "signal_begin":
                setattr(self, hook, hookimpl(lambda: self._listen()))

    def _listen(self) -> None:
        self.count += 1
        if self.count == self.at + 1:
            os.kill(os.getpid(), self.number)


def signal_at(run: Run, directory: str, at: int, number: int) -> int:
    """Run with a signal at an event; returns how many events there are."""
    signaller = Signaller(at, number)
    finish(run, Path(directory), signaller)
    return signaller.count


def die_in_save(run: Run, directory: str, at: int, when: str, update: int, until: int) -> Any:
    """Run, and die in the chosen call of the saves between two updates; returns the calls if it did not."""
    system = Deadly(at, when)
    disk.system = system
    state = finish(run, Path(directory), Arm(system, update, until))
    return system.calls, state


def resume(run: Run, directory: str, **options: Any) -> Any:
    """`finish`, by what can be sent to a fork server."""
    return finish(run, Path(directory), **options)


def children(parent: int) -> list[int]:
    """The processes that a process has started, without this one."""
    found = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return [int(pid) for pid in found if int(pid) != os.getpid()]


def handlers() -> list[Any]:
    """What SIGINT, SIGTERM and SIGUSR1 go to in a process that has only imported and run what `warm` does."""
    return [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]


def fresh(directory: Path) -> Path:
    """An empty directory."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    return directory
