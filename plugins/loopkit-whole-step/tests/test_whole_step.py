"""The whole step as a graph: what it trains, what stays eager and why, and what a comparison finds.

``backend="none"`` runs what was recorded as it is, which takes a hundredth of the time that compiling takes;
test_inductor.py compiles.
"""

from __future__ import annotations

import copy
import random
from itertools import count
from types import MappingProxyType

import numpy as np
import pytest
import torch
from helpers import on
from torch import nn

from loopkit import CancelStep, Learner, TrainingPhase, ValidationPhase, checkpoint, hookimpl
from loopkit.errors import NonFiniteError, PluginError, StateError
from loopkit.events import BackwardBegin, BackwardEnd, UpdateBegin, UpdateEnd, UpdateSkipped
from loopkit.metrics import F1, Accuracy
from loopkit.plugins import (
    DDP,
    Checkpoint,
    ClipGradNorm,
    ClipGradValue,
    GradNoise,
    GradNorm,
    LogMetrics,
    LogTo,
    Metrics,
    MixedPrecision,
    Schedule,
    SkipSpikes,
    StopOnNonFinite,
    WeightAverage,
)
from loopkit.schedules import cosine
from loopkit_whole_step import WholeStep
from loopkit_whole_step.cells import Cells


def batches(count=12, size=8, seed=0):
    rng = torch.Generator().manual_seed(seed)
    return [(torch.randn(size, 6, generator=rng), torch.randint(0, 3, (size,), generator=rng)) for _ in range(count)]


def mlp():
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))


def normed():
    return nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Tanh(), nn.Linear(12, 3))


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def make(*plugins, model=mlp, optimizer=sgd, phase=None, loss=None, **options):
    torch.manual_seed(0)
    phases = {} if phase is None else {"phases": [phase() if isinstance(phase, type) else phase]}
    made = model()
    if isinstance(optimizer, dict):
        optimizer = {name: each(list(made.parameters())) for name, each in optimizer.items()}
    return Learner(made, loss or nn.CrossEntropyLoss(), optimizer, standard=False, plugins=plugins, **phases, **options)


def whole(when="always", **options):
    return WholeStep(when, **{"backend": "none", "show": False, **options})


def apart(one, other):
    pairs = zip(one.model.state_dict().values(), other.model.state_dict().values(), strict=True)
    return max(float((a.double() - b.double()).abs().max()) for a, b in pairs)


def pair(plugins=lambda: (), data=None, epochs=2, *, plain_optimizer=None, step=None, **options):
    """An eager learner and one with the plugin, trained alike; and the plugin."""
    step = step or whole()
    eager, learner = make(*plugins(), **options), make(*plugins(), step, **options)
    for each in (eager, learner):
        torch.manual_seed(1)
        each.fit(data or batches(), epochs=epochs)
    return eager, learner, step


def modes(step):
    return [shape.mode for shape in step.shapes.values()]


def reasons(step):
    return [shape.reason for shape in step.shapes.values()]


def stays_eager(reason, *, plugins=lambda: (), **options):
    """It trains the very bits of an eager learner, and says why."""
    eager, learner, step = pair(plugins, **options)
    assert any(reason in said for said in reasons(step)), reasons(step)
    assert "graph" not in modes(step)
    assert apart(eager, learner) == 0.0


# What is recorded

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "momentum": sgd,
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.001, momentum=0.9),
    "groups": lambda p: torch.optim.AdamW([{"params": p[:2]}, {"params": p[2:], "lr": 0.002, "weight_decay": 0.1}]),
}


class Odd(torch.optim.SGD):
    """An optimizer whose groups or state have another form than torch's."""

    def __init__(self, params, form):
        super().__init__(params, lr=0.05)
        self.form, self.rate = form, 0.05
        if form == "None":
            self.param_groups[0]["lr"] = None
        if form == "none":
            del self.param_groups[0]["lr"]

    def step(self, closure=None):
        group = self.param_groups[0]
        with torch.no_grad():
            for p in group["params"]:
                p.sub_(p.grad, alpha=self.rate)
        if self.form == "count":
            self.state["k"] = 1
        if self.form == "tensor":
            self.state["k"] = torch.ones(())
        if self.form == "proxy":
            self.state["k"] = MappingProxyType({"a": 1})


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        ("None", "parameter group 0 of the optimizer has no learning rate"),
        ("none", "parameter group 0 of the optimizer has no learning rate"),
        ("count", "the state of the optimizer holds a int"),
        ("tensor", "the state of the optimizer holds a Tensor"),
        ("proxy", "the state of the optimizer holds a mappingproxy"),
    ],
)
def test_optimizer_in_another_form_stays_eager(form, reason):
    stays_eager(reason, optimizer=lambda params: Odd(params, form))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_in_the_graph_trains_as_it_does_by_itself(name):
    eager, learner, step = pair(lambda: (ClipGradNorm(0.5), Schedule(cosine(50))), optimizer=OPTIMIZERS[name])
    assert modes(step) == ["graph"]
    assert apart(eager, learner) < 2e-6  # of numbers below 1, after 24 updates in float32
    assert eager.progress == learner.progress


def test_standard_stack_trains_as_it_does_by_itself():
    def stack():
        return Metrics(Accuracy()), ClipGradNorm(0.5), Schedule(cosine(50)), StopOnNonFinite(), GradNorm(clipped=True)

    eager, learner, step = pair(stack)
    assert modes(step) == ["graph"]
    assert apart(eager, learner) < 2e-6
    assert learner.metrics.keys() == eager.metrics.keys()
    assert learner.metrics == pytest.approx(eager.metrics, rel=1e-6)
    assert learner.optimizer.param_groups[0]["lr"] == eager.optimizer.param_groups[0]["lr"]


def test_state_of_the_optimizer_is_of_the_same_kind():
    eager, learner, _ = pair(optimizer=OPTIMIZERS["adam"])
    for one, other in zip(eager.optimizer.state.values(), learner.optimizer.state.values(), strict=True):
        assert {k: (v.dtype, v.shape) for k, v in one.items()} == {k: (v.dtype, v.shape) for k, v in other.items()}
        assert one["step"] == other["step"]
    groups = [{k: v for k, v in each.optimizer.param_groups[0].items() if k != "params"} for each in (eager, learner)]
    assert groups[0] == groups[1]


def test_float64_is_held_to_its_own_rounding():
    """Adam's counter is float64 in the graph: in float32 its corrections would be 1e-5 away."""
    data = [(x.double(), y) for x, y in batches()]
    eager, learner, step = pair(model=lambda: mlp().double(), data=data, optimizer=OPTIMIZERS["adam"])
    assert modes(step) == ["graph"]
    assert apart(eager, learner) < 1e-12  # of numbers below 1, after 24 updates


def test_batch_norm_and_dropout_are_those_of_eager():
    def model():
        return nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(0.3), nn.Linear(12, 3))

    eager, learner, step = pair(model=model)
    assert modes(step) == ["graph"]
    assert apart(eager, learner) < 2e-6


def test_plugins_that_come_after_need_nothing():
    average = {}

    def stack():
        average[len(average)] = WeightAverage()
        return average[len(average) - 1], ClipGradValue(0.1)

    _eager, _learner, step = pair(stack)
    assert modes(step) == ["graph"]
    for one, other in zip(*(each.state_dict().values() for each in average.values()), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)  # float32, 24 updates


