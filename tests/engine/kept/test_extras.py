"""Modules and parameters of the loss function, of phases and of plugins: saved, moved and put back as models are."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from helpers import batches, on
from torch import nn

from loopkit import Learner, TrainingPhase, hookimpl
from loopkit.checkpoint.encoding import decode, encode
from loopkit.errors import StateError
from loopkit.plugins import EarlyStopping, Metrics, StopOnNonFinite, ToDevice, WeightAverage


class Weighted(nn.Module):
    """A loss with a parameter and a buffer."""

    def __init__(self, start=0.0):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(start))
        self.register_buffer("seen", torch.zeros(()))
        self.norm = nn.BatchNorm1d(1)

    def forward(self, outputs, targets):
        if self.training:
            self.seen += 1
        return (self.norm(outputs) - targets).square().mean() * (-self.scale).exp() + self.scale


class Headed(TrainingPhase):
    """Has a module that the optimizer trains."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(1, 1)

    def forward(self, learner, inputs):
        return self.head(learner.model(inputs))


class Named(Headed):
    saved = ("head",)


class Bare(TrainingPhase):
    """Has a parameter in ``saved``."""

    saved = ("shift",)

    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(1))

    def forward(self, learner, inputs):
        return learner.model(inputs) + self.shift


class Listed(Bare):
    """Has parameters in a container."""

    saved = ("shifts",)

    def __init__(self):
        super().__init__()
        self.shifts = [self.shift]


class Plain(Bare):
    """Has a tensor that is no parameter, and saves nothing by name."""

    saved = ()

    def __init__(self):
        super().__init__()
        self.shift = torch.zeros(1, requires_grad=True)


class Adds:
    """A plugin with a module."""

    name = "adds"

    def __init__(self):
        self.shift = nn.Linear(1, 1)

    @hookimpl(updates=("outputs",))
    def loss_begin(self, step):
        step.outputs = self.shift(step.outputs)


def trained(owner):
    if isinstance(owner, nn.Module):
        return list(owner.parameters())
    held = [each for value in vars(owner).values() for each in (value if type(value) is list else [value])]
    made = [[*each.parameters()] if isinstance(each, nn.Module) else [each] for each in held]
    tensors = [tensor for each in made for tensor in each if isinstance(tensor, torch.Tensor)]
    return list(dict.fromkeys(tensors))


OWNERS = {"loss": Weighted, **{kind.__name__: kind for kind in (Headed, Named, Bare, Listed, Plain)}, "plugin": Adds}


def build(owner, *plugins, seed=0, **options):
    """A learner whose optimizer trains what an owner holds."""
    torch.manual_seed(seed)
    made = OWNERS[owner]()
    learner = Learner(
        nn.Linear(3, 1),
        made if owner == "loss" else nn.MSELoss(),
        lambda params: torch.optim.SGD([*params, *trained(made)], lr=0.1, momentum=0.9),
        phases=[made] if isinstance(made, TrainingPhase) else [],
        plugins=[*([made] if owner == "plugin" else []), *plugins],
        standard=False,
        **options,
    )
    return learner, made


def values(learner, made):
    return [each.detach().clone() for each in (*learner.model.parameters(), *trained(made), *buffers(made))]


def buffers(made):
    return list(made.buffers()) if isinstance(made, nn.Module) else []


def equal(one, other):
    assert len(one) == len(other)
    assert all(map(torch.equal, one, other))


@pytest.mark.parametrize("owner", OWNERS)
def test_extra_resumes_with_the_same_bits(owner):
    whole, whole_made = build(owner)
    whole.fit(batches(5), epochs=3)
    first, _ = build(owner)
    first.fit(batches(5), epochs=2)
    state = decode(*encode(first.state_dict()))
    again, made = build(owner, seed=7)
    before = trained(made)
    again.load_state_dict(state)
    assert all(one is other for one, other in zip(before, trained(made), strict=True))
    again.fit(batches(5), epochs=1)
    equal(values(again, made), values(whole, whole_made))


