"""Plugins in any list order give one plan and one result, and work under phases that their authors never saw."""

from __future__ import annotations

import copy
import itertools
import random

import pytest
import torch
from helpers import batches
from torch import nn

from loopkit import Event, Learner, Phase
from loopkit.errors import LoopkitError, OrderError, PluginConflict
from loopkit.plugins import Metrics
from loopkit.plugins.early_stopping import EarlyStopping
from loopkit.plugins.gradients import ClipGradNorm, ClipGradValue, GradNoise, GradNorm
from loopkit.plugins.mixed_precision import MixedPrecision
from loopkit.plugins.schedule import Schedule
from loopkit.plugins.weight_average import WeightAverage
from loopkit.schedules import cosine, warmup

MAKE = {
    "mixed_precision": lambda: MixedPrecision("float16", init_scale=1024.0),
    "clip_grad_norm": lambda: ClipGradNorm(0.1),
    "grad_norm": GradNorm,
    "schedule": lambda: Schedule(warmup(2, then=cosine())),
    "weight_average": lambda: WeightAverage(0.9),
    "early_stopping": lambda: EarlyStopping("train/loss", patience=3),
    "metrics": Metrics,
}
ORDERS = list(itertools.permutations(MAKE))
each = pytest.mark.parametrize("name", MAKE)


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_learner(plugins, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Dropout(0.1), nn.Linear(4, 1))
    options.setdefault("standard", False)
    return Learner(model, nn.MSELoss(), lambda p: torch.optim.AdamW(p, lr=0.01), plugins=plugins, **options)


def made(names):
    return [MAKE[name]() for name in names]


# The list's order


def plan(names):
    return str(make_learner(made(names)).explain())


def test_there_are_5040_orders():
    assert len(set(ORDERS)) == 5040


def test_sampled_orders_give_one_plan():
    sample = random.Random(0).sample(ORDERS, 30)
    assert {plan(names) for names in sample} == {plan(ORDERS[0])}


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_order_gives_one_plan():
    assert {plan(names) for names in ORDERS} == {plan(ORDERS[0])}


def test_plan_of_an_update_is_as_it_must_be():
    lines = str(make_learner(made(MAKE)).explain("train")).split("\nupdate_begin\n")[1].splitlines()
    placed = [line.split()[1] for line in lines if line.strip()[:1].isdigit()]
    assert placed[:3] == ["mixed_precision", "grad_norm", "clip_grad_norm"]  # unscaled, measured, clipped


def trained(names, standard):
    learner = make_learner(made(names), standard=standard, accumulate=2)
    torch.manual_seed(1)
    result = learner.fit(batches(7), batches(2, seed=5), epochs=3)
    metrics = {name: value for name, value in result.metrics.items() if "time" not in name}
    return learner.model.state_dict(), learner.optimizer.state_dict(), metrics


def assert_same(one, other):
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, (dict, list, tuple)):
        assert len(one) == len(other)
        for key in one if isinstance(one, dict) else range(len(one)):
            assert_same(one[key], other[key])
    else:
        assert one == other


@pytest.mark.parametrize("standard", [False, True], ids=["bare", "standard"])
@pytest.mark.parametrize("names", [ORDERS[-1], *random.Random(1).sample(ORDERS, 4)], ids=lambda names: names[0])
def test_order_of_the_list_changes_no_bit(names, standard):
    assert_same(trained(names, standard), trained(ORDERS[0], standard))


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("mixed_precision", "model"),
        ("clip_grad_norm", "model"),
        ("schedule", "model"),
        ("weight_average", "val/loss"),
        ("grad_norm", "train/grad_norm"),
    ],
)
def test_result_depends_on_each_plugin(name, what):
    """Else the comparison of results would say nothing about it."""
    model, _, metrics = trained(MAKE, False)
    model_without, _, metrics_without = trained([other for other in MAKE if other != name], False)
    if what == "model":
        assert not torch.equal(model["0.weight"], model_without["0.weight"])
    else:
        assert metrics[what] != metrics_without.get(what)