class Contrast(TrainingPhase):
    """A phase of one's own, with two losses of a batch of mappings."""

    emits = (BackwardBegin, BackwardEnd, UpdateBegin, UpdateEnd, UpdateSkipped)

    def step(self, learner, step):
        step.inputs = step.batch["x"]
        step.outputs = learner.model(step.inputs)
        step.near = nn.functional.cross_entropy(step.outputs, step.batch["y"])
        step.far = step.outputs.square().mean()
        step.loss = step.near + step.batch["share"] * step.far
        step.backward(step.loss)
        step.update()


def test_phase_of_ones_own_is_recorded():
    data = [{"x": x, "y": y, "share": 0.1} for x, y in batches()]
    seen = []

    def look():
        return (on("step_end", lambda step, **_: seen.append((step.near.item(), step.far.item()))),)

    eager, learner, step = pair(look, phase=Contrast(), data=data)
    assert modes(step) == ["graph"]
    assert apart(eager, learner) < 2e-6
    assert seen[24:] == [pytest.approx(each, rel=1e-5) for each in seen[:24]]
    assert len(seen) == 48


def test_gradients_and_outputs_are_there_for_those_who_come_after():
    seen = []
    look = on("update_end", lambda step, **_: seen.append([p.grad is not None for p in step.params]))
    outputs = on("step_end", lambda step, **_: seen.append(tuple(step.outputs.shape)), "outputs")
    make(look, outputs, whole()).fit(batches(8), epochs=1)
    assert seen == [[True] * 4, (8, 3)] * 8


def test_norm_that_a_plugin_keeps_is_the_graphs():
    norms = []

    def stack():
        clip = ClipGradNorm(0.5)
        return clip, on("step_end", lambda **_: norms.append(float(clip.norm)))

    pair(stack, epochs=1)
    assert norms[12:] == pytest.approx(norms[:12], rel=1e-5)


@pytest.mark.parametrize("accumulate", [2, 3])
def test_window_of_equal_steps_is_recorded(accumulate):
    eager, learner, step = pair(lambda: (ClipGradNorm(0.5),), batches(24), accumulate=accumulate)
    assert set(modes(step)) == {"graph"}
    assert len(step.shapes) == min(accumulate, 3)
    assert eager.progress == learner.progress
    assert apart(eager, learner) < 2e-6


def test_bfloat16_is_recorded():
    eager, learner, step = pair(lambda: (MixedPrecision("bfloat16"), ClipGradNorm(0.5)))
    assert modes(step) == ["graph"]
    assert apart(eager, learner) < 2e-3  # in bfloat16 a number has three digits


def test_last_short_batch_is_a_shape_of_its_own():
    data = [*batches(5), *batches(1, size=3)]
    eager, learner, step = pair(data=data, epochs=6)
    assert modes(step) == ["graph", "graph"]
    assert apart(eager, learner) < 2e-6


def test_frozen_parameters_stay():
    def model():
        made = mlp()
        made[0].weight.requires_grad_(False)
        return made

    eager, learner, step = pair(model=model)
    assert modes(step) == ["graph"]
    assert torch.equal(eager.model[0].weight, learner.model[0].weight)
    assert apart(eager, learner) < 2e-6


def test_tied_weights_stay_tied():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
            self.two.weight = self.one.weight

        def forward(self, x):
            return self.last(self.two(self.one(x).tanh()))

    eager, learner, step = pair(model=Tied)
    assert modes(step) == ["graph"]
    assert learner.model.one.weight is learner.model.two.weight
    assert apart(eager, learner) < 2e-6


# Several optimizers


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.01)


TWO = {"optimizer": {"body": lambda p: sgd(p[:2]), "head": lambda p: adamw(p[2:])}}


class InTurn(TrainingPhase):
    names = ("body", "head")

    def step(self, learner, step):
        step.inputs, step.targets = self.unpack(step.batch)
        step.outputs = learner.model(step.inputs)
        step.loss = self.loss(learner, step.outputs, step.targets)
        self.backward(step)
        for name in self.names:
            step.update(name)

    def backward(self, step):
        step.backward(step.loss)


class Backwards(InTurn):
    names = ("head", "body")


class Named(InTurn):
    def backward(self, step):
        step.backward(step.loss, "body", retain_graph=step.samples < 0)
        step.backward(step.outputs.new_ones(3, requires_grad=True).sum(), "head")


class Norms:
    """The norm that a clipping plugin has at the end of each update."""

    volatile = ("*",)

    def __init__(self):
        self.seen = []

    @hookimpl
    def update_end(self, learner, step):
        self.seen.append((step.optimizer_name, learner.plugins["clip_grad_norm"].norm.item()))


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("phase", [None, InTurn])
def test_several_optimizers_are_recorded(phase, accumulate):
    norms = []

    def stack():
        norms.append(Norms())
        return ClipGradNorm(0.5), GradNorm(clipped=True), Metrics(Accuracy()), StopOnNonFinite(), norms[-1]

    eager, learner, step = pair(stack, phase=phase, accumulate=accumulate, **TWO)
    assert set(modes(step)) == {"graph"}
    assert apart(eager, learner) < 2e-6
    assert eager.progress == learner.progress
    assert list(eager.metrics) == list(learner.metrics)
    for name, value in eager.metrics.items():
        assert learner.metrics[name] == pytest.approx(value, rel=1e-5), name
    for (name, norm), (other_name, other) in zip(norms[0].seen, norms[1].seen, strict=True):
        assert name == other_name
        assert other == pytest.approx(norm, rel=1e-4)  # of gradients that are 1e-6 apart by then


# Votes


def spiky(bad=8):
    data = batches(12)
    data[bad] = (data[bad][0] * 100, data[bad][1])
    return data


def dropping():
    return nn.Sequential(nn.Linear(6, 12), nn.Dropout(0.2), nn.Linear(12, 3))


def test_spike_is_skipped_as_without_the_plugin():
    eager, learner, step = pair(lambda: (SkipSpikes(3.0, warmup=3), Metrics()), data=spiky(), model=dropping)
    assert modes(step) == ["graph"]
    one, other = (each.plugins["skip_spikes"].state_dict() for each in (eager, learner))
    assert one["skipped"] == other["skipped"] >= 1
    assert len(other["losses"]["train"]) == 24 - other["skipped"]
    assert other["losses"]["train"] == pytest.approx(one["losses"]["train"], rel=1e-5)
    assert eager.progress == learner.progress
    assert apart(eager, learner) < 2e-6  # which holds only if the step after a spike has the dropout mask of eager


def test_vote_reads_the_limit_of_its_step():
    plugin, limits = SkipSpikes(3.0, warmup=3), []
    look = on("step_end", lambda learner, step: limits.append((step.loss.item(), plugin.limit.item())))
    step = whole()
    make(plugin, look, step, model=dropping).fit(spiky(), epochs=1)
    assert modes(step) == ["graph"]
    assert plugin.skipped >= 1
    assert len({limit for _, limit in limits}) > 5
    assert all(loss <= limit for loss, limit in limits)


class Later:
    """Puts another loss in the place of the one that was compared."""

    @hookimpl(updates=("loss",), after=("skip_spikes",), traced=())
    def backward_begin(self, step):
        step.loss = step.loss + 10


def test_vote_and_what_is_remembered_are_of_one_loss():
    eager, learner, step = pair(lambda: (SkipSpikes(3.0, warmup=3), Later()))
    assert modes(step) == ["graph"]
    one, other = (each.plugins["skip_spikes"].state_dict()["losses"]["train"] for each in (eager, learner))
    assert max(one) < 5
    assert other == pytest.approx(one, rel=1e-5)


LOSS = [0.0]


class NamesAGlobal(TrainingPhase):
    """Its ``step.loss`` is no global, though one has that name."""

    def step(self, learner, step):
        step.inputs, step.targets = self.unpack(step.batch)
        step.outputs = learner.model(step.inputs)
        step.LOSS = self.loss(learner, step.outputs, step.targets)
        step.loss = step.LOSS
        step.backward(step.loss)
        step.update()


