"""Loaders of torchdata draw an epoch's order again, as it was, whatever their samplers are."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from helpers import on
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
)
from torch.utils.data import default_collate as collate

from engine.kept.resumed import PLACES, Make, X, Y, check_exact, make_run
from loopkit import Learner
from loopkit.errors import StateError

stateful = pytest.importorskip("torchdata.stateful_dataloader")
nodes = pytest.importorskip("torchdata.nodes")
Stateful = pytest.importorskip("torchdata.stateful_dataloader.sampler").RandomSampler

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
SET = TensorDataset(X, Y)


class AtOnce(Sampler[int]):
    """Draws an order when an iteration begins."""

    def __len__(self) -> int:
        return len(X)

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(len(X)).tolist())


class Later(AtOnce):
    """Draws an order when the first index is asked for."""

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(len(X)).tolist()


class OneByOne(AtOnce):
    """Draws each index when it is asked for."""

    def __iter__(self) -> Iterator[int]:
        for _ in range(len(X)):
            yield int(torch.randint(len(X), ()))


class Own(AtOnce):
    """Draws an order from a generator of its own."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)

    def __iter__(self) -> Iterator[int]:
        return iter(self.rng.permutation(len(X)).tolist())


class Batches:
    """Batches of indices, drawn by Python when an iteration begins."""

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[list[int]]:
        order = list(range(len(X)))
        random.shuffle(order)
        return iter([order[i : i + 4] for i in range(0, len(X), 4)])


class Noisy(Dataset[Any]):
    """Draws for each sample."""

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, index: int) -> Any:
        return X[index] + torch.randn(()), Y[index]


SAMPLERS: dict[str, Callable[[], Any]] = {
    "subset": lambda: SubsetRandomSampler(range(24)),
    "at once": AtOnce,
    "later": Later,
    "one by one": OneByOne,
    "own generator": Own,
}


def loaded(sampler: Callable[[], Any], **options: Any) -> Make:
    return lambda: (stateful.StatefulDataLoader(SET, 4, sampler=sampler(), **options), DataLoader(SET, 8))


def linked(sampler: Callable[[], Any], data: Any = SET, **options: Any) -> Make:
    def make() -> tuple[Any, Any]:
        samples = nodes.MapStyleWrapper(map_dataset=data, sampler=sampler())
        return nodes.Loader(nodes.Mapper(nodes.Batcher(samples, 4), collate), **options), DataLoader(SET, 8)

    return make


