from __future__ import annotations

import copy
import doctest
import itertools
import json
import math
import pickle
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import BatchSampler, DataLoader, Subset

import loopkit.data
from loopkit import CancelEpoch, Learner, hookimpl
from loopkit.data import LoaderError, ResumableSampler, SampleIndex, TensorLoader, from_function, seeded
from loopkit.errors import EmptyDataError


def numbered(n: int, width: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs whose rows are all different, and the numbers of the samples as targets."""
    return torch.arange(float(n * width)).reshape(n, width), torch.arange(n)


def wide(n: int = 100) -> tuple[torch.Tensor, torch.Tensor]:
    """Samples of 16 KiB, so that an epoch takes several blocks."""
    return numbered(n, 4096)


def order_of(n: int, seed: int, epoch: int) -> list[int]:
    loader = TensorLoader(torch.arange(n), batch_size=n, shuffle=True, seed=seed)
    loader.set_epoch(epoch)
    return next(iter(loader)).tolist()


def by_hand(tensor: torch.Tensor, order: list[int], batch_size: int, drop_last: bool = False) -> list[torch.Tensor]:
    """One batch after the other, one sample after the other."""
    batches = []
    for low in range(0, len(order), batch_size):
        chosen = order[low : low + batch_size]
        if len(chosen) == batch_size or not drop_last:
            batches.append(torch.stack([tensor[i] for i in chosen]))
    return batches


def same(one: Any, other: Any) -> bool:
    """Whether two batches, or two lists of batches, are bitwise equal."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    return len(one) == len(other) and all(map(same, one, other))


class Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


class Negated(loopkit.data.Loader):
    """A loader of a user's, each of whose batches is made of one of the source's."""

    def batches(self, epoch: int, start: int, indices: torch.Tensor | None = None) -> Any:
        for batch in self.source.batches(epoch, start, indices):
            yield -batch


class Twice(loopkit.data.Loader):
    """A loader of a user's with more batches than the source has."""

    def __init__(self, source: Any) -> None:
        super().__init__(source, steps=2 * len(source))

    def __len__(self) -> int:
        return 2 * len(self.source)

    def batches(self, epoch: int, start: int, indices: torch.Tensor | None = None) -> Any:
        batches = self.source.batches(epoch, self.source.shares.used(0, start // 2), indices)
        return itertools.islice((batch for batch in batches for _ in range(2)), start % 2, None)


def loaders() -> dict[str, Any]:
    """Functions that make loaders of every kind, all of 7 batches or of several blocks."""
    inputs, targets = numbered(20)
    noise = lambda batch, generator: batch[0] + torch.rand(batch[0].shape, generator=generator)  # noqa: E731
    return {
        "tensors": lambda: TensorLoader(inputs, targets, batch_size=3, shuffle=True, seed=5),
        "in order": lambda: TensorLoader(inputs, targets, batch_size=3),
        "drop last": lambda: TensorLoader(inputs, batch_size=3, shuffle=True, drop_last=True),
        "blocks": lambda: TensorLoader(*wide(), batch_size=7, shuffle=True, seed=2),
        "mapping": lambda: TensorLoader({"a": inputs, "b": targets}, batch_size=3, shuffle=True),
        "wrapped": lambda: Negated(TensorLoader(inputs, batch_size=3, shuffle=True)),
        "counted": lambda: Twice(TensorLoader(inputs, batch_size=3, shuffle=True)),
        "mapped": lambda: TensorLoader(inputs, targets, batch_size=3, shuffle=True).map(lambda batch: batch[0] + 1),
        "mapped with seed": lambda: TensorLoader(inputs, targets, batch_size=3, shuffle=True).map(noise, seed=1),
        "function": lambda: from_function(7, lambda index: torch.full((2,), index)),
        "function with seed": lambda: from_function(7, lambda i, generator: torch.rand(3, generator=generator), seed=3),
    }


every_kind = pytest.mark.parametrize("make", loaders().values(), ids=loaders().keys())


# Batches


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 40),
    batch_size=st.integers(1, 45),
    shape=st.sampled_from([(), (3,), (16,), (2, 5), (0,)]),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool]),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
    seed=st.integers(-3, 2**70),
    epoch=st.integers(0, 5),
)
def test_tensor_loader_equals_batches_made_sample_by_sample(
    n: int,
    batch_size: int,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    shuffle: bool,
    drop_last: bool,
    seed: int,
    epoch: int,
) -> None:
    tensor = (torch.arange(n * math.prod(shape)) % 251).reshape(n, *shape).to(dtype)
    if drop_last and batch_size > n:
        batch_size = n
    loader = TensorLoader(tensor, batch_size=batch_size, shuffle=shuffle, seed=seed, drop_last=drop_last)
    loader.set_epoch(epoch)
    order = order_of(n, seed, epoch) if shuffle else list(range(n))
    expected = by_hand(tensor, order, batch_size, drop_last)
    assert same(list(loader), expected)
    assert len(loader) == len(expected)


@pytest.mark.parametrize("shuffle", [False, True])
def test_tensor_loader_equals_batches_made_by_hand_across_blocks(shuffle: bool) -> None:
    inputs, targets = wide()
    loader = TensorLoader(inputs, targets, batch_size=7, shuffle=shuffle, seed=2)
    order = order_of(100, 2, 0) if shuffle else list(range(100))
    batches = list(loader)
    assert same([batch[0] for batch in batches], by_hand(inputs, order, 7))
    assert same([batch[1] for batch in batches], by_hand(targets, order, 7))


def test_tensor_loader_takes_tensors_that_are_not_contiguous() -> None:
    tensor = torch.arange(60.0).reshape(6, 10).t()
    for shuffle in (False, True):
        batches = list(TensorLoader(tensor, batch_size=4, shuffle=shuffle))
        assert same(batches, by_hand(tensor, order_of(10, 0, 0) if shuffle else list(range(10)), 4))
        assert all(batch.is_contiguous() for batch in batches)


def test_tensor_loader_gives_one_tensor_itself() -> None:
    assert [type(batch) for batch in TensorLoader(torch.zeros(4, 2), batch_size=2)] == [torch.Tensor] * 2


def test_tensor_loader_gives_several_tensors_as_tuples() -> None:
    inputs, targets = numbered(5)
    assert [type(batch) for batch in TensorLoader(inputs, targets, batch_size=2)] == [tuple] * 3


