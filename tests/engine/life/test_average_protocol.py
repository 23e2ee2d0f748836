"""What a plugin with ``provides = "average"`` has to have, and that this is all: it is saved, loaded and evaluated."""

from __future__ import annotations

import pytest
import torch
from helpers import batches
from torch import nn

from loopkit import Learner, checkpoint, hookimpl
from loopkit.errors import PluginError
from loopkit.plugins import Checkpoint, Metrics


class Slow:
    """The weights of the last epoch's end."""

    name, provides, owns = "slow", "average", ("weights.val",)

    def __init__(self):
        self.kept = {}

    @hookimpl(phase="training", reads=("params",))
    def epoch_end(self, learner):
        self.kept = {name: p.detach().clone() * 0.5 for name, p in learner.model.named_parameters()}

    @hookimpl(phase="val", updates=("params",))
    def epoch_context(self, learner):
        return None if learner.models.weights.by else self.averaged(learner)

    def averaged(self, learner):
        def swap():
            for name, p in learner.model.named_parameters():
                if name in self.kept:
                    p.data, self.kept[name] = self.kept[name], p.data

        return learner.models.weights.replaced(swap, swap, by=self.name)

    def state_dict(self):
        return {name: kept.clone() for name, kept in self.kept.items()}

    def load_state_dict(self, state):
        self.kept = dict(state)


def make(*plugins):
    torch.manual_seed(0)
    return Learner(nn.Linear(3, 1), nn.MSELoss(), lambda p: torch.optim.SGD(p, lr=0.1), plugins=plugins, standard=False)


@pytest.mark.parametrize("part", ["averaged", "state_dict", "load_state_dict", "owns"])
@pytest.mark.parametrize("way", ["made", "added", "wrapped"])
def test_a_part_that_is_missing_is_named_when_it_is_added(part, way):
    lacking = type("Lacking", (), {key: value for key, value in vars(Slow).items() if key != part and key[:2] != "__"})
    match = rf"provides is 'average', and it has no {part}\. An average has averaged"
    if way == "made":
        with pytest.raises(PluginError, match=match):
            make(lacking())
    else:
        learner = make()
        with pytest.raises(PluginError, match=match):
            learner.add(lacking())
        assert learner.plugins == {}


@pytest.mark.parametrize("weights_only", [True, False])
def test_the_four_parts_are_enough(tmp_path, weights_only):
    run = Checkpoint(tmp_path, best="val/loss", weights_only=weights_only)
    learner = make(Slow(), Metrics(), run)
    learner.fit(batches(3), batches(2), epochs=2)
    best = min(each["val/loss"] for each in [learner.metrics])
    target = make(Slow(), Metrics())
    checkpoint.load_best(target, tmp_path)
    loss = target.evaluate(batches(2))["val/loss"]
    assert loss == learner.evaluate(batches(2))["val/loss"] == best