@pytest.mark.parametrize("owner", OWNERS)
def test_load_that_fails_leaves_an_extra_as_it_was(owner, monkeypatch):
    first, _ = build(owner)
    first.fit(batches(5), epochs=1)
    state = first.state_dict()
    again, made = build(owner, seed=7)
    before = values(again, made)
    monkeypatch.setattr(again.model, "load_state_dict", lambda state: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        again.load_state_dict(state)
    equal(values(again, made), before)


@pytest.mark.parametrize("owner", ["loss", "Headed", "plugin"])
def test_extra_of_another_shape_does_not_fit(owner):
    first, _ = build(owner)
    state = copy.deepcopy(first.state_dict())
    (name,) = state["extras"]
    key = next(iter(state["extras"][name]["tensors"]))
    state["extras"][name]["tensors"][key] = torch.zeros(5)
    again, _ = build(owner)
    with pytest.raises(StateError, match=r"that differ: .*\(5,\) in the state"):
        again.load_state_dict(state)


@pytest.mark.parametrize("owner", ["loss", "Headed", "plugin"])
def test_state_without_an_extra_loads_and_names_it(owner):
    first, _ = build(owner)
    state = copy.deepcopy(first.state_dict())
    del state["extras"]
    again, _ = build(owner)
    with pytest.warns(UserWarning, match="the state holds no parameters of"):
        again.load_state_dict(state)


@pytest.mark.parametrize("owner", ["loss", "Headed", "plugin"])
def test_extra_is_averaged(owner):
    learner, made = build(owner, WeightAverage(0.5))
    kept = [each.detach().clone() for each in trained(made)]
    after = []
    learner.add(on("update_end", lambda: after.append([each.detach().clone() for each in trained(made)])))
    learner.fit(batches(3), epochs=1)
    average = [each.clone() for each in after[0]]
    for moved in after[1:]:
        average = [0.5 * one + 0.5 * other for one, other in zip(average, moved, strict=True)]
    with learner.plugins["weight_average"].averaged(learner):
        for one, other in zip(trained(made), average, strict=True):
            torch.testing.assert_close(one.detach(), other)
    assert not torch.equal(trained(made)[0], kept[0])


@pytest.mark.parametrize("owner", ["loss", "Headed", "plugin"])
def test_extra_is_restored_with_the_best_weights(owner):
    learner, made = build(owner, Metrics(), EarlyStopping("val/loss", patience=9, mode="max", restore_best=True))
    first = []
    learner.add(on("phase_end", lambda phase: phase.name == "val" and first.append(values(learner, made))))
    learner.fit(batches(3), batches(1, seed=5), epochs=4)
    best = max(range(4), key=lambda epoch: learner.plugins["early_stopping"].best_epoch == epoch + 1)
    equal(values(learner, made), first[best])


@pytest.mark.parametrize("owner", ["loss", "Headed", "plugin"])
def test_extra_is_rolled_back(owner):
    learner, made = build(owner, StopOnNonFinite("rollback"))
    given = batches(3)
    given[2] = given[2][0], torch.full((4, 1), torch.nan)
    start = values(learner, made)
    with pytest.warns(UserWarning, match="back to the state after 0 updates"):
        learner.fit(given, epochs=1)
    equal(values(learner, made), start)


@pytest.mark.parametrize("owner", ["Bare", "Listed", "Plain"])
def test_bare_tensor_is_moved_as_the_same_object(owner):
    learner, made = build(owner)
    module = learner.models.with_extras()["phase train"]
    module.to(torch.float64)
    assert made.shift.dtype == torch.float64
    assert made.shift is learner.optimizer.param_groups[0]["params"][-1]


@pytest.mark.parametrize("owner", ["loss", "Headed", "Named", "plugin"])
def test_extra_is_moved(owner):
    learner, made = build(owner, ToDevice("meta"))
    assert {each.device.type for each in (*learner.model.parameters(), *trained(made), *buffers(made))} == {"meta"}


def test_teacher_of_a_phase_in_eval_mode_stays_there():
    class Distils(TrainingPhase):
        def __init__(self):
            super().__init__()
            self.teacher = nn.Sequential(nn.Linear(3, 1), nn.BatchNorm1d(1)).eval().requires_grad_(False)

        def loss(self, learner, outputs, targets):
            return (outputs - self.teacher(targets.expand(-1, 3))).square().mean()

    phase = Distils()
    learner = Learner(nn.Linear(3, 1), None, lambda p: torch.optim.SGD(p, lr=0.1), phases=[phase], standard=False)
    learner.fit(batches(3), epochs=1)
    assert not any(each.training for each in phase.teacher.modules())
    assert torch.equal(phase.teacher[1].running_mean, torch.zeros(1))


def test_loss_is_in_eval_mode_in_a_validation():
    learner, loss = build("loss", Metrics())
    learner.fit(batches(3), batches(2), epochs=2)
    assert loss.seen == 6
    assert loss.training


def test_module_that_is_a_model_is_saved_once():
    class Holds(TrainingPhase):
        def __init__(self, model):
            super().__init__()
            self.model = model
            self.part = model[0]
            self.wrapper = nn.Sequential(model)

    model = nn.Sequential(nn.Linear(3, 1))
    learner = Learner(model, nn.MSELoss(), phases=[Holds(model)], standard=False)
    assert "extras" not in learner.state_dict()


def test_plain_attribute_of_a_module_of_a_phase_is_named(tmp_path):
    class Counts(nn.Linear):
        calls = 0

        def forward(self, inputs):
            self.calls += 1
            return super().forward(inputs)

    learner, phase = build("Headed")
    phase.head = Counts(1, 1)
    learner.set_optimizer(torch.optim.SGD([*learner.model.parameters(), *phase.head.parameters()], lr=0.1))
    learner.fit(batches(2), epochs=1)
    with pytest.warns(UserWarning, match=r"a module of phase 'train' .* has changed its 'head.calls'"):
        learner.state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        learner.state_dict()


def test_tensor_that_a_phase_shares_is_put_back_in_place():
    class Shares(TrainingPhase):
        saved = ("center",)

        def __init__(self):
            super().__init__()
            self.center = torch.zeros(3)
            self.holder = [self.center]

    phase, other = Shares(), Shares()
    state = Learner(nn.Linear(3, 1), phases=[phase], standard=False).state_dict()
    phase.center += 1
    Learner(nn.Linear(3, 1), phases=[other], standard=False).load_state_dict(state)
    assert other.holder[0] is other.center
    assert other.center.tolist() == [1, 1, 1]