def test_tensor_loader_gives_a_mapping_as_dicts() -> None:
    inputs, targets = numbered(5)
    pairs = TensorLoader(inputs, targets, batch_size=2, shuffle=True)
    named = TensorLoader({"inputs": inputs, "targets": targets}, batch_size=2, shuffle=True)
    assert same(list(named), [{"inputs": x, "targets": y} for x, y in pairs])


def test_tensor_loader_gives_a_mapping_of_one_as_dicts() -> None:
    assert same(list(TensorLoader({"x": torch.ones(2)}, batch_size=2)), [{"x": torch.ones(2)}])


# Order


@pytest.mark.parametrize(("n", "batch_size"), [(1, 1), (20, 3), (5000, 1), (1000, 1000)])
def test_shuffle_covers_every_sample_once_in_every_epoch(n: int, batch_size: int) -> None:
    loader = TensorLoader(torch.arange(n), batch_size=batch_size, shuffle=True)
    for _ in range(3):
        assert sorted(torch.cat(list(loader)).tolist()) == list(range(n))


def test_shuffle_takes_a_new_order_in_every_epoch() -> None:
    loader = TensorLoader(torch.arange(50), batch_size=8, shuffle=True)
    orders = {tuple(torch.cat(list(loader)).tolist()) for _ in range(10)}
    assert len(orders) == 10


def test_shuffle_takes_another_order_for_another_seed() -> None:
    orders = {tuple(order_of(50, seed, epoch)) for seed in range(10) for epoch in range(10)}
    assert len(orders) == 100


def test_shuffle_gives_every_place_to_every_sample_about_equally_often() -> None:
    first = Counter(order_of(4, 0, epoch)[0] for epoch in range(2000))
    # 2,000 draws of 4: standard deviation 19.4; five of them are never exceeded by chance
    assert all(abs(first[sample] - 500) < 97 for sample in range(4))


def test_shuffle_is_equal_for_equal_seeds() -> None:
    inputs, targets = numbered(20)
    one = TensorLoader(inputs, targets, batch_size=3, shuffle=True, seed=7)
    other = TensorLoader(inputs, targets, batch_size=3, shuffle=True, seed=7)
    for _ in range(3):
        assert same(list(one), list(other))


def test_shuffle_does_not_depend_on_the_batch_size() -> None:
    samples = torch.arange(30)
    orders = [torch.cat(list(TensorLoader(samples, batch_size=size, shuffle=True))) for size in (1, 4, 30)]
    assert same(orders[0], orders[1])
    assert same(orders[0], orders[2])


@every_kind
def test_loaders_neither_change_nor_read_the_global_generator(make: Any) -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = list(make())
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert same(list(make()), first)


def test_shuffle_works_where_another_default_device_is_set() -> None:
    expected = list(TensorLoader(torch.arange(9), batch_size=2, shuffle=True))
    loader = TensorLoader(torch.arange(9), batch_size=2, shuffle=True)
    with torch.device("meta"):
        assert same(list(loader), expected)


# Memory


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(("n", "batch_size"), [(64, 8), (64, 64), (7, 2)])
def test_batches_share_no_memory_with_the_tensors(n: int, batch_size: int, shuffle: bool) -> None:
    inputs, targets = numbered(n, 16)
    loader = TensorLoader(inputs, targets, batch_size=batch_size, shuffle=shuffle, device="cpu")
    for batch in loader:
        batch[0].fill_(-1)
        batch[1].fill_(-1)
    assert same((inputs, targets), numbered(n, 16))


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("width", [16, 3])
def test_batches_share_no_memory_with_each_other(shuffle: bool, width: int) -> None:
    tensor = numbered(64, width)[0]
    expected = list(TensorLoader(tensor, batch_size=8, shuffle=shuffle))
    batches = list(TensorLoader(tensor, batch_size=8, shuffle=shuffle))
    batches[2].fill_(-1)
    del batches[2], expected[2]
    assert same(batches, expected)


def test_a_change_of_one_batch_does_not_hinder_the_backward_of_another() -> None:
    weight = torch.ones(16, requires_grad=True)
    first, second = TensorLoader(numbered(16, 16)[0], batch_size=8)
    loss = (first * weight).sum()
    second.add_(1)
    loss.backward()
    assert torch.equal(weight.grad, first.sum(0))


@pytest.mark.parametrize("shuffle", [False, True])
def test_batches_made_in_inference_mode_can_be_trained_on(shuffle: bool) -> None:
    batches = iter(TensorLoader(numbered(16, 16)[0], batch_size=8, shuffle=shuffle))
    with torch.inference_mode():
        next(batches)
    weight = torch.ones(16, requires_grad=True)
    batch = next(batches)
    (batch * weight).sum().backward()
    assert torch.equal(weight.grad, batch.sum(0))


@pytest.mark.parametrize("shuffle", [False, True])
def test_blocks_on_a_cpu_hold_at_most_32768_elements(shuffle: bool) -> None:
    batches = list(TensorLoader(*wide(), batch_size=4, shuffle=shuffle))
    held = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() // 4 for x, _ in batches}
    assert sorted(held.values()) == [16_384] + [32_768] * 12


def test_blocks_on_a_device_hold_at_most_a_mebibyte() -> None:
    loader = TensorLoader(wide()[0], batch_size=4, shuffle=True, device="meta")
    assert [batch.untyped_storage().nbytes() for batch in loader] == [2**20] * 16 + [9 * 2**16] * 9


def test_blocks_hold_one_batch_that_is_larger_than_a_mebibyte() -> None:
    loader = TensorLoader(wide()[0], batch_size=70, shuffle=True)
    assert [batch.untyped_storage().nbytes() for batch in loader] == [70 * 4 * 4096, 30 * 4 * 4096]


def test_blocks_hold_at_most_1024_batches() -> None:
    batch = next(iter(TensorLoader(torch.zeros(5000, 16), batch_size=1)))
    assert batch.untyped_storage().nbytes() == 1024 * 16 * 4


def test_blocks_are_gathered_when_they_are_asked_for() -> None:
    tensor = wide()[0]
    batches = iter(TensorLoader(tensor, batch_size=4))
    next(batches)
    tensor.fill_(-1)
    *_, last = batches
    assert torch.equal(last, torch.full((4, 4096), -1.0))


