"""The base of a schedule: the own rate of the optimizer, new, changed by the user, and put back."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers import batches, make_learner, on
from torch import nn

from loopkit import Learner, hookimpl
from loopkit.errors import PluginError
from loopkit.plugins import Metrics, Plateau, Schedule, TorchSchedule
from loopkit.schedules import constant, cosine, linear


class Rates:
    """The rates of the updates."""

    after = ("schedule",)
    volatile = ("rates",)

    def __init__(self):
        self.rates = []

    @hookimpl
    def update_begin(self, learner):
        self.rates.append(round(float(learner.optimizer.param_groups[0]["lr"]), 4))


def rated(plugin, *more, lr=0.1, make=torch.optim.SGD):
    """A learner with a schedule after a fit of four updates, and what notes its rates."""
    rates = Rates()
    learner = Learner(
        nn.Linear(3, 1), nn.MSELoss(), lambda p: make(p, lr=lr), plugins=[rates, plugin, *more], standard=False
    )
    learner.fit(batches(4), epochs=1)
    return learner, rates


def again(learner, rates):
    rates.rates = []
    learner.fit(batches(4), epochs=1)
    return rates.rates


def halves(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 0.5**k)


def stepped(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)


COSINE = [0.02, 0.0171, 0.01, 0.0029]
HALVED = [0.02, 0.01, 0.005, 0.0025]


@pytest.mark.parametrize(
    ("make", "expected", "end"),
    [
        (lambda: Schedule(cosine()), COSINE, 0.0),
        (lambda: Schedule(lambda k: 0.5 ** (k % 4)), HALVED, 0.02),
        (lambda: TorchSchedule(halves), HALVED, 0.00125),
        (lambda: TorchSchedule(stepped), HALVED, 0.00125),
        (lambda: Plateau("train/loss", patience=0, threshold=1e9), [0.02] * 4, 0.002),
    ],
    ids=["cosine", "function", "LambdaLR", "StepLR", "plateau"],
)
def test_schedule_goes_by_the_rate_of_a_new_optimizer(make, expected, end):
    learner, rates = rated(make(), Metrics())
    learner.set_optimizer(torch.optim.SGD(learner.model.parameters(), lr=0.02))
    assert again(learner, rates) == expected
    assert round(learner.optimizer.param_groups[0]["lr"], 6) == end


@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1)], ids=["float", "tensor"])
def test_schedule_goes_by_the_rate_that_the_user_has_set_between_two_fits(lr):
    learner, rates = rated(Schedule(cosine()), lr=lr, make=torch.optim.Adam)
    assert again(learner, rates) == [0.1, 0.0854, 0.05, 0.0146]
    learner.optimizer.param_groups[0]["lr"] = 0.02
    assert again(learner, rates) == COSINE
    assert again(learner, rates) == COSINE


def test_schedule_of_another_hyperparameter_goes_by_what_the_user_has_set():
    schedule = Schedule(cosine(), "weight_decay")
    learner = make_learner(schedule)
    learner.fit(batches(4), epochs=1)
    learner.optimizer.param_groups[0]["weight_decay"] = 0.5
    learner.fit(batches(4), epochs=1)
    assert schedule.state_dict()["bases"] == {"optimizer.0.weight_decay": 0.5}


def test_schedule_of_an_attribute_goes_by_what_the_user_has_set():
    model = nn.Sequential(nn.Linear(3, 1), nn.Dropout(0.5))
    learner = make_learner(Schedule(linear(4), attribute="1.p"), model=model)
    learner.fit(batches(2), epochs=1)
    model[1].p = 0.3
    learner.fit(batches(2), epochs=1)
    learner.remove("schedule_1_p")
    assert model[1].p == 0.3


def test_schedule_keeps_its_base_though_the_optimizer_writes_its_own_rate():
    class Own(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            self.param_groups[0]["lr"] = 7.0

    learner, rates = rated(Schedule(cosine()), make=Own)
    assert rates.rates == again(learner, rates) == [0.1, 0.0854, 0.05, 0.0146]


def test_schedule_keeps_its_base_where_a_rate_is_rounded():
    learner, rates = rated(
        Schedule(cosine(updates=9)), lr=torch.tensor(0.1, dtype=torch.float32), make=torch.optim.Adam
    )
    before = learner.plugins["schedule"].state_dict()["bases"]
    again(learner, rates)
    assert learner.plugins["schedule"].state_dict()["bases"] == before


@pytest.mark.parametrize("loaded", [False, True], ids=["in this process", "loaded"])
def test_schedule_of_a_fit_that_goes_on_changes_its_base_by_the_same_ratio(loaded):
    def pause(learner):
        if learner.progress.steps == 2:
            learner.pause("enough")

    def made(*more):
        rates = Rates()
        return make_learner(Schedule(cosine()), rates, *more), rates

    learner, rates = made(on("step_end", pause))
    learner.fit(batches(4), epochs=1, on_interrupt="return")
    if loaded:
        state = copy.deepcopy(learner.state_dict())
        learner, rates = made()
        learner.load_state_dict(state)
    else:
        learner.remove("acting")
    learner.optimizer.param_groups[0]["lr"] /= 10
    assert again(learner, rates) == [0.005, 0.0015]


@pytest.mark.parametrize(
    "make",
    [
        lambda: Schedule(cosine()),
        lambda: Schedule(cosine(), every="epoch"),
        lambda: Schedule(lambda k: 1e-3, absolute=True),
        lambda: TorchSchedule(halves),
        lambda: TorchSchedule(lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.5, total_steps=9)),
        lambda: Plateau("train/loss", patience=0, threshold=1e9),
    ],
    ids=["cosine", "epochs", "absolute", "LambdaLR", "OneCycleLR", "plateau"],
)
@pytest.mark.parametrize("how", ["remove", "replace"])
def test_schedule_that_is_taken_out_puts_the_rate_back(make, how):
    plugin = make()
    learner, rates = rated(plugin, Metrics())
    again(learner, rates)
    assert learner.optimizer.param_groups[0]["lr"] != 0.1
    if how == "remove":
        learner.remove(plugin.name)
        expected = 0.1
    else:
        learner.replace(plugin.name, Schedule(constant(0.1)))
        expected = 0.01
    assert again(learner, rates) == [expected] * 4


def test_schedule_that_is_taken_out_leaves_a_rate_that_the_user_has_set():
    learner, rates = rated(Schedule(cosine()))
    learner.optimizer.param_groups[0]["lr"] = 0.02
    learner.remove("schedule")
    assert again(learner, rates) == [0.02] * 4


def test_torch_schedule_that_was_made_for_the_old_optimizer_raises():
    optimizer = torch.optim.SGD((model := nn.Linear(3, 1)).parameters(), 0.1)
    plugin = TorchSchedule(stepped(optimizer))
    learner = Learner(model, nn.MSELoss(), optimizer, plugins=[plugin], standard=False)
    learner.fit(batches(1), epochs=1)
    learner.set_optimizer(torch.optim.SGD(model.parameters(), 0.1))
    with pytest.raises(PluginError, match="was made for another optimizer"):
        learner.fit(batches(1), epochs=1)


@pytest.mark.parametrize("make", [lambda: Schedule(cosine()), lambda: TorchSchedule(stepped), lambda: Plateau()])
def test_schedule_loads_states_from_before_it_kept_what_it_left(make):
    plugin = make()
    if not isinstance(plugin, Plateau):
        rated(plugin)
    state = plugin.state_dict()
    for key in ("left", "kept", "loopkit"):
        state.pop(key, None)
    other = make()
    other.load_state_dict(state)
    assert {*state} <= {*other.state_dict()}
