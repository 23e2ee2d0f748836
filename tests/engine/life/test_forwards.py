"""`learner.inference()` and `learner.aside()`: forwards of a hook's own."""

from __future__ import annotations

import copy
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from helpers import batches, make_learner, on
from torch import nn

from loopkit import hookimpl
from loopkit.plugins import Metrics, MixedPrecision, SanityCheck, WeightAverage


def net():
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))


def here(learner):
    """How a forward is now: mode, gradients, autocast, and the first weight."""
    return (
        learner.model.training,
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu"),
        learner.model[0].weight.detach().clone(),
    )


def alike(one, other):
    return one[:3] == other[:3] and torch.equal(one[3], other[3])


class Halved:
    """Puts other weights in place in epochs that do not train."""

    @hookimpl(phase="val", updates=("params",))
    def epoch_context(self, learner):
        put, away = partial(self.scale, learner, 0.5), partial(self.scale, learner, 2.0)
        return learner.models.weights.replaced(put, away, by="halved")

    @torch.no_grad()
    def scale(self, learner, factor):
        for p in learner.model.parameters():
            p.mul_(factor)


@pytest.mark.parametrize("hook", ["phase_end", "epoch_begin", "step_end", "update_end", "fit_end"])
@pytest.mark.parametrize(
    "more",
    [list, lambda: [WeightAverage(0.5), MixedPrecision("bfloat16")], lambda: [Halved()]],
    ids=["plain", "average", "own"],
)
def test_inference_is_as_a_step_of_a_validation(hook, more):
    seen = {}

    def validate(learner, phase):
        if phase.name == "val" and "val" not in seen:
            seen["val"] = here(learner)

    def look(learner):
        before = here(learner)
        with learner.inference():
            seen["inside"] = here(learner)
        assert alike(here(learner), before)

    learner = make_learner(on("loss_begin", validate, "validates"), on(hook, look, "looks"), *more(), model=net())
    learner.fit(batches(2), batches(1), epochs=1)
    seen.pop("val")
    learner.evaluate(batches(1))
    last = seen["inside"]
    look(learner)
    assert seen["val"][:3] == last[:3] == (False, False, len(more()) == 2)
    assert alike(seen["inside"], seen["val"])


def test_inference_leaves_training_bitwise_alone():
    def sample(learner):
        with learner.inference():
            learner.model(torch.ones(2, 3))

    ends = []
    for plugins in ([], [on("step_end", sample), on("phase_end", sample, "also")]):
        torch.manual_seed(0)
        learner = make_learner(*plugins, WeightAverage(0.5), Metrics(), model=net())
        learner.fit(batches(3), batches(1), epochs=2)
        ends.append(copy.deepcopy(learner.model.state_dict()))
    assert all(torch.equal(value, ends[1][name]) for name, value in ends[0].items())


def test_inference_restores_all_after_an_error():
    learner = make_learner(WeightAverage(0.5), MixedPrecision("bfloat16"), model=net())
    learner.fit(batches(2), epochs=1)
    before = here(learner)
    with pytest.raises(KeyError), learner.inference():
        raise KeyError
    assert alike(here(learner), before)


def test_inference_keeps_the_weights_that_an_evaluation_has_put_in_place():
    seen = []

    def look(learner):
        before = here(learner)
        with learner.inference():
            seen.append(torch.equal(here(learner)[3], before[3]))

    learner = make_learner(WeightAverage(0.5), on("epoch_end", look, phase="val"), model=net())
    learner.fit(batches(2), batches(1), epochs=1)
    assert seen == [True]


def test_inference_does_not_put_weights_in_place_twice():
    seen = []

    def look(learner):
        seen.append(learner.model[0].weight.detach().clone())
        with learner.inference():
            seen.append(learner.model[0].weight.detach().clone())

    learner = make_learner(Halved(), on("epoch_end", look, phase="val"), model=net())
    learner.fit(batches(2), batches(1), epochs=1)
    assert torch.equal(*seen)


def test_inference_leaves_out_contexts_of_plugins_that_look_on():
    entered = []

    class Spy:
        provides = "observer"

        @hookimpl
        def step_context(self, step):
            entered.append(step)

    learner = make_learner(Spy(), model=net())
    with learner.inference():
        pass
    assert entered == []


class Noise(nn.Module):
    """Draws from a generator of its own, counts, and makes a buffer at its first use."""

    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(7)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("made", None)

    def forward(self, inputs):
        self.calls.add_(1)
        self.made = inputs.detach().clone()
        return inputs + torch.randn(inputs.shape, generator=self.generator)


def trained(hook, more, act, model):
    """The parameters and buffers after a fit in which a hook acts."""
    torch.manual_seed(0)
    plugins = [] if act is None else [on(hook, act)]
    learner = make_learner(*plugins, *more(), model=model())
    learner.fit(batches(3), batches(1), epochs=2)
    return {**dict(learner.model.named_parameters()), **dict(learner.model.named_buffers())}


@pytest.mark.parametrize("hook", ["loss_begin", "backward_begin", "update_begin", "step_end", "phase_end"])
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize(
    ("more", "model"),
    [
        (list, net),
        (lambda: [WeightAverage(0.5), MixedPrecision("bfloat16")], net),
        (lambda: [SanityCheck()], lambda: nn.Sequential(Noise(), nn.Linear(3, 1))),
    ],
    ids=["norm and dropout", "average and autocast", "a generator of a module"],
)
def test_a_forward_aside_leaves_training_bitwise_alone(hook, more, model, grad):
    def forward(learner):
        with learner.aside(), torch.set_grad_enabled(grad):
            learner.model.train(hook == "step_end")
            learner.model(torch.ones(2, 3))
            torch.rand(1)

    without, with_it = (trained(hook, more, act, model) for act in (None, forward))
    assert all(torch.equal(value, with_it[name]) for name, value in without.items())


def test_samples_at_each_validation_leave_training_bitwise_alone():
    def sample(learner):
        with learner.aside(), learner.inference():
            torch.multinomial(learner.model(torch.ones(2, 3)).exp(), 1)

    def more():
        return [WeightAverage(0.5), MixedPrecision("bfloat16"), SanityCheck()]

    for hook in ("phase_end", "step_end", "loss_begin"):
        without, with_it = (trained(hook, more, act, net) for act in (None, sample))
        assert all(torch.equal(value, with_it[name]) for name, value in without.items())


def test_a_forward_aside_is_not_synced():
    states = []

    class Sync:
        provides = "sync"

        @hookimpl
        def step_begin(self):
            pass

        @contextmanager
        def unsynced(self):
            states.append("in")
            yield
            states.append("out")

    learner = make_learner(Sync(), model=net())
    with learner.aside():
        assert states == ["in"]
        assert learner.models.aside
    assert states == ["in", "out"]
    assert not learner.models.aside


def test_aside_restores_modes_and_made_buffers_after_an_error():
    learner = make_learner(model=nn.Sequential(Noise(), nn.Linear(3, 1)))

    def fail():
        learner.model.eval()
        learner.model(torch.ones(2, 3))
        raise KeyError

    with pytest.raises(KeyError), learner.aside():
        fail()
    assert learner.model.training
    assert learner.model[0].made is None
    assert learner.model[0].calls == 0


def test_nothing_is_saved_in_an_epoch_aside():
    seen = []

    def act(learner):
        with learner.aside():
            learner.evaluate(batches(1))
            seen.append(learner.current.can_save)

    make_learner(on("epoch_end", act, phase="train"), model=net()).fit(batches(2), epochs=1)
    assert seen == [False]
