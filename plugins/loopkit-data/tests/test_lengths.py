"""Epochs that are cut short or counted off a stream: their batches, and that they go on exactly."""

import doctest
import functools
import io
import itertools
from pathlib import Path

import pytest
import torch
from helpers import make_learner, on
from pages import run_page
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, TensorDataset
from tqdm import tqdm

from loopkit import Learner, Phase
from loopkit.data import LoaderError, Prefetch, ResumableSampler, TensorLoader, from_function
from loopkit.data.shards import shard
from loopkit.errors import EmptyDataError, ExhaustedIteratorError
from loopkit.events import BackwardBegin, BackwardEnd, UpdateBegin, UpdateEnd, UpdateSkipped
from loopkit.plugins import Schedule
from loopkit.schedules import cosine
from loopkit_data import Tokens, batched, documents, episodes, in_steps, lengths, limit, per_epoch, split, steps

INPUTS = torch.randn(22, 3, generator=torch.Generator().manual_seed(0))
TARGETS = INPUTS.sum(1, keepdim=True)


class Counter:
    """Numbers, with a place of its own."""

    def __init__(self):
        self.at = self.start = 0

    def __iter__(self):
        self.at, self.start = self.start, 0
        while self.at < 11:
            self.at += 1
            yield INPUTS[2 * self.at - 2 : 2 * self.at], TARGETS[2 * self.at - 2 : 2 * self.at]
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = self.start = state["at"]


def shuffled():
    return TensorLoader(INPUTS, TARGETS, batch_size=2, shuffle=True, seed=3)


def sampled():
    data = TensorDataset(INPUTS, TARGETS)
    return DataLoader(data, 2, sampler=ResumableSampler(data, seed=3))


SOURCES = {
    "loader": shuffled,
    "sampler": sampled,
    "state": Counter,
    "list": lambda: list(TensorLoader(INPUTS, TARGETS, batch_size=2)),
}
KINDS = {"limit": lambda source: limit(source, 4), "per_epoch": lambda source: per_epoch(source, 4)}


def bits(learner):
    """Parameters and momentum."""
    momentum = [state["momentum_buffer"] for state in learner.optimizer.state.values()]
    return [tensor.tolist() for tensor in (*learner.model.parameters(), *momentum)]


def pause(at, learner):
    if learner.progress.steps == at:
        learner.pause("test")


def learner():
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    made = Learner(model, nn.functional.mse_loss, optimizer, plugins=[Schedule(cosine())])
    made.remove("progress")
    return made


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("source", SOURCES)
def test_run_goes_on_in_mid_epoch_with_the_same_bits(source, kind):
    def make():
        return KINDS[kind](SOURCES[source]())

    whole = learner()
    whole.fit(make(), epochs=5)
    for at in (3, 4, 14):
        first = learner()
        first.add(on("step_end", functools.partial(pause, at), "pausing"))
        first.fit(make(), epochs=5, on_interrupt="return")
        assert first.progress.steps == at
        first.remove("pausing")
        again = learner()
        again.load_state_dict(first.state_dict())
        again.fit(make(), epochs=5)
        assert bits(whole) == bits(again)
        assert again.progress == whole.progress


@pytest.mark.parametrize("source", SOURCES)
def test_limit_gives_the_first_batches_of_each_epoch(source):
    whole, few = SOURCES[source](), limit(SOURCES[source](), 4)
    assert len(few) == 4
    for _ in range(3):
        batches = [torch.cat(batch, 1) for batch in whole]
        assert torch.equal(torch.stack([torch.cat(batch, 1) for batch in few]), torch.stack(batches[:4]))


@pytest.mark.parametrize("source", SOURCES)
def test_epochs_of_a_stream_are_the_stream(source):
    epochs, stream = per_epoch(SOURCES[source](), 4), SOURCES[source]()
    found = [torch.cat(batch, 1) for _ in range(6) for batch in epochs]
    expected = itertools.islice(itertools.chain.from_iterable(itertools.repeat(stream)), 24)
    assert torch.equal(torch.stack(found), torch.stack([torch.cat(batch, 1) for batch in expected]))


def test_length_of_a_shorter_epoch_is_said_by_what_wraps_it_too():
    shorter = limit(TensorLoader(INPUTS, batch_size=8), 10)
    for loader in (shorter, shorter.map(lambda batch: batch), Prefetch(shorter), shorter.map(len).shard(0, 2)):
        assert len(loader) == len(list(loader))


