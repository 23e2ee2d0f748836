"""Data that change: ``set_indices`` is saved with the position, ``step.indices`` says which samples a batch holds."""

from __future__ import annotations

import json
import runpy
import time
from itertools import chain
from pathlib import Path

import pytest
import torch
from distributed.processes import run
from helpers import make_learner, on
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from loopkit import Learner
from loopkit.data import LoaderError, ResumableSampler, TensorLoader
from loopkit.errors import StepStateError
from loopkit.plugins import DDP

EXAMPLE = Path(__file__).parents[2] / "examples" / "hard_examples.py"
SAMPLES = 22


def tensors():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(SAMPLES, 3, generator=generator), torch.randint(2, (SAMPLES,), generator=generator)


def with_sampler(workers=0):
    data = TensorDataset(torch.arange(SAMPLES))
    return DataLoader(data, 4, sampler=ResumableSampler(data, seed=1), num_workers=workers)


def held(batches):
    return [(batch[0] if isinstance(batch, list) else batch).tolist() for batch in batches]


KINDS = {
    "tensor_loader": lambda: TensorLoader(torch.arange(SAMPLES), batch_size=4, shuffle=True, seed=1),
    "in_order": lambda: TensorLoader(torch.arange(SAMPLES), batch_size=4),
    "map": lambda: TensorLoader(torch.arange(SAMPLES), batch_size=4, shuffle=True, seed=1).map(lambda x: x),
    "sampler": with_sampler,
}


def target(data):
    if isinstance(data, DataLoader):
        return data.sampler
    return data


@pytest.mark.parametrize("kind", KINDS)
def test_set_indices_takes_effect_in_the_next_epoch_and_none_takes_it_back(kind):
    data, plain = KINDS[kind](), KINDS[kind]()
    chosen = torch.arange(SAMPLES) % 5
    batches = iter(data)
    first = held([next(batches)])
    target(data).set_indices(chosen)
    assert first + held(batches) == held(plain)
    mined = held(data)
    assert sorted(chain(*mined)) == sorted(chosen.tolist())
    assert mined == [chosen[batch].tolist() for batch in held(plain)]
    target(data).set_indices(None)
    assert held(data) == held(plain)


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("kind", ["tensor_loader", "in_order", "sampler"])
def test_position_is_saved_with_the_indices_of_now_and_of_the_next_epoch(kind, steps):
    data, again = KINDS[kind](), KINDS[kind]()
    target(data).set_indices(torch.arange(SAMPLES) % 5)
    batches = iter(data)
    for _ in range(steps):
        next(batches)
    target(data).set_indices([7] * SAMPLES)
    used = {"position": steps * 4} if kind == "sampler" else {}
    state = json.loads(json.dumps(target(data).state_dict(**used)))
    target(again).load_state_dict(state)
    rest = held(batches) if steps else held(data)
    assert held(again) == rest
    assert held(again) == held(data)
    assert set(chain(*held(again))) == {7}


@pytest.mark.parametrize(
    ("indices", "message"),
    [
        ([1, 2], f"there are 2 indices, but an epoch has {SAMPLES} samples"),
        ([SAMPLES] * SAMPLES, f"indices go from {SAMPLES} to {SAMPLES}"),
        ([-1] * SAMPLES, "indices go from -1"),
        ([0.5] * SAMPLES, "give the numbers of samples"),
        ([True] * SAMPLES, "give the numbers of samples"),
    ],
)
@pytest.mark.parametrize("kind", ["tensor_loader", "sampler"])
def test_indices_that_are_none_are_refused(kind, indices, message):
    with pytest.raises(LoaderError, match=message):
        target(KINDS[kind]()).set_indices(indices)


# step.indices