@pytest.mark.parametrize(("shape", "batch_size"), [((3,), 5), ((16,), 4), ((), 1), ((7,), 32)])
def test_batches_begin_like_tensors_of_their_own(shape: tuple[int, ...], batch_size: int) -> None:
    loader = TensorLoader(torch.zeros(100, *shape), batch_size=batch_size, shuffle=True)
    assert [batch.data_ptr() % 64 for batch in loader] == [0] * len(loader)


def test_an_epoch_takes_one_index_select_a_block_and_tensor() -> None:
    inputs, targets = numbered(1000, 64)
    loader = TensorLoader(inputs, targets, batch_size=8, shuffle=True)
    with Operations() as operations:
        for _ in loader:
            pass
    assert operations.count["index_select"] == 4
    assert operations.count["randperm"] == 1
    assert operations.count.total() <= 13


def test_batches_that_fill_a_block_are_not_copied_again() -> None:
    with Operations() as operations:
        list(TensorLoader(torch.zeros(90, 1001), batch_size=33, shuffle=True))
    assert operations.count["index_select"] == 3
    assert operations.count["clone"] == 0


def test_device_moves_the_tensors_once() -> None:
    inputs, targets = numbered(20)
    with Operations() as operations:
        loader = TensorLoader(inputs, targets, batch_size=3, shuffle=True, device="meta")
    assert operations.count["_to_copy"] == 2
    with Operations() as operations:
        batches = list(loader)
    assert operations.count["_to_copy"] == 1  # the order
    assert {tensor.device.type for batch in batches for tensor in batch} == {"meta"}


def test_device_leaves_tensors_alone_that_are_there() -> None:
    inputs = numbered(20)[0]
    batches = iter(TensorLoader(inputs, batch_size=20, device="cpu"))
    inputs.fill_(3)
    assert torch.equal(next(batches), inputs)


@pytest.mark.gpu
def test_device_does_not_change_the_order() -> None:
    inputs, targets = wide()
    here = TensorLoader(inputs, targets, batch_size=7, shuffle=True)
    there = TensorLoader(inputs, targets, batch_size=7, shuffle=True, device="cuda")
    moved = list(there)
    assert {x.device.type for x, _ in moved} == {"cuda"}
    assert same([(x.cpu(), y.cpu()) for x, y in moved], list(here))


@pytest.mark.gpu
def test_map_with_seed_gives_a_generator_on_the_device_of_the_batch() -> None:
    loader = TensorLoader(torch.zeros(8, 4), batch_size=2, device="cuda")
    noisy = loader.map(lambda x, generator: torch.rand(3, device="cuda", generator=generator), seed=0)
    assert same(list(noisy)[1:], list(_resumed(noisy, {**noisy.state_dict(), "epoch": 0, "position": 1})))


def _resumed(loader: Any, state: dict[str, Any]) -> Any:
    loader.load_state_dict(state)
    return loader


# Position


@every_kind
def test_position_counts_batches(make: Any) -> None:
    loader = make()
    assert (loader.epoch, loader.position) == (0, 0)
    for epoch in range(2):
        positions = [(loader.epoch, loader.position) for _ in loader]
        assert positions == [(epoch, k) for k in range(1, len(loader) + 1)]
        assert (loader.epoch, loader.position) == (epoch + 1, 0)


@every_kind
def test_state_resumes_at_every_position(make: Any) -> None:
    loader = make()
    list(loader)
    states, batches = [loader.state_dict()], []
    for batch in loader:
        states.append(loader.state_dict())
        batches.append(batch)
    following = list(loader)
    for k, state in enumerate(states):
        assert (state["epoch"], state["position"]) == (1, k)
        again = make()
        again.load_state_dict(json.loads(json.dumps(state)))
        assert again.state_dict() == state
        assert same(list(again), batches[k:])
        assert same(list(again), following)


@every_kind
def test_state_of_an_ended_epoch_resumes_at_the_next(make: Any) -> None:
    loader, again = make(), make()
    list(loader)
    again.load_state_dict(loader.state_dict())
    assert same(list(again), list(loader))


@every_kind
def test_a_break_ends_the_epoch(make: Any) -> None:
    loader, other = make(), make()
    for _, _ in zip(range(2), loader, strict=False):
        pass
    list(other)
    assert same(list(loader), list(other))


def test_state_after_a_break_resumes_in_the_same_epoch() -> None:
    loader = TensorLoader(torch.arange(9), batch_size=2, shuffle=True)
    expected = list(TensorLoader(torch.arange(9), batch_size=2, shuffle=True))
    for _ in loader:
        break
    loader.load_state_dict(loader.state_dict())
    assert same(list(loader), expected[1:])


def sharded() -> Any:
    return TensorLoader(torch.arange(23), batch_size=2, shuffle=True).shard(1, 2)


def resumed_elsewhere() -> Any:
    """Goes on where two processes were, with samples of its own."""
    two, loader = sharded(), TensorLoader(torch.arange(23), batch_size=2, shuffle=True)
    two.set_indices(torch.arange(22, -1, -1))
    next(iter(two))
    loader.load_state_dict(two.state_dict())
    return loader


def sampled() -> Any:
    return ResumableSampler(23, seed=3)


@pytest.mark.parametrize("make", [sharded, resumed_elsewhere, sampled])
def test_an_iterator_that_is_left_early_leaves_no_position_behind(make: Any) -> None:
    left, whole = make(), make()
    for _ in zip(range(2), left, strict=False):
        pass
    after = left.state_dict()  # of who stops here, and goes on in mid-epoch
    assert (after["epoch"], after["position"] > 0) == (0, True)
    list(whole)
    assert left.state_dict(next_epoch=True) == whole.state_dict(next_epoch=True)
    ahead = iter(left)
    assert left.state_dict() == after  # no batch of it was asked for
    assert torch.equal(*(torch.as_tensor(next(each)) for each in (ahead, iter(whole))))
    assert left.state_dict() == whole.state_dict()
    assert same(*([torch.as_tensor(batch) for batch in each] for each in (left, whole)))


def test_an_iterator_that_was_not_used_begins_no_epoch() -> None:
    loader = TensorLoader(torch.arange(9), batch_size=2, shuffle=True)
    iter(loader)
    next(iter(loader))
    assert (loader.epoch, loader.position) == (0, 1)


