from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from loopkit.data import (
    Loader,
    LoaderError,
    ResumableBatchSampler,
    ResumableSampler,
    SampleIndex,
    Shares,
    TensorLoader,
    from_function,
    seeded,
)
from loopkit.data.shards import restore_order, set_epoch, shard
from loopkit.errors import EmptyDataError, WorldError

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")

TAILS = ("uneven", "pad", "drop")
sizes = st.integers(1, 5)
counts = st.integers(1, 40)
batch_sizes = st.integers(1, 8)
tails = st.sampled_from(TAILS)


def make(kind: str, samples: int, batch_size: int, **options: Any) -> Any:
    """A loader of the numbers of samples."""
    if kind == "tensors":
        return TensorLoader(torch.arange(samples), batch_size=batch_size, **options)
    if kind == "mapped":
        return TensorLoader(torch.arange(samples), batch_size=batch_size, **options).map(lambda x: x)
    dropped = {"drop_last": options.pop("drop_last", False)}
    sampler = ResumableSampler(samples, **{"shuffle": False, **options})
    return DataLoader(range(samples), batch_size, sampler=sampler, **dropped)  # type: ignore[arg-type]


def go_to(loader: Any, epoch: int) -> None:
    (loader if isinstance(loader, Loader) else loader.batch_sampler).set_epoch(epoch)


def order_of(samples: int, shuffle: bool, epoch: int, seed: int = 0) -> list[int]:
    loader = TensorLoader(torch.arange(samples), batch_size=samples, shuffle=shuffle, seed=seed)
    loader.set_epoch(epoch)
    return list(next(iter(loader)).tolist())


