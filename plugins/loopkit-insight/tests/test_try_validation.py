"""A look at the validation before the training leaves everything as it was."""

import os
import random
import threading

import numpy as np
import pytest
import torch
from distributed.processes import run
from helpers import batches, make_learner, on
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from loopkit import ValidationPhase, hookimpl
from loopkit.data import ResumableSampler, TensorLoader
from loopkit.errors import PluginError
from loopkit.logs import JsonLines, read_log
from loopkit.plugins import DDP, History, LogMetrics, LogTo, Metrics
from loopkit_insight import TryValidation


class ItemsAlone:
    """An iterable of which nobody knows whether it begins anew."""

    def __init__(self, items):
        self.items = items

    def __iter__(self):
        return iter(self.items)


class Drawing(ValidationPhase):
    """Changes whatever a phase can change."""

    saved = ("seen",)

    def __init__(self):
        super().__init__()
        self.seen = 0

    def step(self, learner, step):
        super().step(learner, step)
        self.seen += 1
        learner.model.bias.add_(torch.rand(1) + random.random())
        learner.log("val/seen", self.seen)


TENSORS = torch.arange(24.0).reshape(8, 3), torch.ones(8, 1)
SETS = {
    "list": lambda: batches(3),
    "loader": lambda: TensorLoader(*TENSORS, batch_size=2, shuffle=True),
    "shuffled": lambda: DataLoader(TensorDataset(*TENSORS), 2, shuffle=True),
    "own generator": lambda: DataLoader(TensorDataset(*TENSORS), 2, shuffle=True, generator=torch.Generator()),
    "sampler": lambda: DataLoader(TensorDataset(*TENSORS), 2, sampler=ResumableSampler(8)),
}


@pytest.mark.parametrize("kind", SETS)
def test_look_at_the_validation_leaves_everything_as_it_was(kind, tmp_path):
    def run(*look):
        torch.manual_seed(0)
        random.seed(0)
        states = []
        path = tmp_path / f"{len(look)}.jsonl"
        plugins = [
            *look,
            Metrics(),
            History(),
            LogTo(JsonLines(path)),
            LogMetrics(),
        ]
        learner = make_learner(*plugins, phases=[Drawing()], lr=0.1)
        train, val = TensorLoader(*TENSORS, batch_size=4, shuffle=True), SETS[kind]()
        first = on("fit_begin", lambda learner: states.append(learner.model.bias.clone()), "first")
        learner.add(first, on("forward_begin", lambda step: states.append(step.inputs.clone()), "seen"))
        result = learner.fit(train, val, epochs=2)
        rows = [{k: v for k, v in row.items() if k != "seconds"} for row in result.history]
        logged = {name: list(read_log(path).values(name)) for name in ("train/loss", "val/loss", "val/seen")}
        return learner, states, rows, logged

    (one, seen, rows, logged), (other, again, rows_again, logged_again) = run(), run(TryValidation(2))
    assert [each.tolist() for each in seen] == [each.tolist() for each in again]
    assert rows == rows_again
    assert logged == logged_again
    assert torch.equal(one.model.bias, other.model.bias)
    assert one.metrics == other.metrics
    assert one.phases["val"].seen == other.phases["val"].seen


def test_look_at_the_validation_finds_its_mistakes_before_the_first_step():
    calls = []

    def broken(outputs, targets):
        calls.append(len(outputs))
        raise ValueError("no such metric")

    learner = make_learner(TryValidation(2), Metrics(broken, phase="val"))
    with pytest.raises(ValueError, match="no such metric") as caught:
        learner.fit(batches(3), batches(3), epochs=1)
    assert any("before training, TryValidation(2) validated on phase 'val'" in n for n in caught.value.__notes__)
    assert learner.progress.steps == 0
    assert len(calls) == 1


def test_look_at_the_validation_takes_so_many_batches_of_each_set_once():
    seen = []

    class Counting(ValidationPhase):
        def step(self, learner, step):
            seen.append((self.name, learner.progress.steps))
            super().step(learner, step)

    learner = make_learner(TryValidation(2), phases=[Counting()])
    learner.fit(batches(2), {"val": batches(3), "ood": batches(3)}, epochs=1)
    assert seen == [("val", 0)] * 2 + [("val", 2)] * 3
    learner.fit(batches(2), batches(3), epochs=1)
    assert len(seen) == 8


@pytest.mark.parametrize("data", [iter(batches(3)), lambda: batches(3), ItemsAlone(batches(3))])
def test_look_at_data_whose_place_cannot_be_put_back_is_refused(data):
    learner = make_learner(TryValidation(1))
    with pytest.raises(PluginError, match=r"the data of phase 'val' is .*, whose place cannot be put back: give"):
        learner.fit(batches(2), data, epochs=1)
    assert learner.progress.steps == 0


