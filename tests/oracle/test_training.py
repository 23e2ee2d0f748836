"""Training against loops written by hand: every parameter, buffer and optimizer state is bitwise the same."""

from __future__ import annotations

import copy
import functools
import operator
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from loopkit import Event, Learner, Phase, TrainingPhase, every, hookimpl
from loopkit.events import BackwardBegin, BackwardEnd, UpdateBegin, UpdateEnd, UpdateSkipped

standard = pytest.mark.parametrize("standard", [False, True], ids=["bare", "standard"])
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=1e-3),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
}
optimizers = pytest.mark.parametrize("make_optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
SIZES = (4, 4, 4, 4, 4, 4, 4, 3)  # 8 batches: an uneven tail for windows of 3; the last batch is uneven too


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_model(dtype=torch.float32):
    """Dropout draws random numbers in training; batch norm has buffers."""
    torch.manual_seed(1)
    layers = nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 2)
    return nn.Sequential(*layers).to(dtype)


def make_batches(sizes=SIZES, dtype=torch.float32, seed=2):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=dtype)  # noqa: E731
    return [(draw(n, 5), draw(n, 2)) for n in sizes]


def added(weights):
    """Their sum, one after the other; from Python 3.12 on, ``sum`` of floats keeps what each addition rounds off."""
    return functools.reduce(operator.add, weights)


def by_hand(model, optimizer, batches, epochs=1, *, k=1, reduction="mean", weigh=len, loss_fn=mse_loss):
    """The loop of a careful person; ``weigh`` gives the weight of a step from its targets.

    Weights that are tensors of integers are turned into the loss's dtype, else their quotients would be float32.
    """
    model.train()
    for _ in range(epochs):
        weights = []
        for i, (inputs, targets) in enumerate(batches):
            if not weights:
                optimizer.zero_grad()
            loss = loss_fn(model(inputs), targets)
            weight = weigh(targets)
            weights.append(weight.to(loss.dtype) if isinstance(weight, torch.Tensor) else weight)
            if reduction == "mean" and k > 1:
                loss = loss * (weights[-1] / weights[0] / k)
            loss.backward()
            if len(weights) == k or i == len(batches) - 1:
                if reduction == "mean" and k > 1:
                    factor = k * weights[0] / added(weights)
                    if factor != 1:
                        for p in model.parameters():
                            p.grad.mul_(factor)
                optimizer.step()
                weights = []
    optimizer.zero_grad()


def state(modules, optimizers):
    """Every tensor and number of the modules and optimizers, as nested dicts."""
    return [module.state_dict() for module in modules] + [optimizer.state_dict() for optimizer in optimizers]


def assert_same(one, other, path="state"):
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype, path
        assert torch.equal(one, other), path
    elif isinstance(one, (dict, list, tuple)):
        assert len(one) == len(other), path
        for key in one if isinstance(one, dict) else range(len(one)):
            assert_same(one[key], other[key], f"{path}.{key}")
    else:
        assert one == other, path


def compare(
    make_optimizer,
    *,
    batches=None,
    dtype=torch.float32,
    phases=(),
    run=None,
    standard=False,
    epochs=2,
    val=None,
    **hand,
):
    """Train two equal models, by hand and with a learner (``run(learner)``), and compare all that there is."""
    batches = make_batches(dtype=dtype) if batches is None else batches
    model = make_model(dtype)
    own = copy.deepcopy(model)
    optimizer, hand_optimizer = make_optimizer(own.parameters()), make_optimizer(model.parameters())
    torch.manual_seed(3)
    by_hand(model, hand_optimizer, batches, epochs, **hand)
    learner = Learner(
        own,
        hand.get("loss_fn", mse_loss),
        optimizer,
        phases=phases,
        accumulate=hand.get("k", 1),
        standard=standard,
    )
    torch.manual_seed(3)
    if run is None:
        learner.fit(batches, val, epochs=epochs)
    else:
        run(learner)
    assert_same(state([own], [optimizer]), state([model], [hand_optimizer]))


def test_hand_loop_trains():
    model = make_model()
    before = copy.deepcopy(model.state_dict())
    by_hand(model, OPTIMIZERS["sgd"](model.parameters()), make_batches(), 2, k=3)
    assert all(not torch.equal(before[name], value) for name, value in model.state_dict().items())