def global_batches(order: list[int], whole: int, size: int, tail: str) -> list[list[int]]:
    """The batches of all processes together, one after the other."""
    batches = [order[low : low + whole] for low in range(0, len(order), whole)]
    left = len(batches[-1])
    if left < whole and tail == "drop":
        batches.pop()
    elif left < whole and tail == "pad":
        batches[-1] = list(itertools.islice(itertools.cycle(order), len(order) - left, len(order) - left + whole))
    elif left < size * min(whole // size, 2) and size > 1 and len(batches) > 1:
        batches[-2:] = [batches[-2] + batches[-1]]
    return batches


def flat(rows: Iterable[Iterable[Any]]) -> list[Any]:
    return list(itertools.chain.from_iterable(rows))


def lists(loader: Any) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


def steps_of(parts: list[Any]) -> list[list[list[int]]]:
    """For each step the batches of all ranks."""
    return [list(step) for step in zip(*map(lists, parts), strict=True)]


every_kind = pytest.mark.parametrize("kind", ["tensors", "sampler"])


# The cut


@every_kind
@settings(max_examples=250, deadline=None)
@given(
    size=sizes,
    samples=counts,
    batch_size=batch_sizes,
    tail=tails,
    shuffle=st.booleans(),
    drop_last=st.booleans(),
    epoch=st.integers(0, 2),
)
def test_processes_share_each_global_batch(
    kind: str, size: int, samples: int, batch_size: int, tail: str, shuffle: bool, drop_last: bool, epoch: int
) -> None:
    whole = size * batch_size
    effective = "drop" if drop_last else tail if size > 1 else "uneven"
    least = whole if effective == "drop" else 1 if effective == "pad" else size
    if kind == "tensors" and drop_last and samples < batch_size:
        return  # there is no such loader
    loader = make(kind, samples, batch_size, shuffle=shuffle, drop_last=drop_last)
    if samples < least and size > 1:
        with pytest.raises(EmptyDataError, match=f"an epoch of {samples} is too short for {size} processes"):
            shard(loader, 0, size, tail)
        return
    parts = [shard(loader, rank, size, tail)[0] for rank in range(size)]
    if size > 1:
        for part in parts:
            go_to(part, epoch)
        steps = steps_of(parts)
    else:
        epoch, steps = 0, steps_of(parts)
    order = order_of(samples, shuffle, epoch)
    assert [flat(step) for step in steps] == global_batches(order, whole, size, effective)
    assert {len(part) for part in parts} == {len(steps)}
    for step in steps[:-1]:
        assert {len(batch) for batch in step} == {batch_size}
    lengths = [len(batch) for batch in steps[-1]] if steps else [1]
    assert min(lengths) >= 1
    assert max(lengths) <= batch_size + 2
    assert min(lengths) > 1 or min(len(steps) - 1, batch_size - 1) == 0 or effective != "uneven" or size == 1
    assert max(lengths) - min(lengths) <= 1
    if effective == "uneven":
        assert sorted(flat(flat(steps))) == list(range(samples))


@every_kind
@pytest.mark.parametrize("size", [2, 4])
def test_the_union_of_a_step_is_the_batch_of_a_single_process(kind: str, size: int) -> None:
    parts = [shard(make(kind, 34, 3, shuffle=True, seed=4), rank, size)[0] for rank in range(size)]
    whole = make(kind, 34, 3 * size, shuffle=True, seed=4)
    for _ in range(2):
        assert [flat(step) for step in steps_of(parts)] == lists(whole)


@pytest.mark.parametrize("samples", [24, 25, 27, 31])
def test_batches_of_a_part_begin_like_tensors_of_their_own_and_stand_alone(samples: int) -> None:
    tensor = torch.arange(float(samples * 5)).reshape(samples, 5)
    expected = list(TensorLoader(tensor, batch_size=4, shuffle=True).shard(1, 3))
    batches = list(TensorLoader(tensor, batch_size=4, shuffle=True).shard(1, 3))
    assert {batch.data_ptr() % 64 for batch in batches} == {0}
    batches[0].fill_(-1)
    assert all(map(torch.equal, batches[1:], expected[1:]))


def test_parts_over_several_blocks_are_whole() -> None:
    tensor = torch.arange(100.0)[:, None].expand(100, 4096).contiguous()
    parts = [TensorLoader(tensor, batch_size=4, shuffle=True, seed=2).shard(rank, 3) for rank in range(3)]
    rows = [torch.cat([batch[:, 0] for batch in step]) for step in zip(*parts, strict=True)]
    assert torch.cat(rows).tolist() == order_of(100, True, 0, seed=2)


def test_a_part_gives_several_tensors_and_mappings() -> None:
    x, y = torch.arange(20.0).reshape(10, 2), torch.arange(10)
    pairs = list(TensorLoader(x, y, batch_size=2).shard(1, 2))
    named = list(TensorLoader({"x": x, "y": y}, batch_size=2).shard(1, 2))
    assert [pair[1].tolist() for pair in pairs] == [[2, 3], [6, 7], [9]]
    assert all(torch.equal(one["x"], other[0]) for one, other in zip(named, pairs, strict=True))


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize(("size", "n"), [(2, 6), (2, 7), (3, 7), (4, 2)])
def test_functions_are_called_with_every_index(tail: Any, size: int, n: int) -> None:
    loader = from_function(n, lambda index: index)
    if tail == "drop" and n < size:
        with pytest.raises(EmptyDataError):
            loader.shard(0, size, tail)
        return
    parts = [loader.shard(rank, size, tail) for rank in range(size)]
    steps = list(zip(*parts, strict=True))
    count = n // size if tail == "drop" else -(-n // size)
    assert steps == [tuple((i * size + rank) % n for rank in range(size)) for i in range(count)]
    assert {len(part) for part in parts} == {count}


def draw(batch: Any, generator: torch.Generator) -> tuple[Any, float]:
    return batch, torch.rand((), generator=generator).item()


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize(
    "make_loader",
    [
        lambda: TensorLoader(torch.arange(24), batch_size=2, shuffle=True),
        lambda: from_function(12, lambda index: torch.tensor([index])),
        lambda: from_function(12, lambda index, generator: torch.rand(1, generator=generator), seed=1),
    ],
)
def test_maps_with_seeds_draw_for_a_batch_what_a_single_process_draws(make_loader: Any, first: bool) -> None:
    loader = make_loader()
    parts = [
        loader.map(draw, seed=3).shard(rank, 3) if first else loader.shard(rank, 3).map(draw, seed=3)
        for rank in range(3)
    ]
    for _ in range(2):
        whole = loader.map(draw, seed=3)
        alone = [(batch.tolist(), number) for batch, number in whole]
        taken = [(batch.tolist(), number) for step in zip(*parts, strict=True) for batch, number in step]
        assert taken == alone
        assert len({number for _, number in taken}) == 12
        loader.set_epoch(whole.epoch)


def test_tail_with_fewer_samples_than_each_process_needs_joins_the_batch_before() -> None:
    x = torch.arange(10)
    assert lists(TensorLoader(x, batch_size=2).shard(1, 2, least=2)) == [[2, 3], [7, 8, 9]]
    sampler = ResumableSampler(range(10), shuffle=False).shard(1, 2, batch_size=2, least=2)
    assert list(sampler) == [[2, 3], [7, 8, 9]]


def test_maps_with_seeds_draw_other_numbers_in_each_part_of_the_tail() -> None:
    parts = [TensorLoader(torch.arange(31), batch_size=8).map(draw, seed=0).shard(rank, 3) for rank in range(3)]
    numbers = [number for part in parts for _, number in part]
    assert len(set(numbers)) == 6


def test_seeds_of_samples_do_not_depend_on_the_process() -> None:
    seeds = {int(index): index.seed for index in ResumableSampler(20, seed=2)}
    for rank in range(3):
        for index in itertools.chain(*ResumableSampler(20, seed=2).shard(rank, 3, batch_size=2)):
            assert isinstance(index, SampleIndex)
            assert index.seed == seeds[index]


def test_the_sampler_of_a_part_gives_its_samples_and_their_number() -> None:
    for rank, tail in itertools.product(range(3), TAILS):
        batches = ResumableSampler(23).shard(rank, 3, tail, batch_size=3)  # type: ignore[arg-type]
        assert list(batches.sampler) == flat(ResumableSampler(23).shard(rank, 3, tail, batch_size=3))  # type: ignore[arg-type]
        assert len(batches.sampler) == len(list(batches.sampler))


def test_a_part_begins_where_its_loader_is() -> None:
    loader = TensorLoader(torch.arange(12), batch_size=2)
    loader.load_state_dict({**loader.state_dict(), "epoch": 1, "position": 2})
    part = loader.shard(1, 2)
    assert (part.epoch, part.position, part.consumed) == (1, 2, 4)
    assert lists(part) == [[6, 7], [10, 11]]
    assert (loader.epoch, loader.position) == (1, 2)
    next(iter(loader))
    assert loader.shard(1, 2).state_dict(next_epoch=True)["epoch"] == 2


def test_size_1_cuts_nothing() -> None:
    loader = TensorLoader(torch.arange(7), batch_size=2)
    assert lists(loader.shard(0, 1, "drop")) == lists(loader)
    assert shard(loader, 0, 1) == (loader, "")
    stream = iter([1])
    assert shard(stream, 0, 1) == (stream, "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((2, 2), "rank is 2: there are 2 processes"),
        ((-1, 2), "rank is -1"),
        ((0, 0), "size is 0"),
        ((0, 2, "even"), "tail is 'even': it must be one of 'uneven', 'pad', 'drop'"),
    ],
)
def test_impossible_parts_are_refused(arguments: Any, message: str) -> None:
    with pytest.raises(LoaderError, match=message):
        TensorLoader(torch.arange(9), batch_size=2).shard(*arguments)
    with pytest.raises(LoaderError, match=message):
        ResumableSampler(9).shard(*arguments, batch_size=2)