def test_attribute_of_the_name_of_a_global_is_none():
    step = whole()
    change = on("epoch_begin", lambda learner: globals().__setitem__("LOSS", [learner.progress.epochs]))
    make(change, step, phase=NamesAGlobal()).fit(batches(), epochs=4)
    assert [(shape.mode, shape.changes) for shape in step.shapes.values()] == [("graph", 0)]


class Penalty:
    @hookimpl(updates=("loss",), traced=())
    def backward_begin(self, learner, step):
        step.loss = step.loss + 0.1 * learner.model[0].weight.square().sum()


def test_loss_that_a_plugin_puts_in_its_place_is_recorded():
    totals = []
    look = on("step_end", lambda step: totals.append((step.total_loss - step.loss).item()))
    eager, learner, step = pair(lambda: (Penalty(), look))
    assert modes(step) == ["graph"]
    assert apart(eager, learner) < 2e-6
    assert min(totals) > 0.01
    assert totals[24:] == pytest.approx(totals[:24], rel=1e-4)


def test_bad_loss_is_raised_as_without_the_plugin():
    data = batches(10)
    data[7] = (data[7][0] * float("inf"), data[7][1])
    errors, left = [], []
    for step in ((), (whole(),)):
        learner = make(StopOnNonFinite(), Metrics(), *step, model=normed)
        with pytest.raises(NonFiniteError) as caught:
            learner.fit(data, epochs=1)
        errors.append(str(caught.value))
        left.append(learner)
    assert errors[0] == errors[1]
    assert left[0].progress == left[1].progress
    assert apart(*left) < 2e-6  # the buffers, too
    for one, other in zip(*(each.optimizer.state.values() for each in left), strict=True):
        assert torch.allclose(one["momentum_buffer"], other["momentum_buffer"], atol=1e-5)  # of numbers near 1


class Rooted(nn.Module):
    """Its gradient, and not its output, is nan where the inputs are 0."""

    def __init__(self):
        super().__init__()
        self.inner = mlp()

    def forward(self, x):
        return self.inner(x) + 1e-3 * (self.inner[0].weight.sum() * x.abs().sum()).square().sqrt()


def test_bad_gradient_is_raised_as_without_the_plugin():
    data = batches(10)
    data[7] = (data[7][0] * 0, data[7][1])
    errors, left = [], []
    for step in ((), (whole(),)):
        learner = make(StopOnNonFinite(gradients=True), *step, model=Rooted)
        with pytest.raises(NonFiniteError) as caught:
            learner.fit(data, epochs=1)
        errors.append(str(caught.value))
        left.append(learner)
    assert errors[0] == errors[1]
    assert "although the loss is finite" in errors[0]
    assert apart(*left) < 2e-6


@pytest.mark.filterwarnings("ignore:.*skipped", "ignore:.*back to the state")
@pytest.mark.parametrize("every", [3, 100])
@pytest.mark.parametrize("policy", ["skip", "rollback"])
@pytest.mark.parametrize(("bad", "model"), [(float("inf"), normed), (0.0, Rooted)], ids=["loss", "gradient"])
def test_bad_step_is_passed_over_as_without_the_plugin(policy, bad, model, every):
    data = batches(10)
    data[7] = (data[7][0] * bad, data[7][1])
    guard = lambda: (StopOnNonFinite(policy, max_skips=1, snapshot_every=every),)  # noqa: E731
    eager, learner, step = pair(guard, data=data, model=model)
    anew = policy == "rollback" and every == 100  # it goes back to where the optimizer had no state
    assert modes(step) == ["counted" if anew else "graph"]
    assert eager.progress == learner.progress
    assert apart(eager, learner) < 5e-6  # of numbers below 2, after 20 updates in float32


# What changes between steps

REGRESSION = [(x, x.sum(1, keepdim=True)) for x, _ in batches()]