# One optimizer


@standard
@optimizers
@dtypes
@pytest.mark.parametrize("k", [1, 3, 4])
def test_training_equals_the_loop_by_hand(make_optimizer, dtype, k, standard):
    compare(make_optimizer, dtype=dtype, k=k, standard=standard)


@standard
@pytest.mark.parametrize("k", [1, 3, 4])
def test_training_with_sums_equals_the_loop_by_hand(k, standard):
    summed = functools.partial(mse_loss, reduction="sum")
    compare(OPTIMIZERS["sgd"], k=k, reduction="sum", loss_fn=summed, standard=standard)


class Tokens(TrainingPhase):
    """Weighs each step by its positive targets, as a number or as a tensor."""

    def __init__(self, count):
        super().__init__()
        self.count = count

    def loss(self, learner, outputs, targets):
        learner.current.epoch.current.weight = self.count(targets)
        return super().loss(learner, outputs, targets)


WEIGHTS = {
    "int": lambda targets: int((targets > 0).sum()),
    "float": lambda targets: float(targets.abs().sum()),
    "int_tensor": lambda targets: (targets > 0).sum(),
    "float_tensor": lambda targets: targets.abs().sum(),
}


@standard
@dtypes
@pytest.mark.parametrize("k", [1, 3, 4])
@pytest.mark.parametrize("weigh", WEIGHTS.values(), ids=WEIGHTS)
def test_training_with_token_weights_equals_the_loop_by_hand(weigh, k, dtype, standard):
    compare(OPTIMIZERS["adamw"], dtype=dtype, k=k, weigh=weigh, phases=[Tokens(weigh)], standard=standard)


@pytest.mark.parametrize("weigh", [lambda targets: 7, lambda targets: torch.tensor(7)], ids=["number", "tensor"])
@pytest.mark.parametrize("k", [2, 3, 5])
def test_full_windows_of_equal_weights_equal_the_textbook(weigh, k):
    model = make_model()
    own = copy.deepcopy(model)
    batches = make_batches([4] * (2 * k))
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    torch.manual_seed(3)
    model.train()
    for i, (inputs, targets) in enumerate(batches):
        (mse_loss(model(inputs), targets) / k).backward()
        if i % k == k - 1:
            optimizer.step()
            optimizer.zero_grad()
    learner = Learner(own, mse_loss, OPTIMIZERS["sgd"], phases=[Tokens(weigh)], accumulate=k, standard=False)
    torch.manual_seed(3)
    learner.fit(batches, epochs=1)
    assert_same(state([own], [learner.optimizer]), state([model], [optimizer]))