def test_limit_leaves_a_shorter_epoch_as_it_is():
    assert len(limit(shuffled(), 100)) == len(list(limit(shuffled(), 100))) == 11
    assert len(limit([1, 2], 100)) == len(list(limit([1, 2], 100))) == 2


def test_processes_take_the_parts_of_the_loader():
    for made in KINDS.values():
        whole = TensorLoader(INPUTS, batch_size=4, shuffle=True, seed=3)
        parts = [made(TensorLoader(INPUTS, batch_size=2, shuffle=True, seed=3)).shard(rank, 2) for rank in range(2)]
        one = made(whole)
        for _ in range(3):
            joined = [torch.cat(pair) for pair in zip(*parts, strict=True)]
            assert torch.equal(torch.cat(joined), torch.cat(list(one)))


def test_schedules_over_a_whole_fit_know_the_length():
    made = learner()
    made.fit(per_epoch(shuffled(), 7), epochs=2)
    assert made.progress.updates == 14
    assert made.optimizer.param_groups[0]["lr"] < 0.1 * 0.02  # the last but one of 14 values of a cosine to 0


def test_fit_takes_steps_without_data():
    class Full(Phase):
        name, training, batchless = "train", True, True
        emits = (BackwardBegin, BackwardEnd, UpdateBegin, UpdateEnd, UpdateSkipped)

        def step(self, learner, step):
            assert step.batch is None
            step.loss = nn.functional.mse_loss(learner.model(INPUTS), TARGETS)
            step.backward(step.loss)
            step.update()

    made = Learner(nn.Linear(3, 1), optimizer=torch.optim.SGD, phases=[Full()])
    made.remove("progress")
    made.fit(steps(3), epochs=2)
    assert (made.progress.steps, made.progress.samples) == (6, 6)
    assert [len(episodes(4).shard(rank, 2)) for rank in range(2)] == [4, 4]


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(("part", "expected"), [(0.5, 5), (0.1, 1), (0.29, 3), (0.99, 10)])
def test_part_of_an_epoch_is_so_many_of_its_batches(source, part, expected):
    if source == "state":
        pytest.skip("it has no length")
    few = limit(SOURCES[source](), part)
    assert len(few) == len(list(few)) == expected


def test_part_of_an_epoch_is_exact_and_the_one_of_lightning():
    from lightning.pytorch.loops.utilities import _select_data_fetcher  # noqa: F401 - it is installed

    for part in (0.1, 0.25, 0.5, 0.7):
        assert len(limit(list(range(1, 41)), part)) == int(40 * part)
    assert len(limit(list(range(1, 101)), 0.29)) == 29  # int(100 * 0.29) is 28


def test_each_process_takes_its_part_of_a_part():
    parts = [limit(TensorLoader(torch.arange(80), batch_size=2), 0.25).shard(rank, 2) for rank in range(2)]
    assert [len(part) for part in parts] == [5, 5]
    assert sorted(number for part in parts for batch in part for number in batch.tolist()) == list(range(20))


def test_part_of_data_without_a_length_or_of_too_few_raises():
    with pytest.raises(LoaderError, match=r"0\.1 of generator, which has no len\(\)"):
        limit((each for each in [1]), 0.1)
    with pytest.raises(LoaderError, match=r"0\.1 of 9 batches, which is less than one"):
        limit(list(range(9)), 0.1)


def samples_after(loader, steps):
    """How many samples so many steps over a loader have."""
    endless = itertools.chain.from_iterable(itertools.repeat(loader))
    return sum(len(batch) for batch in itertools.islice(endless, steps))


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("kind", ["loader", "dataloader"])
def test_steps_are_the_fewest_with_so_many_samples(kind, drop_last):
    if kind == "loader":
        loader = TensorLoader(torch.arange(11), batch_size=4, drop_last=drop_last)
    else:
        loader = DataLoader(torch.arange(11), batch_size=4, drop_last=drop_last)
    for samples in range(1, 40):
        steps = in_steps(loader, samples=samples)
        assert samples_after(loader, steps) >= samples > samples_after(loader, steps - 1)