class Parts(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.act, self.outer, self.last = nn.Linear(6, 4), nn.Sigmoid(), nn.Linear(4, 1), torch.sin

    def forward(self, x):
        return self.last(self.outer(self.act(self.inner(x))))


def faster(optimizer):
    """Its state, with another momentum."""
    state = optimizer.state_dict()
    state["param_groups"][0]["momentum"] = 0.5
    return state


def test_hyperparameter_that_changes_is_recorded_anew():
    def more_decay(learner, epoch, **_):
        learner.optimizer.param_groups[0]["weight_decay"] = 0.1 if learner.progress.epochs >= 1 else 0.0

    eager, learner, step = pair(lambda: (on("epoch_begin", more_decay),), epochs=3)
    assert modes(step) == ["graph"]
    assert [shape.changes for shape in step.shapes.values()] == [1]
    assert apart(eager, learner) < 2e-6


@pytest.mark.parametrize(
    "change",
    [
        lambda learner: setattr(learner, "loss_fn", nn.L1Loss()),
        lambda learner: setattr(learner.model, "act", nn.Tanh()),
        lambda learner: setattr(learner.model, "last", torch.exp),
        lambda learner: learner.optimizer.load_state_dict(faster(learner.optimizer)),
    ],
    ids=["loss", "module", "function", "optimizer"],
)
def test_part_that_is_replaced_between_epochs_is_recorded_anew(change):
    def replace(learner, **_):
        if learner.progress.epochs == 1:
            change(learner)

    eager, learner, step = pair(lambda: (on("epoch_begin", replace),), REGRESSION, model=Parts, loss=nn.MSELoss())
    assert modes(step) == ["graph"]
    assert [shape.changes for shape in step.shapes.values()] == [1]
    assert apart(eager, learner) < 2e-6


def test_loss_that_is_replaced_within_an_epoch_is_seen_in_the_next_step():
    def replace(learner, **_):
        if learner.progress.updates == 6:
            learner.loss_fn = nn.L1Loss()

    seen = []
    look = on("step_end", lambda step, **_: seen.append(step.loss.item()), "look")
    eager, learner, step = pair(
        lambda: (on("step_begin", replace), look), REGRESSION, 1, model=Parts, loss=nn.MSELoss()
    )
    assert modes(step) == ["graph"]
    assert seen[12:] == pytest.approx(seen[:12], rel=1e-5)
    assert apart(eager, learner) < 2e-6


def test_loss_that_is_replaced_in_each_step_makes_it_eager():
    def replace(learner, **_):
        learner.loss_fn = nn.MSELoss() if learner.progress.updates % 2 else nn.L1Loss()

    data = REGRESSION * 3
    eager, learner, step = pair(lambda: (on("step_begin", replace),), data, 1, model=Parts, loss=nn.MSELoss())
    assert reasons(step) == ["the loss function changes from time to time"]
    assert apart(eager, learner) < 2e-6


def test_attribute_that_changes_in_each_step_makes_it_eager():
    class Cool(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.heat = mlp(), 1.0

        def forward(self, x):
            return self.inner(x) / self.heat

    def cool(learner, **_):
        learner.model.heat *= 1.01

    eager, learner, step = pair(lambda: (on("step_begin", cool),), batches(40), model=Cool)
    assert reasons(step) == ["heat of model 'model' changes from time to time"]
    assert apart(eager, learner) < 2e-6


@pytest.mark.parametrize(
    ("change", "changes"),
    [(lambda model: model[1].eval(), 2), (lambda model: model[0].weight.requires_grad_(False), 1)],
    ids=["mode, until the next epoch", "requires_grad"],
)
def test_mode_and_requires_grad_are_of_the_key(change, changes):
    def model():
        return nn.Sequential(nn.Linear(6, 12), nn.Dropout(0.3), nn.Linear(12, 3))

    def later(learner, **_):
        if learner.progress.updates == 6:
            change(learner.model)

    eager, learner, step = pair(lambda: (on("step_begin", later),), model=model)
    assert modes(step) == ["graph"]
    assert [shape.changes for shape in step.shapes.values()] == [changes]
    assert apart(eager, learner) < 2e-6


def test_hook_on_a_module_that_comes_later_is_called():
    calls = []
    step = whole()
    learner = make(step)
    learner.fit(batches(8), epochs=1)
    assert modes(step) == ["graph"]
    learner.model[0].register_forward_hook(lambda *_: calls.append(1))
    learner.run("train", batches(3))
    assert len(calls) == 3
    assert reasons(step) == ["there are hooks on its modules, its parameters or its optimizer"]


def test_plugin_that_comes_later_is_called():
    seen = []
    step = whole()
    learner = make(step)
    learner.fit(batches(8), epochs=1)
    learner.add(on("loss_begin", lambda **_: seen.append(1)))
    learner.run("train", batches(3))
    assert len(seen) == 3


# What stays eager, and why


class Counts(TrainingPhase):
    def __init__(self):
        super().__init__()
        self.count = 0

    def loss(self, learner, outputs, targets):
        self.count += 1
        return super().loss(learner, outputs, targets) * (1 + 0.1 * self.count)


class Reads(TrainingPhase):
    def loss(self, learner, outputs, targets):
        return super().loss(learner, outputs, targets) / (1 + learner.progress.updates)


class Index(TrainingPhase):
    def step(self, learner, step):
        self.scale = 1.0
        if step.index % 2:
            super().step(learner, step)
        else:
            super().step(learner, step)


class Asks(TrainingPhase):
    def loss(self, learner, outputs, targets):
        loss = super().loss(learner, outputs, targets)
        return loss * 2 if loss.item() > 1 else loss


class Chooses(TrainingPhase):
    def loss(self, learner, outputs, targets):
        loss = super().loss(learner, outputs, targets)
        return loss * 2 if loss > 1 else loss


class Twice(TrainingPhase):
    def step(self, learner, step):
        step.inputs, step.targets = self.unpack(step.batch)
        step.outputs = learner.model(step.inputs)
        step.loss = self.loss(learner, step.outputs, step.targets)
        step.backward(step.loss, retain_graph=True)
        step.backward(step.loss * 0.5)
        step.update()


class Closes(TrainingPhase):
    def step(self, learner, step):
        def closure():
            step.loss = self.loss(learner, learner.model(step.batch[0]), step.batch[1])
            step.backward(step.loss)
            return step.loss

        step.update(closure=closure)


class Logs(TrainingPhase):
    def step(self, learner, step):
        super().step(learner, step)
        learner.log("loss", step.loss)


class Compares(TrainingPhase):
    def loss(self, learner, outputs, targets):
        return super().loss(learner, outputs, targets) * (1 + len(learner.metrics))


class Skips(TrainingPhase):
    def step(self, learner, step):
        step.inputs, step.targets = self.unpack(step.batch)
        step.outputs = learner.model(step.inputs)
        step.loss = self.loss(learner, step.outputs, step.targets)
        step.backward(step.loss)
        step.skip_update("no")
        step.update()


class Weighs(TrainingPhase):
    def step(self, learner, step):
        step.weight = 4
        super().step(learner, step)


@pytest.mark.parametrize(
    ("phase", "reason"),
    [
        (Compares, "it uses learner.metrics, which is not the same in each step"),
        (Skips, "it decides whether to update (no)"),
        (Counts, "it changes the phase.count, which a graph would not"),
        (Reads, "it uses learner.progress, which is not the same in each step"),
        (Index, "it uses step.index, which is not the same in each step"),
        (Asks, "it asks for the value of a tensor, by .item() or by a choice that depends on data"),
        (Chooses, "it asks for the value of a tensor, by .item() or by a choice that depends on data"),
        (Twice, "it has several backwards"),
        (Closes, "its optimizer evaluates the loss itself, by a closure"),
        (Logs, "it uses learner.log, which is not the same in each step"),
    ],
)
def test_phase_that_cannot_be_recorded_stays_eager(phase, reason):
    stays_eager(reason, phase=phase)


class Own(TrainingPhase):
    own_updates = True

    def step(self, learner, step):
        learner.optimizer.zero_grad()
        self.loss(learner, learner.model(step.batch[0]), step.batch[1]).backward()
        learner.optimizer.step()
        step.updated()


class Idles(TrainingPhase):
    def step(self, learner, step):
        step.skip()


def test_phase_that_updates_in_its_own_way_stays_eager(capsys):
    learners = [make(phase=Own), make(whole(), phase=Own)]
    for learner in learners:
        assert learner.fit(batches(6), epochs=1).updates == 6
    assert apart(*learners) == 0.0
    assert "phase 'train' updates in its own way: whole_step leaves its steps eager" in capsys.readouterr().err
    assert "eager, because the phase updates in its own way" in str(learners[1].explain("train"))


def test_phase_that_skips_steps_stays_eager():
    stays_eager("it decides whether to train (step.skip)", phase=Idles)


class Recurrent(nn.Module):
    """Reads three steps of two numbers; with ``repeat`` as many times after each other."""

    def __init__(self, kind=nn.LSTM, repeat=1, **options):
        super().__init__()
        self.inner, self.repeat = kind(2, 8, batch_first=True, **options), repeat
        self.last = nn.Linear(16 if options.get("bidirectional") else 8, 3)

    def forward(self, x):
        return self.last(self.inner(x.view(-1, 3, 2).repeat(1, self.repeat, 1))[0][:, -1])


def hooked():
    model = mlp()
    model[0].register_forward_hook(lambda *_: None)
    return model


def hooked_parameter():
    model = mlp()
    model[0].weight.register_hook(lambda grad: grad * 0.5)
    return model


def hooked_optimizer(parameters):
    made = sgd(parameters)
    made.register_step_pre_hook(lambda *_: None)
    return made


def compiled_model():
    model = mlp()
    model[0].compile(backend="eager")
    return model


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, "model 'model', inner is an LSTM, whose own kernel is faster"),
        ({"kind": nn.GRU, "num_layers": 2}, "inner is recurrent, with several layers"),
        ({"kind": nn.RNN, "bidirectional": True}, "inner is recurrent, with several layers or both directions"),
        ({"kind": nn.GRU, "repeat": 11}, "a recurrent module has 33 steps to unroll, more than 32"),
    ],
    ids=["LSTM", "layers", "directions", "length"],
)
def test_recurrent_module_that_is_not_unrolled_stays_eager(options, reason):
    stays_eager(reason, model=lambda: Recurrent(**options))


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (nn.GRU, {}),
        (nn.RNN, {}),
        (nn.RNN, {"nonlinearity": "relu"}),
        (nn.GRU, {"bias": False, "repeat": 3}),
    ],
    ids=["GRU", "tanh", "relu", "without bias"],
)
def test_recurrent_module_of_a_short_sequence_is_unrolled(kind, options):
    eager, learner, step = pair(lambda: (ClipGradNorm(0.5),), model=lambda: Recurrent(kind, **options))
    assert modes(step) == ["graph"]
    assert apart(eager, learner) < 2e-6  # of numbers below 1, after 24 updates in float32
    copy.deepcopy(learner.model)  # nothing of the recording is left in it


def test_module_with_hooks_stays_eager():
    stays_eager("there are hooks on its modules", model=hooked)
    stays_eager("there are hooks on its modules, its parameters", model=hooked_parameter)
    stays_eager("there are hooks on its modules, its parameters or its optimizer", optimizer=hooked_optimizer)