@standard
@optimizers
def test_accumulation_nears_one_big_batch(make_optimizer, standard):
    """With sizes that differ, on a model that does not couple samples."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    own = copy.deepcopy(model)
    batches = make_batches((4, 2, 5, 3), dtype=torch.float64)
    big = [tuple(torch.cat(part) for part in zip(*batches[i : i + 2], strict=True)) for i in (0, 2)]
    by_hand(model, make_optimizer(model.parameters()), big, 3)
    learner = Learner(own, mse_loss, make_optimizer, accumulate=2, standard=standard)
    learner.fit(batches, epochs=3)
    for one, other in zip(own.parameters(), model.parameters(), strict=True):
        # only the order of summation differs; 6 updates of float64 rounding, 1e-16 each, grown by AdamW's division
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


@standard
@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("every", [{}, {"validate": every(updates=2)}], ids=["epochs", "updates"])
def test_validation_in_between_changes_no_bit(every, k, standard):
    batches, val = make_batches(), make_batches((4, 2), seed=9)
    compare(
        OPTIMIZERS["adamw"], batches=batches, k=k, standard=standard,
        run=lambda learner: learner.fit(batches, val, epochs=2, **every),
    )  # fmt: skip


class EvaluateEverywhere:
    """Evaluates and predicts at every event of a training step."""

    def __init__(self, data):
        self.data, self.runs = data, 0

    def _nest(self, learner, phase):
        if phase.training:
            learner.evaluate(self.data)
            learner.predict(self.data)
            self.runs += 1

    @hookimpl
    def step_begin(self, learner, phase):
        self._nest(learner, phase)

    @hookimpl
    def loss_begin(self, learner, phase):
        self._nest(learner, phase)

    @hookimpl
    def backward_end(self, learner, phase):
        self._nest(learner, phase)

    @hookimpl
    def update_begin(self, learner, phase):
        self._nest(learner, phase)

    @hookimpl
    def step_end(self, learner, phase):
        self._nest(learner, phase)


def test_evaluation_in_every_hook_changes_no_bit():
    batches = make_batches()
    nested = EvaluateEverywhere(make_batches((4, 2), seed=9))

    def run(learner):
        learner.add(nested)
        learner.fit(batches, epochs=2)

    compare(OPTIMIZERS["sgd"], batches=batches, k=3, run=run)
    assert nested.runs == 2 * (8 * 4 + 3)


@standard
@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("sized", [True, False])
def test_own_outer_loop_equals_the_loop_by_hand(sized, k, standard):
    batches = make_batches()

    def run(learner):
        for _ in range(2):
            with learner.epoch("train", length=len(batches) if sized else None) as epoch:
                for batch in batches:
                    epoch.step(batch)

    compare(OPTIMIZERS["sgd"], batches=batches, k=k, run=run, standard=standard)


@standard
@pytest.mark.parametrize("k", [1, 3])
def test_fitting_equals_the_loop_by_hand(k, standard):
    batches = make_batches()

    def run(learner):
        with learner.rounds():
            for _ in range(2):
                learner.run("train", batches)

    compare(OPTIMIZERS["sgd"], batches=batches, k=k, run=run, standard=standard)


def test_break_out_of_an_epoch_equals_the_loop_over_the_first_batches():
    batches = make_batches()

    def run(learner):
        with learner.epoch("train", length=len(batches)) as epoch:
            for batch in batches:
                if epoch.steps == 5:
                    break
                epoch.step(batch)

    compare(OPTIMIZERS["sgd"], batches=batches[:5], epochs=1, k=3, run=run)


def test_max_steps_equals_the_loop_over_the_first_batches():
    batches = make_batches()
    compare(
        OPTIMIZERS["sgd"], batches=batches[:5], epochs=1, k=3, run=lambda learner: learner.fit(batches, max_steps=5)
    )


class TwicePhase(TrainingPhase):
    """Two backwards a step, each with its own forward."""

    def step(self, learner, step):
        inputs, targets = step.batch
        for sign in (1, -1):
            step.loss = learner.loss_fn(learner.model(sign * inputs), targets)
            step.backward(step.loss)
        step.update()


@standard
@pytest.mark.parametrize("k", [1, 3])
def test_several_backwards_of_a_step_count_once(k, standard):
    model = make_model()
    own = copy.deepcopy(model)
    batches = make_batches([4] * 6)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    torch.manual_seed(3)
    model.train()
    for i, (inputs, targets) in enumerate(batches):
        for sign in (1, -1):
            (mse_loss(model(sign * inputs), targets) / k).backward()
        if i % k == k - 1:
            optimizer.step()
            optimizer.zero_grad()
    learner = Learner(own, mse_loss, OPTIMIZERS["sgd"], phases=[TwicePhase()], accumulate=k, standard=standard)
    torch.manual_seed(3)
    learner.fit(batches, epochs=1)
    assert_same(state([own], [learner.optimizer]), state([model], [optimizer]))


# Batches of other kinds


@dataclass
class Pair:
    inputs: torch.Tensor
    targets: torch.Tensor


KINDS = {"list": list, "dict": lambda b: {"inputs": b[0], "targets": b[1]}, "dataclass": lambda b: Pair(*b)}


@standard
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_batches_of_other_kinds_equal_the_loop_by_hand(kind, standard):
    batches = make_batches()
    made = [kind(batch) for batch in batches]
    compare(OPTIMIZERS["sgd"], batches=batches, k=3, run=lambda learner: learner.fit(made, epochs=2), standard=standard)


# A closure


class ClosurePhase(TrainingPhase):
    def step(self, learner, step):
        step.inputs, step.targets = step.batch

        def closure():
            step.outputs = learner.model(step.inputs)
            step.loss = learner.loss_fn(step.outputs, step.targets)
            step.backward(step.loss)
            return step.loss

        step.update(closure=closure)


@standard
@dtypes
def test_lbfgs_equals_the_loop_by_hand(dtype, standard):
    model = make_model(dtype)
    own = copy.deepcopy(model)
    make = lambda params: torch.optim.LBFGS(params, lr=0.1, max_iter=4)  # noqa: E731
    optimizer = make(model.parameters())
    batches = make_batches((6, 6), dtype)
    torch.manual_seed(3)
    model.train()
    for _ in range(2):
        for inputs, targets in batches:

            def closure(inputs=inputs, targets=targets):
                optimizer.zero_grad()
                loss = mse_loss(model(inputs), targets)
                loss.backward()
                return loss

            optimizer.step(closure)
    learner = Learner(own, mse_loss, make, phases=[ClosurePhase()], standard=standard)
    torch.manual_seed(3)
    learner.fit(batches, epochs=2)
    assert_same(state([own], [learner.optimizer]), state([model], [optimizer]))


# Several models and optimizers


class RivalryBegin(Event):
    """The critic is about to be trained."""


class GANPhase(Phase):
    name = "train"
    training = True
    emits = (RivalryBegin, BackwardBegin, BackwardEnd, UpdateBegin, UpdateEnd, UpdateSkipped)

    def step(self, learner, step):
        real = step.batch[0]
        generator, critic = learner.model["generator"], learner.model["critic"]
        step.emit(RivalryBegin)
        fake = generator(torch.randn(len(real), 3))
        step.loss = critic(fake.detach()).square().mean() + (critic(real) - 1).square().mean()
        step.backward(step.loss, "critic")
        step.update("critic")
        step.loss = (critic(fake) - 1).square().mean()
        step.backward(step.loss, "generator")
        step.update("generator")


class Listener:
    def __init__(self):
        self.steps = []

    @hookimpl
    def rivalry_begin(self, step):
        self.steps.append(step.index)


GAN_OPTIMIZERS = {
    "generator": lambda params: torch.optim.AdamW(params, lr=0.01),
    "critic": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.5),
}


@standard
@pytest.mark.parametrize("k", [1, 3])
def test_two_optimizers_equal_the_loop_by_hand(k, standard):
    torch.manual_seed(1)
    models = {"generator": nn.Linear(3, 5), "critic": nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))}
    own = copy.deepcopy(models)
    generator, critic = models.values()
    optimizers = {name: make(models[name].parameters()) for name, make in GAN_OPTIMIZERS.items()}
    batches = make_batches()

    def update(name, weights):
        if k > 1 and (factor := k * weights[0] / added(weights)) != 1:
            for p in models[name].parameters():
                p.grad.mul_(factor)
        optimizers[name].step()
        optimizers[name].zero_grad()

    torch.manual_seed(3)
    for _ in range(2):
        weights = []
        for i, (real, _) in enumerate(batches):
            weights.append(len(real))
            share = weights[-1] / weights[0] / k
            due = len(weights) == k or i == len(batches) - 1
            fake = generator(torch.randn(len(real), 3))
            loss = critic(fake.detach()).square().mean() + (critic(real) - 1).square().mean()
            (loss * share).backward(inputs=list(critic.parameters()))
            if due:
                update("critic", weights)
            loss = (critic(fake) - 1).square().mean()
            (loss * share).backward(inputs=list(generator.parameters()))
            if due:
                update("generator", weights)
                weights = []

    listener = Listener()
    learner = Learner(
        own, None, GAN_OPTIMIZERS, plugins=[listener], phases=[GANPhase()], accumulate=k, standard=standard
    )
    torch.manual_seed(3)
    result = learner.fit(batches, epochs=2)
    own_optimizers = [learner.optimizer[name] for name in optimizers]
    assert_same(state(own.values(), own_optimizers), state(models.values(), optimizers.values()))
    assert listener.steps == [*range(8), *range(8)]
    assert result.updates == 2 * 2 * -(-8 // k)
