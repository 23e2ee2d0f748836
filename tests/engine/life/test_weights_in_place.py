"""What stands in the weights' place is in no state: saves inside of it hold the models' own weights."""

from __future__ import annotations

import pytest
import torch
from helpers import batches, make_learner, on
from torch import nn

from loopkit import checkpoint, hookimpl
from loopkit.checkpoint import storage
from loopkit.plugins import Checkpoint, WeightAverage


class Putting:
    """Puts tensors in place in a validation, in one of the ways in which that can be done."""

    name = "putting"
    owns = ("weights.val",)

    def __init__(self, way):
        self.way = way

    @hookimpl(phase="val", updates=("params", "buffers"))
    def epoch_context(self, learner):
        tensors = [*learner.model.parameters(), *learner.model.buffers()]
        other = [torch.full_like(tensor, 5) for tensor in tensors]
        put, away = getattr(self, self.way)([t.detach() for t in tensors], tensors, other)
        return learner.models.weights.replaced(put, away, by=self.name)

    def copies(self, held, tensors, other):
        own = []

        def put():
            own[:] = [tensor.clone() for tensor in held]
            for tensor, new in zip(held, other, strict=True):
                tensor.copy_(new)

        def away():
            for tensor, old in zip(held, own, strict=True):
                tensor.copy_(old)

        return put, away

    def exchanges(self, held, tensors, other):
        def swap():
            for tensor, new in zip(tensors, other, strict=True):
                tensor.data, new.data = new.data, tensor.data

        return swap, swap

    def exchanges_values(self, held, tensors, other):
        def swap():
            for tensor, new in zip(held, other, strict=True):
                kept = tensor.clone()
                tensor.copy_(new)
                new.copy_(kept)

        return swap, swap


def net():
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


@pytest.mark.parametrize("way", ["copies", "exchanges", "exchanges_values"])
def test_a_state_inside_holds_the_own_weights(way):
    states, own = [], []

    def keep(learner):
        states.append(learner.state_dict())

    def look(learner):
        own.append({name: tensor.clone() for name, tensor in learner.model.state_dict().items()})

    learner = make_learner(
        Putting(way), on("step_end", keep, phase="val"), on("epoch_end", look, "looks", phase="train"), model=net()
    )
    learner.fit(batches(2), batches(1), epochs=1)
    (state,) = states
    assert all(torch.equal(state["models"]["model"][name], tensor) for name, tensor in own[0].items())


@pytest.mark.parametrize("way", ["copies", "exchanges", "exchanges_values"])
@pytest.mark.parametrize("weights_only", [True, False])
def test_a_checkpoint_inside_holds_the_own_weights(tmp_path, way, weights_only):
    def save(learner):
        learner.current.request_save()

    run = Checkpoint(tmp_path, keep=9, weights_only=weights_only)
    learner = make_learner(Putting(way), on("step_end", save, phase="val"), run, model=net())
    learner.fit(batches(2), batches(2), epochs=1)
    saved = [manifest.path for manifest in storage.listing(tmp_path)]
    assert len(saved) > 1
    for each in saved:
        model = net()
        checkpoint.load_weights(model, each)
        for name, tensor in learner.model.state_dict().items():
            assert torch.equal(model.state_dict()[name], tensor), (each, name)


def test_a_state_inside_two_of_them_holds_the_own_weights():
    states = []
    average = WeightAverage(0.5)

    class Both(Putting):
        @hookimpl(phase="val", updates=("params", "buffers"), after=("average",))
        def epoch_context(self, learner):
            return super().epoch_context(learner)

    Both.owns = ("model.both",)
    learner = make_learner(
        average, Both("copies"), on("step_end", lambda learner: states.append(learner.state_dict()), phase="val")
    )
    learner.fit(batches(2), batches(1), epochs=1)
    assert torch.equal(states[0]["models"]["model"]["weight"], learner.model.weight)
