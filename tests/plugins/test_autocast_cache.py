"""What autocast caches of the weights within a step: kept where they stay the same, forgotten where they change."""

from __future__ import annotations

import copy
import pickle
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.nn.functional import mse_loss

from loopkit import Learner, Phase, TrainingPhase, hookimpl
from loopkit.errors import PhaseError
from loopkit.plugins import Compile, MixedPrecision

SCALE = 256.0
RHO = 0.5
DTYPES = ["bfloat16", "float16"]


def make_model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2))


def make_batches(count=6):
    generator = torch.Generator().manual_seed(2)
    return [(torch.randn(4, 5, generator=generator), torch.randn(4, 2, generator=generator)) for _ in range(count)]


def sgd(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def make_learner(phase, *plugins, dtype="bfloat16", model=None, standard=False):
    mixed = MixedPrecision(dtype, init_scale=SCALE)
    phases = [phase] if phase else []
    return Learner(model or make_model(), mse_loss, sgd, plugins=[mixed, *plugins], phases=phases, standard=standard)


def make_scaler(dtype):
    return torch.amp.GradScaler("cpu", enabled=dtype == "float16", init_scale=SCALE)


def autocast(dtype="bfloat16"):
    return torch.autocast("cpu", getattr(torch, dtype))


def assert_same(learner, model):
    for (name, own), other in zip(learner.model.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(own, other), name


# A weight that changes between two forwards


class Moved(TrainingPhase):
    """Computes the loss, adds to the weights, and computes it again."""

    def step(self, learner, step):
        inputs, targets = step.batch
        step.first = learner.loss_fn(learner.model(inputs), targets)
        self.change(learner.model[2].weight)
        step.second = learner.loss_fn(learner.model(inputs), targets)
        step.backward(step.second)
        step.update()

    def change(self, weight):
        with torch.no_grad():
            weight.add_(10.0)


def test_forward_after_a_change_of_the_weights_sees_it():
    learner, model, batch = make_learner(Moved()), make_model(), make_batches(1)[0]
    with learner.epoch("train") as epoch:
        step = epoch.step(batch)
    losses = []
    for change in (0.0, 10.0):
        with torch.no_grad():
            model[2].weight.add_(change)
        with autocast():
            losses.append(mse_loss(model(batch[0]), batch[1]))
    assert [step.first.item(), step.second.item()] == [loss.item() for loss in losses]
    assert step.second > 10 * step.first


class MovedData(Moved):
    def change(self, weight):
        weight.data.add_(10.0)


def test_change_through_data_is_found_in_the_first_step():
    with pytest.raises(PhaseError, match=r"model\.2\.weight changed through \.data between two forwards.*no_grad"):
        make_learner(MovedData(), standard=True).fit(make_batches(), epochs=1)


class AfterBackward(TrainingPhase):
    """Changes weights through ``.data`` where that does no harm: autocast has forgotten them by then."""

    def step(self, learner, step):
        inputs, targets = step.batch
        step.loss = learner.loss_fn(learner.model(inputs), targets)
        step.backward(step.loss)
        learner.model[2].weight.data.add_(0.1)
        step.again = learner.loss_fn(learner.model(inputs), targets)
        step.update()


def test_change_through_data_after_a_backward_is_no_error():
    learner = make_learner(AfterBackward(), standard=True)
    learner.fit(make_batches(), epochs=2)
    assert learner.progress.updates == 12


class DataSGD(torch.optim.Optimizer):
    """Changes weights through ``.data``, which moves no version."""

    def __init__(self, params):
        super().__init__(params, {})

    def step(self, closure=None):
        loss = None if closure is None else closure()
        for p in (p for group in self.param_groups for p in group["params"]):
            p.data.sub_(p.grad, alpha=0.5)
        return loss if closure is None else closure()


class SeesUpdates(TrainingPhase):
    """Keeps the loss before and after the update of a step; with a closure, those of its evaluations."""

    def __init__(self, closes):
        super().__init__()
        self.closes, self.seen = closes, []

    def compute(self, learner, step):
        loss = learner.loss_fn(learner.model(step.batch[0]), step.batch[1])
        self.seen.append(loss.item())
        return loss

    def step(self, learner, step):
        def closure():
            loss = self.compute(learner, step)
            step.backward(loss)
            learner.model(step.batch[0])  # which autocast remembers
            return loss

        loss = closure()
        step.update(closure=closure if self.closes else None)
        step.loss = self.compute(learner, step) if not self.closes else loss


@pytest.mark.parametrize("closes", [False, True], ids=["plain", "closure"])
def test_forward_after_an_update_that_moves_no_version_sees_it(closes):
    phase = SeesUpdates(closes)
    learner = Learner(
        make_model(), mse_loss, DataSGD, plugins=[MixedPrecision("bfloat16")], phases=[phase], standard=False
    )
    learner.fit(make_batches(1), epochs=1)
    assert len(set(phase.seen[-2:])) == 2
    with autocast():
        last = mse_loss(learner.model(make_batches(1)[0][0]), make_batches(1)[0][1])
    assert phase.seen[-1] == last.item()


def test_fit_under_the_users_own_autocast_makes_its_last_update_without_it():
    class Sees:
        on: ClassVar[list] = []

        @hookimpl
        def update_begin(self):
            self.on.append(torch.is_autocast_enabled("cpu"))

    learner = Learner(make_model(), mse_loss, DataSGD, plugins=[Sees()], accumulate=2, standard=False)
    with autocast():
        learner.fit(iter(make_batches(3)), epochs=1)
    assert Sees.on == [False, False]


def test_frozen_weights_that_have_no_version_are_no_error():
    model = make_model()
    with torch.inference_mode():
        model[0].weight = nn.Parameter(torch.zeros(8, 5), requires_grad=False)
    learner = make_learner(None, model=model)
    learner.fit(make_batches(2), epochs=1)
    assert learner.progress.updates == 2


# Weights that are used several times


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.shared, self.head = nn.Linear(5, 5), nn.Linear(5, 2)

    def forward(self, inputs):
        return self.head(self.shared(torch.tanh(self.shared(torch.tanh(self.shared(inputs))))))


@pytest.mark.parametrize("dtype", DTYPES)
def test_tied_weights_equal_one_autocast_a_step(dtype):
    model, data = Tied(), make_batches()
    learner = make_learner(None, dtype=dtype, model=Tied())
    learner.fit(data, epochs=2)
    optimizer, scaler = sgd(model.parameters()), make_scaler(dtype)
    for inputs, targets in data * 2:
        with autocast(dtype):
            loss = mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert_same(learner, model)


class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.cell, self.head = nn.RNNCell(5, 6), nn.Linear(6, 2)

    def forward(self, inputs, hidden):
        hidden = self.cell(inputs, hidden)
        return self.head(hidden), hidden


class Unrolled(TrainingPhase):
    """Calls the model eight times in a step."""

    def forward(self, model, inputs):
        hidden, total = torch.zeros(len(inputs), 6), 0.0
        for _ in range(8):
            outputs, hidden = (model.model if isinstance(model, Learner) else model)(inputs, hidden)
            total = total + outputs
        return total


def unrolled_by_hand(dtype, model, data, cached=True):
    optimizer, scaler = sgd(model.parameters()), make_scaler(dtype)
    for inputs, targets in data:
        with torch.autocast("cpu", getattr(torch, dtype), cache_enabled=cached):
            loss = mse_loss(Unrolled().forward(model, inputs), targets)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return model


@pytest.mark.parametrize("dtype", DTYPES)
def test_cell_that_is_called_often_equals_one_autocast_a_step(dtype):
    data = make_batches()
    learner = make_learner(Unrolled(), dtype=dtype, model=Cell())
    learner.fit(data, epochs=2)
    assert_same(learner, unrolled_by_hand(dtype, Cell(), data * 2))
    other = unrolled_by_hand(dtype, Cell(), data * 2, cached=False)  # the test would see a cache that is cleared
    assert not torch.equal(learner.model.cell.weight_hh, other.cell.weight_hh)


# Sharpness-aware minimization


def climb(params):
    """Move the parameters along their gradients; returns by how much."""
    norm = torch.stack([p.grad.norm() for p in params]).norm()
    moves = [p.grad * (RHO / norm) for p in params]
    with torch.no_grad():
        for p, move in zip(params, moves, strict=True):
            p.add_(move)
    return moves


def descend(params, moves):
    with torch.no_grad():
        for p, move in zip(params, moves, strict=True):
            p.sub_(move)


def sam_by_hand(dtype, model, data):
    optimizer, scaler = sgd(model.parameters()), make_scaler(dtype)
    params = list(model.parameters())
    for inputs, targets in data:
        for turn in range(2):
            with autocast(dtype):
                loss = mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            if not turn:
                moves = climb(params)
        descend(params, moves)
        scaler.step(optimizer)
        scaler.update()
    return model


class SAMPhase(TrainingPhase):
    def step(self, learner, step):
        inputs, targets = step.batch
        params = list(learner.model.parameters())
        step.backward(learner.loss_fn(learner.model(inputs), targets))
        moves = climb(params)
        for p in params:
            p.grad = None
        step.backward(learner.loss_fn(learner.model(inputs), targets))
        descend(params, moves)
        step.update()


class SAM:
    """The same as a plugin."""

    @hookimpl(updates=("grads",))
    def backward_end(self, learner, step):
        params = list(learner.model.parameters())
        moves = climb(params)
        for p in params:
            p.grad = None
        loss = learner.loss_fn(learner.model(step.inputs), step.targets)
        seed = torch.as_tensor(step.seed, dtype=loss.dtype)
        with torch.autocast("cpu", enabled=False):
            loss.backward(seed)
        descend(params, moves)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("phase", "plugins"), [(SAMPhase, []), (None, [SAM])], ids=["phase", "plugin"])
def test_sharpness_aware_minimization_equals_one_autocast_a_forward(dtype, phase, plugins):
    data = make_batches()
    learner = make_learner(phase and phase(), *[make() for make in plugins], dtype=dtype)
    learner.fit(data, epochs=2)
    assert_same(learner, sam_by_hand(dtype, make_model(), data * 2))


class InBackward(torch.autograd.Function):
    on = None

    @staticmethod
    def forward(ctx, value):
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        InBackward.on = torch.is_autocast_enabled("cpu")
        return gradient


class Watched(TrainingPhase):
    def loss(self, learner, outputs, targets):
        return InBackward.apply(super().loss(learner, outputs, targets))


def test_backward_runs_without_autocast():
    make_learner(Watched()).fit(make_batches(), epochs=1)
    assert InBackward.on is False


# A target network


class Target(TrainingPhase):
    """Learns what a slow copy of the model says, which moves in the middle of the step."""

    def __init__(self):
        super().__init__()
        self.target = None

    def step(self, learner, step):
        step.loss = self.compute(learner.models["model"], self.target or learner.models["target"], step.batch[0])
        step.backward(step.loss, "model" if self.target is None else None)
        step.update()

    @staticmethod
    def compute(model, target, inputs):
        before = target(inputs).detach()
        with torch.no_grad():
            for slow, fast in zip(target.parameters(), model.parameters(), strict=True):
                slow.lerp_(fast, 0.5)
        return mse_loss(model(inputs), target(inputs).detach() + before)


@pytest.mark.parametrize("held", [False, True], ids=["in the learner", "in the phase"])
def test_target_network_that_moves_in_the_step_equals_one_autocast_a_forward(held):
    model, data, phase = make_model(), make_batches(), Target()
    own, own_target = copy.deepcopy(model), make_model()
    with torch.no_grad():
        own_target[0].weight.mul_(3.0)
    target = copy.deepcopy(own_target)
    phase.target = own_target if held else None
    models = own if held else {"model": own, "target": own_target}
    optimizers = sgd if held else {"model": sgd}
    learner = Learner(models, None, optimizers, plugins=[MixedPrecision("bfloat16")], phases=[phase], standard=False)
    learner.fit(data, epochs=2)
    optimizer = sgd(model.parameters())
    for inputs, _ in data * 2:
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            loss = Target.compute(model, target, inputs)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for one, other in ((own, model), (own_target, target)):
        assert all(torch.equal(p, q) for p, q in zip(one.parameters(), other.parameters(), strict=True))


# What the models look like meanwhile and afterwards


class Copied(Phase):
    name = "copied"

    def __init__(self):
        super().__init__()
        self.kinds = set()

    def step(self, learner, step):
        step.outputs = learner.model(step.batch[0])
        copies = copy.deepcopy(learner.model), pickle.loads(pickle.dumps(learner.model))
        self.kinds |= {type(each) for each in copies}
        assert all(torch.equal(each(step.batch[0]), step.outputs) for each in copies)


def test_model_can_be_copied_within_a_step_and_is_as_it_was_afterwards():
    model, phase = make_model(), Copied()
    first, second = (make_learner(phase, model=model) for _ in range(2))
    with first.epoch(phase) as epoch, second.epoch(phase) as inner:
        epoch.step(make_batches(1)[0])
        inner.step(make_batches(1)[0])
        epoch.step(make_batches(1)[0])
    assert phase.kinds == {nn.Sequential}
    assert type(model) is nn.Sequential


def test_compiled_model_is_compiled_once_for_all_epochs():
    torch._dynamo.reset()
    counter = CompileCounter()
    learner = make_learner(None, Compile(backend=counter))
    learner.fit(make_batches(), epochs=3)
    assert counter.frame_count == 1
