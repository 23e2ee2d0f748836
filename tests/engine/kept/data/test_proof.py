"""Data that are replayed or put back are proved by the batch before the position."""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from helpers import on
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler, TensorDataset

from engine.kept.resumed import Make, X, Y, check_exact
from loopkit import Learner, every, seed_everything
from loopkit.data import ResumableSampler, TensorLoader
from loopkit.errors import PluginError, StateError
from loopkit.plugins import Checkpoint


def own() -> torch.Generator:
    return torch.Generator().manual_seed(0)


class Lazy:
    """Batches by index."""

    def __init__(self, inputs: Any) -> None:
        self.inputs = inputs

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        if index >= 6:
            raise IndexError
        return self.inputs[4 * index : 4 * index + 4].clone(), Y[4 * index : 4 * index + 4]


class Stream(IterableDataset[Any]):
    def __init__(self, inputs: Any) -> None:
        self.inputs = inputs

    def __iter__(self) -> Iterator[Any]:
        return zip(self.inputs, Y, strict=True)


class Arrays:
    """Batches of tensors made of NumPy arrays."""

    def __init__(self, inputs: Any) -> None:
        self.inputs = inputs

    def __iter__(self) -> Iterator[Any]:
        for x, y in zip(self.inputs.split(4), Y.split(4), strict=True):
            yield torch.from_numpy(x.numpy() + np.float32(1)), y


DATA: dict[str, Callable[[Any], Any]] = {
    "TensorLoader": lambda x: TensorLoader(x, Y, batch_size=4, shuffle=True),
    "mapped": lambda x: TensorLoader(x, Y, batch_size=4).map(lambda batch: batch),
    "ResumableSampler": lambda x: DataLoader(TensorDataset(x, Y), 4, sampler=ResumableSampler(24)),
    "batch sampler": lambda x: DataLoader(
        TensorDataset(x, Y), batch_sampler=BatchSampler(ResumableSampler(24), 4, False)
    ),
    "shuffled": lambda x: DataLoader(TensorDataset(x, Y), 4, shuffle=True),
    "generator": lambda x: DataLoader(TensorDataset(x, Y), 4, shuffle=True, generator=own()),
    "list": lambda x: list(zip(x.split(4), Y.split(4), strict=True)),
    "by index": Lazy,
    "stream": lambda x: DataLoader(Stream(x), 4),
    "iterable": Arrays,
    "function": lambda x: lambda: list(zip(x.split(4), Y.split(4), strict=True)),
}
OTHER = X.clone()
OTHER[:, 0] = 7.0


