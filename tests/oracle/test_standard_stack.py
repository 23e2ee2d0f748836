"""Every combination of the standard plugins against one loop written by hand: all is bitwise the same."""

from __future__ import annotations

import copy
import itertools
import math
import random
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim.lr_scheduler import StepLR

from loopkit import Learner, Phase
from loopkit.plugins.gradients import ClipGradNorm, ClipGradValue, GradNorm
from loopkit.plugins.mixed_precision import MixedPrecision
from loopkit.plugins.schedule import Schedule, TorchSchedule
from loopkit.schedules import cosine, warmup

EPOCHS = 2
SIZES = (4, 4, 4, 4, 4, 4, 4, 3)  # 8 batches: windows of 3 leave a tail of two, whose samples are uneven
OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.02, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
}


@dataclass(frozen=True)
class Cell:
    """One combination."""

    accumulate: int = 1
    clip: str = "none"
    schedule: str = "none"
    dtype: str = "float32"
    optimizer: str = "sgd"
    several: bool = False

    @property
    def updates(self) -> int:
        """Of the whole fit, for each optimizer, if none is skipped."""
        return EPOCHS * -(-len(SIZES) // self.accumulate)

    def __str__(self) -> str:
        count = "two" if self.several else "one"
        return f"k{self.accumulate}-{self.clip}-{self.schedule}-{self.dtype}-{self.optimizer}-{count}"


CELLS = [
    Cell(*values)
    for values in itertools.product(
        (1, 3),
        ("none", "norm", "value"),
        ("none", "cosine", "torch"),
        ("float32", "bfloat16", "float16"),
        ("sgd", "adamw"),
        (False, True),
    )
]
SAMPLE = random.Random(0).sample(CELLS, 20)
COMPILED = random.Random(1).sample(CELLS, 6)


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_networks(several):
    """Dropout draws random numbers, batch norm has buffers, one input is read by both rivals."""
    torch.manual_seed(1)
    if not several:
        layers = nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 2)
        return {"model": nn.Sequential(*layers)}
    generator = nn.Sequential(nn.Linear(5, 6), nn.Dropout(0.2), nn.Linear(6, 2))
    return {"critic": nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)), "generator": generator}


def make_batches():
    generator = torch.Generator().manual_seed(2)
    return [(torch.randn(n, 5, generator=generator), torch.randn(n, 2, generator=generator)) for n in SIZES]


# What each network learns from


def supervised_loss(networks, inputs, targets):
    return mse_loss(networks["model"](inputs), targets)


def far_from(scores, wanted):
    """In float32: a loss in float16 would overflow when it is scaled."""
    return (scores.float() - wanted).square().mean()


def critic_loss(networks, inputs, targets):
    critic, generator = networks["critic"], networks["generator"]
    return far_from(critic(generator(inputs).detach()), 0) + far_from(critic(targets), 1)


def generator_loss(networks, inputs, targets):
    return far_from(networks["critic"](networks["generator"](inputs)), 1)


LOSSES = {"model": supervised_loss, "critic": critic_loss, "generator": generator_loss}


# By hand


def cosine_with_warmup(update, total, warm=3):
    """Rise linearly to 1 in ``warm`` updates, then fall to 0 as half a cosine."""
    if update < warm:
        return (update + 1) / warm
    return 0.5 * (1 + math.cos(math.pi * (update - warm) / (total - warm)))


def by_hand(cell, networks, batches):
    """The loop of a careful person, for any number of networks that take turns within a step."""
    dtype, k = getattr(torch, cell.dtype), cell.accumulate
    params = {name: list(network.parameters()) for name, network in networks.items()}
    optimizers = {name: OPTIMIZERS[cell.optimizer](params[name]) for name in networks}
    schedulers = {name: StepLR(optimizer, 2, 0.7) for name, optimizer in optimizers.items()}
    base = {name: optimizer.param_groups[0]["lr"] for name, optimizer in optimizers.items()}
    updates = dict.fromkeys(networks, 0)
    scaler = torch.amp.GradScaler("cpu", enabled=dtype == torch.float16, growth_interval=3)
    for network in networks.values():
        network.train()
    for _ in range(EPOCHS):
        sizes = []
        for i, (inputs, targets) in enumerate(batches):
            sizes.append(len(inputs))
            due = len(sizes) == k or i == len(batches) - 1
            for name, optimizer in optimizers.items():
                if cell.schedule == "cosine":
                    optimizer.param_groups[0]["lr"] = base[name] * cosine_with_warmup(updates[name], cell.updates)
                if len(sizes) == 1:
                    optimizer.zero_grad()

                with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
                    loss = LOSSES[name](networks, inputs, targets)
                share = sizes[-1] / sizes[0] / k
                scaler.scale(loss * share).backward(inputs=params[name])

                if due:
                    factor = k * sizes[0] / sum(sizes)
                    if factor != 1:
                        for p in params[name]:
                            p.grad.mul_(factor)
                    scaler.unscale_(optimizer)
                    finite = all(bool(p.grad.isfinite().all()) for p in params[name])
                    if cell.clip == "norm":
                        nn.utils.clip_grad_norm_(params[name], 0.3)
                    elif cell.clip == "value":
                        nn.utils.clip_grad_value_(params[name], 0.05)
                    scaler.step(optimizer)  # not if the gradients overflowed
                    if finite:
                        updates[name] += 1
                        if cell.schedule == "torch":
                            schedulers[name].step()
            if due:
                scaler.update()
                sizes = []
    for name, optimizer in optimizers.items():
        optimizer.zero_grad()
        if cell.schedule == "cosine":
            optimizer.param_groups[0]["lr"] = base[name] * cosine_with_warmup(updates[name], cell.updates)
    return optimizers, scaler, sum(updates.values())