@pytest.mark.parametrize("count", [0, True, 1.5])
def test_look_at_no_number_of_batches_is_refused(count):
    with pytest.raises(PluginError, match=rf"^TryValidation: batches is {count}: it is a whole number, from 1$"):
        TryValidation(count)


class Noisy(Dataset):
    """Samples with noise from a generator of its own."""

    def __init__(self, draw):
        self.draw = draw

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return TENSORS[0][index] + self.draw(), TENSORS[1][index]


def by_torch():
    generator = torch.Generator().manual_seed(1)
    return lambda: torch.rand(1, generator=generator)


SHARED = random.Random(1)


def by_global():
    SHARED.seed(1)
    return lambda: sum(SHARED.random() for _ in range(2))


def draws():
    made = {"torch": by_torch(), "numpy": np.random.default_rng(1).random, "old": np.random.RandomState(1).rand}
    return made | {"python": random.Random(1).random, "global": by_global()}


@pytest.mark.parametrize("kind", draws())
@pytest.mark.parametrize("where", ["dataset", "subset", "collate_fn"])
def test_look_at_the_validation_puts_the_generators_of_a_dataset_back(kind, where):
    def trained(*look):
        draw = draws()[kind]
        if where == "collate_fn":
            val = DataLoader(
                TensorDataset(*TENSORS),
                2,
                collate_fn=lambda batch: tuple(torch.stack(z) + draw() for z in zip(*batch, strict=True)),
            )
        else:
            val = DataLoader(Noisy(draw) if where == "dataset" else Subset(Noisy(draw), range(8)), 2)
        learner = make_learner(*look, Metrics())
        learner.fit(batches(2), val, epochs=1)
        return learner.metrics

    assert trained(TryValidation(2)) == trained()


class ToFloat:
    """Makes floats of bytes, and counts."""

    name = "to_float"

    def __init__(self):
        self.moved = 0

    @hookimpl
    def move_batch(self, batch):
        self.moved += 1
        return batch[0].float(), batch[1]


class Doubled:
    """Has twice what there was, and counts."""

    name = "doubled"

    def __init__(self):
        self.taken = 0

    @hookimpl
    def setup_data(self, data):
        return Counted(self, data)


class Counted(list):
    def __init__(self, plugin, data):
        super().__init__([(inputs * 2, targets) for inputs, targets in data])
        self.plugin = plugin

    def __iter__(self):
        self.plugin.taken += 1
        return super().__iter__()


class Widened:
    """Gives the models what they take."""

    name = "widened"

    @hookimpl(updates=("inputs",))
    def forward_begin(self, step):
        step.inputs = torch.cat([step.inputs] * 3, 1)


def test_look_at_the_validation_has_the_plugins_that_change_batches():
    seen = []

    class Watching(ValidationPhase):
        def step(self, learner, step):
            seen.append((step.batch[0].tolist(), learner.progress.steps))
            super().step(learner, step)

    data = [(torch.ones(2, 1, dtype=torch.uint8), torch.ones(2, 1))] * 3
    plugins = [ToFloat(), Doubled(), Widened()]
    learner = make_learner(TryValidation(2), *plugins, phases=[Watching()])
    learner.fit(data, data, epochs=1)
    assert seen == [([[2.0], [2.0]], steps) for steps in (0, 0, 3, 3, 3)]
    assert (plugins[0].moved, plugins[1].taken) == (6, 2)


def test_look_at_the_validation_refuses_what_cannot_be_copied():
    writing = ToFloat()
    with (
        open(os.devnull) as writing.file,
        pytest.raises(PluginError, match=r"cannot be copied, plugin 'to_float': cannot pickle .*: give its class __d"),
    ):
        make_learner(TryValidation(1), writing).fit(batches(2), batches(2), epochs=1)


def test_look_at_the_validation_gives_copies_of_what_holds_locks_their_own():
    class Holding(ToFloat):
        def __init__(self):
            super().__init__()
            self.locks = {"plain": threading.Lock(), "again": threading.RLock()}
            self.changed = threading.Condition()
            self.seen = []

        @hookimpl
        def step_begin(self):
            with self.locks["again"], self.changed:
                self.seen.append(self.locks["plain"].acquire(blocking=False))

    holding = Holding()
    with holding.locks["plain"], holding.locks["again"]:
        learner = make_learner(TryValidation(1), holding)
        learner.fit(batches(2), batches(2), epochs=1)
    assert holding.seen == [False] * 4  # the look had a lock of its own


def looked(rank):
    learner = make_learner(DDP(overlap=True), TryValidation(1), Metrics())
    plain = make_learner(DDP(overlap=True), Metrics())
    for each in (learner, plain):
        each.fit(TensorLoader(*TENSORS, batch_size=2), TensorLoader(*TENSORS, batch_size=2), epochs=1)
    return torch.equal(learner.model.weight, plain.model.weight), learner.metrics == plain.metrics


def test_look_at_the_validation_of_several_processes():
    assert run(looked, 2) == [(True, True)] * 2