def test_a_part_of_a_part_is_refused() -> None:
    with pytest.raises(LoaderError, match="it is one of 2 parts already"):
        TensorLoader(torch.arange(9), batch_size=2).shard(0, 2).shard(0, 2)
    with pytest.raises(LoaderError, match="it is one of 2 parts already"):
        ResumableSampler(9).shard(0, 2, batch_size=2).sampler.shard(0, 2, batch_size=2)
    with pytest.raises(LoaderError, match="the sampler is not a part"):
        ResumableBatchSampler(ResumableSampler(9))


# Positions for any number of processes


def consume(loader: TensorLoader, steps: int) -> list[list[int]]:
    return [batch.tolist() for batch in itertools.islice(loader, steps)]


def tensors(samples: int, batch_size: int, size: int, tail: Any = "uneven", seed: int = 0) -> list[TensorLoader]:
    loader = TensorLoader(torch.arange(samples), batch_size=batch_size, shuffle=True, seed=seed)
    return [loader.shard(rank, size, tail) for rank in range(size)]


@settings(max_examples=300, deadline=None)
@given(
    samples=st.integers(5, 40),
    legs=st.lists(st.tuples(sizes, batch_sizes, st.integers(0, 4)), min_size=1, max_size=6),
)
def test_an_epoch_over_changing_numbers_of_processes_has_each_sample_once(
    samples: int, legs: list[tuple[int, int, int]]
) -> None:
    state: dict[str, Any] | None = None
    taken: list[int] = []
    steps = 0
    for leg, (size, batch_size, count) in enumerate(legs):
        parts = tensors(samples, batch_size, size)
        if state is not None:
            for part in parts:
                own = part.state_dict()
                alike = own.get("processes") == state.get("processes") and own["batch_size"] != state["batch_size"]
                if alike:  # refused below, in a test of its own
                    return
                part.load_state_dict(json.loads(json.dumps(state)))
        left = parts[0].shares.steps(len(taken))
        last = leg == len(legs) - 1
        count = left if last else min(count, left)
        rows = [consume(part, count) for part in parts]
        assert {len(row) for row in rows} == {count}
        steps += count
        union = [index for step in zip(*rows, strict=True) for batch in step for index in batch]
        order, short = order_of(samples, True, 0), parts[0].shares.short(len(taken))
        if short and count:
            assert union == order[-short:] + order[: size - short]
            union = order[-short:]
        taken += union
        states = [part.state_dict() for part in parts]
        assert all(each == states[0] for each in states)
        state = states[0]
        if count or not last:
            assert (state["epoch"], state["position"]) == (0, steps)
            assert parts[0].consumed == len(taken)
    assert taken == order_of(samples, True, 0)