def test_module_that_is_compiled_by_itself_stays_eager():
    stays_eager("model 'model', 0 is compiled by itself already", model=compiled_model)


def test_step_that_weighs_itself_stays_eager_in_windows():
    stays_eager("it weights the steps of an update, and uneven windows are rescaled", phase=Weighs, accumulate=2)


def test_batch_of_what_a_graph_cannot_take_stays_eager():
    """It trains the same, and the engine's own step takes it."""

    class Takes(TrainingPhase):
        def unpack(self, batch):
            return batch[0] + 0.0, batch[1]

    class Note:
        pass

    noted = [(*each, Note()) for each in batches()]
    stays_eager("its batch holds more than tensors and numbers", data=noted, phase=Takes)
    wanting = [(x.requires_grad_(), y) for x, y in batches()]
    stays_eager("its batch requires grad", data=wanting)


def test_optimizer_of_other_parameters_stays_eager():
    def with_a_stranger(parameters):
        first, *others = parameters
        return sgd([nn.Parameter(first.detach().view(-1)), *others])  # the memory of a model's, in another parameter

    stays_eager("its optimizer has parameters that are in no model", optimizer=with_a_stranger)


class CountsAttribute(torch.optim.SGD):
    calls = 0

    def step(self, closure=None):
        self.calls += 1
        super().step(closure)
        if self.calls % 7 == 0:
            self.param_groups[0]["params"][0].data.mul_(0.5)