# Conflicts

CONFLICTS = {
    "two clippers": (
        lambda: [ClipGradNorm(1.0), ClipGradValue(1.0)],
        OrderError,
        "update_begin: plugins 'clip_grad_norm' and 'clip_grad_value' both update 'grads', and nothing says which "
        'comes first. Give the learner order=["clip_grad_norm", "clip_grad_value"] (or the reverse)',
    ),
    "two of one name": (
        lambda: [ClipGradNorm(1.0), ClipGradNorm(2.0)],
        LoopkitError,
        "two plugins are called 'clip_grad_norm'",
    ),
    "clip and noise": (
        lambda: [GradNoise(), ClipGradNorm(1.0)],
        OrderError,
        "update_begin: plugins 'clip_grad_norm' and 'grad_noise' both update 'grads', and nothing says which comes "
        'first. Give the learner order=["clip_grad_norm", "grad_noise"] (or the reverse)',
    ),
    "two mixed precisions": (
        lambda: [MixedPrecision(), Renamed("float16")],
        PluginConflict,
        "'mixed_precision' and 'renamed' both own \"grads.scale\": keep one of them",
    ),
    "two schedules of the learning rate": (
        lambda: [Schedule(cosine()), Schedule(cosine(), name="other")],
        PluginConflict,
        "'other' and 'schedule' both own",
    ),
}


class Renamed(MixedPrecision):
    name = "renamed"


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(("plugins", "error", "message"), CONFLICTS.values(), ids=CONFLICTS)
def test_conflict_is_refused(plugins, error, message, turned):
    given = plugins()
    with pytest.raises(error) as refused:
        make_learner(given[::-1] if turned else given)
    assert message in str(refused.value)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(("plugins", "error", "message"), CONFLICTS.values(), ids=CONFLICTS)
def test_conflict_is_refused_when_the_second_is_added(plugins, error, message, turned):
    one, other = plugins()[::-1] if turned else plugins()
    learner = make_learner([one])
    before = str(learner.explain())
    with pytest.raises(error) as refused:
        learner.add(other)
    assert message in str(refused.value)
    assert str(learner.explain()) == before


@pytest.mark.parametrize("order", [["clip", "noise"], ["noise", "clip"], ["grad_noise", "clip_grad_norm"]])
def test_order_settles_clipping_and_noise(order):
    learner = make_learner([GradNoise(), ClipGradNorm(1.0)], order=order)
    lines = str(learner.explain("train")).split("\nupdate_begin\n")[1].splitlines()
    placed = [line.split()[1] for line in lines if line.strip()[:1].isdigit()][:2]
    first = "clip_grad_norm" if order[0].startswith("clip") else "grad_noise"
    assert placed[0] == first


# Replacement


@pytest.mark.parametrize("standard", [False, True], ids=["bare", "standard"])
def test_one_clipper_replaces_another(standard):
    learner = make_learner(made(MAKE), standard=standard)
    learner.replace("clip", ClipGradValue(0.05))
    other = make_learner(
        [*made(name for name in MAKE if name != "clip_grad_norm"), ClipGradValue(0.05)], standard=standard
    )
    assert str(learner.explain()) == str(other.explain())
    for each_learner in (learner, other):
        torch.manual_seed(1)
        each_learner.fit(batches(4), epochs=1)
    assert_same(learner.model.state_dict(), other.model.state_dict())


# Phases that the plugins have never seen


class CriticBegin(Event):
    """The critic is about to score."""


class Adversaries(Phase):
    """Two networks, two losses, two optimizers; the losses have no name on the step."""

    name = "train"
    training = True
    emits = (CriticBegin,)

    def step(self, learner, step):
        inputs, targets = step.batch
        critic, generator = learner.model["critic"], learner.model["generator"]
        step.emit(CriticBegin)
        fake = generator(inputs)
        step.backward(
            critic(fake.detach()).float().square().mean() + (critic(targets).float() - 1).square().mean(), "critic"
        )
        step.update("critic")
        step.backward((critic(fake).float() - 1).square().mean(), "generator")
        step.update("generator")


