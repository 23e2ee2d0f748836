"""Optimizers with modes: ``train()`` and ``eval()`` of schedule-free optimizers are called around training."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers import batches, on
from torch import nn

from loopkit import Learner, TrainingPhase, checkpoint, every, hookimpl
from loopkit.plugins import Checkpoint, ClipGradNorm, EarlyStopping, Metrics, MixedPrecision, WeightAverage

BETA = 0.9


class Modal(torch.optim.Optimizer):
    """A schedule-free SGD: parameters are `y` in training, `x` in evaluation. A switch to its own mode fails."""

    volatile = ("calls",)

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr, "k": 0, "mode": "new"})
        self.calls = []

    def pairs(self):
        return [(p, self.state[p]) for group in self.param_groups for p in group["params"] if "z" in self.state[p]]

    def turn(self, mode):
        self.calls.append(mode)
        assert self.param_groups[0]["mode"] != mode, "it has that mode"
        for group in self.param_groups:
            group["mode"] = mode

    def train(self):
        self.turn("train")
        for p, state in self.pairs():
            p.lerp_(state["z"], 1 - BETA)

    def eval(self):
        self.turn("eval")
        for p, state in self.pairs():
            p.lerp_(state["z"], 1 - 1 / BETA)

    @torch.no_grad()
    def step(self, closure=None):
        group = self.param_groups[0]
        assert group["mode"] == "train"
        group["k"] += 1
        for p in group["params"]:
            z = self.state[p].setdefault("z", p.detach().clone())
            p.lerp_(z, 1 - 1 / BETA)
            z.sub_(p.grad, alpha=group["lr"])
            p.lerp_(z, 1 / group["k"])
            p.lerp_(z, 1 - BETA)


class Swapping(Modal):
    """Keeps `x` beside, and exchanges it with the parameters."""

    def swap(self):
        for p, state in self.pairs():
            x = state.setdefault("x", state["z"].clone())
            p.data, state["x"] = x, p.data

    def train(self):
        self.turn("train")
        self.swap()

    def eval(self):
        self.turn("eval")
        self.swap()

    @torch.no_grad()
    def step(self, closure=None):
        group = self.param_groups[0]
        assert group["mode"] == "train"
        for p in group["params"]:
            z = self.state[p].setdefault("z", p.detach().clone())
            p.sub_(p.grad, alpha=group["lr"])
            x = self.state[p].setdefault("x", z.clone())
            x.lerp_(p, 0.3)


class Wrapping:
    """Is no subclass of torch's; its mode is an attribute that is in no state."""

    def __init__(self, params, lr=0.1):
        self.base = Modal(params, lr)
        self.base.param_groups[0]["mode"] = "train"
        self.training = False
        self.calls = []

    state = property(lambda self: self.base.state)
    param_groups = property(lambda self: self.base.param_groups)

    def train(self, mode=True):
        self.calls.append("train")
        assert not self.training, "it has that mode"
        self.training = True
        for p, state in self.base.pairs():
            p.lerp_(state["z"], 1 - BETA)

    def eval(self):
        self.calls.append("eval")
        self.training = False
        for p, state in self.base.pairs():
            p.lerp_(state["z"], 1 - 1 / BETA)

    def step(self, closure=None):
        assert self.training
        self.base.step()

    def zero_grad(self, set_to_none=True):
        self.base.zero_grad(set_to_none)

    def state_dict(self):
        return self.base.state_dict()

    def load_state_dict(self, state):
        self.base.load_state_dict(state)


KINDS = [Modal, Swapping, Wrapping]


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))


def by_hand(kind, epochs, clip=False, accumulate=1, bf16=False):
    """Losses of the validations, and the model after the last ``train()``."""
    model = net()
    optimizer, loss_fn = kind(model.parameters()), nn.MSELoss()
    losses = []
    for _ in range(epochs):
        with torch.no_grad():
            if "eval" in optimizer.calls or not optimizer.calls:
                optimizer.train()
        data = batches(5)
        for start in range(0, 5, accumulate):
            window = data[start : start + accumulate]
            for x, y in window:
                with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                    loss = loss_fn(model(x), y)
                (loss / len(window)).backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            optimizer.eval()
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                found = [loss_fn(model(x), y).item() for x, y in batches(2, seed=1)]
            optimizer.calls.clear()
            optimizer.train()
            optimizer.calls.clear()
            optimizer.calls.append("train")
        losses.append(sum(found) / 2)
    return losses, model