class CountsInState(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["step"] = state.get("step", 0) + 1
                p.sub_(group["lr"] / state["step"] * p.grad)


class CountsInGroup(torch.optim.SGD):
    def step(self, closure=None):
        self.param_groups[0]["calls"] = self.param_groups[0].get("calls", 0) + 1
        super().step(closure)


def test_optimizer_that_counts_where_a_graph_does_not_stays_eager():
    stays_eager("it changes the optimizer.calls", optimizer=lambda p: CountsAttribute(p, lr=0.05))
    stays_eager("its optimizer changes 'step' in Python", optimizer=CountsInState)
    stays_eager("its optimizer changes 'calls' in Python", optimizer=lambda p: CountsInGroup(p, lr=0.05))


class Draws(TrainingPhase):
    def loss(self, learner, outputs, targets):
        return super().loss(learner, outputs, targets) * (1 + random.random())


class DrawsNumPy(TrainingPhase):
    def loss(self, learner, outputs, targets):
        return super().loss(learner, outputs, targets) * (1 + float(np.random.rand()))


@pytest.mark.parametrize(("phase", "name"), [(Draws, "Python's random"), (DrawsNumPy, "NumPy")])
def test_phase_that_draws_random_numbers_of_python_stays_eager(phase, name):
    step, after = whole(), []
    for each in ((), (step,)):
        random.seed(0)
        np.random.seed(0)
        make(*each, phase=phase).fit(batches(6), epochs=1)
        after.append((random.random(), np.random.rand()))
    assert reasons(step) == [f"it draws random numbers of {name}, which a graph would not"]
    assert after[0] == after[1]


def test_compiler_that_fails_leaves_the_step_eager():
    def fails(graph, inputs):
        raise RuntimeError("there is no C++ compiler\nand more")

    step = whole(backend=fails)
    stays_eager("it cannot be compiled (RuntimeError: there is no C++ compiler)", step=step)


class Embeds(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.last = nn.Embedding(7, 5), nn.Linear(5, 3)

    def forward(self, x):
        return self.last(self.inner(x).mean(1))


def test_model_of_another_dtype_is_recorded_anew():
    data = [(x.long() % 7, y) for x, y in batches()]
    change = lambda: (on("epoch_begin", lambda learner: learner.progress.epochs and learner.model.double()),)  # noqa: E731
    eager, learner, step = pair(change, data=data, model=Embeds, optimizer=OPTIMIZERS["sgd"])
    assert modes(step) == ["graph"]
    assert [shape.changes for shape in step.shapes.values()] == [1]
    assert apart(eager, learner) < 2e-6


@pytest.mark.parametrize(("moved", "changes"), [(lambda w: w.clone(), 0), (lambda w: w.t().contiguous().t(), 1)])
def test_parameter_that_moves_within_an_epoch_is_looked_at(moved, changes):
    def move(learner, step):
        if step.index == 7:
            learner.model[0].weight.data = moved(learner.model[0].weight.data)

    eager, learner, step = pair(lambda: (on("step_end", move),), epochs=1, data=batches(20))
    assert modes(step) == ["graph"]
    assert [shape.changes for shape in step.shapes.values()] == [changes]
    assert apart(eager, learner) < 2e-6


def test_state_of_the_optimizer_in_another_order_is_looked_at():
    def reorder(learner, step):
        if step.index == 7:
            state = learner.optimizer.state
            p = next(iter(state))
            state[p] = state.pop(p)

    eager, learner, step = pair(lambda: (on("step_end", reorder),), epochs=1, data=batches(20))
    assert [shape.changes for shape in step.shapes.values()] == [1]
    assert apart(eager, learner) < 2e-6


def test_hook_on_all_modules_keeps_the_step_eager():
    calls = []
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *_: calls.append(1))
    try:
        stays_eager("there are hooks on its modules")
    finally:
        handle.remove()


def test_hook_on_a_parameter_that_comes_within_an_epoch_is_called():
    calls = []

    def register(learner, step):
        if step.index == 7:
            learner.model[0].weight.register_hook(lambda grad: calls.append(step.index))

    step = whole()
    make(on("step_end", register), step).fit(batches(), epochs=1)
    assert len(calls) == 4


def test_number_of_a_batch_that_varies_is_not_remembered_for_ever():
    data = [(*batch, number / 100) for number, batch in enumerate(batches(100))]

    class Weighs(TrainingPhase):
        def unpack(self, batch):
            return batch[:2]

    step = whole()
    make(step, phase=Weighs).fit(data, epochs=2)
    assert len(step.shapes) == 65
    assert reasons(step)[-1] == "64 other shapes came before it"


def test_batches_of_another_dtype_strides_or_autocast_are_shapes_of_their_own():
    data = [(x.long() % 7, y) for x, y in batches()]
    kinds = [data, [(x.int(), y) for x, y in data], [(x.t().contiguous().t(), y) for x, y in data]]
    mixed = [batch for each in zip(*kinds, strict=True) for batch in each]
    eager, learner, step = pair(data=mixed, model=Embeds)
    assert modes(step) == ["graph"] * 3
    assert apart(eager, learner) < 2e-6
    learner.add(MixedPrecision("bfloat16"))
    learner.fit(mixed, epochs=1)
    assert len(step.shapes) == 6


def test_optimizer_that_counts_in_python_stays_eager():
    stays_eager("it asks for the value of a tensor", optimizer=lambda p: torch.optim.Adafactor(p, lr=0.01))


def test_uneven_windows_stay_eager():
    data = [each for pair in zip(batches(9), batches(9, size=5), strict=True) for each in pair]
    eager, learner, step = pair(data=data, accumulate=2)
    assert any("the weights of a window's steps differ" in reason for reason in reasons(step))
    assert apart(eager, learner) < 2e-6


def test_hook_in_the_step_that_has_to_be_called_keeps_it_eager():
    stays_eager(
        "loss_begin of plugin 'acting' has to be called in it", plugins=lambda: (on("loss_begin", lambda **_: None),)
    )
    stays_eager("update_begin of plugin 'grad_noise' has to be called in it", plugins=lambda: (GradNoise(),))
    stays_eager(
        "plugin 'acting' takes the optimizer's step",
        plugins=lambda: (on("optimizer_step", lambda default, **_: default()),),
    )


def test_float16_stays_eager():
    stays_eager(
        "it uses a tensor that is in no model, phase, loss or batch, such as the scale of the loss in float16",
        plugins=lambda: (MixedPrecision("float16"),),
    )


def test_optimizers_that_are_not_updated_alike_stay_eager():
    for phase, reason in {
        Backwards: "it updates in another way than each optimizer once and in turn",
        Named: "it calls backward only for 'body'",
    }.items():
        stays_eager(reason, phase=phase, **TWO)
    stays_eager("a parameter is in two of its optimizers", optimizer={"body": sgd, "head": sgd})


def test_plugin_that_reads_between_the_updates_of_two_optimizers_keeps_the_step_eager():
    stays_eager(
        "update_end of plugin 'weight_average' reads params between the updates of two optimizers",
        plugins=lambda: (WeightAverage(),),
        **TWO,
    )


# Metrics


def test_metric_that_has_to_be_called_is_updated_behind_the_graph():
    for more in (F1(), lambda outputs, targets: (outputs.argmax(1) == targets).float().sum().item()):
        eager, learner, step = pair(lambda more=more: (Metrics(Accuracy(), more=copy.deepcopy(more)),))
        assert modes(step) == ["graph"]
        assert learner.metrics == pytest.approx(eager.metrics, rel=1e-6)


def test_function_metric_that_counts_in_python_is_never_wrong():
    calls = []

    def odd(outputs, targets):
        calls.append(1)
        return outputs.mean() * len(calls)

    def fresh():
        calls.clear()
        return (Metrics(odd),)

    results = []
    for more in ((), (whole(),)):
        learner = make(*fresh(), *more)
        learner.fit(batches(), epochs=1)
        results.append(learner.metrics["train/odd"])
    assert results[1] == pytest.approx(results[0], rel=1e-5)


def test_metrics_that_a_phase_does_not_feed_stay_out():
    data = [{"x": x, "y": y, "share": 0.1} for x, y in batches()]
    eager, learner, step = pair(lambda: (Metrics(Accuracy()),), phase=Contrast(), data=data)
    assert modes(step) == ["graph"]
    assert learner.metrics.keys() == eager.metrics.keys() == {"train/loss"}


# Trust, but verify


class Hidden(TrainingPhase):
    """Counts where nobody can look."""

    def loss(self, learner, outputs, targets):
        return super().loss(learner, outputs, targets) * (1 + 0.1 * next(HIDDEN))


class Global(TrainingPhase):
    def loss(self, learner, outputs, targets):
        global COUNT
        COUNT += 1
        return super().loss(learner, outputs, targets) * (1 + 0.1 * COUNT)


class Box:
    """An object whose attributes cannot be listed."""

    __slots__ = ("scale",)


BOX = Box()


class Boxed(TrainingPhase):
    def loss(self, learner, outputs, targets):
        return super().loss(learner, outputs, targets) * BOX.scale


class Scaled(TrainingPhase):
    def loss(self, learner, outputs, targets):
        return super().loss(learner, outputs, targets) * SCALE


HIDDEN = count()
COUNT = 0
SCALE = 1.0


def test_counter_that_is_baked_in_is_found(monkeypatch):
    monkeypatch.setitem(globals(), "HIDDEN", count())
    step = whole()
    make(step, phase=Hidden()).fit(batches(), epochs=1)
    (reason,) = reasons(step)
    assert reason.startswith("compared, it is not the same: step.loss (")


def test_global_that_counts_is_seen_and_put_back(monkeypatch):
    monkeypatch.setitem(globals(), "COUNT", 0)
    step = whole()
    make(step, phase=Global()).fit(batches(), epochs=1)
    assert reasons(step) == ["it changes the global COUNT, which a graph would not"]
    assert COUNT == 12


def test_global_that_is_baked_in_is_seen_when_an_epoch_begins(monkeypatch):
    monkeypatch.setitem(globals(), "SCALE", 1.0)

    def change(learner, **_):
        globals()["SCALE"] = 3.0 if learner.progress.epochs >= 6 else 1.0

    eager, learner, step = pair(lambda: (on("epoch_begin", change),), phase=Scaled(), epochs=8)
    assert modes(step) == ["graph"]
    assert [shape.changes for shape in step.shapes.values()] == [1]
    assert apart(eager, learner) < 1e-5  # of numbers below 2, after 96 updates in float32


def test_global_that_nobody_sees_is_found_when_an_epoch_begins():
    def change(learner, **_):
        BOX.scale = 3.0 if learner.progress.epochs >= 1 else 1.0

    eager, learner, step = pair(lambda: (on("epoch_begin", change),), phase=Boxed())
    (reason,) = reasons(step)
    assert reason.startswith("compared at the begin of an epoch, it is not the same any more: what it returns (")
    assert apart(eager, learner) < 2e-6


@pytest.mark.parametrize(("dtype", "off"), [(torch.float32, 1e-4), (torch.float64, 1e-10)])
@pytest.mark.parametrize("what", ["step.outputs", "the gradients", "the buffers", "the optimizer's state"])
def test_small_error_of_a_compiler_is_found(what, dtype, off):
    def wrong(graph, inputs):
        cells = Cells.of(learner, learner.phases["train"], {})
        tensors = cells.tensors()
        buffer = next(i for i, each in enumerate(tensors) if each is learner.model[1].running_var)

        def run(*given):
            outputs = list(graph(*given))
            if what in ("step.outputs", "the gradients"):
                shape = (8, 3) if what == "step.outputs" else (3, 12)
                at = next(i for i, each in enumerate(outputs) if each.shape == shape)
                outputs[at] = outputs[at] * (1 + off)
            else:
                given[buffer if what == "the buffers" else len(tensors)].mul_(1 + off)
            return outputs

        return run

    def double():
        return normed().to(dtype)

    data = [(x.to(dtype), y) for x, y in batches()]
    step = whole(backend=wrong)
    learner = make(step, model=double)
    learner.fit(data, epochs=1)
    assert reasons(step)[0].startswith(f"compared, it is not the same: {what} (")


def test_compiler_that_computes_something_else_is_found():
    def wrong(graph, inputs):
        def run(*given):
            outputs = graph(*given)
            given[0].add_(1e-3 * given[0])  # a parameter
            return outputs

        return run

    eager, learner, step = pair(step=whole(backend=wrong))
    assert reasons(step)[0].startswith("compared, it is not the same: a parameter (")
    assert apart(eager, learner) == 0.0


def test_python_state_is_as_it_was_after_a_recording_that_is_refused():
    class Keeps(TrainingPhase):
        def __init__(self):
            super().__init__()
            self.seen, self.table = [], {"a": 1}

        def loss(self, learner, outputs, targets):
            self.seen.append(1)
            self.table["b"] = len(self.seen)
            return super().loss(learner, outputs, targets)

    phase = Keeps()
    step = whole()
    make(step, phase=phase).fit(batches(5), epochs=1)
    assert (len(phase.seen), phase.table) == (5, {"a": 1, "b": 5})
    assert "it changes the phase.seen" in reasons(step)[0]


class CountsItself(nn.Module):
    """A model and a loss function that count their calls."""

    def __init__(self):
        super().__init__()
        self.inner, self.calls = mlp(), []

    def forward(self, x, targets=None):
        self.calls.append(1)
        scale = 1 + 0.01 * len(self.calls)
        return self.inner(x) * scale if targets is None else nn.functional.cross_entropy(x, targets) * scale


@pytest.mark.parametrize("where", ["model 'model'", "the loss function"])
def test_counter_of_a_module_is_seen_and_put_back(where):
    step = whole()
    given = {"model": CountsItself} if where == "model 'model'" else {"loss": CountsItself()}
    learner = make(step, optimizer=lambda p: sgd(list(p)), **given)
    learner.fit(batches(), epochs=1)
    assert reasons(step) == [f"it changes {where}.calls, which a graph would not"]
    assert len((learner.model if where == "model 'model'" else learner.loss_fn).calls) == 12


# Never slower


def test_fit_too_short_to_repay_stays_eager():
    step = whole("auto")
    make(step).fit(batches(10), epochs=2)
    (reason,) = reasons(step)
    assert reason.endswith("steps are too few to repay 4 s of compiling")
    assert modes(step) == ["eager"]


def timed(ratio, monkeypatch, when="auto"):
    """A plugin for whose clock an eager step takes a second, and a compiled one ``ratio``."""
    now = [0.0]
    step = whole(when)

    def clock():
        shape = next(iter(step.shapes.values()))
        now[0] += 1.0 if len(shape.eager) <= len(shape.graph) else ratio
        return now[0]

    monkeypatch.setattr("loopkit_whole_step.whole_step.time.perf_counter", clock)
    return step


@pytest.mark.parametrize(("ratio", "mode"), [(0.5, "graph"), (0.96, "graph"), (0.98, "eager"), (2.0, "eager")])
def test_graph_is_kept_if_it_is_faster(ratio, mode, monkeypatch):
    step = timed(ratio, monkeypatch)
    make(step).run("train", batches(40))
    assert modes(step) == [mode]
    assert reasons(step) == ["" if mode == "graph" else f"compiled it takes {ratio:.2f} of the time"]
    (shape,) = step.shapes.values()
    assert (len(shape.eager), len(shape.graph)) == (10, 10)


def test_long_fit_is_compiled_by_itself(monkeypatch):
    step = timed(0.5, monkeypatch)
    stop = on("step_end", lambda learner: learner.progress.steps == 40 and learner.stop("enough"))
    make(step, stop).fit(batches(), epochs=1000)
    assert modes(step) == ["graph"]


def test_shape_is_compiled_when_it_comes_after_three():
    made = []

    def compiler(graph, inputs):
        made.append(learner.progress.steps)
        return graph

    learner = make(whole(backend=compiler))
    learner.fit(batches(6), epochs=1)
    assert made == [3]


SYNCS = {
    "ddp": DDP,
    "ddp at the update": lambda: DDP(overlap=False, weighted=True),
    "fsdp": lambda: pytest.importorskip("loopkit_sharded").FSDP(),
    "local": lambda: pytest.importorskip("loopkit_local").AverageParameters(),
}


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("name", SYNCS)
def test_plugin_that_syncs_processes_is_idle_where_there_is_one(name, accumulate):
    eager, learner, step = pair(lambda: (SYNCS[name](), ClipGradNorm(0.1)), accumulate=accumulate)
    assert set(modes(step)) == {"graph"}
    assert apart(eager, learner) < 1e-6
    assert "has to be called in it" not in str(learner.explain("train"))


def test_compiling_is_told_in_a_line_and_counted(capsys):
    step = whole(show=True)
    make(step).fit(batches(8), epochs=1)
    (shape,) = step.shapes.values()
    said = capsys.readouterr()
    line = "whole_step: the step of 'train' for [((8, 6), 'torch.float32'), ((8,), 'torch.int64')]: compiled in "
    assert f"{line}{shape.seconds:.1f} s" in said.out + said.err
    assert shape.seconds > 0


def test_reason_is_told_once_for_all_shapes(capsys):
    step = whole(show=True)
    make(step, phase=Reads()).fit([*batches(5), *batches(5, size=3)], epochs=1)
    said = capsys.readouterr()
    assert (said.out + said.err).count("stays eager, because it uses learner.progress") == 1
    assert modes(step) == ["eager", "eager"]


def test_no_more_than_four_shapes_are_compiled():
    step = whole()
    data = [batch for size in range(3, 9) for batch in batches(4, size=size)]
    make(step).fit(data, epochs=2)
    assert sorted(modes(step)) == ["eager", "eager", "graph", "graph", "graph", "graph"]
    assert reasons(step)[-1] == "4 other shapes are compiled already"


# Decisions whose reason is gone


def test_eager_step_is_decided_anew_when_its_plugin_is_gone():
    step = whole()
    learner = make(GradNoise(), step)
    learner.fit(batches(), epochs=1)
    assert reasons(step) == ["update_begin of plugin 'grad_noise' has to be called in it"]
    learner.remove("grad_noise")
    learner.fit(batches(), epochs=1)
    assert modes(step) == ["graph"]


@pytest.mark.parametrize(
    ("when", "epochs", "mode"), [("auto", 3, "eager"), ("auto", 10**6, "graph"), ("always", 3, "graph")]
)
def test_saved_decision_of_too_few_steps_holds_for_as_few(when, epochs, mode, monkeypatch):
    short = whole("auto")
    first = make(short)
    first.fit(batches(), epochs=2)
    assert reasons(short) == ["21 steps are too few to repay 4 s of compiling"]
    step = timed(0.5, monkeypatch, when)
    again = make(step, on("step_end", lambda learner: learner.progress.steps == 80 and learner.stop("enough")))
    again.load_state_dict(first.state_dict(), allow=("acting",))
    again.fit(batches(), epochs=epochs)
    assert modes(step) == [mode]


def test_compiling_again_after_a_resume_is_told(capsys):
    first = make(whole())
    first.fit(batches(), epochs=1)
    again = make(whole(show=True))
    again.load_state_dict(first.state_dict())
    again.fit(batches(), epochs=2)
    assert "compiled again in" in "".join(capsys.readouterr())


def test_plugins_that_log_need_nothing(tmp_path):
    step = whole()
    stack = Metrics(Accuracy()), Schedule(cosine(50)), LogTo(tmp_path), LogMetrics(every=2)
    make(*stack, step).fit(batches(), epochs=2)
    assert modes(step) == ["graph"]


# Checkpoints


@pytest.mark.parametrize("at", [2, 5, 9, 14])
def test_run_that_goes_on_is_bitwise_the_one_in_one_piece(at):
    def learner():
        return make(Metrics(Accuracy()), ClipGradNorm(0.5), Schedule(cosine(50)), whole(), optimizer=OPTIMIZERS["adam"])

    whole_run, first, second = learner(), learner(), learner()
    whole_run.fit(batches(), epochs=2)
    states = []
    stop = on("step_end", lambda learner, **_: learner.progress.updates == at and learner.pause("test"), "stop")
    save = on("signal_begin", lambda learner: states.append(copy.deepcopy(learner.state_dict())), "save")
    first.add(stop, save)
    first.fit(batches(), epochs=2, on_interrupt="return")
    first.remove("stop")
    first.remove("save")
    state = {**states[0], "plugins": {k: v for k, v in states[0]["plugins"].items() if k not in ("stop", "save")}}
    second.load_state_dict(state)
    second.fit(batches(), epochs=2)
    assert second.progress == whole_run.progress
    assert apart(second, whole_run) == 0.0
    assert second.metrics == whole_run.metrics


@pytest.mark.parametrize("seconds", [0.01, 1.8], ids=["by the steps that are left", "by its operations"])
def test_resumed_run_keeps_the_graph_however_few_steps_are_left(seconds):
    first, step = make(whole()), whole("auto")
    first.fit(batches(8), epochs=1)
    state = first.state_dict()
    (shape,) = state["plugins"]["whole_step"]["shapes"].values()
    assert shape["mode"] == "graph"
    shape.update(eager=[seconds] * 10, graph=[seconds / 2] * 10)
    second = make(step)
    second.load_state_dict(state)
    second.fit(batches(8), epochs=2)
    assert (modes(step), reasons(step)) == (["graph"], [""])


def test_resumed_run_leaves_room_for_the_graphs_that_are_to_come():
    sizes = range(3, 7)
    first, step = make(whole()), whole()
    first.fit([batch for size in sizes for batch in batches(6, size=size)], epochs=1)
    second = make(step)
    second.load_state_dict(first.state_dict())
    second.run("train", [*batches(8, size=7), *(batch for size in sizes for batch in batches(4, size=size))])
    assert modes(step) == ["graph"] * 4 + ["eager"]


@pytest.mark.parametrize(("version", "checks"), [(None, 0), ("2.99.0", 2)], ids=["same", "other"])
def test_graph_of_another_torch_is_compared_anew(version, checks, monkeypatch):
    first, step = make(whole()), whole()
    first.fit(batches(8), epochs=1)
    state = first.state_dict()
    saved = state["plugins"]["whole_step"]
    saved["torch"] = version or saved["torch"]
    second, compared = make(step), []
    own = step._comparing.compare
    monkeypatch.setattr(step._comparing, "compare", lambda *given: compared.append(1) or own(*given))
    second.load_state_dict(state)
    second.fit(batches(8), epochs=2)
    assert (modes(step), len(compared)) == (["graph"], checks)


def test_eager_learner_goes_on_with_the_checkpoints(tmp_path):
    saved = make(Metrics(), whole(), Checkpoint(tmp_path), optimizer=adamw)
    saved.fit(batches(), epochs=1)
    eager = make(Metrics(), optimizer=adamw)
    with pytest.raises(StateError, match=r"allow=\('whole_step',\)"):
        checkpoint.load(eager, tmp_path)
    checkpoint.load(eager, tmp_path, allow=("whole_step",))
    assert apart(saved, eager) == 0.0
    for one, other in zip(*(each.optimizer.state.values() for each in (saved, eager)), strict=True):
        assert all(torch.equal(one[key], other[key]) for key in ("step", "exp_avg", "exp_avg_sq"))
    eager.fit(batches(), epochs=2)
    assert eager.progress.updates == 24


# What it says


def test_explain_says_where_everything_is():
    step = whole()
    learner = make(Metrics(), ClipGradNorm(0.5), Schedule(cosine(50)), on("loss_begin", lambda **_: None), step)
    notes = {(row.hook, row.plugin): row.note for row in learner.explain("train").rows}
    assert notes["update_begin", "clip_grad_norm"] == "in the graph"
    assert notes["step_end", "metrics"] == "in the graph"
    assert notes["update_end", "schedule"] == "after it"
    assert notes["loss_begin", "acting"] == "keeps the step eager, because it has to be called in it"


def test_options_are_checked():
    with pytest.raises(PluginError, match=r"WholeStep: when is 'never': it is 'auto' or 'always'"):
        WholeStep("never")
    with pytest.raises(PluginError, match=r"WholeStep\(backend='fast'\): it is 'inductor', 'none' or a function"):
        WholeStep(backend="fast")


def test_cancelled_step_is_left_out():
    def cancel(step, **_):
        if step.index == 6:
            raise CancelStep("no")

    eager, learner, step = pair(lambda: (on("step_begin", cancel), Metrics()))
    assert modes(step) == ["graph"]
    assert eager.progress == learner.progress
    assert apart(eager, learner) < 2e-6


def test_validation_runs_as_it_is():
    step = whole()
    eager, learner = make(Metrics()), make(Metrics(), step)
    for each in (eager, learner):
        each.fit(batches(), batches(3), epochs=2)
    assert learner.metrics == pytest.approx(eager.metrics, rel=1e-5)


def test_hookimpl_without_traced_is_the_default():
    class Plain:
        @hookimpl
        def step_end(self):
            pass

    assert Plain.step_end.loopkit_options.traced is None


# Steps that do not train


def evaluated(model=normed, phase=None, **options):
    step = whole(**options)
    learners = [make(Metrics(Accuracy()), *more, model=model, phase=phase) for more in ([], [step])]
    for learner in learners:
        learner.fit(batches(3), epochs=1)
    return (*learners, step)


def of_phase(step, name):
    return [(shape.mode, shape.reason) for shape in step.shapes.values() if shape.name.startswith(f"{name} ")]


def test_evaluation_is_a_graph_of_the_same_metrics():
    eager, learner, step = evaluated()
    assert learner.evaluate(batches(9, seed=2)) == eager.evaluate(batches(9, seed=2))
    assert of_phase(step, "val") == [("graph", "")]


def test_prediction_is_a_graph_of_the_same_outputs():
    eager, learner, step = evaluated()
    assert torch.equal(learner.predict(batches(9, seed=2)), eager.predict(batches(9, seed=2)))
    assert of_phase(step, "predict") == [("graph", "")]
    assert "a graph" in str(learner.explain("predict"))


def test_validation_in_a_fit_changes_neither_training_nor_what_it_measures():
    learners = [make(Metrics(Accuracy()), *more, model=normed) for more in ([], [whole()])]
    for learner in learners:
        torch.manual_seed(1)
        learner.fit(batches(), batches(6, seed=2), epochs=3)
    eager, learner = learners
    assert set(modes(learner.plugins["whole_step"])) == {"graph"}
    assert len(modes(learner.plugins["whole_step"])) == 2
    assert apart(eager, learner) < 1e-6  # of numbers below 2, after 36 updates in float32
    assert learner.metrics == pytest.approx(eager.metrics, rel=1e-5)


def test_graph_of_a_validation_takes_the_weights_that_stand_there():
    learners = [make(Metrics(), WeightAverage(decay=0.5), *more) for more in ([], [whole()])]
    for learner in learners:
        learner.fit(batches(), batches(6, seed=2), epochs=3)
    eager, learner = learners
    assert ("graph", "") in of_phase(learner.plugins["whole_step"], "val")
    assert learner.metrics["val/loss"] == pytest.approx(eager.metrics["val/loss"], rel=1e-5)


@pytest.mark.parametrize("mode", ["grad", "inference_mode"])
def test_phase_in_another_grad_mode_stays_eager(mode):
    class Own(ValidationPhase):
        grad_mode = mode

    eager, learner, step = evaluated(phase=Own)
    assert learner.evaluate(batches(6)) == eager.evaluate(batches(6))
    assert of_phase(step, "val") == [("eager", f"its grad_mode is {mode!r}")]


def test_evaluation_by_itself_has_the_steps_of_its_epoch_left():
    _, learner, step = evaluated(when="auto", backend="inductor")
    learner.evaluate(batches(9))
    ((mode, reason),) = of_phase(step, "val")
    assert mode == "eager"
    assert reason.startswith("5 steps are too few to repay")


def test_validations_of_a_fit_are_counted_by_the_steps_that_it_plans():
    step = whole("auto", backend="inductor")
    make(step).fit(batches(10), batches(6), epochs=4)
    ((mode, reason),) = of_phase(step, "val")
    assert mode == "eager"
    assert reason.startswith("20 steps are too few to repay")  # 2 of this one, and 6 in each of three more


def test_step_that_calls_backward_without_training_stays_eager():
    class Own(ValidationPhase):
        def step(self, learner, step):
            super().step(learner, step)
            step.backward(step.loss)

    _, learner, step = evaluated(phase=Own)
    with pytest.raises(Exception, match="backward"):
        learner.evaluate(batches(6))
    assert "graph" not in [mode for mode, _ in of_phase(step, "val")]