def run(directory: Any, train: Any, at: int | None = None, plugins: Any = (), **options: Any) -> list[str]:
    """Fit, up to a step where it is paused; returns what was warned of."""
    seed_everything(0)
    plugins = [*plugins, Checkpoint(directory, save=every(updates=1), resume="auto", **options)]
    if at is not None:
        plugins.append(on("step_end", lambda learner: learner.pause() if learner.progress.steps == at else None))
    model = nn.Sequential(nn.Linear(3, 1), nn.Dropout(0.1))
    learner = Learner(model, nn.MSELoss(), lambda p: torch.optim.SGD(p, 0.01), plugins=plugins, standard=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        learner.fit(train, epochs=2, on_interrupt="return")
    return [str(each.message) for each in caught]


@pytest.mark.parametrize("kind", DATA)
def test_other_data_stop_a_resumed_run_before_its_first_step(kind, tmp_path):
    run(tmp_path, DATA[kind](X), at=8)
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(
        StateError, match=r"batch 1 of the open epoch is another one.*Checkpoint\(\.\.\., data=\"warn\"\)"
    ):
        run(tmp_path, DATA[kind](OTHER))
    assert sorted(os.listdir(tmp_path)) == before
    assert run(tmp_path, DATA[kind](X)) == []


@pytest.mark.parametrize("by", ["option", "environment"])
@pytest.mark.parametrize("kind", ["TensorLoader", "shuffled", "list"])
def test_other_data_pass_with_a_warning(kind, by, tmp_path, monkeypatch):
    run(tmp_path, DATA[kind](X), at=8)
    if by == "environment":
        monkeypatch.setenv("LOOPKIT_DATA", "warn")
    options = {"data": "warn"} if by == "option" else {}
    found = run(tmp_path, DATA[kind](OTHER), **options)
    assert any("batch 1 of the open epoch is another one than before. The run continues" in each for each in found)


def test_data_is_a_known_word(tmp_path):
    with pytest.raises(PluginError, match="data is 'warm': it is 'stop' or 'warn'"):
        Checkpoint(tmp_path, data="warm")


class SelfSeeded(IterableDataset[Any]):
    """Shuffles by a seed that it draws from the system."""

    def __iter__(self) -> Iterator[Any]:
        order = random.Random(os.urandom(8)).sample(range(24), 24)
        return ((X[i], Y[i]) for i in order)


def test_data_that_do_not_repeat_only_warn_at_a_resume(tmp_path):
    run(tmp_path, DataLoader(SelfSeeded(), 4), at=9)
    found = run(tmp_path, DataLoader(SelfSeeded(), 4))
    assert any("these data yield other batches each time they are read" in each for each in found)


class Seeded(IterableDataset[Any]):
    """Shuffles in each epoch by a seed that it drew from the system as it was made."""

    def __init__(self) -> None:
        self.seed = os.urandom(8)

    def __iter__(self) -> Iterator[Any]:
        order = random.Random(self.seed).sample(range(24), 24)
        return ((X[i], Y[i]) for i in order)


class SeededSampler(Sampler[int]):
    """The same in a sampler."""

    def __init__(self) -> None:
        self.seed = int.from_bytes(os.urandom(4))

    def __len__(self) -> int:
        return 24

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(24, generator=torch.Generator().manual_seed(self.seed)).tolist())


SEEDED: dict[str, Callable[[], Any]] = {
    "stream": lambda: DataLoader(Seeded(), 4),
    "sampler": lambda: DataLoader(TensorDataset(X, Y), 4, sampler=SeededSampler()),
    "iterable": lambda: Once(os.urandom(8)),
}


class Once:
    """Batches in an order that a process draws once."""

    def __init__(self, seed: bytes) -> None:
        self.seed = seed

    def __iter__(self) -> Iterator[Any]:
        order = random.Random(self.seed).sample(range(24), 24)
        return ((X[order[i : i + 4]], Y[order[i : i + 4]]) for i in range(0, 24, 4))


@pytest.mark.parametrize("kind", SEEDED)
def test_orders_that_a_process_seeds_itself_stop_a_resumed_run(kind, tmp_path):
    run(tmp_path, SEEDED[kind](), at=9)
    with pytest.raises(StateError, match="batch 2 of the open epoch is another one"):
        run(tmp_path, SEEDED[kind]())


class Step:
    """A step of a pipeline, as webdataset has them: a function, and what it is called with."""

    def __init__(self, f: Any, *args: Any, **kw: Any) -> None:
        self.f, self.args, self.kw = f, args, kw

    def __call__(self, data: Any) -> Any:
        return self.f(data, *self.args, **self.kw)


def _shuffle(data: Any, bufsize: int = 8, rng: Any = None, seed: Any = None) -> Iterator[Any]:
    drawn = rng or random.Random(os.urandom(8) if seed is None else seed)
    held = list(data)
    yield from drawn.sample(held, len(held))


_shuffle.__module__ = "webdataset.filters"


class Pipeline(IterableDataset[Any]):
    def __init__(self, *steps: Any) -> None:
        self.pipeline = list(steps)

    def __iter__(self) -> Iterator[Any]:
        data: Any = range(24)
        for step in self.pipeline:
            data = step(data)
        return ((X[i], Y[i]) for i in data)