@pytest.mark.parametrize("before", [1, 2, 4])
@pytest.mark.parametrize("after", [1, 2, 4])
@every_kind
def test_resuming_at_every_position_gives_the_rest(kind: str, before: int, after: int) -> None:
    whole = 8
    for samples in (40, 43):
        order = order_of(samples, True, 0)
        full = [order[low : low + whole] for low in range(0, 40, whole)]
        for position in range(1, 5):
            parts = [shard(make(kind, samples, whole // before, shuffle=True), r, before)[0] for r in range(before)]
            taken = [
                flat(step)
                for step in zip(*([b.tolist() for b in itertools.islice(p, position)] for p in parts), strict=True)
            ]
            assert taken == full[:position]
            others = [shard(make(kind, samples, whole // after, shuffle=True), r, after)[0] for r in range(after)]
            for other in others:
                if kind == "tensors":
                    other.load_state_dict(parts[-1].state_dict())
                else:
                    other.batch_sampler.sampler.load_state_dict(
                        parts[-1].batch_sampler.sampler.state_dict(position * whole)
                    )
            rest = [flat(step) for step in steps_of(others)]
            assert flat(rest) == order[position * whole :]
            assert rest[:4] == full[position:][:4] or samples == 43
            assert sorted(flat(flat(steps_of(others)))) == list(range(samples))


def test_a_state_of_as_many_processes_is_bit_for_bit_the_same() -> None:
    for size in (1, 2, 4):
        one, other = tensors(40, 4, size)[-1], tensors(40, 4, size)[-1]
        consume(one, 2)
        other.load_state_dict(one.state_dict())
        assert other.state_dict() == one.state_dict()
    assert one.state_dict() == {
        "epoch": 0,
        "position": 2,
        "samples": 40,
        "batch_size": 4,
        "drop_last": False,
        "shuffle": True,
        "seed": 0,
        "processes": 4,
        "tail": "uneven",
        "consumed": 32,
    }


def test_a_state_of_one_process_has_nothing_new() -> None:
    (loader,) = tensors(40, 4, 1)
    consume(loader, 2)
    expected = {
        "epoch": 0,
        "position": 2,
        "samples": 40,
        "batch_size": 4,
        "drop_last": False,
        "shuffle": True,
        "seed": 0,
    }
    assert loader.state_dict() == expected
    part = tensors(40, 2, 2)[1]
    consume(part, 3)
    loader.load_state_dict(part.state_dict())
    assert loader.state_dict() == {**expected, "position": 3}  # 12 samples in 3 steps of 4


def test_a_state_that_its_position_does_not_tell_says_what_was_consumed() -> None:
    part, (loader,), (again,) = tensors(40, 4, 2)[1], tensors(40, 4, 1), tensors(40, 4, 1)
    consume(part, 3)
    loader.load_state_dict(part.state_dict())
    assert loader.state_dict()["consumed"] == 24
    consume(loader, 2)
    state = loader.state_dict()
    assert (state["position"], state["consumed"]) == (5, 32)
    again.load_state_dict(state)
    assert flat(lists(again)) == order_of(40, True, 0)[32:]
    assert again.state_dict()["epoch"] == 1
    assert "consumed" not in again.state_dict()


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda: tensors(40, 5, 2)[0], "batch_size 4 in the state, batch_size 5 here"),
        (lambda: tensors(40, 4, 2, "pad")[0], "tail 'uneven' in the state, tail 'pad' here"),
        (lambda: tensors(41, 4, 4)[0], "samples 40 in the state, samples 41 here"),
        (lambda: tensors(40, 4, 4, seed=1)[0], "seed 0 in the state, seed 1 here"),
        (lambda: tensors(40, 4, 1, seed=1)[0], "seed 0 in the state, seed 1 here"),
        (lambda: from_function(40, lambda index: index), "samples 40 in the state"),
    ],
)
def test_states_of_other_data_are_refused(other: Any, message: str) -> None:
    part = tensors(40, 4, 2)[0]
    consume(part, 2)
    with pytest.raises(LoaderError, match=message):
        other().load_state_dict(part.state_dict())


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"consumed": 41}, "the state's consumed is 41, but an epoch has 40"),
        ({"consumed": -1}, "consumed is -1"),
        ({"consumed": None}, "consumed is None"),
        ({"position": -1}, "position is -1"),
    ],
)
def test_malformed_states_are_refused(changed: dict[str, Any], message: str) -> None:
    part, other = tensors(40, 4, 2)[0], tensors(40, 4, 4)[0]
    for loader in (part, other):
        with pytest.raises(LoaderError, match=message):
            loader.load_state_dict({**part.state_dict(), **changed})
        assert loader.position == 0


