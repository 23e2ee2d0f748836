"""Steps in a row of phases that do not train: what changes between them is seen, and eager ones cost nothing."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from loopkit import Learner, PredictionPhase, ValidationPhase, hookimpl
from loopkit.metrics import Accuracy
from loopkit.plugins import Metrics
from loopkit_whole_step import WholeStep

STEPS = 24
AT = 14
"""The graph has run since the sixth step."""


class Scaled(nn.Module):
    """A model with a number of Python's, a mode that matters, and a buffer."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Linear(12, 3)
        self.register_buffer("offset", torch.zeros(3))
        self.scale, self.extra = 2.0, 1

    def forward(self, x):
        scale = self.scale if hasattr(self, "extra") else 1.0
        return self.last(torch.tanh(self.norm(self.first(x)))) * scale + self.shift()

    def shift(self):
        offset = getattr(self, "offset", 0.5)
        return 1.0 if offset is None else offset


def batches(count=STEPS, size=8):
    rng = torch.Generator().manual_seed(3)
    return [(torch.randn(size, 6, generator=rng), torch.randint(0, 3, (size,), generator=rng)) for _ in range(count)]


def learner(*plugins, phases=()):
    torch.manual_seed(0)
    return Learner(
        Scaled(), nn.CrossEntropyLoss(), standard=False, plugins=[Metrics(Accuracy()), *plugins], phases=phases
    )


def whole(**options):
    return WholeStep("always", **{"backend": "none", "show": False, **options})


def changed(data, change, learner):
    """Batches; before one of them, the model is changed."""
    for at, batch in enumerate(data):
        if at == AT:
            batch = change(learner, batch) or batch
        yield batch


def to_train(learner, batch):
    learner.model.norm.train()


def frozen(learner, batch):
    learner.model.first.requires_grad_(False)


def other_scale(learner, batch):
    learner.model.scale = 3.0


def no_scale(learner, batch):
    del learner.model.extra


def other_buffer(learner, batch):
    learner.model.offset = torch.ones(3)


def buffer_of_another_shape(learner, batch):
    learner.model.offset = torch.ones(1)


def buffer_that_is_gone(learner, batch):
    del learner.model.offset


def buffer_that_is_none(learner, batch):
    learner.model.offset = None


def other_weights(learner, batch):
    learner.model.first.weight.data = torch.ones(12, 6)


def other_strides(learner, batch):
    learner.model.first.weight.data = torch.ones(6, 12).t()


def other_parameter(learner, batch):
    learner.model.last.bias = nn.Parameter(torch.ones(3))


def hooked(learner, batch):
    learner.model.first.register_forward_hook(lambda module, given, made: made * 2)


def other_loss(learner, batch):
    learner.loss_fn = nn.CrossEntropyLoss(label_smoothing=0.5)


def of_option(learner, batch):
    learner.loss_fn.label_smoothing = 0.5


def shorter(learner, batch):
    return tuple(each[:5] for each in batch)


def in_a_list(learner, batch):
    return list(batch)


def of_other_strides(learner, batch):
    return batch[0].t().contiguous().t(), batch[1]


CHANGES = [
    *(to_train, frozen, other_scale, no_scale, other_buffer, buffer_of_another_shape),
    *(buffer_that_is_gone, buffer_that_is_none, other_weights, other_strides),
    *(other_parameter, hooked, other_loss, of_option, shorter, in_a_list, of_other_strides),
]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("call", ["evaluate", "predict"])
def test_change_between_two_steps_is_seen(call, change):
    found, step = [], whole()
    for plugins in ([], [step]):
        made = learner(*plugins)
        found.append(getattr(made, call)(changed(batches(), change, made)))
    assert any(shape.graph or shape.since for shape in step.shapes.values())
    if call == "predict":
        torch.testing.assert_close(found[1], found[0])
    else:
        assert found[1] == pytest.approx(found[0], rel=1e-6)


class Counting(ValidationPhase):
    """Counts the samples of a batch by what it holds."""

    def samples(self, batch):
        return 8 if float(batch[0][0, 0]) > -10 else 3


def test_batch_that_counts_otherwise_has_its_own_weight():
    def fewer(learner, batch):
        batch[0][0, 0] = -20.0

    found, step = [], whole()
    for plugins in ([], [step]):
        made = learner(*plugins, phases=[Counting()])
        found.append(made.evaluate(changed(batches(), fewer, made)))
    assert found[1] == pytest.approx(found[0], rel=1e-6)
    assert [shape.mode for shape in step.shapes.values()] == ["graph"]


class Watched(WholeStep):
    """Counts the steps that it is asked to take."""

    asked = 0

    @hookimpl(reads=("*",))
    def take_step(self, learner, phase, step, default):
        self.asked += 1
        super().take_step(learner, phase, step, default)


@pytest.mark.parametrize("reason", ["too short", "slower", "grad_mode"])
@pytest.mark.parametrize("call", ["evaluate", "predict"])
def test_steps_that_stay_eager_are_left_to_the_phase(call, reason, monkeypatch):
    class Val(ValidationPhase):
        grad_mode = "grad" if reason == "grad_mode" else "no_grad"

    class Predict(PredictionPhase):
        grad_mode = "grad" if reason == "grad_mode" else "no_grad"

    monkeypatch.setattr("loopkit_whole_step.shapes.Shape.ratio", property(lambda self: 1.3))
    step = Watched("always" if reason == "grad_mode" else "auto", backend="none", show=False)
    if reason == "slower":
        monkeypatch.setattr("loopkit_whole_step.compiling.Compiling.worth", lambda *given: "")
    made = learner(step, phases=[Val(), Predict()])
    getattr(made, call)(batches(60))
    first, step.asked = step.asked, 0
    getattr(made, call)(batches(60))
    assert step.asked <= 10
    assert first < 60
    assert [shape.mode for shape in step.shapes.values()] == ["eager"]
    assert "eager, because" in str(made.explain("val" if call == "evaluate" else call))


def test_plugin_that_comes_later_is_asked_again():
    step = Watched(backend="none", show=False)
    made = learner(step)
    made.evaluate(batches())

    def added(learner, batch):
        step.asked = 0
        learner.add(Seen())

    class Seen:
        name = "seen"

        @hookimpl
        def step_end(self, step):
            """Look on."""

    made.evaluate(changed(batches(), added, made))
    assert step.asked > 0
