"""Open windows with sparse gradients: a run that is stopped in one goes on with the same bits."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch
from helpers import on
from torch import nn

from loopkit import Learner
from loopkit.checkpoint.encoding import decode, encode
from loopkit.errors import StateError

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # of torch, in its Adagrad
WORDS = torch.tensor([[0, 1, 1], [2, 2, 0], [1, 3, 0], [4, 0, 1]])
DATA = [(WORDS[i : i + 2], torch.ones(2, 1)) for i in (0, 2, 1, 0, 2)]


class Enough(Exception):
    """Ends a run."""


class Counts(nn.Module):
    def __init__(self, bag):
        super().__init__()
        kind = nn.EmbeddingBag if bag else nn.Embedding
        self.words = kind(5, 3, sparse=True)
        self.bag = bag
        self.last = nn.Linear(3, 1)

    def forward(self, words):
        return self.last(self.words(words) if self.bag else self.words(words).mean(1))


OPTIMIZERS = {
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    "Adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=0.1),
    "two": lambda model: {
        "words": torch.optim.SparseAdam(model.words.parameters(), lr=0.1),
        "last": torch.optim.Adam(model.last.parameters(), lr=0.1),
    },
}


def run(kind, bag, stop=None, state=None):
    torch.manual_seed(0 if state is None else 7)
    model = Counts(bag)
    learner = Learner(model, nn.MSELoss(), OPTIMIZERS[kind](model), accumulate=3, standard=False)
    states = []

    def save():
        states.append(decode(*encode(learner.state_dict())))
        if len(states) == stop:
            raise Enough

    if stop is not None:
        learner.add(on("step_end", save, "saving"))
    if state is not None:
        learner.load_state_dict(state)
    with suppress(Enough):
        learner.fit(DATA, epochs=2)
    return states, [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("bag", [False, True])
def test_run_resumes_in_a_window_of_sparse_gradients(kind, bag):
    _, whole = run(kind, bag)
    for stop in (1, 2, 7):
        states, _ = run(kind, bag, stop)
        _, resumed = run(kind, bag, state=states[-1])
        assert all(map(torch.equal, resumed, whole))


def test_sparse_gradient_of_another_shape_does_not_fit():
    states, _ = run("SGD", False, 1)
    (window,) = states[0]["epochs"][0]["windows"].values()
    window["grads"][0]["shape"] = [6, 3]
    with pytest.raises(StateError, match="window of 'optimizer'"):
        run("SGD", False, state=states[0])
