"""A plugin with ``updates=("loss",)`` at ``backward_begin``: backward starts from what it puts there.

Each oracle is a loop with the penalty written in, and bitwise.
"""

from __future__ import annotations

import contextlib
import gc
import weakref

import pytest
import torch
from distributed.processes import run
from helpers import batches, make_learner, on
from torch import nn

from loopkit import Learner, Phase, TrainingPhase, fresh, hookimpl
from loopkit.data import TensorLoader
from loopkit.errors import CancelStep, LossError, PhaseError
from loopkit.plugins import DDP, ClipGradNorm, Metrics, MixedPrecision

DECAY = 0.3


def penalty(model):
    return DECAY * sum(p.square().sum() for p in model.parameters())


class Penalty:
    @hookimpl(reads=("params",), updates=("loss",))
    def backward_begin(self, learner, step):
        step.loss = step.loss + penalty(learner.model)


class Scratch(Phase):
    """Keeps no loss on its step."""

    name = "train"
    training = True

    def step(self, learner, step):
        inputs, targets = step.batch
        step.backward(learner.loss_fn(learner.model(inputs), targets))
        step.update()


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def by_hand(data, accumulate=1, dtype=None, clip=None):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", enabled=dtype is torch.float16)
    for index, (inputs, targets) in enumerate(data):
        if index % accumulate == 0:
            optimizer.zero_grad()
        with torch.autocast("cpu", dtype) if dtype else contextlib.nullcontext():
            loss = nn.functional.mse_loss(model(inputs), targets) + penalty(model)
        scaler.scale(loss / accumulate).backward()
        if (index + 1) % accumulate == 0:
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            scaler.step(optimizer)
            scaler.update()
    return model


def same(one, other):
    return all(torch.equal(p, q) for p, q in zip(one.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("phase", [TrainingPhase, Scratch])
@pytest.mark.parametrize(
    ("plugins", "options"),
    [
        ([], {}),
        ([], {"accumulate": 2}),
        ([MixedPrecision("bfloat16")], {"dtype": torch.bfloat16}),
        ([MixedPrecision("float16")], {"dtype": torch.float16}),
        ([ClipGradNorm(0.2), MixedPrecision("bfloat16")], {"accumulate": 2, "dtype": torch.bfloat16, "clip": 0.2}),
    ],
    ids=["plain", "accumulate", "bfloat16", "float16", "all"],
)
def test_backward_starts_from_the_loss_that_a_plugin_puts_there(phase, plugins, options):
    own = [fresh(plugin) for plugin in plugins]
    learner = make_learner(Penalty(), *own, model=net(), phases=[phase()], accumulate=options.get("accumulate", 1))
    data = batches(4)
    learner.fit(data, epochs=1)
    assert same(learner.model, by_hand(data, **options))


def test_metrics_and_step_end_have_the_phases_own_loss():
    seen = []
    look = on("step_end", lambda step: seen.append((step.loss.detach(), step.total_loss.detach())), "look")
    at_end = on("backward_end", lambda step: seen.append(step.loss is step.total_loss), "at_end")
    learner = make_learner(Penalty(), Metrics(), look, at_end)
    before, data = penalty(learner.model).detach(), batches(1)
    own = learner.loss_fn(learner.model(data[0][0]), data[0][1]).detach()
    result = learner.fit(data, epochs=1)
    assert seen == [True, (own, own + before)]
    assert result.metrics["train/loss"] == own.item()


def test_without_listeners_total_loss_is_the_loss():
    learner = make_learner()
    with learner.epoch("train") as epoch:
        step = epoch.step(batches(1)[0])
    assert step.total_loss is step.loss
    assert step.backward_name is None


def test_name_of_a_backward_is_over_with_it():
    during, after = [], []
    listen = on("backward_end", lambda step: during.append(step.backward_name))

    class Twice(Phase):
        name, training = "train", True

        def step(self, learner, step):
            inputs, targets = step.batch
            step.backward(learner.loss_fn(learner.model(inputs), targets), "optimizer")
            after.append(step.backward_name)
            step.backward(learner.loss_fn(learner.model(inputs), targets))
            step.update()

    make_learner(listen, phases=[Twice()]).fit(batches(1), epochs=1)
    assert (during, after) == (["optimizer", None], [None])


def test_total_loss_before_backward_says_when_it_exists():
    learner = make_learner(on("backward_begin", lambda step: step.total_loss))
    with pytest.raises(AttributeError, match=r"step.total_loss is not set: it exists from backward_end on"):
        learner.fit(batches(1), epochs=1)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (1.0, "is float 1.0"),
        (torch.ones(2, requires_grad=True), r"has shape \(2,\)"),
        (torch.tensor(1.0), "does not require grad"),
    ],
)
def test_loss_that_a_plugin_puts_there_is_checked_again(bad, message):
    learner = make_learner(on("backward_begin", lambda step: setattr(step, "loss", bad), updates=("loss",)))
    with pytest.raises(LossError, match=f"the loss that a plugin put on the step at backward_begin {message}"):
        learner.fit(batches(1), epochs=1)