@pytest.mark.parametrize("step", [lambda: Step(_shuffle), lambda: Step(_shuffle, 8), lambda: Step(_shuffle, rng=None)])
def test_a_shuffle_of_webdataset_that_seeds_itself_is_named_at_the_first_save(step, tmp_path):
    found = run(tmp_path, DataLoader(Pipeline(step()), 4), at=9)
    assert len(found) == 1
    assert "shuffle in the data of DataLoader seeds itself from the clock" in found[0]
    assert "Give shuffle(..., rng=random.Random(0))" in found[0]
    named, differs = run(tmp_path, DataLoader(Pipeline(step()), 4))
    assert "other batches each time they are read" in f"{named} {differs}"


@pytest.mark.parametrize("place", ["in mid-epoch", "between epochs"])
@pytest.mark.parametrize("given", [{"rng": random.Random}, {"seed": int}])
def test_a_shuffle_of_webdataset_that_is_given_a_seed_is_exact(given, place):
    ((name, kind),) = given.items()
    check_exact(
        lambda: (DataLoader(Pipeline(Step(_shuffle, **{name: kind(3)})), 4), DataLoader(TensorDataset(X, Y), 8)), place
    )


class Noisy(TensorDataset):
    def __getitem__(self, index: int) -> Any:
        return X[index] + torch.randn(()), Y[index]


class NoisyByIndex(Lazy):
    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return x + torch.randn(()), y


EXACT: dict[str, Make] = {
    "noise between draws of training": lambda: (DataLoader(Noisy(X, Y), 4, shuffle=True), None),
    "noise by index": lambda: (NoisyByIndex(X), None),
    "noise, position kept": lambda: (DataLoader(Noisy(X, Y), 4, sampler=ResumableSampler(24)), None),
    "mapped noise": lambda: (TensorLoader(X, Y, batch_size=4).map(lambda b: (b[0] + torch.randn(()), b[1])), None),
    "last batch is smaller": lambda: (TensorLoader(X, Y, batch_size=5, shuffle=True), None),
    "worker": lambda: (DataLoader(TensorDataset(X, Y), 5, sampler=ResumableSampler(24), num_workers=1), None),
    "sampler, last batch is smaller": lambda: (
        DataLoader(TensorDataset(X, Y), 5, sampler=ResumableSampler(24)),
        None,
    ),
}


@pytest.mark.parametrize("kind", EXACT)
def test_data_that_draw_are_exact_and_never_stop(kind):
    check_exact(EXACT[kind], "in mid-epoch")


@pytest.mark.parametrize("kind", ["TensorLoader", "list", "shuffled"])
def test_batches_that_training_changes_in_place_prove_nothing(kind, tmp_path):
    def change(step: Any) -> None:
        step.batch[0].mul_(0.5)

    changes = on("step_begin", change, "changes", updates=("batch",))
    run(tmp_path, DATA[kind](X.clone()), at=8, plugins=[changes])
    assert run(tmp_path, DATA[kind](X.clone()), plugins=[on("step_begin", change, "changes", updates=("batch",))]) == []


def test_nothing_is_hashed_without_a_save(monkeypatch):
    from loopkit.engine.kept.data import data_check as proof

    monkeypatch.setattr(proof, "digest", lambda value: pytest.fail("hashed"))
    learner = Learner(nn.Linear(3, 1), nn.MSELoss(), lambda p: torch.optim.SGD(p, 0.01), standard=False)
    learner.fit(DATA["list"](X), epochs=1)


class Picture:
    """Something that has no digest."""

    shape = (4, 3)


def test_data_without_a_digest_are_unproved_in_explain(tmp_path):
    def own(batch: Any) -> Any:
        return {"inputs": batch[0], "targets": batch[1], "picture": Picture()}

    seed_everything(0)
    saves = Checkpoint(tmp_path, save=every(updates=1))
    learner = Learner(
        nn.Linear(3, 1), nn.MSELoss(), lambda p: torch.optim.SGD(p, 0.01), plugins=[saves], standard=False
    )
    learner.fit(TensorLoader(X, Y, batch_size=4).map(own), epochs=1)
    assert "data of phase 'train': unproved at a resume, as dict(" in str(learner.explain())