def test_a_state_without_what_was_consumed_is_refused() -> None:
    part = tensors(40, 4, 2)[0]
    state = part.state_dict()
    del state["consumed"]
    for loader in (part, tensors(40, 4, 4)[0]):
        with pytest.raises(LoaderError, match="the state has no consumed"):
            loader.load_state_dict(state)


@pytest.mark.parametrize("sizes", [(1, 2, 1, 4), (4, 1, 2), (2, 4, 1)])
def test_functions_and_maps_go_on_with_other_numbers_of_processes(sizes: tuple[int, ...]) -> None:
    loader = from_function(21, lambda index: index).map(draw, seed=1)
    alone = list(loader)
    loader.set_epoch(0)
    taken: list[Any] = []
    state = None
    for leg, size in enumerate(sizes):
        parts = [loader.shard(rank, size) for rank in range(size)]
        for part in parts:
            if state is not None:
                part.load_state_dict(state)
        last = leg == len(sizes) - 1
        rows = [list(part if last else itertools.islice(part, 2)) for part in parts]
        taken += [batch for step in zip(*rows, strict=True) for batch in step]
        state = parts[0].state_dict()
    assert taken[:21] == alone
    assert [index for index, _ in taken[21:]] == list(range(len(taken) - 21))


# Loaders of the user's own


def numbers(n: int = 23, **options: Any) -> DataLoader[Any]:
    return DataLoader(range(n), **{"batch_size": 4, **options})  # type: ignore[arg-type]