def test_an_iterator_that_was_left_behind_does_not_move_the_loader() -> None:
    loader = TensorLoader(torch.arange(9), batch_size=2, shuffle=True)
    state = loader.state_dict()
    old = iter(loader)
    next(old)
    loader.load_state_dict(state)
    next(old)
    assert loader.state_dict() == state
    new = iter(loader)
    next(new)
    list(old)
    assert (loader.epoch, loader.position) == (0, 1)


def test_an_iterator_that_another_replaced_does_not_move_the_loader() -> None:
    loader = TensorLoader(torch.arange(9), batch_size=2, shuffle=True)
    old, new = iter(loader), iter(loader)
    next(old)
    next(new)
    next(old)
    assert (loader.epoch, loader.position) == (1, 1)


def test_two_iterators_at_once_are_two_epochs() -> None:
    loader, other = (TensorLoader(torch.arange(9), batch_size=2, shuffle=True) for _ in range(2))
    pairs = list(zip(loader, loader, strict=True))
    assert same([first for first, _ in pairs], list(other))
    assert same([second for _, second in pairs], list(other))


@every_kind
def test_set_epoch_chooses_the_epoch(make: Any) -> None:
    loader, other = make(), make()
    epochs = [list(other) for _ in range(4)]
    for epoch in (3, 1, 1, 0):
        loader.set_epoch(epoch)
        assert same(list(loader), epochs[epoch])


def test_set_epoch_in_mid_epoch_begins_that_epoch_at_its_first_batch() -> None:
    loader = TensorLoader(torch.arange(9), batch_size=2, shuffle=True)
    expected = list(TensorLoader(torch.arange(9), batch_size=2, shuffle=True))
    next(iter(loader))
    loader.set_epoch(0)
    assert same(list(loader), expected)


def test_set_epoch_keeps_the_position_of_a_state_of_this_epoch() -> None:
    loader = TensorLoader(torch.arange(9), batch_size=2, shuffle=True)
    loader.load_state_dict({**loader.state_dict(), "epoch": 2, "position": 3})
    loader.set_epoch(2)
    assert (loader.epoch, loader.position) == (2, 3)
    loader.set_epoch(3)
    assert (loader.epoch, loader.position) == (3, 0)


@pytest.mark.parametrize("epoch", [-1, 1.0, None, True])
def test_set_epoch_refuses_what_is_no_epoch(epoch: Any) -> None:
    loader = TensorLoader(torch.arange(9), batch_size=2)
    with pytest.raises(LoaderError, match=r"^epoch is .*: it must be a whole number, from 0$"):
        loader.set_epoch(epoch)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"batch_size": 3}, "batch_size 2 in the state, batch_size 3 here"),
        ({"shuffle": False}, "shuffle True in the state, shuffle False here"),
        ({"seed": 1}, "seed 0 in the state, seed 1 here"),
        ({"drop_last": True}, "drop_last False in the state, drop_last True here"),
    ],
)
def test_state_of_another_loader_is_refused(changed: dict[str, Any], message: str) -> None:
    state = TensorLoader(torch.arange(9), batch_size=2, shuffle=True).state_dict()
    other = TensorLoader(torch.arange(9), **{"batch_size": 2, "shuffle": True, **changed})
    with pytest.raises(LoaderError, match=message):
        other.load_state_dict(state)
    assert other.position == 0


def test_state_of_another_length_is_refused() -> None:
    state = TensorLoader(torch.arange(9), batch_size=2).state_dict()
    with pytest.raises(LoaderError, match="samples 9 in the state, samples 10 here"):
        TensorLoader(torch.arange(10), batch_size=2).load_state_dict(state)


def test_state_refusal_lists_every_difference() -> None:
    state = TensorLoader(torch.arange(9), batch_size=2).state_dict()
    with pytest.raises(LoaderError, match=r"samples 9 .*; batch_size 2 .*; seed 0 in the state, seed 4 here"):
        TensorLoader(torch.arange(8), batch_size=4, seed=4).load_state_dict(state)


def test_state_of_another_kind_of_loader_is_refused() -> None:
    state = from_function(5, lambda index: index).state_dict()
    with pytest.raises(LoaderError, match=r"batches 5 in the state, no batches here; .*no samples in the state"):
        TensorLoader(torch.arange(9), batch_size=2).load_state_dict(state)


def test_state_of_from_function_with_another_seed_or_length_is_refused() -> None:
    state = from_function(5, lambda index, generator: index, seed=1).state_dict()
    with pytest.raises(
        LoaderError, match="batches 5 in the state, batches 6 here; seed 1 in the state, seed None here"
    ):
        from_function(6, lambda index: index).load_state_dict(state)


def test_state_of_a_map_with_another_seed_is_refused() -> None:
    loader = TensorLoader(torch.arange(9), batch_size=2)
    state = loader.map(lambda batch, generator: batch, seed=1).state_dict()
    with pytest.raises(LoaderError, match=r"map_seeds \[1\] in the state, map_seeds \[2\] here"):
        loader.map(lambda batch, generator: batch, seed=2).load_state_dict(state)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"position": 6}, "position is 6, but an epoch has 5 batches"),
        ({"position": -1}, "position is -1"),
        ({"position": 1.5}, "position is 1.5"),
        ({"epoch": -1}, "epoch is -1"),
        ({"epoch": None}, "epoch is None"),
    ],
)
def test_state_with_an_impossible_position_is_refused(changed: dict[str, Any], message: str) -> None:
    loader = TensorLoader(torch.arange(9), batch_size=2)
    with pytest.raises(LoaderError, match=message):
        loader.load_state_dict({**loader.state_dict(), **changed})


def test_state_without_a_position_is_refused() -> None:
    loader = TensorLoader(torch.arange(9), batch_size=2)
    state = loader.state_dict()
    del state["position"]
    with pytest.raises(LoaderError, match="no position in the state"):
        loader.load_state_dict(state)


# map


def test_map_calls_its_function_once_a_batch_when_it_is_asked_for() -> None:
    calls: list[int] = []
    mapped = TensorLoader(torch.arange(6), batch_size=2).map(lambda batch: calls.append(int(batch[0])))
    batches = iter(mapped)
    assert (len(mapped), calls) == (3, [])
    next(batches)
    assert calls == [0]
    assert list(batches) == [None, None]
    assert calls == [0, 2, 4]


