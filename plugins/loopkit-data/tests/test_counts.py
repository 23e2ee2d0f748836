"""How many samples a batch of a loader around another one has."""

import pytest
import torch
from helpers import make_learner

from loopkit import TrainingPhase
from loopkit.data import Prefetch, from_function
from loopkit_data import batched, limit, per_epoch

LONG = torch.randn(9, 4, 3), torch.randn(4, 1)
SHORT = torch.randn(2, 4, 3), torch.randn(4, 1)


class Last(TrainingPhase):
    """Takes the last time of sequences that begin with the times."""

    def forward(self, learner, inputs):
        return learner.model(inputs[-1])


class First(TrainingPhase):
    """Takes the first time of sequences whose samples come first."""

    def forward(self, learner, inputs):
        return learner.model(inputs[:, 0])


class Counting(list):
    """A list of batches that counts their samples."""

    def count_samples(self, batch):
        return batch[0].shape[1]


class Remote:
    """Answers any name with a new object, as proxies of remote objects do."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Remote()

    def __iter__(self):
        return iter([(torch.randn(4, 3), torch.zeros(4, 1))])


def counting(data):
    data.count_samples = lambda batch: batch[0].shape[1]
    return data


def turned(batch):
    return tuple(part.transpose(0, 1) if part.ndim > 2 else part for part in batch)


def samples_of(data, phase):
    learner = make_learner(phases=[phase])
    learner.fit(data, epochs=1)
    return learner.progress.samples


WRAPPERS = {
    "limit": lambda loader: limit(loader, 2),
    "limit of a list": lambda loader: limit(Counting([LONG, SHORT]), 2),
    "per_epoch": lambda loader: per_epoch(loader, 2),
    "several": lambda loader: limit(Prefetch(limit(loader, 2), "cpu"), 2),
    "batched": lambda loader: limit(counting(batched([5, 3], 1, collate=lambda each: (LONG, SHORT)[each[0] < 4])), 2),
}


@pytest.mark.parametrize("kind", WRAPPERS)
def test_loaders_around_another_count_by_its_function(kind):
    loader = counting(from_function(2, lambda index: (LONG, SHORT)[index]))
    assert samples_of(WRAPPERS[kind](loader), Last()) == 8


CHANGED = {
    "map within": lambda loader: limit(Prefetch(loader.map(turned), "cpu"), 2),
    "batched": lambda loader: batched(Counting([1, 2]), 1, collate=lambda each: turned((LONG, SHORT)[each[0] - 1])),
}


@pytest.mark.parametrize("kind", CHANGED)
def test_loaders_that_change_batches_do_not_count_by_the_function_of_the_inner_one(kind):
    loader = from_function(2, lambda index: (LONG, SHORT)[index])
    loader.count_samples = lambda batch: pytest.fail("it counts another batch")
    assert samples_of(CHANGED[kind](loader), First()) == 8


def test_data_that_answer_any_name_are_limited():
    assert samples_of(limit(Remote(), 1), TrainingPhase()) == 4