@pytest.mark.parametrize("size", [2, 3])
def test_steps_of_several_processes_have_so_many_samples_together(size):
    def together(steps):
        return sum(
            samples_after(TensorLoader(torch.arange(20), batch_size=3).shard(rank, size), steps) for rank in range(size)
        )

    loader = TensorLoader(torch.arange(20), batch_size=3)
    for samples in range(1, 50):
        steps = in_steps(loader, samples=samples, processes=size)
        assert together(steps) >= samples > together(steps - 1)
        assert in_steps(loader.shard(0, size), samples=samples) == steps


def test_tokens_are_those_of_the_blocks(tmp_path):
    torch.arange(1000, dtype=torch.int16).numpy().astype("uint16").tofile(tmp_path / "train.bin")
    tokens = Tokens(tmp_path / "train.bin", block=7, batch_size=5)
    found = in_steps(tokens, tokens=3001)
    counted = [inputs.numel() for inputs, _ in itertools.islice(itertools.chain(tokens, tokens, tokens, tokens), found)]
    assert sum(counted) >= 3001 > sum(counted[:-1])
    assert in_steps(TensorLoader(torch.zeros(20, 8), batch_size=5), tokens=81, block=8) == 3


def test_fit_over_so_many_samples_has_a_schedule_of_that_length():
    made, loader = learner(), shuffled()
    made.fit(loader, max_steps=in_steps(loader, samples=28))
    assert (made.progress.samples, made.progress.updates) == (28, 14)
    assert made.optimizer.param_groups[0]["lr"] < 0.1 * 0.02  # the last but one of 14 values of a cosine to 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: in_steps([1], samples=1), "does not know how many samples"),
        (lambda: in_steps(shuffled()), "give samples= or tokens="),
        (lambda: in_steps(shuffled(), samples=1, tokens=1), "give samples= or tokens="),
        (lambda: in_steps(shuffled(), tokens=5), "give block="),
        (lambda: in_steps(shuffled(), samples=0), "samples is 0: it is a whole number"),
        (lambda: in_steps(from_function(5, lambda index: index), samples=5), "does not know how many samples"),
    ],
)
def test_lengths_that_are_unknown_raise(call, message):
    with pytest.raises(LoaderError, match=message):
        call()


@pytest.mark.parametrize("count", [0, True, 2.5])
def test_lengths_refuse_what_is_no_count(count):
    for make in (limit, per_epoch):
        with pytest.raises(LoaderError, match="it is a whole number, from 1"):
            make([1], count)


def test_stream_that_is_empty_or_shuffled_by_torch_is_refused():
    with pytest.raises(EmptyDataError, match="is empty, or was used up"):
        next(iter(per_epoch([], 2)))
    with pytest.raises(LoaderError, match="ResumableSampler"):
        limit(DataLoader(INPUTS, sampler=RandomSampler(INPUTS)), 2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("at", [0, 3])
def test_chosen_samples_come_from_the_next_epoch_on_and_are_saved(kind, at):
    def made():
        return KINDS[kind](TensorLoader(torch.arange(22), batch_size=2, shuffle=True, seed=3))

    def held(batches):
        return [batch.tolist() for batch in batches]

    plain, loader, again = made(), made(), made()
    first, second = held(plain), held(plain)
    batches = iter(loader)
    began = held(itertools.islice(batches, 2))
    loader.source.set_indices(torch.arange(22) // 2)
    assert began + held(batches) == first
    batches = iter(loader)
    began = held(itertools.islice(batches, at))
    if at:
        loader.set_indices(None)
    again.load_state_dict(loader.state_dict())
    rest = held(batches)
    assert began + rest == [[number // 2 for number in batch] for batch in second]
    assert held(again) == rest
    assert held(again) == held(loader)
    assert loader.indices is None


def test_limit_of_batches_of_a_function_has_a_length():
    assert list(limit(from_function(5, lambda index: index), 3)) == [0, 1, 2]


@pytest.mark.parametrize("module", [documents, lengths, split])
def test_examples_in_docstrings_are_true(module):
    failed, tried = doctest.testmod(module, extraglobs={"torch": torch})
    assert tried
    assert not failed


def test_readme_prints_what_it_shows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with torch.random.fork_rng(devices=[]):
        run_page(Path(__file__).parent.parent / "README.md")


@pytest.mark.parametrize("wrap", [lambda loader: loader, lambda loader: loader.map(torch.neg)], ids=["bare", "mapped"])
@pytest.mark.parametrize("make", [limit, per_epoch])
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 3)])
def test_another_number_of_processes_is_refused_in_mid_epoch(make, wrap, before, after):
    def made(size):
        loader = wrap(make(TensorLoader(torch.arange(64), batch_size=2), 8))
        return loader if size == 1 else loader.shard(0, size)

    saved = made(before)
    list(itertools.islice(saved, 3))
    with pytest.raises(LoaderError, match=f"{make.__name__}.*{before} process.*{after} here"):
        made(after).load_state_dict(saved.state_dict())
    again = made(before)
    again.load_state_dict(saved.state_dict())
    assert next(iter(again)).tolist() == next(itertools.islice(made(before), 3, None)).tolist()


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 3)])
def test_between_two_epochs_a_limit_goes_on_in_another_number_of_processes(before, after):
    def made(make, size):
        loader = make(TensorLoader(torch.arange(64), batch_size=2, shuffle=True, seed=3), 4)
        return loader if size == 1 else loader.shard(0, size)

    saved, expected, again = made(limit, before), made(limit, after), made(limit, after)
    list(saved)
    again.load_state_dict(saved.state_dict())
    expected.set_epoch(1)
    assert [batch.tolist() for batch in again] == [batch.tolist() for batch in expected]
    stream = made(per_epoch, before)
    list(stream)
    with pytest.raises(LoaderError, match="per_epoch"):
        made(per_epoch, after).load_state_dict(stream.state_dict())


