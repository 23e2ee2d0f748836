"""Windows whose weights sum to 0: their updates are skipped."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers import on
from torch import nn

from loopkit import Learner, Phase, TrainingPhase, losses
from loopkit.errors import PhaseError
from loopkit.plugins import ClipGradNorm, GradNorm, MixedPrecision


class Weighted(TrainingPhase):
    """Its steps have these weights, in turn."""

    def __init__(self, weights):
        super().__init__()
        self.weights = weights

    def step(self, learner, step):
        step.weight = self.weights[step.index % len(self.weights)]
        super().step(learner, step)


class OfPhase(Weighted, Phase):
    pass


def adamw(params):
    return torch.optim.AdamW(params, lr=0.1)


def make(weights, optimizer=adamw, **options):
    torch.manual_seed(0)
    options = {"standard": False, "phases": [Weighted(weights)], **options}
    return Learner(nn.Linear(3, 1), nn.MSELoss(), optimizer, **options)


def batches(count=6):
    generator = torch.Generator().manual_seed(3)
    return [(torch.randn(4, 3, generator=generator), torch.randn(4, 1, generator=generator)) for _ in range(count)]


def events(learner):
    seen = []
    for event in ("update_begin", "update_end", "update_skipped"):
        learner.add(on(event, lambda step, event=event: seen.append(event), name=event))
    return seen


@pytest.mark.parametrize("zero", [torch.tensor(0.0), torch.tensor(0), 0, 0.0, False], ids=repr)
@pytest.mark.parametrize("accumulate", [1, 2, 3, 8])
def test_update_whose_weights_sum_to_zero_is_skipped(zero, accumulate):
    learner = make([zero], accumulate=accumulate)
    before = copy.deepcopy(learner.model.state_dict())
    seen = events(learner)
    result = learner.fit(batches(), epochs=2)
    assert (result.steps, result.updates) == (12, 0)
    assert all(torch.equal(value, before[key]) for key, value in learner.model.state_dict().items())
    assert seen == ["update_begin", "update_skipped"] * (2 * max(6 // accumulate, 1))


@pytest.mark.parametrize("zero", [torch.tensor(0.0), 0], ids=repr)
@pytest.mark.parametrize("extra", ["bare", "heard", "standard", "clipped", "scaled"])
def test_weightless_steps_between_others_leave_no_trace(zero, extra):
    plugins = {
        "heard": lambda: [on("update_begin", lambda: None)],
        "clipped": lambda: [ClipGradNorm(0.1), GradNorm()],
        "scaled": lambda: [MixedPrecision("float32", scaling=True)],
    }.get(extra, list)
    data = batches()
    learner = make([4, zero, 4], plugins=plugins(), standard=extra == "standard")
    assert learner.fit(data, epochs=1).updates == 4
    by_hand = make([4], plugins=plugins(), standard=extra == "standard")
    by_hand.fit([data[0], data[2], data[3], data[5]], epochs=1)
    assert torch.equal(learner.model.weight, by_hand.model.weight)


def test_weightless_steps_of_a_window_leave_no_trace():
    data = batches()
    learner, by_hand = make([torch.tensor(2.0), torch.tensor(0.0)], accumulate=2), make([2.0])
    learner.fit(data, epochs=1)
    by_hand.fit(data[::2], epochs=1)
    assert torch.allclose(learner.model.weight, by_hand.model.weight, rtol=0, atol=1e-6)  # scaled by other factors


def test_tensor_weights_that_count_change_nothing():
    learners = [make([torch.tensor(7)]), make([4]), make([5000])]
    for learner in learners:
        learner.fit(batches(), epochs=1)
    assert torch.equal(learners[0].model.weight, learners[1].model.weight)
    assert torch.equal(learners[2].model.weight, learners[1].model.weight)


class ByName(Phase):
    """Two optimizers, of which one has a step without weight."""

    name, training = "train", True

    def step(self, learner, step):
        inputs, targets = step.batch
        for name, model in learner.models.items():
            step.weight = torch.tensor(float(name == "one"))
            step.backward(learner.loss_fn(model(inputs), targets), name)
            step.update(name)


def test_window_of_one_optimizer_is_skipped_alone():
    models = {"one": nn.Linear(3, 1), "two": nn.Linear(3, 1)}
    before = copy.deepcopy(models)
    learner = Learner(models, nn.MSELoss(), dict.fromkeys(models, adamw), phases=[ByName()], standard=False)
    assert learner.fit(batches(), epochs=1).updates == 6
    assert not torch.equal(models["one"].weight, before["one"].weight)
    assert torch.equal(models["two"].weight, before["two"].weight)


def test_loss_that_is_a_sum_takes_no_notice_of_weights():
    learner = make([0])
    learner.loss_fn = losses.summed(nn.MSELoss(reduction="sum"))
    assert learner.fit(batches(), epochs=1).updates == 6


@pytest.mark.parametrize("weight", [-1, float("inf"), float("nan")])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_weight_that_is_none_is_refused(weight, accumulate):
    with pytest.raises(PhaseError, match=r"a weight is a finite number that is not negative"):
        make([weight], accumulate=accumulate).fit(batches(), epochs=1)
