"""Runs that end at a place and are resumed with new objects, compared with the run that does not."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from loopkit import Learner, hookimpl, seed_everything
from loopkit.checkpoint.encoding import decode, encode

GENERATOR = torch.Generator().manual_seed(0)
X, Y = torch.randn(24, 3, generator=GENERATOR), torch.randn(24, 1, generator=GENERATOR)
Make = Callable[[], tuple[Any, Any]]
Place = tuple[str, str, int]
PLACES = {
    "in mid-epoch": ("step_end", "train", 8),
    "between epochs": ("phase_end", "val", 1),
    "in the validation": ("step_end", "val", 4),
    "before the validation": ("phase_end", "train", 1),
}
"""Where a run is saved and ends: at which hook of which phase, and at which call of it."""


class Enough(Exception):
    """Ends a run."""


class Seen:
    """Notes the batches, and saves the state at a place, where it ends the run."""

    name = "seen"
    volatile = ("batches", "state", "_calls")

    def __init__(self, place: Place | None) -> None:
        self.batches: list[tuple[str, float]] = []
        self.state: Any = None
        self._place, self._calls = place, 0

    @hookimpl
    def step_begin(self, phase: Any, step: Any) -> None:
        self.batches.append((phase.name, step.batch[0].sum().item()))

    @hookimpl
    def step_end(self, learner: Learner, phase: Any) -> None:
        self._look(learner, "step_end", phase.name)

    @hookimpl
    def phase_end(self, learner: Learner, phase: Any) -> None:
        self._look(learner, "phase_end", phase.name)

    def _look(self, learner: Learner, hook: str, phase: str) -> None:
        if self._place is None or (hook, phase) != self._place[:2]:
            return
        self._calls += 1
        if self._calls == self._place[2]:
            self.state = decode(*encode(learner.state_dict()))
            raise Enough


def make_run(make: Make, place: Place | None = None, state: Any = None, **options: Any) -> tuple[Seen, list[Tensor]]:
    """Fit a model with dropout; returns what was seen, and the parameters at the end."""
    seed_everything(0 if state is None else 99)
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.3), nn.Linear(4, 1))
    seen = Seen(place)
    learner = Learner(model, nn.MSELoss(), lambda p: torch.optim.SGD(p, lr=0.01), plugins=[seen], standard=False)
    train, val = make()
    if state is not None:
        learner.load_state_dict(state)
    with suppress(Enough):
        learner.fit(train, val, epochs=3, **options)
    return seen, [p.detach().clone() for p in model.parameters()]


_whole: dict[Any, tuple[Seen, list[Tensor]]] = {}


def check_exact(make: Make, place: str, **options: Any) -> None:
    """Compare a run that was saved and resumed, in its batches and bits, with the one that was not."""
    if make not in _whole:
        _whole[make] = make_run(make, **options)
    whole, parameters = _whole[make]
    before, _ = make_run(make, PLACES[place], **options)
    assert before.state is not None
    after, found = make_run(make, state=before.state, **options)
    assert before.batches + after.batches == whole.batches
    assert all(map(torch.equal, found, parameters))