def test_the_same_loader_gives_the_same_part() -> None:
    for loader in (numbers(), TensorLoader(torch.arange(9), batch_size=2)):
        part, line = shard(loader, 1, 2)
        assert shard(loader, 1, 2)[0] is part
        assert shard(loader, 1, 2)[1] == line
        assert shard(part, 1, 2) == (part, "")
        assert shard(loader, 0, 2)[0] is not part
        with pytest.raises(WorldError, match="is the part of rank 1 of 2, and this is rank 0 of 2"):
            shard(part, 0, 2)


def test_the_epoch_goes_on_from_pass_to_pass() -> None:
    loader = numbers(shuffle=True)
    epochs = [flat(flat(steps_of([shard(loader, 0, 2)[0]]))) for _ in range(3)]
    assert epochs[0] != epochs[1] != epochs[2]


def test_a_new_loader_for_each_pass_has_the_order_of_its_epoch() -> None:
    part = shard(numbers(shuffle=True), 0, 2)[0]
    for epoch in range(3):
        assert lists(shard(numbers(shuffle=True), 0, 2, epoch=epoch)[0]) == lists(part)


def test_sequential_loaders_keep_their_order() -> None:
    parts, lines = zip(*(shard(numbers(), rank, 2) for rank in range(2)), strict=True)
    assert [flat(step) for step in steps_of(list(parts))] == [
        list(range(8)),
        list(range(8, 16)),
        list(range(16, 23)),
    ]
    assert set(lines) == {
        "DataLoader: 3 steps of 2 x 4 samples, the last one of 7; ResumableSampler without shuffle in the place of "
        "SequentialSampler"
    }


@pytest.mark.parametrize(("generator", "seed"), [(None, 7), (5, 5)])
def test_random_loaders_take_the_order_of_their_seed(generator: int | None, seed: int) -> None:
    own = None if generator is None else torch.Generator().manual_seed(generator)
    loaders = [numbers(shuffle=True, generator=own) for _ in range(2)]
    parts, lines = zip(*(shard(loader, rank, 2, seed=7) for rank, loader in enumerate(loaders)), strict=True)
    assert flat(flat(steps_of(list(parts)))) == order_of(23, True, 0, seed)
    assert all(line.endswith(f"; ResumableSampler with seed {seed} in the place of RandomSampler") for line in lines)


@pytest.mark.parametrize(
    ("tail", "drop_last", "line", "steps"),
    [
        ("uneven", False, "3 steps of 2 x 4 samples, the last one of 7", 3),
        ("pad", False, "3 steps of 2 x 4 samples, the last one filled up with 1 from the epoch's begin", 3),
        ("drop", False, "2 steps of 2 x 4 samples, 7 left out", 2),
        ("uneven", True, "2 steps of 2 x 4 samples, 7 left out", 2),
    ],
)
def test_tails_are_told(tail: str, drop_last: bool, line: str, steps: int) -> None:
    part, said = shard(numbers(drop_last=drop_last), 0, 2, tail)
    assert line in said
    assert len(part) == len(list(part)) == steps


def collate(samples: list[int]) -> list[int]:
    return [-sample for sample in samples]


def begin_worker(worker: int) -> None:
    torch.manual_seed(worker)


def test_a_loader_made_anew_keeps_the_rest() -> None:
    class Named(DataLoader[Any]):
        note = "kept"

    loader = Named(
        range(8),  # type: ignore[arg-type]
        batch_size=2,
        num_workers=1,
        collate_fn=collate,
        pin_memory=False,
        timeout=20,
        worker_init_fn=begin_worker,
        prefetch_factor=3,
        persistent_workers=True,
        multiprocessing_context="fork",
        generator=torch.Generator(),
    )
    part, _ = shard(loader, 1, 2)
    assert type(part) is Named
    same = (
        "dataset num_workers collate_fn pin_memory timeout worker_init_fn prefetch_factor persistent_workers generator "
        "multiprocessing_context in_order"
    )
    assert all(getattr(part, name) is getattr(loader, name) for name in same.split())
    assert [list(part), list(part)] == [[[-2, -3], [-6, -7]]] * 2
    assert (loader.batch_size, type(loader.sampler), len(loader)) == (2, SequentialSampler, 4)
    assert next(iter(loader)) == [0, -1]