@pytest.mark.parametrize(
    ("loader", "samples", "steps"),
    [
        (lambda tensors: limit(tensors, 2), 10, 3),  # epochs of 4 and 4 samples
        (lambda tensors: limit(limit(tensors, 2), 1), 10, 3),
        (lambda tensors: limit(tensors, 0.5), 5, 2),
        (lambda tensors: per_epoch(tensors, 2), 10, 3),  # 4, 4 and 2 samples, over two epochs
        (lambda tensors: per_epoch(tensors, 7), 11, 4),
    ],
)
def test_in_steps_of_epochs_that_are_cut_counts_their_samples(loader, samples, steps):
    data = loader(TensorLoader(torch.arange(10), batch_size=4))
    assert in_steps(data, samples=samples) == steps
    seen = 0
    batches = (len(batch) for _ in range(9) for batch in data)
    for made, size in enumerate(batches, start=1):
        seen += size
        if seen >= samples:
            assert made == steps
            return


@pytest.mark.parametrize(
    ("loader", "words"),
    [
        (lambda tensors: limit(per_epoch(tensors, 2), 1), "does not know how many samples"),
        (lambda tensors: limit(tensors, 2).map(torch.neg), "does not know how many samples"),
        (lambda tensors: DataLoader(range(3), batch_size=4, drop_last=True), "has no batch"),
    ],
)
def test_in_steps_says_what_it_cannot_count(loader, words):
    with pytest.raises(LoaderError, match=words):
        in_steps(loader(TensorLoader(torch.arange(10), batch_size=4)), samples=10)


class OneShot(IterableDataset):
    """A stream whose iterator is there once."""

    def __init__(self):
        self.samples = iter([(torch.randn(3), torch.randn(1)) for _ in range(8)])

    def __iter__(self):
        return self.samples


def few():
    return ((torch.randn(2, 3), torch.randn(2, 1)) for _ in range(5))


def singles():
    return ((torch.randn(3), torch.randn(1)) for _ in range(10))


ONCE = {
    "limit": (lambda: limit(few(), 2), r"limit\(generator, 2\) begins again.*per_epoch\(stream, steps\) continues"),
    "limit of map": (lambda: limit(map(tuple, few()), 2), "a map can be used once"),
    "limit of batched": (lambda: limit(batched(singles(), 2), 2), "a generator can be used once"),
    "limit of a bar": (lambda: limit(tqdm(few(), disable=True), 2), "a generator can be used once"),
    "per_epoch": (lambda: per_epoch(few(), 4), r"per_epoch\(generator, 4\) begins again"),
    "batched": (lambda: batched(singles(), 2), "holds a generator that an earlier epoch used up"),
    "bar": (lambda: tqdm(few(), disable=True), "holds a generator that an earlier epoch used up"),
}


@pytest.mark.parametrize("kind", ONCE)
def test_iterator_within_a_loader_is_named_in_the_second_epoch(kind):
    make, message = ONCE[kind]
    make_learner().fit(make(), epochs=1)
    with pytest.raises(ExhaustedIteratorError, match=message):
        make_learner().fit(make(), epochs=2)
    with pytest.raises(ExhaustedIteratorError, match=message):
        make_learner().fit(list(few()), make(), epochs=2)