def test_map_equals_calls_by_hand() -> None:
    loader = TensorLoader(*numbered(20), batch_size=3, shuffle=True)
    mapped = loader.map(lambda batch: (batch[0] * 2, batch[1]))
    for _ in range(2):
        assert same(list(mapped), [(x * 2, y) for x, y in loader])


def test_map_begins_at_the_position_of_its_loader() -> None:
    loader = TensorLoader(torch.arange(9), batch_size=2, shuffle=True)
    expected = list(loader)
    loader.load_state_dict({**loader.state_dict(), "epoch": 0, "position": 2})
    mapped = loader.map(lambda batch: batch)
    assert mapped.state_dict() == loader.state_dict()
    assert same(list(mapped), expected[2:])


def test_map_of_a_loader_in_mid_epoch_begins_the_next() -> None:
    loader, other = (TensorLoader(torch.arange(9), batch_size=2, shuffle=True) for _ in range(2))
    next(iter(loader))
    mapped = loader.map(lambda batch: batch)
    list(other)
    assert same(list(mapped), list(other))


def test_map_does_not_move_its_loader() -> None:
    loader = TensorLoader(torch.arange(9), batch_size=2, shuffle=True)
    list(loader.map(lambda batch: batch))
    assert (loader.epoch, loader.position) == (0, 0)


def test_map_without_seed_exchanges_states_with_its_loader() -> None:
    loader = TensorLoader(torch.arange(9), batch_size=2, shuffle=True)
    mapped = loader.map(lambda batch: batch)
    next(iter(mapped))
    loader.load_state_dict(mapped.state_dict())
    assert same(list(loader), list(TensorLoader(torch.arange(9), batch_size=2, shuffle=True))[1:])


def test_map_makes_no_batch_that_a_resumed_epoch_passes_over() -> None:
    calls: list[int] = []
    mapped = from_function(5, lambda index: calls.append(index) or index).map(lambda index: index)
    mapped.load_state_dict({**mapped.state_dict(), "position": 3})
    assert list(mapped) == [3, 4]
    assert calls == [3, 4]


def draw(batch: Any, generator: torch.Generator) -> float:
    return float(torch.rand((), generator=generator))


def test_map_with_seed_draws_other_numbers_for_every_batch_epoch_and_seed() -> None:
    drawn = []
    for seed in range(3):
        mapped = TensorLoader(torch.zeros(20), batch_size=2).map(draw, seed=seed)
        drawn += [number for _ in range(3) for number in mapped]
    assert len(set(drawn)) == len(drawn) == 90


def test_map_with_seed_does_not_depend_on_what_was_drawn_before() -> None:
    loader = TensorLoader(torch.arange(20), batch_size=2)

    def greedy(batch: torch.Tensor, generator: torch.Generator) -> float:
        torch.rand(int(batch[0]), generator=generator)
        return 0.0

    once = list(loader.map(draw, seed=0))
    batches = loader.map(lambda batch, generator: (draw(batch, generator), greedy(batch, generator)), seed=0)
    assert [number for number, _ in batches] == once


def test_maps_with_equal_seeds_draw_their_own_numbers() -> None:
    loader = from_function(4, draw, seed=0)
    mapped = loader.map(lambda x, generator: (x, draw(x, generator)), seed=0)
    mapped = mapped.map(lambda pair, generator: (*pair, draw(pair, generator)), seed=0)
    drawn = [number for batch in mapped for number in batch]
    assert len(set(drawn)) == len(drawn) == 12


def test_map_refuses_what_cannot_be_called() -> None:
    with pytest.raises(LoaderError, match="fn is int: it must be a function"):
        TensorLoader(torch.zeros(4), batch_size=2).map(3)  # type: ignore[arg-type]


def test_an_error_in_a_function_leaves_the_position_before_its_batch() -> None:
    def fail_at_two(index: int) -> int:
        if index == 2:
            raise KeyError("no such file")
        return index

    loader = from_function(5, fail_at_two)
    with pytest.raises(KeyError, match="no such file"):
        list(loader)
    assert (loader.epoch, loader.position) == (0, 2)


# from_function


def test_from_function_calls_its_function_with_every_index() -> None:
    loader = from_function(4, lambda index: index * 10)
    assert len(loader) == 4
    assert [list(loader), list(loader)] == [[0, 10, 20, 30]] * 2


def test_from_function_with_seed_draws_other_numbers_for_every_batch_epoch_and_seed() -> None:
    drawn = []
    for seed in range(3):
        loader = from_function(10, draw, seed=seed)
        drawn += [number for _ in range(3) for number in loader]
    assert len(set(drawn)) == len(drawn) == 90


@pytest.mark.parametrize("n", [0, -1])
def test_from_function_refuses_no_batches(n: int) -> None:
    with pytest.raises(EmptyDataError, match=f"there is no batch: n is {n}"):
        from_function(n, lambda index: index)


@pytest.mark.parametrize("n", [2.0, "3", None])
def test_from_function_refuses_a_count_that_is_no_number(n: Any) -> None:
    with pytest.raises(LoaderError, match=r"n is .*: it must be a whole number"):
        from_function(n, lambda index: index)


@every_kind
def test_state_for_the_next_epoch_is_its_begin(make: Any) -> None:
    loader, other = make(), make()
    assert loader.state_dict(next_epoch=True) == loader.state_dict()
    next(iter(loader))
    state = loader.state_dict(next_epoch=True)
    assert (state["epoch"], state["position"]) == (1, 0)
    other.load_state_dict(state)
    assert same(list(other), list(loader))


# ResumableSampler


class Letters:
    """Samples by index; they can go to workers."""

    def __len__(self) -> int:
        return 11

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(float(index))