def test_loaders_without_batches_give_single_samples() -> None:
    loader = DataLoader(range(7), batch_size=None)  # type: ignore[arg-type]
    parts = [shard(loader, rank, 3)[0] for rank in range(3)]
    assert [list(part) for part in parts] == [[0, 3, 6], [1, 4, 0], [2, 5, 1]]
    assert len(parts[0]) == 3


def test_plain_batch_samplers_are_cut() -> None:
    loader = DataLoader(range(9), batch_sampler=BatchSampler(SequentialSampler(range(9)), 2, True))  # type: ignore[arg-type]
    assert lists(shard(loader, 1, 2)[0]) == [[2, 3], [6, 7]]


def test_resumable_samplers_keep_order_and_place() -> None:
    sampler = ResumableSampler(16, seed=3)
    sampler.load_state_dict({**sampler.state_dict(8), "epoch": 2})
    loader = numbers(16, sampler=sampler)
    part, line = shard(loader, 1, 2)
    assert line == "DataLoader: 2 steps of 2 x 4 samples"
    assert lists(part) == [order_of(16, True, 2, seed=3)[12:]]


def test_datasets_with_seeds_give_what_they_give_in_one_process() -> None:
    data = seeded(torch.zeros(12), lambda x, generator: x + torch.rand((), generator=generator))
    whole = DataLoader(data, 6, sampler=ResumableSampler(data))
    parts = [shard(DataLoader(data, 3, sampler=ResumableSampler(data)), rank, 2)[0] for rank in range(2)]
    assert all(torch.equal(torch.cat(step), batch) for *step, batch in zip(*parts, whole, strict=True))


def test_a_distributed_sampler_is_left_alone_in_training() -> None:
    sampler = DistributedSampler(range(10), num_replicas=2, rank=1, shuffle=True)  # type: ignore[arg-type]
    loader = numbers(10, sampler=sampler)
    assert shard(loader, 1, 2) == (loader, "DataLoader: left as it is, with its DistributedSampler")
    assert set_epoch(loader, 3)
    assert sampler.epoch == 3
    with pytest.raises(WorldError, match=r"is the part of rank 1 of 2, and this is rank 1 of 4"):
        shard(loader, 1, 4)
    for other in (numbers(), [1], TensorLoader(torch.arange(3), batch_size=1)):
        assert not set_epoch(other, 3)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


class Own(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


class Batches(BatchSampler):
    pass


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (DataLoader(Stream()), "its dataset Stream gives samples one after the other"),
        (DataLoader(range(4), sampler=Own()), "Own decides which samples come"),  # type: ignore[arg-type]
        (DataLoader(range(4), sampler=WeightedRandomSampler([1.0], 4)), "WeightedRandomSampler decides"),  # type: ignore[arg-type]
        (DataLoader(range(4), sampler=RandomSampler(range(4), num_samples=2)), "RandomSampler decides"),  # type: ignore[arg-type]
        (DataLoader(range(4), sampler=RandomSampler(range(4), replacement=True)), "RandomSampler decides"),  # type: ignore[arg-type]
        (DataLoader(range(4), batch_sampler=Batches(SequentialSampler(range(4)), 2, False)), "Batches decides"),  # type: ignore[arg-type]
        ([torch.zeros(2)], "list cannot be shared out"),
        ((x for x in range(3)), "generator cannot be shared out"),
        (lambda: [1], "function cannot be shared out"),
    ],
)
def test_what_cannot_be_shared_is_refused(data: Any, message: str) -> None:
    with pytest.raises(
        WorldError, match=rf"(?s){message}.*shard it yourself by learner\.world\.rank.*DDP\(shard=False\)"
    ):
        shard(data, 0, 2)