def fit(kind, epochs=3, plugins=(), load=None, **options):
    model = net()
    fits = {name: options.pop(name) for name in ("validate",) if name in options}
    learner = Learner(model, nn.MSELoss(), kind, plugins=plugins, standard=False, **options)
    if load is not None:
        learner.load_state_dict(load)
    learner.fit(batches(5), batches(2, seed=1), epochs=epochs, **fits)
    return learner


def alike(one, other):
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


class Losses:
    """Notes the losses of validations."""

    volatile = ("*",)

    def __init__(self):
        self.seen = []

    @hookimpl(phase="val", reads=("metrics",))
    def phase_end(self, learner):
        self.seen.append(learner.metrics["val/loss"])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("options", "plugins"),
    [
        ({}, list),
        ({"clip": True, "accumulate": 2}, lambda: [ClipGradNorm(0.1)]),
        ({"bf16": True}, lambda: [MixedPrecision("bfloat16")]),
    ],
    ids=["plain", "clip and accumulate", "bfloat16"],
)
def test_a_fit_is_bitwise_its_loop_by_hand(kind, options, plugins):
    losses, model = by_hand(kind, 3, **options)
    seen = Losses()
    learner = fit(kind, 3, [*plugins(), Metrics(), seen], accumulate=options.get("accumulate", 1))
    assert alike(learner.model, model)
    assert seen.seen == pytest.approx(losses, rel=1e-6)  # float64 here, float32 there


class Saver:
    """Keeps the state at every edge."""

    volatile = ("*",)

    def __init__(self):
        self.states = []

    @hookimpl(reads=("*",))
    def step_end(self, learner):
        if learner.current.can_save:
            self.states.append(copy.deepcopy(learner.state_dict()))

    @hookimpl(reads=("*",))
    def phase_end(self, learner):
        self.step_end(learner)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("validate", [every(epochs=1), every(updates=2)], ids=["epochs", "updates"])
def test_a_run_goes_on_bitwise_from_every_edge(kind, validate):
    seen, saver = Losses(), Saver()
    whole = fit(kind, 2, [Metrics(), seen, saver], validate=validate)
    without = Losses()
    assert alike(fit(kind, 2, [Metrics(), without], validate=validate).model, whole.model)
    assert without.seen == seen.seen
    for state in saver.states:
        again = Losses()
        learner = fit(kind, 2, [Metrics(), again, Saver()], load=state, validate=validate)
        assert alike(learner.model, whole.model)
        assert again.seen == seen.seen[len(seen.seen) - len(again.seen) :]


def test_each_is_called_only_when_the_mode_differs():
    learner = fit(Modal, 2, [Metrics()])
    assert learner.optimizer.calls == ["train", "eval", "train", "eval", "train"]
    learner.fit(batches(2), epochs=1)
    assert learner.optimizer.calls[5:] == []


@pytest.mark.parametrize("kind", KINDS)
def test_an_evaluation_off_schedule_leaves_the_training_form_bitwise(kind):
    def evaluate(learner):
        learner.evaluate(batches(1))
        learner.predict(batches(1))
        with learner.inference():
            learner.model(torch.ones(1, 3))

    plain, looked = (
        fit(kind, 2),
        fit(kind, 2, [on("step_end", evaluate, phase="train"), on("phase_end", evaluate, "b", phase="train")]),
    )
    before = list(plain.model.parameters()), [p.data_ptr() for p in plain.model.parameters()]
    evaluate(plain)
    assert alike(plain.model, looked.model)
    assert before == (list(plain.model.parameters()), [p.data_ptr() for p in plain.model.parameters()])
    plain.fit(batches(5), epochs=1)
    looked.fit(batches(5), epochs=1)
    assert alike(plain.model, looked.model)


def test_an_evaluation_after_a_fit_measures_the_evaluation_form():
    learner = fit(Modal, 2, [Metrics()])
    measured = learner.metrics["val/loss"]
    _, model = by_hand(Modal, 2)
    assert alike(learner.model, model)
    learner.optimizer.calls.clear()
    assert learner.evaluate(batches(2, seed=1))["val/loss"] == pytest.approx(measured, rel=1e-5)  # once more to and fro
    assert learner.optimizer.calls == ["eval"]