def test_data_that_are_empty_in_a_later_epoch_are_not_called_an_iterator():
    with pytest.raises(EmptyDataError, match="and an earlier epoch had some: if there is an iterator in it") as error:
        make_learner().fit(DataLoader(OneShot(), 2), epochs=2)
    assert type(error.value) is EmptyDataError


class Begun:
    """An iterator that begins anew when it is asked for."""

    def __init__(self):
        self.left = 0

    def __iter__(self):
        self.left = 4
        return self

    def __next__(self):
        if not self.left:
            raise StopIteration
        self.left -= 1
        return torch.ones(2, 3), torch.ones(2, 1)


class Lines:
    """Batches of a file that stays open."""

    def __init__(self):
        self.source = io.StringIO("a\nb\nc\nd\n")

    def __iter__(self):
        self.source.seek(0)
        return ((torch.ones(2, 3), torch.ones(2, 1)) for _ in self.source)


class Placed:
    """An endless iterator with a state."""

    def __init__(self):
        self.place = 0

    def __iter__(self):
        return self

    def __next__(self):
        self.place += 1
        return torch.ones(2, 3), torch.ones(2, 1)

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


AGAIN = {
    "begun": Begun,
    "file": Lines,
    "placed": Placed,
    "batched": lambda: batched(Begun(), 1, collate=lambda each: each[0]),
    "bar": lambda: tqdm(Begun(), disable=True),
}


@pytest.mark.parametrize("make", [limit, per_epoch])
@pytest.mark.parametrize("kind", AGAIN)
def test_iterators_that_can_begin_again_have_all_epochs(kind, make):
    learner = make_learner()
    learner.fit(make(AGAIN[kind](), 3), epochs=3)
    assert learner.progress.updates == 9


@pytest.mark.parametrize("make", [limit, per_epoch])
@pytest.mark.parametrize("kind", ["begun", "file", "placed"])
def test_iterators_that_can_begin_again_are_loaded_in_the_same_process(kind, make):
    data = make(AGAIN[kind](), 3)
    first = iter(data)
    next(first)
    state = data.state_dict()
    assert len(list(first)) == 2
    data.load_state_dict(state)
    assert len(list(data)) == 2


@pytest.mark.parametrize("kind", ["limit", "batched", "per_epoch"])
def test_function_that_makes_a_new_iterator_has_all_epochs(kind):
    learner = make_learner()
    learner.fit(ONCE[kind][0], epochs=2)
    assert learner.progress.epochs == 2


def test_per_epoch_continues_an_iterator():
    learner = make_learner()
    learner.fit(per_epoch(few(), 2), epochs=2)
    assert learner.progress.updates == 4


@pytest.mark.parametrize("make", [limit, per_epoch])
@pytest.mark.parametrize("data", [5, None, few])
def test_data_that_cannot_be_iterated_raise(make, data):
    with pytest.raises(LoaderError, match="cannot be iterated: give an iterable of batches"):
        make(data, 2)


@pytest.mark.parametrize("part", [0.0, 1.0, 1.5, -0.5, float("nan")])
def test_part_that_is_none_raises(part):
    with pytest.raises(LoaderError, match=r"a whole number, from 1, or a part of an epoch between 0 and 1"):
        limit([1, 2], part)


@pytest.mark.parametrize(
    "data",
    [lambda: DataLoader(OneShot(), 2), few, lambda: batched(singles(), 2)],
    ids=["stream", "generator", "batched"],
)
def test_limit_of_data_without_a_length_has_its_own(data):
    assert len(limit(data(), 2)) == 2


@pytest.mark.parametrize(
    "make",
    [
        lambda loader: limit(loader, 5),
        lambda loader: per_epoch(loader, 5),
        lambda loader: limit(loader, 5).map(torch.neg),
        lambda loader: Prefetch(limit(loader, 5), "cpu"),
        lambda loader: steps(5),
    ],
    ids=["limit", "per_epoch", "map", "prefetch", "steps"],
)
def test_line_about_the_parts_of_processes_counts_the_steps(make):
    loader = make(TensorLoader(torch.arange(64), batch_size=4))
    part, line = shard(loader, 0, 2)
    assert line.partition(": ")[2] == "5 steps in each of 2 processes"
    assert len(part) == 5