# By loopkit


class Rivals(Phase):
    """The two networks take turns."""

    name = "train"
    training = True

    def step(self, learner, step):
        inputs, targets = step.batch
        for name in learner.models:
            step.loss = LOSSES[name](learner.models, inputs, targets)
            step.backward(step.loss, name)
            step.update(name)


def make_plugins(cell, names):
    plugins = []
    if cell.dtype != "float32":
        plugins.append(MixedPrecision(cell.dtype, growth_interval=3))
    if cell.clip == "norm":
        plugins.append(ClipGradNorm(0.3))
    elif cell.clip == "value":
        plugins.append(ClipGradValue(0.05))
    for name in names:
        if cell.schedule == "cosine":
            plugins.append(Schedule(warmup(3, then=cosine()), optimizer=name, name=f"schedule_{name}"))
        elif cell.schedule == "torch":
            make = partial(StepLR, step_size=2, gamma=0.7)
            plugins.append(TorchSchedule(make, optimizer=name, name=f"schedule_{name}"))
    return plugins


def make_learner(cell, networks, standard):
    if cell.several:
        optimizer = dict.fromkeys(networks, OPTIMIZERS[cell.optimizer])
        phases, names, model = [Rivals()], list(networks), networks
    else:
        optimizer, phases, names, model = OPTIMIZERS[cell.optimizer], [], ["optimizer"], networks["model"]
    plugins = make_plugins(cell, names)
    if standard:
        plugins.append(GradNorm())
        random.Random(str(cell)).shuffle(plugins)
    return Learner(
        model, mse_loss, optimizer, plugins=plugins, phases=phases, accumulate=cell.accumulate, standard=standard
    )


def assert_same(one, other, path):
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype, path
        assert torch.equal(one, other), path
    elif isinstance(one, (dict, list, tuple)):
        assert len(one) == len(other), path
        for key in one if isinstance(one, dict) else range(len(one)):
            assert_same(one[key], other[key], f"{path}.{key}")
    else:
        assert one == other, path


def hyperparameters(optimizer):
    """The state of an optimizer without what torch's schedulers note in it for themselves."""
    state = optimizer.state_dict()
    for group in state["param_groups"]:
        group.pop("initial_lr", None)
    return state


def compare(cell, standard, backend=None):
    networks = make_networks(cell.several)
    own = copy.deepcopy(networks)
    if backend is not None:
        for network in (*networks.values(), *own.values()):
            network.compile(backend=backend)
    batches = make_batches()
    torch.manual_seed(3)
    optimizers, scaler, updates = by_hand(cell, networks, batches)
    learner = make_learner(cell, own, standard)
    torch.manual_seed(3)
    result = learner.fit(batches, epochs=EPOCHS)
    assert result.updates == updates
    for name, network in networks.items():
        assert_same(own[name].state_dict(), network.state_dict(), name)
    for mine, hand in zip(learner.optimizers.values(), optimizers.values(), strict=True):
        assert_same(hyperparameters(mine), hyperparameters(hand), "optimizer")
    if cell.dtype == "float16":
        assert learner.plugins["mixed_precision"].loss_scale == scaler.get_scale()


standards = pytest.mark.parametrize("standard", [False, True], ids=["bare", "standard"])


@standards
@pytest.mark.parametrize("cell", SAMPLE, ids=str)
def test_sampled_combination_equals_the_loop_by_hand(cell, standard):
    compare(cell, standard)


@pytest.mark.slow
@standards
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_combination_equals_the_loop_by_hand(cell, standard):
    compare(cell, standard)


@pytest.mark.slow
@pytest.mark.parametrize("cell", COMPILED, ids=str)
def test_compiled_combination_equals_the_loop_by_hand(cell):
    torch._dynamo.reset()
    compare(cell, True, backend="aot_eager")


def test_every_choice_changes_the_result():
    """Else the combinations would compare the same thing again and again."""
    results = []
    for change in (
        {},
        {"accumulate": 3},
        {"clip": "norm"},
        {"clip": "value"},
        {"schedule": "cosine"},
        {"schedule": "torch"},
        {"dtype": "bfloat16"},
        {"dtype": "float16"},
        {"optimizer": "adamw"},
    ):
        networks = make_networks(False)
        torch.manual_seed(3)
        by_hand(Cell(**change), networks, make_batches())
        results.append(networks["model"][0].weight.detach())
    assert all(not torch.equal(one, other) for one, other in itertools.combinations(results, 2))


def test_float16_cells_meet_an_overflow():
    """The initial scale is too large for the first update, so that what is skipped is compared, too."""
    cell = Cell(dtype="float16", schedule="cosine")
    assert by_hand(cell, make_networks(False), make_batches())[2] < cell.updates