@pytest.mark.parametrize("kind", [*KINDS, "workers"])
def test_step_says_which_samples_its_batch_holds(kind):
    data = with_sampler(workers=1) if kind == "workers" else KINDS[kind]()
    target(data).set_indices(torch.arange(SAMPLES) // 2)
    seen = []

    def look(step):
        batch = step.batch[0] if isinstance(step.batch, list) else step.batch
        seen.append(torch.equal(step.indices, batch))

    learner = make_learner(on("step_begin", look))
    learner.model.forward = lambda x: (x[0] if isinstance(x, list) else x).float()[:, None]
    learner.predict(data)
    learner.predict(data)
    assert seen == [True] * 12


def test_step_of_data_without_indices_says_so():
    learner = make_learner(on("step_end", lambda step: step.indices))
    with pytest.raises(StepStateError, match=r"step.indices is not set: the data does not know its samples"):
        learner.evaluate([(torch.randn(2, 3), torch.randn(2, 1))])


class Slow(Dataset):
    """Samples of which the first take long, so that another worker is done before."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        if index < 2:
            time.sleep(0.2)
        return torch.tensor([float(index)])


class Turned(DataLoader):
    """Batches in another order than the sampler's."""

    def __iter__(self):
        return reversed(list(super().__iter__()))


def odd_only(samples):
    return torch.stack([each for each in samples if each % 2])


UNKNOWN = {
    "any order": lambda: DataLoader(Slow(), 4, num_workers=2, in_order=False),
    "any order, resumable": lambda: DataLoader(
        Slow(), 4, num_workers=2, in_order=False, sampler=ResumableSampler(SAMPLES, seed=1)
    ),
    "own iteration": lambda: Turned(TensorDataset(torch.arange(float(SAMPLES))), 4),
}
FILTERED = {
    "collate": lambda: DataLoader(torch.arange(22.0)[:, None], 4, collate_fn=odd_only),
    "collate, resumable": lambda: DataLoader(
        torch.arange(22.0)[:, None], 4, collate_fn=odd_only, sampler=ResumableSampler(22)
    ),
    "map": lambda: TensorLoader(torch.arange(22.0)[:, None], batch_size=4).map(lambda batch: batch[:3]),
    "pairs": lambda: DataLoader(
        TensorDataset(*2 * [torch.arange(22.0)[:, None]]),
        4,
        collate_fn=lambda b: [odd_only([each[k] for each in b]) for k in (0, 1)],
    ),
    "texts": lambda: DataLoader(list("abcdefgh"), 4, collate_fn=lambda texts: [each for each in texts if each != "b"]),
    "texts in a tuple": lambda: DataLoader(list("abcdefgh"), 4, collate_fn=lambda texts: (tuple(texts[:3]), (1, 2, 3))),
    "own count": lambda: counting(DataLoader(torch.zeros(8, 5), 4, collate_fn=lambda b: torch.stack(b[1:]).T), 3),
}


def counting(data, samples):
    data.count_samples = lambda batch: samples
    return data


def indices_of(data):
    learner = make_learner()
    learner.model.forward = lambda x: torch.zeros(4, 1)
    return list(learner.predict_batches(data, indices=True))


@pytest.mark.parametrize("kind", UNKNOWN)
def test_data_in_another_order_than_their_sampler_has_no_indices(kind):
    with pytest.raises(StepStateError, match=r"the data does not know its samples: \w+ has (in_order=False|its own)"):
        indices_of(UNKNOWN[kind]())


@pytest.mark.parametrize("workers", [0, 1])
def test_order_that_one_worker_keeps_is_known(workers):
    data = DataLoader(Slow(), 4, num_workers=workers, in_order=False)
    assert [each.tolist() for each, _ in indices_of(data)][:2] == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize("kind", FILTERED)
def test_batch_of_other_samples_than_the_data_took_has_no_indices(kind):
    with pytest.raises(StepStateError, match=r"its batch counts \d samples, and the data made it of 4"):
        indices_of(FILTERED[kind]())


COUNTED = {
    "sequences": (torch.zeros(5, 4, 1), lambda batch: batch.shape[1]),
    "nodes": (torch.zeros(4, 1), lambda batch: 9),
    "texts": (["a", "b", "c", "d"], None),
}


@pytest.mark.parametrize("kind", COUNTED)
def test_batch_whose_count_may_be_that_of_the_indices_has_them(kind):
    batch, count = COUNTED[kind]
    data = DataLoader(Slow(), 4, collate_fn=lambda samples: batch, drop_last=True)
    if count is not None:
        data.count_samples = count
    learner = make_learner(on("step_begin", lambda step: seen.append(step.indices.tolist())))
    learner.model.forward = lambda x: torch.zeros(4, 1)
    seen = []
    learner.predict(data)
    assert seen[:2] == [[0, 1, 2, 3], [4, 5, 6, 7]]


IMAGES = [torch.zeros(3, 5, 5) for _ in range(4)]
MORE = {
    "two views": torch.zeros(8, 1),
    "packed": (torch.zeros(9, 2), torch.zeros(4, 1)),
    "times first": (torch.zeros(6, 4, 1), torch.zeros(4, 1)),
    "images of one size": (IMAGES, [0, 1, 2, 3]),
    "images of one size in tuples": (tuple(IMAGES), tuple({"boxes": torch.zeros(i, 4)} for i in range(4))),
    "list of images": IMAGES,
    "texts with labels": (["a", "b", "c", "d"], [0, 1, 2, 3]),
}


@pytest.mark.parametrize("kind", MORE)
def test_batch_that_may_hold_all_samples_has_indices(kind):
    data = DataLoader(Slow(), 4, collate_fn=lambda samples: MORE[kind], drop_last=True)
    assert [each.tolist() for each, _ in indices_of(data)][:2] == [[0, 1, 2, 3], [4, 5, 6, 7]]


# The example


def pause(stop_at, learner):
    if learner.progress.steps == stop_at:
        learner.pause("half")


def mining(rank=0, world=1, stop_at=None, state=None, epochs=3):
    torch.manual_seed(0)
    loader = TensorLoader(*tensors(), batch_size=4, shuffle=True)
    made = runpy.run_path(str(EXAMPLE), run_name="example")["HardExamples"](loader, least=0.1)
    shown = []
    look = on("step_begin", lambda step: shown.append(step.indices.tolist()), "look")
    parts = [made, look, *([DDP()] if world > 1 else [])]
    if stop_at is not None:
        parts.append(
            on("step_end", lambda learner: learner.progress.steps == stop_at and learner.pause("half"), "stop")
        )
    learner = Learner(
        nn.Linear(3, 2), nn.CrossEntropyLoss(), lambda p: torch.optim.SGD(p, lr=0.5), plugins=parts, standard=False
    )
    if state is not None:
        learner.load_state_dict(state)
    learner.fit(loader, epochs=epochs, on_interrupt="return")
    return shown, [p.detach().clone() for p in learner.model.parameters()], learner.state_dict()


def same(one, other):
    return all(torch.equal(p, q) for p, q in zip(one, other, strict=True))


@pytest.mark.parametrize("stop_at", [2, 6, 9])
def test_mining_that_is_stopped_goes_on_exactly(stop_at):
    shown, weights, _ = mining()
    first, _, state = mining(stop_at=stop_at)
    rest, again, _ = mining(state=state)
    assert first + rest == shown
    assert same(weights, again)
    assert sorted(chain(*shown[6:12])) != list(range(SAMPLES))


def in_two(rank):
    shown, weights, _ = mining(rank, 2)
    first, _, state = mining(rank, 2, stop_at=5)
    rest, again, _ = mining(rank, 2, state=state)
    return shown == first + rest, same(weights, again), shown, weights


def test_mining_on_two_processes_goes_on_exactly():
    one, other = run(in_two, 2)
    assert one[:2] == other[:2] == (True, True)
    assert one[2] != other[2]
    assert same(one[3], other[3])