def test_step_that_is_cancelled_at_backward_begin_has_the_phases_own_loss():
    def act(step):
        step.own, step.loss = step.loss, step.loss + 1.0
        raise CancelStep("no")

    seen = []
    look = on("step_cancelled", lambda step: seen.append(step.loss is step.own), "look")
    make_learner(on("backward_begin", act, updates=("loss",)), look).fit(batches(1), epochs=1)
    assert seen == [True]


class InTurn(Phase):
    """A backward of its own for each of two networks."""

    name = "train"
    training = True

    def step(self, learner, step):
        inputs, targets = step.batch
        for name, model in learner.model.items():
            step.backward(nn.functional.mse_loss(model(inputs), targets), name)
        step.update()


def test_each_of_several_backwards_says_whose_it_is():
    class OfOne:
        @hookimpl(updates=("loss",))
        def backward_begin(self, learner, step):
            if step.backward_name == "b":
                step.loss = step.loss + penalty(learner.model["b"])

    def sgd(model):
        return torch.optim.SGD(model.parameters(), lr=0.1)

    models = {"a": net(), "b": net()}
    optimizers = {name: sgd(model) for name, model in models.items()}
    learner = Learner(models, optimizer=optimizers, phases=[InTurn()], plugins=[OfOne()], standard=False)
    data = batches(4)
    learner.fit(data, epochs=1)
    plain = make_learner(model=net(), phases=[Scratch()])
    plain.fit(data, epochs=1)
    assert same(models["a"], plain.model)
    assert same(models["b"], by_hand(data))


class WithClosure(TrainingPhase):
    def step(self, learner, step):
        inputs, targets = step.batch

        def closure():
            step.loss = learner.loss_fn(learner.model(inputs), targets)
            step.backward(step.loss)
            return self.returned(step)

        step.update(closure=closure)

    def returned(self, step):
        return step.loss


def lbfgs(params):
    return torch.optim.LBFGS(params, lr=0.5, max_iter=5, line_search_fn="strong_wolfe")


def test_optimizer_of_a_closure_gets_the_loss_that_backward_started_from():
    data, model = batches(2), net()
    learner = Learner(net(), nn.MSELoss(), lbfgs, phases=[WithClosure()], plugins=[Penalty()], standard=False)
    learner.fit(data, epochs=1)
    optimizer = lbfgs(model.parameters())
    for inputs, targets in data:

        def closure(inputs=inputs, targets=targets):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), targets) + penalty(model)
            loss.backward()
            return loss

        optimizer.step(closure)
    assert same(learner.model, model)


def test_closure_that_returns_another_loss_than_was_replaced_is_refused():
    class Numbers(WithClosure):
        def returned(self, step):
            return step.loss.item()

    learner = Learner(net(), nn.MSELoss(), lbfgs, phases=[Numbers()], plugins=[Penalty()], standard=False)
    with pytest.raises(PhaseError, match=r"closure .* returned another loss than it gave to step.backward"):
        learner.fit(batches(1), epochs=1)


def test_step_that_is_cancelled_within_its_closure_is_freed_at_once():
    steps = []

    def cancel(step):
        assert step.closure is not None
        steps.append(weakref.ref(step))
        raise CancelStep

    plugins = [on("backward_end", cancel)]
    learner = Learner(net(), nn.MSELoss(), lbfgs, phases=[WithClosure()], plugins=plugins, standard=False)
    gc.disable()
    try:
        learner.fit(batches(2), epochs=1)
        assert [step() for step in steps] == [None, None]
    finally:
        gc.enable()


# Several processes


def samples():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(32, 3, generator=generator), torch.randn(32, 1, generator=generator)


def together(rank):
    learner = make_learner(DDP(), Penalty(), model=net(), accumulate=2)
    learner.fit(TensorLoader(*samples(), batch_size=4), epochs=1)
    return list(learner.model.parameters())


def together_by_hand(rank):
    torch.distributed.init_process_group("gloo")
    model = net()
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs, targets = samples()
    for index, low in enumerate(range(rank * 4, 32, 8)):
        with wrapped.no_sync() if index % 2 == 0 else contextlib.nullcontext():
            loss = nn.functional.mse_loss(wrapped(inputs[low : low + 4]), targets[low : low + 4]) + penalty(model)
            (loss / 2).backward()
        if index % 2:
            optimizer.step()
            optimizer.zero_grad()
    return list(model.parameters())


def test_penalty_on_two_processes_is_bitwise_the_loop_by_hand():
    ours, theirs = run(together, 2), run(together_by_hand, 2)
    for rank in range(2):
        assert all(torch.equal(p, q) for p, q in zip(ours[rank], theirs[rank], strict=True))