def noise(sample: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return sample + torch.rand((), generator=generator)


def noisy_loader(size: int = 4, workers: int = 0, **options: Any) -> Any:
    dataset = seeded(Letters(), noise)
    return DataLoader(dataset, size, sampler=ResumableSampler(dataset, seed=3), num_workers=workers, **options)


@pytest.mark.parametrize("seed", [0, 7])
def test_sampler_takes_the_order_of_a_tensor_loader(seed: int) -> None:
    sampler = ResumableSampler(9, seed=seed)
    for epoch in range(3):
        assert list(sampler) == order_of(9, seed, epoch)
        assert sampler.epoch == epoch


def test_sampler_without_shuffle_keeps_the_order() -> None:
    sampler = ResumableSampler(range(5), shuffle=False)
    assert [list(sampler), list(sampler), len(sampler)] == [[0, 1, 2, 3, 4], [0, 1, 2, 3, 4], 5]


@pytest.mark.parametrize("shuffle", [True, False])
def test_sampler_gives_every_index_once_across_blocks(shuffle: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = list(ResumableSampler(10, shuffle=shuffle))
    monkeypatch.setattr(loopkit.data.sampler, "BLOCK_INDICES", 3)
    for position in range(11):
        sampler = ResumableSampler(10, shuffle=shuffle)
        sampler.load_state_dict(sampler.state_dict(position))
        assert list(sampler) == expected[position:]


def test_sampler_neither_changes_nor_reads_the_global_generator() -> None:
    before = torch.get_rng_state()
    expected = list(ResumableSampler(9))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(1)
    assert list(ResumableSampler(9)) == expected


def test_sampler_begins_an_epoch_when_its_first_index_is_asked_for() -> None:
    sampler = ResumableSampler(9)
    iter(sampler)
    indices = iter(sampler)
    next(indices)
    assert sampler.epoch == 0
    next(iter(sampler))
    assert sampler.epoch == 1
    assert list(indices) == order_of(9, 0, 0)[1:]


def test_sampler_that_was_read_to_its_end_is_still_in_its_epoch() -> None:
    sampler = ResumableSampler(9)
    list(sampler)
    assert sampler.state_dict(4) == {"epoch": 0, "position": 4, "samples": 9, "shuffle": True, "seed": 0}
    assert sampler.state_dict()["position"] == 9
    assert sampler.state_dict(next_epoch=True)["epoch"] == 1


def test_sampler_state_of_a_last_batch_that_is_not_full_is_the_end() -> None:
    sampler = ResumableSampler(9)
    sampler.load_state_dict(sampler.state_dict(12))
    assert list(sampler) == []
    assert list(sampler) == order_of(9, 0, 1)


def test_sampler_set_epoch_keeps_a_position_of_that_epoch() -> None:
    sampler = ResumableSampler(9)
    state = {**sampler.state_dict(4), "epoch": 2}
    sampler.load_state_dict(state)
    sampler.set_epoch(2)
    assert (sampler.start, list(sampler)) == (4, order_of(9, 0, 2)[4:])
    sampler.set_epoch(2)
    assert (sampler.start, list(sampler)) == (0, order_of(9, 0, 2))


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (ResumableSampler(8), "ResumableSampler: samples 9 in the state, samples 8 here"),
        (ResumableSampler(9, seed=1), "seed 0 in the state, seed 1 here"),
        (ResumableSampler(9, shuffle=False), "shuffle True in the state, shuffle False here"),
    ],
)
def test_sampler_state_of_another_one_is_refused(other: ResumableSampler, message: str) -> None:
    with pytest.raises(LoaderError, match=message):
        other.load_state_dict(ResumableSampler(9).state_dict())


def test_sampler_refuses_what_it_cannot_sample() -> None:
    with pytest.raises(EmptyDataError, match="there is no sample"):
        ResumableSampler([])
    with pytest.raises(LoaderError, match=r"samples is 2\.5: it must be a whole number"):
        ResumableSampler(2.5)  # type: ignore[arg-type]
    with pytest.raises(LoaderError, match="position is -1"):
        ResumableSampler(3).state_dict(-1)
    with pytest.raises(LoaderError, match="position is 4, but an epoch has 3 samples"):
        ResumableSampler(3).load_state_dict({**ResumableSampler(3).state_dict(), "position": 4})


def test_sample_index_is_an_int_that_keeps_its_seed() -> None:
    index = pickle.loads(pickle.dumps(SampleIndex(3, 2**62)))
    assert (index, type(index), index.seed) == (3, SampleIndex, 2**62)
    assert [torch.arange(5)[index].item(), "abcde"[index]] == [3, "d"]


@pytest.mark.parametrize("position", range(0, 12))
def test_samples_are_equal_for_any_workers_and_batch_sizes_from_any_position(position: int) -> None:
    expected = torch.cat(list(noisy_loader()))
    for size, workers in ((3, 0), (4, 2 if position in (0, 5) else 0), (1, 0)):
        loader = noisy_loader(size, workers)
        loader.sampler.load_state_dict(loader.sampler.state_dict(position))
        batches = list(loader)
        assert torch.equal(torch.cat([*batches, torch.empty(0)]), expected[position:])


@pytest.mark.parametrize("options", [{}, {"workers": 2}, {"workers": 2, "persistent_workers": True}])
def test_samples_differ_from_epoch_to_epoch_and_not_by_workers(options: dict[str, Any]) -> None:
    loader, other = noisy_loader(**options), noisy_loader()
    epochs = [torch.cat(list(loader)) for _ in range(3)]
    assert same(epochs, [torch.cat(list(other)) for _ in range(3)])
    noises = [sample - sample.floor() for sample in torch.cat(epochs)]
    assert len(set(map(float, noises))) > 20


def test_samples_go_through_drop_last_and_a_batch_sampler() -> None:
    whole = torch.cat(list(noisy_loader()))
    assert torch.equal(torch.cat(list(noisy_loader(drop_last=True))), whole[:8])
    dataset = seeded(Letters(), noise)
    batches = BatchSampler(ResumableSampler(dataset, seed=3), 4, drop_last=False)
    assert torch.equal(torch.cat(list(DataLoader(dataset, batch_sampler=batches))), whole)


def test_seeded_datasets_inside_each_other_draw_their_own_numbers() -> None:
    drawn = lambda sample, generator: [*sample, float(torch.rand((), generator=generator))]  # noqa: E731
    dataset = seeded(seeded([[], []], drawn), drawn)
    one, other = dataset[SampleIndex(0, 5)]
    assert one != other
    assert len(dataset) == 2


def test_seeded_refuses_an_index_without_a_seed() -> None:
    dataset = seeded(Letters(), noise)
    with pytest.raises(LoaderError, match=r"index 3 is .*no seed.*sampler=ResumableSampler\(dataset\).*around Subset"):
        dataset[3]
    with pytest.raises(LoaderError, match="has no seed"):
        next(iter(DataLoader(Subset(dataset, [1, 2]), sampler=ResumableSampler(2))))
    inside = seeded(Subset(Letters(), [1, 2]), noise)
    assert len(list(DataLoader(inside, sampler=ResumableSampler(inside)))) == 2


