from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from loopkit.base import generators
from loopkit.data import ResumableSampler, TensorLoader, from_function, seeded
from loopkit.data.shards import shard
from loopkit.engine.kept.data.loader_positions import (
    begin,
    epoch_length,
    facts,
    load_position,
    needs_replay,
    resume,
    save_position,
)
from loopkit.errors import StateError

stateful_dataloader = pytest.importorskip("torchdata.stateful_dataloader")
torchdata_nodes = pytest.importorskip("torchdata.nodes")
StatefulDataLoader = stateful_dataloader.StatefulDataLoader
StatefulDistributedSampler = pytest.importorskip("torchdata.stateful_dataloader.sampler").StatefulDistributedSampler

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")

SAMPLES = torch.arange(20.0)
EPOCHS = 3


def noise(sample: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return sample + torch.rand((), generator=generator)


class Stream(IterableDataset[torch.Tensor]):
    """Samples in order, shared out among the workers."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        worker = torch.utils.data.get_worker_info()
        return iter(SAMPLES[worker.id :: worker.num_workers] if worker else SAMPLES)


class StreamWithState(IterableDataset[torch.Tensor]):
    """Samples in order, with a place that is saved; of several workers each gives all of them."""

    def __init__(self) -> None:
        self.place = self.first = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        first, self.first = self.first, 0
        for index in range(first, 10):
            self.place = index + 1
            yield SAMPLES[index]

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.first = state["place"]


class Lazy:
    """Batches by index, without ``__iter__``; counts those that are made."""

    def __init__(self) -> None:
        self.made: list[int] = []

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> torch.Tensor:
        if index >= 5:
            raise IndexError
        self.made.append(index)
        return SAMPLES[4 * index : 4 * index + 4]


class Shuffled:
    """An iterable without a position, whose order comes from the global generator or its own."""

    def __init__(self, generator: torch.Generator | None = None) -> None:
        self.generator = generator

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from SAMPLES[torch.randperm(20, generator=self.generator)].split(4)


class Counter:
    """An iterable with a state of its own: epochs of five batches, the rest of one that was left among them."""

    def __init__(self) -> None:
        self.next = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.next % 6 < 5:
            self.next += 1
            yield torch.tensor([float(self.next)])
        self.next += 1

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = state["next"]


def nodes(sampler: Any = None, **options: Any) -> Any:
    """A loader of torchdata.nodes, whose samples two threads make."""
    source = torchdata_nodes.MapStyleWrapper(map_dataset=SAMPLES, sampler=sampler or ResumableSampler(20))
    made = torchdata_nodes.ParallelMapper(source, torch.Tensor.clone, num_workers=2, method="thread")
    batches = torchdata_nodes.Mapper(torchdata_nodes.Batcher(made, 4), torch.stack)
    return torchdata_nodes.Loader(torchdata_nodes.Prefetcher(batches, 2), **options)


def own() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def sampled(size: int = 4, workers: int = 0, **options: Any) -> DataLoader[Any]:
    data = seeded(SAMPLES, noise)
    return DataLoader(data, batch_size=size, sampler=ResumableSampler(data), num_workers=workers, **options)


def batch_sampled(size: int = 4, **options: Any) -> DataLoader[Any]:
    return DataLoader(SAMPLES, batch_sampler=BatchSampler(ResumableSampler(20), size, False), **options)


def persistent(make: Callable[..., Any], **options: Any) -> Any:
    return make(num_workers=2, persistent_workers=True, **options)


MAKERS: dict[str, Callable[[], Any]] = {
    "tensors": lambda: TensorLoader(SAMPLES, batch_size=4, shuffle=True),
    "function": lambda: from_function(5, lambda index, generator: torch.rand(2, generator=generator), seed=0),
    "sampler": sampled,
    "sampler, generator": lambda: sampled(generator=own()),
    "sampler, 2 workers": lambda: sampled(workers=2),
    "sampler, persistent workers": lambda: sampled(workers=2, persistent_workers=True),
    "batch sampler": batch_sampled,
    "sampler without batches": lambda: DataLoader(SAMPLES, batch_size=None, sampler=ResumableSampler(20)),
    "sampler in StatefulDataLoader": lambda: StatefulDataLoader(SAMPLES, batch_size=4, sampler=ResumableSampler(20)),
    "stateful": lambda: StatefulDataLoader(SAMPLES, batch_size=4, shuffle=True),
    "stateful, generator": lambda: StatefulDataLoader(SAMPLES, batch_size=4, shuffle=True, generator=own()),
    "stateful, 2 workers": lambda: StatefulDataLoader(SAMPLES, batch_size=4, shuffle=True, num_workers=2),
    "stateful, 2 workers, generator": lambda: StatefulDataLoader(
        SAMPLES, batch_size=4, shuffle=True, num_workers=2, generator=own()
    ),
    "stateful, persistent workers": lambda: persistent(StatefulDataLoader, dataset=SAMPLES, shuffle=True, batch_size=4),
    "stateful, rare snapshots": lambda: StatefulDataLoader(
        SAMPLES, batch_size=4, shuffle=True, num_workers=2, snapshot_every_n_steps=3
    ),
    "stateful, its own sampler": lambda: StatefulDataLoader(
        SAMPLES, batch_size=4, sampler=StatefulDistributedSampler(SAMPLES, num_replicas=1, rank=0)
    ),
    "stateful stream": lambda: StatefulDataLoader(StreamWithState(), batch_size=2),
    "stateful stream, 2 workers": lambda: StatefulDataLoader(StreamWithState(), batch_size=4, num_workers=2),
    "nodes": nodes,
    "nodes that do not restart": lambda: nodes(restart_on_stop_iteration=False),
    "nodes, torch's sampler": lambda: nodes(DistributedSampler(SAMPLES, num_replicas=1, rank=0)),
    "nodes, torchdata's sampler": lambda: nodes(StatefulDistributedSampler(SAMPLES, num_replicas=1, rank=0)),
    "own state": Counter,
    "list": lambda: list(SAMPLES.split(4)),
    "tuple": lambda: SAMPLES.split(4),
    "lazy": Lazy,
    "shuffled": Shuffled,
    "shuffled, generator": lambda: Shuffled(own()),
    "loader": lambda: DataLoader(SAMPLES, batch_size=4, shuffle=True),
    "loader, generator": lambda: DataLoader(SAMPLES, batch_size=4, shuffle=True, generator=own()),
    "loader, 2 workers": lambda: DataLoader(SAMPLES, batch_size=4, shuffle=True, num_workers=2),
    "loader, persistent workers": lambda: persistent(DataLoader, dataset=SAMPLES, batch_size=4, shuffle=True),
    "stream": lambda: DataLoader(Stream(), batch_size=4),
    "custom batches": lambda: DataLoader(SAMPLES, batch_sampler=Pairs(ResumableSampler(20), 4, False)),
}
STREAM = "ignore:the state of StreamWithState"


def makers(chosen: int, without: tuple[str, ...] = ()) -> list[Any]:
    """`MAKERS` as parameters; of those that start workers, which takes long, each third one, the others slow."""
    working = [name for name in MAKERS if "workers" in name or "snapshots" in name]
    left = [name for i, name in enumerate(working) if i % 3 != chosen]
    return [
        pytest.param(make, id=name, marks=pytest.mark.slow if name in left else ())
        for name, make in MAKERS.items()
        if name not in without
    ]


class Pairs(BatchSampler):
    """Batches of a size that only it knows."""

    def __iter__(self) -> Iterator[list[int]]:
        indices = iter(self.sampler)
        for size in (4, 2, 6, 1, 7):
            yield [next(indices) for _ in range(size)]


class Run:
    """Passes over data, in which every step draws a number, like dropout."""

    def __init__(self, data: Any, left: dict[int, int], save: tuple[int, int | None] | None = None) -> None:
        self.data, self.left, self.save = data, left, save
        self.steps: list[tuple[torch.Tensor, float]] = []
        self.saved: tuple[dict[str, Any], Any, int, int] | None = None

    def go(self, first: int = 0, saved: dict[str, Any] | None = None, edge: Any = None) -> Run:
        for epoch in range(first, EPOCHS):
            count = 0
            if saved is not None:
                generators.restore(edge)
                skip = load_position(self.data, saved, replay=True)
                assert bool(skip) == (saved["running"] and saved["kind"] in ("sequence", "iterable"))
                if skip and needs_replay(self.data):
                    generators.restore(saved["begun"]["generators"])
                begun = saved.get("begun") or begin(self.data)
                batches, count = resume(self.data, saved, skip), saved["steps"]
                if saved["running"]:
                    generators.restore(edge)
                saved = None
            else:
                begun = begin(self.data)
                batches = iter(self.data)
            for batch in batches:
                self.steps.append((torch.as_tensor(batch).clone(), torch.rand(()).item()))
                count += 1
                if self.save == (epoch, count):
                    self.keep(save_position(self.data, count, running=True, begun=begun), epoch)
                if self.left.get(epoch) == count:
                    break
            if self.save == (epoch, None):
                self.keep(save_position(self.data, 0, running=False), epoch + 1)
        return self

    def keep(self, saved: dict[str, Any], epoch: int) -> None:
        assert plain(saved)
        self.saved = saved, generators.save(), len(self.steps), epoch


def plain(value: Any) -> bool:
    """Whether a state holds nothing but what a checkpoint can hold."""
    if isinstance(value, dict):
        return all(type(key) in (str, int) for key in value) and all(map(plain, value.values()))
    if type(value) in (list, tuple):
        return all(map(plain, value))
    return value is None or isinstance(value, (bool, int, float, str, torch.Tensor))


def same(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(
        torch.equal(x, y) and drawn == again for (x, drawn), (y, again) in zip(one, other, strict=True)
    )


def check_exact(make: Callable[[], Any], save: tuple[int, int | None], left: dict[int, int]) -> None:
    torch.manual_seed(5)
    expected = Run(make(), left).go().steps
    torch.manual_seed(5)
    run = Run(make(), left, save).go()
    assert same(run.steps, expected), "saving changed the run"
    assert run.saved is not None
    saved, edge, done, epoch = run.saved
    torch.manual_seed(99)
    assert same(Run(make(), left).go(epoch, saved, edge).steps, expected[done:])


# Going on exactly


@pytest.mark.filterwarnings(STREAM)
@pytest.mark.parametrize("make", makers(0))
def test_position_in_mid_epoch_goes_on_with_the_next_batch(make: Callable[[], Any]) -> None:
    check_exact(make, (1, 2), {})


@pytest.mark.filterwarnings(STREAM)
@pytest.mark.parametrize("make", makers(1))
def test_position_between_epochs_goes_on_with_the_next_epoch(make: Callable[[], Any]) -> None:
    check_exact(make, (0, None), {})


@pytest.mark.filterwarnings(STREAM)
@pytest.mark.parametrize("make", makers(2))
def test_position_after_a_pass_that_was_left_goes_on_with_the_next_epoch(make: Callable[[], Any]) -> None:
    check_exact(make, (1, None), {1: 2})


@pytest.mark.filterwarnings(STREAM)
@pytest.mark.parametrize("make", makers(0, without=("sampler without batches",)))
def test_position_at_the_last_batch_goes_on_with_the_end_of_the_pass(make: Callable[[], Any]) -> None:
    check_exact(make, (1, 5), {})


@pytest.mark.slow
@pytest.mark.filterwarnings(STREAM)
@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("left", [{}, {0: 2}, {1: 3}])
def test_position_is_exact_wherever_it_was_saved(name: str, left: dict[int, int]) -> None:
    make = MAKERS[name]
    for epoch in range(2):
        used = left.get(epoch - 1, 0) if name == "own state" else 0
        for count in [*range(1, min(left.get(epoch, 6), 6 - used)), None]:
            check_exact(make, (epoch, count), left)


@pytest.mark.parametrize("make", [MAKERS["tensors"], sampled, MAKERS["sampler, 2 workers"]])
def test_position_is_exact_after_a_second_resumption_in_one_epoch(make: Callable[[], Any]) -> None:
    expected = [batch.clone() for batch in make()]
    saved, batches = None, []
    for steps in (1, 3, 4):
        data = make()
        if saved is not None:
            load_position(data, saved, replay=False)
        rest = iter(data) if saved is None else resume(data, saved, 0)
        while len(batches) < steps:
            batches.append(next(rest))
        saved = save_position(data, steps, running=True)
    assert saved["state"]["position"] == (4 if saved["kind"] == "loader" else 16)
    assert all(map(torch.equal, batches, expected))


def test_position_saved_right_after_it_was_loaded_is_the_same() -> None:
    for make in (MAKERS["tensors"], sampled):
        data, again = make(), make()
        next(iter(data))
        saved = save_position(data, 1, running=True)
        load_position(again, saved, replay=False)
        assert save_position(again, 1, running=True) == saved


def test_position_before_the_first_batch_of_a_pass_is_the_next_epoch() -> None:
    data = sampled()
    next(iter(data))
    saved = save_position(data, 0, running=True)
    assert (saved["running"], saved["state"]["epoch"], saved["state"]["position"]) == (False, 1, 0)


def test_position_of_a_list_makes_no_batch_that_is_passed_over() -> None:
    data = Lazy()
    saved = save_position(data, 3, running=True)
    assert len(list(resume(data, saved, load_position(data, saved, replay=False)))) == 2
    assert data.made == [3, 4]


def test_position_is_loaded_into_data_that_is_in_use() -> None:
    data = sampled(workers=2)
    expected = [*data]
    again = sampled(workers=2)
    batches = iter(again)
    next(batches)
    next(batches)
    saved = save_position(again, 2, running=True)
    next(batches)
    load_position(again, saved, replay=False)
    assert all(map(torch.equal, resume(again, saved, 0), expected[2:]))


# Another batch size


@pytest.mark.parametrize("size", [1, 3, 8, 50])
@pytest.mark.parametrize("workers", [0, 2])
def test_sampler_goes_on_with_another_batch_size(size: int, workers: int) -> None:
    data = sampled(workers=workers)
    batches = iter(data)
    used = [next(batches), next(batches)]
    saved = save_position(data, 2, running=True)
    again = sampled(size)
    with pytest.warns(UserWarning, match=f"batch size: 4 before, {size} now") as caught:
        assert load_position(again, saved, replay=False) == 0
    assert len(caught) == 1
    rest = list(resume(again, saved, 0))
    assert torch.equal(torch.cat(used + rest), torch.cat(list(sampled())))
    assert epoch_length(again, saved) == 2 + len(rest)
    if len(rest) > 1:
        third = sampled(size)
        load_position(again, saved | {"facts": facts(again)}, replay=False)
        next(iter(again))
        load_position(third, save_position(again, 3, running=True), replay=False)
        assert torch.equal(torch.cat(list(third)), torch.cat(rest[1:]))


def test_epoch_length_without_last_batches_that_are_not_full() -> None:
    data = sampled()
    next(iter(data))
    saved = save_position(data, 1, running=True)
    again = sampled(3, drop_last=True)
    with pytest.warns(UserWarning, match="batch size"):
        load_position(again, saved, replay=False)
    assert epoch_length(again, saved) == 1 + len(list(again)) == 6


def test_epoch_length_is_that_of_the_data_between_epochs() -> None:
    for make in (sampled, MAKERS["list"], MAKERS["loader"]):
        assert epoch_length(make(), save_position(make(), 0, running=False)) == 5
    assert epoch_length(Shuffled(), save_position(Shuffled(), 0, running=False)) is None


# Another number of processes


def by_tensors(size: int, batch_size: int, tail: str = "uneven", samples: int = 45, **options: Any) -> list[Any]:
    """The parts of all processes; samples are numbers."""
    loader = TensorLoader(torch.arange(samples), batch_size=batch_size, shuffle=True, **options)
    return [shard(loader, rank, size, tail, training=False)[0] for rank in range(size)]


def by_map(size: int, batch_size: int, tail: str = "uneven", samples: int = 45, **options: Any) -> list[Any]:
    loader = TensorLoader(torch.arange(samples), batch_size=batch_size, shuffle=True, **options).map(lambda x: x)
    return [shard(loader, rank, size, tail, training=False)[0] for rank in range(size)]


def by_sampler(
    size: int, batch_size: int, tail: str = "uneven", samples: int = 45, workers: int = 0, **options: Any
) -> list[Any]:
    sampler = ResumableSampler(samples)
    loader = DataLoader(range(samples), batch_size, sampler=sampler, num_workers=workers, **options)  # type: ignore[arg-type]
    return [shard(loader, rank, size, tail, training=False)[0] for rank in range(size)]


def by_sampler_with_workers(size: int, batch_size: int) -> list[Any]:
    return by_sampler(size, batch_size, workers=1)


def by_stateful_loader(size: int, batch_size: int) -> list[Any]:
    loader = StatefulDataLoader(range(45), batch_size, sampler=ResumableSampler(45))
    return [shard(loader, rank, size, training=False)[0] for rank in range(size)]


def order_of(samples: int = 45) -> list[int]:
    return list(ResumableSampler(samples))


class Together:
    """A pass of several processes, that goes on where another was saved."""

    def __init__(self, parts: list[Any], saved: dict[str, Any] | None = None) -> None:
        self.parts, self.steps, self.taken = parts, 0, []  # type: ignore[var-annotated]
        if saved is None:
            self.batches, self.length = [iter(part) for part in parts], len(parts[0])
            return
        assert [load_position(part, saved, replay=False) for part in parts] == [0] * len(parts)
        self.steps = saved["steps"]
        lengths = [epoch_length(part, saved) for part in parts]
        assert len(set(lengths)) == 1
        assert lengths[0] is not None
        self.length = lengths[0]
        self.batches = [resume(part, saved, 0) for part in parts]

    def take(self, steps: int) -> None:
        for _ in range(min(steps, self.length - self.steps)):
            self.taken += [index for batches in self.batches for index in next(batches).tolist()]
            self.steps += 1

    def save(self) -> dict[str, Any]:
        saved = [save_position(part, self.steps, running=True) for part in self.parts]
        assert all(each == saved[0] for each in saved)
        assert plain(saved[0])
        return saved[0]

    def end(self) -> None:
        self.take(10_000)
        assert [next(batches, None) for batches in self.batches] == [None] * len(self.batches)


every_part = pytest.mark.parametrize(
    "make_parts", [by_tensors, by_map, by_sampler, by_sampler_with_workers, by_stateful_loader]
)


@every_part
@pytest.mark.parametrize("sizes", [(1, 2, 1, 4), (4, 2, 4), (2, 4, 1, 1)])
def test_position_goes_on_with_other_numbers_of_processes(make_parts: Any, sizes: tuple[int, ...]) -> None:
    whole, taken, saved = 8, [], None
    for size in sizes:
        run = Together(make_parts(size, whole // size), saved)
        assert run.length == 6
        run.take(1)
        saved, taken = run.save(), taken + run.taken
    run.taken = []
    run.end()
    assert taken + run.taken == order_of()
    assert run.steps == run.length == 6
    following = [list(part) for part in run.parts]
    epochs = ResumableSampler(45)
    list(epochs)
    assert [int(i) for step in zip(*following, strict=True) for batch in step for i in batch] == list(epochs)


@pytest.mark.filterwarnings("ignore:the data of .*samples per step of all processes")
@pytest.mark.filterwarnings("ignore:the rest of the epoch of")
@pytest.mark.parametrize("make_parts", [by_tensors, by_sampler])
@pytest.mark.parametrize("before", [1, 2, 4])
@pytest.mark.parametrize("after", [1, 2, 4])
@pytest.mark.parametrize("tail", ["uneven", "pad", "drop"])
def test_position_goes_on_from_everywhere_with_any_batch_size(
    make_parts: Any, before: int, after: int, tail: str
) -> None:
    if before == after:
        return
    for first, second in ((4, 4), (3, 5), (1, 3), (5, 1)):
        for samples in (22, 24):
            order = order_of(samples)
            for steps in range(1, len(make_parts(before, first, tail, samples)[0]) + 1):
                run = Together(make_parts(before, first, tail, samples))
                run.take(steps)
                saved, count = run.save(), len(run.taken)
                other = Together(make_parts(after, second, tail, samples), saved)
                again = other.save()
                assert again["steps"] == steps
                assert again["state"]["epoch"] == 0
                assert again["state"].get("consumed", again["state"]["position"]) <= samples or make_parts is by_tensors
                other.end()
                assert other.steps == other.length
                used = min(count, samples)
                rest = other.taken
                if tail == "drop" and after > 1:
                    assert rest == order[used : used + (samples - used) // (after * second) * after * second]
                else:
                    assert rest[: samples - used] == order[used:]
                    extra = rest[samples - used :]
                    assert len(extra) < after * second
                    assert tail == "pad" or not extra or (samples - used < after and len(extra) < after)


def test_position_of_as_many_processes_is_as_exact_as_that_of_one() -> None:
    for make_parts in (by_tensors, by_sampler):
        run = Together(make_parts(2, 4))
        run.take(2)
        saved = run.save()
        other = Together(make_parts(2, 4), saved)
        assert other.save() == saved
        run.end()
        other.end()
        assert other.taken == run.taken[16:]


def test_another_number_of_processes_is_told_where_steps_have_other_samples() -> None:
    for make_parts in (by_tensors, by_sampler):
        for middle in (True, False):
            run = Together(make_parts(1, 4))
            run.take(2)
            saved = save_position(run.parts[0], 2, running=middle)
            for size, batch_size in ((2, 2), (4, 1)):
                load_position(make_parts(size, batch_size)[0], saved, replay=False)
            with pytest.warns(UserWarning, match="samples per step of all processes: 4 before, 8 now") as caught:
                load_position(make_parts(2, 4)[0], saved, replay=False)
            assert len(caught) == 1


def test_position_of_other_data_is_refused_for_other_numbers_of_processes_too() -> None:
    run = Together(by_tensors(1, 4))
    run.take(2)
    for other, message in (
        (by_tensors(2, 2, samples=44), "samples: 45 before, 44 now"),
        (by_tensors(2, 2, seed=1), "seed 0 in the state, seed 1 here"),
        (by_sampler(2, 2), "position kept by: loader before, sampler now.*fit any number of processes, use loopkit"),
    ):
        with pytest.raises(StateError, match=message):
            load_position(other[0], run.save(), replay=False)
    alone = Together(by_tensors(2, 4))
    alone.take(1)
    with pytest.raises(StateError, match="batches: 6 before, 8 now; batch size: 4 before, 3 now"):
        load_position(by_tensors(2, 3)[0], alone.save(), replay=False)
    assert alone.save()["facts"]["processes"] == 2


@pytest.mark.filterwarnings("ignore:the data of .*samples per step of all processes")
def test_too_few_samples_for_the_processes_are_filled_up_and_told() -> None:
    for make_parts in (by_tensors, by_sampler):
        run = Together(make_parts(1, 2, samples=7))
        run.take(3)
        with pytest.warns(UserWarning, match="fewer than the 4 processes") as caught:
            other = Together(make_parts(4, 2, samples=7), run.save())
        told = [str(each.message) for each in caught if "fewer than the 4 processes" in str(each.message)]
        assert len(told) == 4
        assert "is 1 of 7 samples" in told[0]
        other.end()
        assert other.taken == [*order_of(7)[6:], *order_of(7)[:3]]


# What changed


@pytest.mark.parametrize(
    ("make", "other", "message"),
    [
        (MAKERS["tensors"], lambda: TensorLoader(SAMPLES, batch_size=5), "batches: 5 before, 4 now; batch size: 4"),
        (MAKERS["tensors"], lambda: TensorLoader(SAMPLES, batch_size=4, seed=1, shuffle=True), "seed 0 in the state"),
        (sampled, lambda: DataLoader(range(30), 4, sampler=ResumableSampler(30)), "samples: 20 before, 30 now"),
        (sampled, lambda: DataLoader(SAMPLES, 4, sampler=ResumableSampler(20, seed=1)), "seed 0 in the state, seed 1"),
        (sampled, MAKERS["list"], "position kept by: sampler before, sequence now"),
        (MAKERS["list"], lambda: list(SAMPLES.split(2)), "batches: 5 before, 10 now"),
        (MAKERS["loader"], lambda: DataLoader(SAMPLES, batch_size=5, shuffle=True), "batch size: 4 before, 5 now"),
        (MAKERS["loader"], lambda: DataLoader(range(19), batch_size=4), "samples: 20 before, 19 now"),
        (MAKERS["stream"], lambda: DataLoader(Stream(), batch_size=4, num_workers=2), "workers: 0 before, 2 now"),
        (MAKERS["stateful"], MAKERS["stateful, 2 workers"], "workers: 0 before, 2 now"),
        (MAKERS["stateful"], lambda: StatefulDataLoader(range(20), batch_size=5), "batch size: 4 before, 5 now"),
    ],
)
def test_position_in_mid_epoch_is_refused_for_other_data(
    make: Callable[[], Any], other: Callable[[], Any], message: str
) -> None:
    data = make()
    begun = begin(data)
    next(iter(data))
    saved = save_position(data, 1, running=True, begun=begun)
    with pytest.raises(StateError, match=message):
        load_position(other(), saved, replay=True)


@pytest.mark.parametrize(
    ("make", "other", "message"),
    [
        (MAKERS["tensors"], lambda: TensorLoader(SAMPLES, batch_size=5), "batch size: 4 before, 5 now; drop|4 before"),
        (sampled, lambda: DataLoader(range(30), 4, sampler=ResumableSampler(30)), "samples: 20 before, 30 now"),
        (sampled, lambda: DataLoader(SAMPLES, 4, sampler=ResumableSampler(20, seed=1)), "seed: 0 before, 1 now"),
        (sampled, MAKERS["list"], "position kept by: sampler before, sequence now"),
        (MAKERS["list"], lambda: list(SAMPLES.split(2)), "batches: 5 before, 10 now"),
        (MAKERS["loader"], MAKERS["loader, 2 workers"], "workers: 0 before, 2 now"),
        (MAKERS["stateful"], MAKERS["stateful, 2 workers"], "workers: 0 before, 2 now"),
    ],
)
def test_position_between_epochs_gives_one_warning_for_other_data(
    make: Callable[[], Any], other: Callable[[], Any], message: str
) -> None:
    data, saved = other(), save_position(make(), 0, running=False)
    with pytest.warns(UserWarning, match=message) as caught:
        assert load_position(data, saved, replay=False) == 0
    assert len(caught) == 1


def test_position_between_epochs_keeps_the_epoch_for_other_data() -> None:
    data = sampled()
    next(iter(data))
    other = DataLoader(range(30), 4, sampler=ResumableSampler(30))
    with pytest.warns(UserWarning, match="samples"):
        load_position(other, save_position(data, 0, running=False), replay=False)
    assert other.sampler.epoch == 1


def test_number_of_workers_makes_no_difference_to_a_sampler() -> None:
    data = sampled()
    next(iter(data))
    load_position(sampled(workers=2), save_position(data, 1, running=True), replay=False)


def test_number_of_workers_gives_a_warning_where_it_may_make_a_difference() -> None:
    data = MAKERS["loader"]()
    saved = save_position(data, 1, running=True, begun=begin(data))
    with pytest.warns(UserWarning, match="in mid-epoch: workers: 0 before, 2 now"):
        assert load_position(MAKERS["loader, 2 workers"](), saved, replay=True) == 1


def test_facts_are_what_can_be_told() -> None:
    assert facts(sampled(workers=2)) == {
        "kind": "sampler",
        "class": "DataLoader",
        "length": 5,
        "batch_size": 4,
        "samples": 20,
        "workers": 2,
        "in_order": True,
    }
    assert facts(MAKERS["tensors"]()) == {
        "kind": "loader",
        "class": "TensorLoader",
        "length": 5,
        "batch_size": 4,
        "samples": 20,
        "content": "(float32 (20,) 83eb87e69452)",
    }
    assert facts([1, 2]) == {"kind": "sequence", "class": "list", "length": 2}
    assert facts(Shuffled()) == {"kind": "iterable", "class": "Shuffled"}
    assert facts(iter([1])) == {"kind": "iterator", "class": "list_iterator"}
    assert facts(DataLoader(Stream()))["kind"] == "iterable"


# No position


@pytest.mark.parametrize("name", ["loader", "shuffled", "stream"])
def test_replay_is_not_done_unless_allowed(name: str) -> None:
    data = MAKERS[name]()
    assert needs_replay(data)
    saved = save_position(data, 2, running=True, begun=begin(data))
    with pytest.raises(StateError, match=r"has no position.*2 batches.*TensorLoader.*ResumableSampler.*replay=True"):
        load_position(data, saved, replay=False)


def test_replay_of_data_that_has_become_shorter_is_refused() -> None:
    data = Shuffled()
    saved = save_position(data, 9, running=True, begun=begin(data))
    with pytest.raises(StateError, match="ended after 5 batches, but 9"):
        resume(data, saved, load_position(data, saved, replay=True))


def test_an_iterator_in_its_first_pass_is_replayed() -> None:
    data = iter(SAMPLES.split(4))
    saved = save_position(data, 2, running=True, begun=begin(data))
    again = iter(SAMPLES.split(4))
    rest = resume(again, saved, load_position(again, saved, replay=True))
    assert all(map(torch.equal, rest, SAMPLES.split(4)[2:]))


@pytest.mark.parametrize("running", [True, False])
def test_an_iterator_that_an_earlier_pass_had_used_is_refused(running: bool) -> None:
    data = iter(SAMPLES.split(4))
    saved = save_position(data, 2, running=running, begun=begin(data), earlier_epochs=1)
    with pytest.raises(StateError, match="used once, and an earlier epoch had used it"):
        load_position(iter(SAMPLES.split(4)), saved, replay=True)


def test_an_iterator_whose_pass_was_left_is_refused() -> None:
    saved = save_position(iter(SAMPLES), 2, running=False)
    with pytest.raises(StateError, match="used once"):
        load_position(iter(SAMPLES), saved, replay=True)


def test_batches_without_an_order_have_no_position() -> None:
    data = sampled(workers=2, in_order=False)
    with pytest.raises(StateError, match=r"in_order=False.*Use in_order=True"):
        load_position(data, save_position(data, 1, running=True), replay=True)


def test_a_position_that_another_pass_has_moved_is_refused() -> None:
    data = MAKERS["tensors"]()
    batches = iter(data)
    next(batches)
    list(data)
    next(batches)
    with pytest.raises(StateError, match="2 batches of TensorLoader were used, but its position is 0: another epoch"):
        save_position(data, 2, running=True)


@pytest.mark.parametrize("value", [b"bytes", torch.Generator(), {(1, 2): 3}, object(), {1.5}])
def test_a_state_that_cannot_be_saved_is_refused(value: Any) -> None:
    data = Counter()
    data.state_dict = lambda: {"list": [value]}  # type: ignore[method-assign]
    with pytest.raises(StateError, match=r"Counter\.state_dict\(\)\['list'\]\[0\] is .*cannot be saved"):
        save_position(data, 0, running=False)


def test_a_state_is_copied() -> None:
    data, tensor = Counter(), torch.zeros(2)
    data.state_dict = lambda: {"tensor": tensor}  # type: ignore[method-assign]
    saved = save_position(data, 1, running=True)
    tensor.fill_(1)
    assert torch.equal(saved["state"]["tensor"], torch.zeros(2))


def test_a_dataset_whose_state_is_not_restored_between_epochs_is_named() -> None:
    data = MAKERS["stateful stream"]()
    with pytest.warns(UserWarning, match="the state of StreamWithState in StatefulDataLoader is not restored"):
        load_position(data, save_position(data, 0, running=False), replay=False)


@pytest.mark.parametrize("name", ["stateful", "stateful, 2 workers", "sampler, 2 workers", "loader, generator"])
def test_saving_draws_no_numbers_and_begins_no_pass(name: str) -> None:
    data = MAKERS[name]()
    before = torch.get_rng_state()
    children = len(os.listdir("/proc/self/task"))
    saved = save_position(data, 0, running=False)
    load_position(data, saved, replay=False)
    assert torch.equal(torch.get_rng_state(), before)
    assert len(os.listdir("/proc/self/task")) == children


def test_positions_give_no_warning_where_nothing_changed() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in ("tensors", "sampler", "list", "loader", "own state"):
            load_position(MAKERS[name](), save_position(MAKERS[name](), 0, running=False), replay=False)
