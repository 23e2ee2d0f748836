"""A resumed epoch that is shorter or longer than the one before it is named."""

from __future__ import annotations

import warnings

import pytest
import torch
from helpers import make_learner, on
from torch.utils.data import DataLoader, IterableDataset


class Stream(IterableDataset):
    """Samples without a length."""

    def __init__(self, count):
        self.count = count

    def __iter__(self):
        return iter([(torch.ones(3), torch.ones(1)) for _ in range(self.count)])


class Stateful:
    """A loader whose state lies about how much is left."""

    def __init__(self, count, left):
        self.count = count
        self.left = left
        self.resumed = False

    def __iter__(self):
        resumed, self.resumed = self.resumed, False
        yield from [(torch.ones(2, 3), torch.ones(2, 1)) for _ in range(self.left if resumed else self.count)]

    def state_dict(self):
        return {"at": 1}

    def load_state_dict(self, state):
        self.resumed = True


def resumed(first, second, at, epochs=3):
    """Fit, pause after a step, and fit again with other data; return what was warned of at the second fit."""

    def pause(learner):
        if learner.progress.steps == at:
            learner.pause()

    states = []
    saves = on("signal_begin", lambda learner: states.append(learner.state_dict()), "saver", reads=("*",))
    make_learner(on("step_end", pause), saves).fit(first, epochs=epochs, on_interrupt="return")
    learner = make_learner()
    learner.load_state_dict(states[0])
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        learner.fit(second, epochs=epochs)
    return [str(each.message) for each in seen]


@pytest.mark.parametrize(
    ("first", "second", "steps"),
    [
        (Stateful(6, 0), Stateful(6, 3), 5),
        (Stateful(6, 0), Stateful(6, 5), 7),
        (DataLoader(Stream(12), 2), DataLoader(Stream(8), 2), 4),
        (DataLoader(Stream(12), 2), DataLoader(Stream(16), 2), 8),
    ],
)
def test_resumed_epoch_of_another_length_is_named(first, second, steps):
    found = resumed(first, second, at=8)
    assert len(found) == 1
    assert f"that was resumed ended after {steps} steps, and the one before it had 6" in found[0]


@pytest.mark.parametrize("second", [Stateful(6, 4), DataLoader(Stream(12), 2)])
def test_resumed_epoch_of_the_same_length_is_not_named(second):
    first = Stateful(6, 0) if isinstance(second, Stateful) else DataLoader(Stream(12), 2)
    assert resumed(first, second, at=8) == []


def test_first_epoch_is_compared_with_the_next_one():
    assert resumed(Stateful(6, 0), Stateful(6, 4), at=2) == []
    found = resumed(Stateful(6, 0), Stateful(6, 1), at=2)
    assert [each.partition(" ended")[2][:48] for each in found] == [" after 6 steps, and the one before it had 3: Sta"]


class Stuck(Stateful):
    """A loader that begins each later epoch where it was resumed, as streams with a state do."""

    def __init__(self, count, left):
        super().__init__(count, left)
        self.stuck = False

    def __iter__(self):
        yield from [(torch.ones(2, 3), torch.ones(2, 1)) for _ in range(self.left if self.stuck else self.count)]

    def load_state_dict(self, state):
        self.stuck = True


@pytest.mark.parametrize(
    ("first", "second", "at", "steps"),
    [
        (Stuck(6, 0), Stuck(6, 4), 2, "ended after 4 steps, and the one before it had 6"),
        (Stuck(6, 0), Stuck(6, 3), 9, "ended after 3 steps, and the one before it had 6"),
        (Stuck(6, 0), Stuck(6, 5), 1, "ended after 5 steps, and the one before it had 6"),
    ],
)
def test_an_epoch_after_a_resumed_one_of_another_length_is_named_once(first, second, at, steps):
    found = resumed(first, second, at)
    assert len(found) == 1
    assert f"epoch of phase 'train' after the one that was resumed {steps}" in found[0]
