"""Batches without samples, as Poisson sampling makes them, where a phase or a plugin takes them."""

from __future__ import annotations

import pytest
import torch
from helpers import batches
from torch import nn

from loopkit import Learner, TrainingPhase, hookimpl
from loopkit.errors import PhaseInputError
from loopkit.plugins import SkipSpikes

EMPTY = (torch.zeros(0, 3), torch.zeros(0, 1))


class Noisy(torch.optim.SGD):
    """Adds noise to each update, as private training does."""

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            p.grad.add_(0.1)
        super().step()


class Taking(TrainingPhase):
    takes_empty = True


class Private:
    takes_empty = True

    @hookimpl
    def update_begin(self):
        pass


def by_hand(data, accumulate=1):
    torch.manual_seed(0)
    model, loss_fn = nn.Linear(3, 1), nn.MSELoss()
    optimizer = Noisy(model.parameters(), lr=0.1)
    for start in range(0, len(data), accumulate):
        window = data[start : start + accumulate]
        samples = sum(len(x) for x, _ in window)
        optimizer.zero_grad()
        for x, y in window:
            (loss_fn(model(x), y) * (len(x) / max(samples, 1))).backward()
        optimizer.step()
    return model


DATA = [*batches(2), EMPTY, EMPTY, batches(3)[2], EMPTY]


@pytest.mark.parametrize("way", [{"phases": [Taking()]}, {"plugins": [Private()]}], ids=["phase", "plugin"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_empty_batches_are_updates_that_count_in_no_metric(way, accumulate):
    torch.manual_seed(0)
    plugins = [*way.get("plugins", ()), SkipSpikes()]
    learner = Learner(
        nn.Linear(3, 1),
        nn.MSELoss(),
        lambda p: Noisy(p, lr=0.1),
        phases=way.get("phases", ()),
        plugins=plugins,
        accumulate=accumulate,
    )
    learner.remove("progress")
    learner.fit(DATA, epochs=1)
    assert learner.progress.updates == 6 // accumulate
    assert learner.progress.samples == 12
    assert learner.progress.steps == 6
    assert torch.allclose(learner.model.weight, by_hand(DATA, accumulate).weight, atol=1e-7)  # other rounding of shares
    assert 0 < learner.metrics["train/loss"] < 10


def test_a_validation_takes_them_too():
    learner = Learner(nn.Linear(3, 1), nn.MSELoss(), lambda p: Noisy(p, lr=0.1), plugins=[Private()])
    full, with_empty = (learner.evaluate(data) for data in (batches(2), [EMPTY, *batches(2), EMPTY]))
    assert full == with_empty


def test_without_a_declaration_they_are_refused_with_the_way_out():
    learner = Learner(nn.Linear(3, 1), nn.MSELoss(), lambda p: Noisy(p, lr=0.1), standard=False)
    with pytest.raises(PhaseInputError, match=r"it has no samples; .*takes_empty = True"):
        learner.fit([EMPTY], epochs=1)