def test_seeded_refuses_what_has_no_samples_by_index() -> None:
    with pytest.raises(LoaderError, match="samples by index"):
        seeded(iter([1]), noise)
    with pytest.raises(LoaderError, match="fn is int"):
        seeded([1], 3)  # type: ignore[arg-type]


# Errors at construction


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ((), "was given no tensor"),
        (({},), "was given no tensor"),
        ((np.array(["a", "b"]),), r"array '0' is of dtype <U1, which tensors do not have: give numbers"),
        (({"x": np.array([None, 1])},), "array 'x' is of dtype object"),
        ((np.zeros(3), np.zeros(2)), "different numbers of samples"),
        (([1, 2, 3],), "tensor '0' is list.*, not a tensor: torch.as_tensor"),
        (((torch.zeros(3), torch.zeros(3)),), r"tensor '0' is tuple.*TensorLoader\(\*tensors"),
        ((torch.zeros(3), {"x": torch.zeros(3)}), "tensor '1' is dict"),
        (({"x": torch.zeros(3)}, torch.zeros(3)), "one mapping of tensors, or only tensors"),
        ((torch.zeros(3), None), "tensor '1' is NoneType"),
        ((torch.tensor(1.0),), "tensor '0' has no dimension"),
        ((torch.zeros(3), torch.zeros(4, 3)), "different numbers of samples .*: '0' has 3, '1' has 4"),
        (({"x": torch.zeros(3), "y": torch.zeros(2)},), "'x' has 3, 'y' has 2"),
        ((torch.zeros(3), torch.zeros(3, device="meta")), "different devices: '0' is on cpu, '1' is on meta"),
        ((torch.zeros(3, requires_grad=True),), "tensor '0' requires grad"),
        ((torch.eye(3).to_sparse(),), "tensor '0' has layout torch.sparse_coo"),
    ],
)
def test_tensor_loader_refuses_what_it_cannot_cut(tensors: tuple[Any, ...], message: str) -> None:
    with pytest.raises(LoaderError, match=message):
        TensorLoader(*tensors, batch_size=1)


@pytest.mark.parametrize("batch_size", [0, -1, 2.0, None, True, "8"])
def test_tensor_loader_refuses_a_batch_size_that_is_none(batch_size: Any) -> None:
    with pytest.raises(LoaderError, match=r"batch_size is .*: it must be a whole number, from 1"):
        TensorLoader(torch.zeros(3), batch_size=batch_size)


def test_tensor_loader_refuses_a_seed_that_is_none() -> None:
    with pytest.raises(LoaderError, match="seed is None: it must be a whole number"):
        TensorLoader(torch.zeros(3), batch_size=1, seed=None)  # type: ignore[arg-type]


def test_tensor_loader_refuses_drop_last_of_the_only_batch() -> None:
    with pytest.raises(EmptyDataError, match="hold 3 samples and batch_size is 4 with drop_last=True"):
        TensorLoader(torch.zeros(3), batch_size=4, drop_last=True)


def test_tensor_loader_refuses_tensors_without_samples() -> None:
    with pytest.raises(EmptyDataError, match="hold 0 samples"):
        TensorLoader(torch.zeros(0, 3), batch_size=4)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "int64", "uint8", "bool"])
def test_tensor_loader_takes_arrays_as_they_are(dtype: str) -> None:
    values = np.arange(10).reshape(5, 2).astype(dtype)
    frozen = values.copy()
    frozen.flags.writeable = False
    for array in (values, frozen, values[::-1], values.T.copy().T):
        (batch,) = TensorLoader({"x": array}, batch_size=5)
        assert batch["x"].dtype is torch.from_numpy(values).dtype
        assert torch.equal(batch["x"], torch.tensor(array.tolist(), dtype=batch["x"].dtype))


def test_tensor_loader_takes_numpy_whole_numbers() -> None:
    loader = TensorLoader(torch.arange(5), batch_size=np.int64(2), shuffle=True, seed=np.int32(0))  # type: ignore[arg-type]
    assert json.loads(json.dumps(loader.state_dict())) == loader.state_dict()


def test_tensor_loader_shows_what_it_holds() -> None:
    assert repr(TensorLoader({"x": torch.zeros(3, 2)}, batch_size=2)) == (
        "TensorLoader(dict(x: Tensor[3, 2] float32 cpu), batch_size=2, shuffle=False, seed=0, drop_last=False)"
    )


# In a Learner