def test_stateful_data_loaders_are_shared() -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    for workers in (0, 1):
        for shuffle in (False, True):
            loaders = [stateful(range(11), batch_size=2, shuffle=shuffle, num_workers=workers) for _ in range(2)]
            parts = [shard(loader, rank, 2)[0] for rank, loader in enumerate(loaders)]
            assert {type(part) for part in parts} == {stateful}
            for epoch in range(2):
                order = order_of(11, shuffle, epoch)
                assert [flat(step) for step in steps_of(parts)] == global_batches(order, 4, 2, "uneven")


# Order


@settings(max_examples=150, deadline=None)
@given(size=sizes, samples=st.integers(5, 40), batch_size=batch_sizes, tail=tails)
def test_restored_order_is_that_of_one_process(size: int, samples: int, batch_size: int, tail: Any) -> None:
    rows = torch.arange(samples * 2.0).reshape(samples, 2)
    if tail == "drop" and samples < size * batch_size:
        return
    parts = [
        [{"a": x * 2, "b": (x[:, 0],)} for x in TensorLoader(rows, batch_size=batch_size).shard(rank, size, tail)]
        for rank in range(size)
    ]
    ordered = restore_order(parts, samples)
    kept = samples // (size * batch_size) * size * batch_size if tail == "drop" and size > 1 else samples
    assert torch.equal(torch.cat([batch["a"] for batch in ordered]), rows[:kept] * 2)
    assert torch.equal(torch.cat([batch["b"][0] for batch in ordered]), rows[:kept, 0])


class Biased(DistributedSampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self)))


class FromOne(DistributedSampler[int]):
    """Its first epoch is 1."""

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch + 1)


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("samples", [8, 9, 10, 17])
def test_in_the_place_of_a_distributed_sampler_each_sample_comes_once(samples: int, shuffle: bool) -> None:
    data = torch.arange(samples)
    kinds = DistributedSampler, FromOne, DistributedSampler
    loaders = [DataLoader(data, 3, sampler=kind(data, 3, r, shuffle=shuffle)) for r, kind in enumerate(kinds)]  # type: ignore[arg-type]
    parts = [shard(loader, rank, 3, training=False)[0] for rank, loader in enumerate(loaders)]
    batches = [list(part) for part in parts]
    assert sum(len(batch) for part in batches for batch in part) == samples
    assert torch.equal(torch.cat(restore_order(batches, samples)), data)


def test_a_sampler_of_ones_own_that_is_distributed_is_refused_where_samples_are_counted() -> None:
    loader = numbers(10, sampler=Biased(range(10), 2, 0))  # type: ignore[arg-type]
    assert shard(loader, 0, 2)[0] is loader
    with pytest.raises(WorldError, match=r"Biased decides which samples come.*DDP\(shard=False\)"):
        shard(loader, 0, 2, training=False)


def test_order_of_outputs_that_differ_is_refused() -> None:
    with pytest.raises(WorldError, match="outputs of 1, 2 steps, by rank"):
        restore_order([[torch.zeros(1)], [torch.zeros(1)] * 2], 3)
    with pytest.raises(WorldError, match="outputs are str"):
        restore_order([[("a",)], [("b",)]], 1)


# Shares


@settings(max_examples=300, deadline=None)
@given(size=st.integers(2, 5), samples=counts, batch_size=batch_sizes, tail=tails, start=st.integers(0, 40))
def test_shares_of_the_rest_of_an_epoch_are_consecutive_and_complete(
    size: int, samples: int, batch_size: int, tail: Any, start: int
) -> None:
    shares, start = Shares(samples, batch_size, size, tail), min(start, samples)
    places = [shares.part(rank, start, step) for step in range(shares.steps(start)) for rank in range(size)]
    assert [low for low, _ in places] == [start, *(end for _, end in places)][: len(places)]
    assert all(low < end for low, end in places)
    seen = Counter(place % samples for low, end in places for place in range(low, end))
    left = set(range(start, samples))
    if tail == "drop":
        assert set(seen) <= left
        assert len(left - set(seen)) < shares.whole
    else:
        assert left <= set(seen)
        assert tail == "pad" or shares.short(start) or seen == Counter(left)
    for step in range(shares.steps(start)):
        used = shares.used(start, step)
        assert used == places[step * size][0]
        assert shares.steps(used) == shares.steps(start) - step or shares.short(used)
