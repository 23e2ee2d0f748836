"""An average of a third party, loaded from a checkpoint of weights only: it starts again as a new one."""

import pytest
import torch
from torch import nn

from loopkit import Learner, checkpoint, hookimpl
from loopkit.plugins import Checkpoint, Metrics


class Mean:
    """The mean of the weights at the ends of epochs; its state has two entries from the begin on."""

    name = "mean"
    provides = "average"
    owns = ("weights.val",)

    def __init__(self):
        self.count, self.mean = 0, {}

    @hookimpl(phase="training", reads=("params",))
    def epoch_end(self, learner):
        self.count += 1
        for name, p in learner.model.named_parameters():
            self.mean.setdefault(name, p.detach().clone()).lerp_(p.detach(), 1 / self.count)

    @hookimpl(phase="val", updates=("params",))
    def epoch_context(self, learner):
        return None if learner.models.weights.by else self.averaged(learner)

    def averaged(self, learner):
        def swap():
            for name, p in learner.model.named_parameters():
                if name in self.mean:
                    p.data, self.mean[name] = self.mean[name], p.data

        return learner.models.weights.replaced(swap, swap, by=self.name)

    def state_dict(self):
        return {"count": self.count, "mean": {name: mean.clone() for name, mean in self.mean.items()}}

    def load_state_dict(self, state):
        self.count, self.mean = state["count"], dict(state["mean"])


class Weighted(Mean):
    """Has an option, which it keeps."""

    def __init__(self, first=0):
        super().__init__()
        self.first = first

    def state_dict(self):
        return {"first": self.first, **super().state_dict()}

    def load_state_dict(self, state):
        assert state["first"] == self.first
        super().load_state_dict(state)


class TakesNothing(Mean):
    """Does not keep its option, so that no new one can be made: it takes an empty state."""

    def __init__(self, first):
        super().__init__()

    def load_state_dict(self, state):
        self.count, self.mean = state.get("count", 0), dict(state.get("mean", {}))


BATCHES = [(torch.randn(4, 3), torch.randn(4, 1)) for _ in range(3)]


@pytest.mark.parametrize("make", [Mean, lambda: Weighted(2), lambda: TakesNothing(2)])
def test_load_best_of_weights_only_begins_an_average_anew(make, tmp_path):
    def learner(*plugins):
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return Learner(model, nn.MSELoss(), optimizer, plugins=[make(), Metrics(), *plugins], standard=False)

    saved = tmp_path / "run"
    learner(Checkpoint(saved, best="val/loss", weights_only=True)).fit(BATCHES, BATCHES[:1], epochs=3)
    again = learner()
    again.fit(BATCHES, epochs=1)
    checkpoint.load_best(again, saved)
    assert again.plugins["mean"].count == 0
    assert again.evaluate(BATCHES[:1])["val/loss"] == checkpoint.best(saved).metrics["val/loss"]