class Positions:
    """Notes where a loader is at the end of every step."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.seen: list[tuple[int, int]] = []

    @hookimpl
    def step_end(self) -> None:
        self.seen.append((self.loader.epoch, self.loader.position))


class CancelSecondStep:
    @hookimpl
    def step_begin(self, step: Any) -> None:
        if step.index == 1:
            raise CancelEpoch("enough")


def make_data() -> TensorLoader:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(50, 4, generator=generator)
    return TensorLoader(inputs, inputs.sum(1, keepdim=True), batch_size=8, shuffle=True)


def make_learner(*plugins: Any) -> Learner:
    torch.manual_seed(0)
    optimizer = lambda params: torch.optim.SGD(params, lr=0.1)  # noqa: E731
    return Learner(nn.Linear(4, 1), nn.MSELoss(), optimizer, plugins=plugins, standard=False)


def test_fit_with_a_loader_equals_the_loop_by_hand() -> None:
    learner = make_learner()
    result = learner.fit(make_data(), epochs=3)
    torch.manual_seed(0)
    model, loader = nn.Linear(4, 1), make_data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs, targets = loader._tensors
    for epoch in range(3):
        order = order_of(50, 0, epoch)
        for x, y in zip(by_hand(inputs, order, 8), by_hand(targets, order, 8), strict=True):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
    assert same(list(learner.model.parameters()), list(model.parameters()))
    assert (result.steps, result.samples) == (21, 150)


def test_fit_sees_the_position_of_the_step_at_its_end() -> None:
    loader = make_data()
    positions = Positions(loader)
    make_learner(positions).fit(loader, epochs=2)
    assert positions.seen == [(epoch, k) for epoch in range(2) for k in range(1, 8)]


def test_fit_begins_the_next_epoch_after_a_cancelled_one() -> None:
    loader = make_data()
    positions = Positions(loader)
    make_learner(positions, CancelSecondStep()).fit(loader, epochs=3)
    assert positions.seen == [(0, 1), (1, 1), (2, 1)]


def test_predict_keeps_the_order_of_the_samples() -> None:
    inputs = numbered(10)[0]
    learner = make_learner()
    learner.loss_fn = nn.MSELoss()
    learner.model.weight = nn.Parameter(torch.eye(4)[:1])
    features = torch.cat([inputs, inputs[:, :1]], 1)
    outputs = learner.predict(TensorLoader(features, batch_size=4))
    assert torch.equal(outputs[:, 0], features[:, 0] + learner.model.bias)


# Documentation


def test_examples_in_the_docstrings_run() -> None:
    data = loopkit.data
    modules = [data.loader, data.place, data.prefetch, data.sampler, data.tensor_loader]
    results = [doctest.testmod(module, extraglobs=vars(data)) for module in modules]
    assert sum(result.attempted for result in results) > 10
    assert sum(result.failed for result in results) == 0


# The same batches in every epoch


def test_same_gives_the_first_batches_in_every_epoch_and_leaves_the_loader_where_it_is():
    loader = TensorLoader(torch.arange(10), batch_size=3, shuffle=True, seed=4)
    few = loopkit.data.same(loader, batches=2)
    first = [batch.tolist() for batch in few]
    assert len(few) == 2
    assert [batch.tolist() for batch in few] == first == [batch.tolist() for batch in loader][:2]


@pytest.mark.parametrize("batches", [1, 7])
def test_same_takes_any_iterable_and_no_more_than_there_is(batches):
    given = [(torch.ones(2), torch.zeros(2)), (torch.zeros(2), torch.ones(2))]
    few = loopkit.data.same(iter(given), batches=batches)
    assert [id(batch) for batch in few] == [id(batch) for batch in given[:batches]] == [id(batch) for batch in few]


def test_same_goes_on_at_its_position_and_refuses_other_batches():
    few = loopkit.data.same([torch.ones(2), torch.zeros(2)], batches=2)
    next(iter(few))
    state = few.state_dict()
    again = loopkit.data.same([torch.ones(2), torch.zeros(2)], batches=2)
    again.load_state_dict(state)
    assert [batch.tolist() for batch in again] == [[0.0, 0.0]]
    assert [batch.tolist() for batch in again] == [[1.0, 1.0], [0.0, 0.0]]
    with pytest.raises(LoaderError, match="content"):
        loopkit.data.same([torch.ones(2), torch.ones(2)], batches=2).load_state_dict(state)


@pytest.mark.parametrize("batches", [0, -1, 1.5, True])
def test_same_refuses_what_is_no_count(batches):
    with pytest.raises(LoaderError, match="batches"):
        loopkit.data.same([torch.ones(2)], batches=batches)


def test_same_refuses_to_leave_out_batches_that_were_repeated():
    batch = torch.ones(2)
    with pytest.raises(LoaderError, match=r"20 batches are given several times, .*give the list itself as the data"):
        loopkit.data.same([batch] * 20)
    assert len(loopkit.data.same([batch] * 20, batches=20)) == 20
    assert len(loopkit.data.same([batch, torch.ones(2)])) == 1


def test_same_of_nothing_is_refused():
    with pytest.raises(EmptyDataError, match="no batch"):
        loopkit.data.same([])


# Loaders of one's own


def shuffled_numbers(batch_size: int = 2) -> TensorLoader:
    return TensorLoader(torch.arange(23), batch_size=batch_size, shuffle=True, seed=4)


def test_own_loader_is_shared_as_its_source_and_takes_states_of_other_processes() -> None:
    parts = [Negated(shuffled_numbers()).shard(rank, 2) for rank in range(2)]
    for part, plain in zip(parts, [shuffled_numbers().shard(rank, 2) for rank in range(2)], strict=True):
        for batch, expected in zip(part, plain, strict=True):
            assert same(-batch, expected)
            assert same(part.indices, expected)
    begun = [iter(part) for part in parts]
    used = torch.cat([-next(batches) for _ in range(2) for batches in begun])
    alone = Negated(shuffled_numbers())
    alone.load_state_dict(parts[0].state_dict())
    assert torch.cat([used, *(-batch for batch in alone)]).tolist() == order_of(23, 4, 1)


def test_own_loader_with_its_own_steps_goes_on_in_the_same_processes_alone() -> None:
    def part() -> Any:
        return Twice(shuffled_numbers()).shard(1, 2)

    begun = part()
    batches = iter(begun)
    next(batches)
    again, alone = part(), Twice(shuffled_numbers())
    again.load_state_dict(begun.state_dict())
    assert same(list(again), list(batches))
    begun = part()
    next(iter(begun))
    with pytest.raises(LoaderError, match=r"counts the batches of each process.*2 processes, 1 here"):
        alone.load_state_dict(begun.state_dict())


def test_own_loader_yields_the_samples_that_were_chosen() -> None:
    for kind in (Negated, Twice):
        loader = kind(shuffled_numbers())
        loader.set_indices([5] * 23)
        assert set(torch.cat(list(loader)).abs().tolist()) == {5}
        assert loader.chosen.tolist() == [5] * 23


def test_own_loader_refuses_what_it_cannot_wrap_or_choose() -> None:
    with pytest.raises(LoaderError, match="Negated was given DataLoader: it takes a loader"):
        Negated(DataLoader([1, 2]))  # type: ignore[arg-type]
    with pytest.raises(LoaderError, match="has no samples by index"):
        from_function(3, lambda index: index).set_indices([0, 0, 0])
    with pytest.raises(LoaderError, match="steps is 0"):
        loopkit.data.Loader.__init__(Twice.__new__(Twice), shuffled_numbers(), steps=0)


@pytest.mark.parametrize(
    "make",
    [
        lambda: TensorLoader(torch.arange(12), batch_size=4, shuffle=True),
        lambda: TensorLoader(torch.arange(12), batch_size=4).map(lambda batch: batch + 1),
        lambda: ResumableSampler(12),
    ],
    ids=["loader", "map", "sampler"],
)
def test_copy_of_a_loader_moves_on_its_own(make):
    loader = make()
    next(iter(loader))
    state = loader.state_dict()
    copied = copy.copy(loader)
    list(copied)
    assert loader.state_dict() == state
    assert copied.state_dict() != state