class NoBackward(Phase):
    """Trains nothing, and marks that."""

    name = "train"
    training = True

    def step(self, learner, step):
        with torch.no_grad():
            step.loss = learner.model(step.batch[0]).float().square().mean()
        step.skip()


class Several(Phase):
    """Two backwards for each update."""

    name = "train"
    training = True

    def step(self, learner, step):
        inputs, targets = step.batch
        for sign in (1, -1):
            step.loss = learner.loss_fn(learner.model(sign * inputs), sign * targets)
            step.backward(step.loss)
        step.update()


def adversaries(plugins, **options):
    torch.manual_seed(0)
    models = {"critic": nn.Linear(1, 1), "generator": nn.Linear(3, 1)}
    make = lambda params: torch.optim.SGD(params, lr=0.01)  # noqa: E731
    options.setdefault("standard", False)
    return Learner(models, None, dict.fromkeys(models, make), plugins=plugins, phases=[Adversaries()], **options)


LEARNERS = {
    "adversaries": adversaries,
    "no backward": lambda plugins, **options: make_learner(plugins, phases=[NoBackward()], **options),
    "several": lambda plugins, **options: make_learner(plugins, phases=[Several()], **options),
}
UPDATES = {"adversaries": {1: 20, 3: 8}, "no backward": {1: 0, 3: 0}, "several": {1: 10, 3: 4}}
"""Of two epochs of 5 steps, by the steps of a window."""
NEEDS = {"early_stopping": ["metrics"]}


def with_loss(name, phase_name):
    """The plugin, with what it needs; under the adversaries nothing makes ``train/loss``."""
    if name == "early_stopping" and phase_name == "adversaries":
        return [EarlyStopping("train/grad_norm_critic", training="train/grad_norm_critic", mode="min"), GradNorm()]
    return made([name, *NEEDS.get(name, [])])


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("phase", LEARNERS)
@each
def test_plugin_works_under_a_phase_that_it_has_never_seen(name, phase, accumulate):
    learner = LEARNERS[phase](with_loss(name, phase), accumulate=accumulate)
    before = copy.deepcopy([model.state_dict() for model in learner.models.values()])
    result = learner.fit(batches(5), epochs=2)
    assert result.updates == UPDATES[phase][accumulate]
    after = [model.state_dict() for model in learner.models.values()]
    moved = [not torch.equal(one[key], other[key]) for one, other in zip(before, after, strict=True) for key in one]
    assert all(moved) if UPDATES[phase][accumulate] else not any(moved)


@pytest.mark.parametrize("standard", [False, True], ids=["bare", "standard"])
@pytest.mark.parametrize("phase", LEARNERS)
def test_all_plugins_work_together_under_a_phase_that_they_have_never_seen(phase, standard):
    names = [name for name in MAKE if name != "early_stopping"]
    learner = LEARNERS[phase](made(names), standard=standard, accumulate=3)
    result = learner.fit(batches(5), epochs=2)
    assert result.updates == UPDATES[phase][3]


def test_metrics_under_a_phase_without_update_say_nothing_of_gradients():
    learner = LEARNERS["no backward"](made(["grad_norm", "metrics", "mixed_precision"]))
    learner.fit(batches(5), epochs=1)
    assert set(learner.metrics) == {"train/loss", "train/loss_scale", "train/skipped"}


def test_metrics_under_adversaries_are_those_of_each_optimizer():
    learner = adversaries(made(["grad_norm", "mixed_precision"]))
    learner.fit(batches(5), epochs=1)
    names = {"train/grad_norm_critic", "train/grad_norm_generator", "train/loss_scale", "train/skipped"}
    assert set(learner.metrics) == names