@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_the_measured_form_is_saved_and_loaded(tmp_path, kind, weights_only):
    forms = []

    def keep(learner):
        forms.append([p.detach().clone() for p in learner.model.parameters()])

    run = Checkpoint(tmp_path, best="val/loss", weights_only=weights_only)
    learner = fit(kind, 3, [Metrics(), run, on("epoch_end", keep, phase="val")])
    best = learner.metrics["val/loss"]
    model = net()
    checkpoint.load_weights(model, checkpoint.best(tmp_path))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), forms[-1], strict=True))
    for target in (learner, fit(kind, 1, [Metrics()]), Learner(net(), nn.MSELoss(), kind, plugins=[Metrics()])):
        checkpoint.load_best(target, tmp_path)
        assert target.evaluate(batches(2, seed=1))["val/loss"] == best
        target.fit(batches(2), batches(1), epochs=1)
        assert target.optimizer.calls[-3:] == ["train", "eval", "train"]


def test_the_best_form_is_restored_in_evaluation_mode():
    learner = fit(Modal, 3, [Metrics(), stop := EarlyStopping("val/loss", restore_best=True)])
    assert learner.evaluate(batches(2, seed=1))["val/loss"] == stop.best
    learner.fit(batches(2), batches(2, seed=1), epochs=1)
    assert learner.optimizer.calls[-5:] == ["eval", "train", "eval", "train", "eval"]


def test_a_plugin_that_owns_the_weights_switches_itself():
    class Owner:
        name, provides, owns = "owner", "average", ("weights.val",)

        def averaged(self, learner):
            raise NotImplementedError

        def state_dict(self):
            return {}

        def load_state_dict(self, state):
            pass

        @hookimpl
        def epoch_begin(self, learner):
            learner.optimizer.param_groups[0]["mode"] = "train"

    learner = fit(Modal, 2, [Owner()])
    assert learner.optimizer.calls == []
    assert "left to plugin 'owner'" in str(learner.explain())


def test_an_average_that_stands_nowhere_owns_no_weights():
    assert fit(Modal, 1, [WeightAverage(0.5, phases=())]).optimizer.calls == ["train", "eval", "train"]


def test_an_option_leaves_the_switches_to_the_user():
    class Own(TrainingPhase):
        def step(self, learner, step):
            if not learner.optimizer.calls:
                learner.optimizer.train()
            super().step(learner, step)

    learner = Learner(net(), nn.MSELoss(), Modal, phases=[Own()], standard=False, optimizer_modes=False)
    learner.fit(batches(2), batches(1), epochs=1)
    assert learner.optimizer.calls == ["train"]
    assert "left to you" in str(learner.explain())


def test_modes_are_of_the_class_and_callable_without_arguments():
    class Forwarding(torch.optim.SGD):
        def __getattr__(self, name):
            if name in ("train", "eval"):
                return lambda: pytest.fail("called")
            raise AttributeError(name)

    class Asking(torch.optim.SGD):
        def train(self, mode):
            pytest.fail("called")

        def eval(self):
            pytest.fail("called")

    class Half(torch.optim.SGD):
        def eval(self):
            pytest.fail("called")

    for kind in (Forwarding, Asking, Half):
        learner = fit(lambda params, kind=kind: kind(params, lr=0.1), 1)
        assert learner.models.modes.optimizers == {}
        assert "train()" not in str(learner.explain())


def test_explain_shows_what_is_called():
    learner = Learner(net(), nn.MSELoss(), Modal)
    assert "optimizer 'optimizer' (Modal): train() before training, eval()" in str(learner.explain())


def test_another_optimizer_begins_anew():
    learner = fit(Modal, 1)
    learner.set_optimizer(Modal)
    learner.fit(batches(2), epochs=1)
    assert learner.optimizer.calls == ["train"]


def test_an_error_in_eval_leaves_the_training_form():
    class Failing(Modal):
        def eval(self):
            super().eval()
            raise RuntimeError("no memory")

    learner = Learner(net(), nn.MSELoss(), Failing, standard=False)
    learner.fit(batches(2), epochs=1)
    before = copy.deepcopy(learner.model.state_dict())
    with pytest.raises(RuntimeError, match="no memory"):
        learner.evaluate(batches(1))
    assert all(torch.equal(value, before[name]) for name, value in learner.model.state_dict().items())
    assert learner.optimizer.param_groups[0]["mode"] == "train"