KINDS: dict[str, Make] = {
    **{name: loaded(sampler) for name, sampler in SAMPLERS.items()},
    **{f"nodes, {name}": linked(sampler) for name, sampler in SAMPLERS.items()},
    "nodes, sampler of torchdata": linked(lambda: Stateful(SET)),
    "nodes, sampler of torch": linked(lambda: RandomSampler(SET)),
    "nodes, noise": linked(Later, Noisy()),
    "nodes that do not restart": linked(AtOnce, restart_on_stop_iteration=False),
    "batches": lambda: (stateful.StatefulDataLoader(SET, batch_sampler=Batches()), DataLoader(SET, 8)),
}
WORKERS: dict[str, Make] = {
    "own generator": loaded(Own, num_workers=2),
    "subset": loaded(SAMPLERS["subset"], num_workers=1),
    "persistent": loaded(AtOnce, num_workers=2, persistent_workers=True),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", KINDS)
def test_order_of_a_loader_of_torchdata_is_exact_after_a_resume(kind, place):
    check_exact(KINDS[kind], place)


@pytest.mark.slow  # each run starts workers three times
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", WORKERS)
def test_order_is_exact_with_workers(kind, place):
    check_exact(WORKERS[kind], place)


class Numbers:
    """The samples of a stream, in their order."""

    def __init__(self) -> None:
        self.used = 0

    def __iter__(self) -> Iterator[int]:
        while self.used < len(X):
            self.used += 1
            yield self.used - 1
        self.used = 0


class BufferShuffled:
    """Fills a buffer, and yields it in another order; its state is how many samples it has read."""

    def __init__(self, inner: Any, buffer_size: int) -> None:
        self.inner, self.buffer_size = inner, buffer_size

    def __iter__(self) -> Iterator[int]:
        samples = iter(self.inner)
        while held := [each for _, each in zip(range(self.buffer_size), samples, strict=False)]:
            yield from random.Random(0).sample(held, len(held))


class Filtered:
    """A step of a stream after others."""

    def __init__(self, *inner: Any) -> None:
        self.inner = inner

    def __iter__(self) -> Iterator[int]:
        return iter(self.inner[-1])


class Stream(IterableDataset[Any]):
    """A stream with a state, which begins each epoch where the state is until it is told an epoch."""

    def __init__(self, buffer_size: int = 8, *, steps: int = 0) -> None:
        self._numbers, self._loaded = Numbers(), 0
        self._samples: Any = BufferShuffled(self._numbers, buffer_size) if buffer_size else self._numbers
        for _ in range(steps):
            self._samples = Filtered(self._samples)

    def set_epoch(self, epoch: int) -> None:
        self._loaded = 0

    def __iter__(self) -> Iterator[Any]:
        self._numbers.used = self._loaded
        return ((X[i], Y[i]) for i in self._samples)

    def state_dict(self) -> dict[str, Any]:
        return {"used": self._numbers.used}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loaded = state["used"]


def node(stream: Stream) -> Any:
    return nodes.Loader(nodes.Mapper(nodes.Batcher(nodes.IterableWrapper(stream), 4), collate))


LOST: dict[str, Callable[[], Any]] = {
    "shuffled": lambda: stateful.StatefulDataLoader(Stream(), 4),
    "filtered": lambda: stateful.StatefulDataLoader(Stream(steps=12), 4),
    "nodes": lambda: node(Stream()),
}
HERE = r"Give torch\.utils\.data\.DataLoader in place of (Stateful|Loader)"


@pytest.mark.parametrize("kind", LOST)
def test_a_buffer_that_a_state_leaves_out_is_named_and_refused_in_mid_epoch(kind):
    def make() -> Any:
        return LOST[kind](), None

    with pytest.warns(UserWarning, match=HERE), pytest.raises(StateError, match=HERE):
        make_run(make, PLACES["in mid-epoch"])


def test_a_checkpoint_with_such_a_position_is_refused():
    def plain() -> Any:
        return stateful.StatefulDataLoader(Stream(buffer_size=1), 4), None

    state = make_run(plain, PLACES["in mid-epoch"])[0].state
    with pytest.warns(UserWarning, match=HERE), pytest.raises(StateError, match=HERE):
        make_run(lambda: (LOST["shuffled"](), None), state=state)


EXACT: dict[str, Make] = {
    "plain loader": lambda: (DataLoader(Stream(), 4), DataLoader(SET, 8)),
    "plain loader, filtered": lambda: (DataLoader(Stream(steps=3), 4), DataLoader(SET, 8)),
    "no buffer": lambda: (stateful.StatefulDataLoader(Stream(0), 4), DataLoader(SET, 8)),
    "buffer of one sample": lambda: (stateful.StatefulDataLoader(Stream(1), 4), DataLoader(SET, 8)),
    "nodes": lambda: (node(Stream(0)), DataLoader(SET, 8)),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", EXACT)
def test_streams_resume_with_the_rest_and_whole_later_epochs(kind, place):
    check_exact(EXACT[kind], place)


@pytest.mark.filterwarnings("ignore:the stream in StatefulDataLoader is shuffled")
def test_a_pause_whose_epoch_cannot_be_resumed_is_never_a_new_fit_in_silence(capsys):
    learner = Learner(torch.nn.Linear(3, 1), torch.nn.MSELoss(), lambda p: torch.optim.SGD(p, 0.1), standard=False)
    learner.add(on("step_end", lambda learner, **_: learner.pause("enough"), "pauses"))
    learner.fit(LOST["shuffled"](), epochs=2, on_interrupt="return")
    with pytest.raises(StateError, match=r"learner\.forget\(\) drops the epoch that was open"):
        learner.state_dict()
    learner.remove("pauses")
    learner.fit(LOST["shuffled"](), epochs=2)
    assert "the epoch that was open cannot be resumed: the stream in" in capsys.readouterr().err
    assert learner.progress.steps == 1 + 12
    learner.state_dict()
