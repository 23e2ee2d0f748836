"""Mixed precision against loops by hand with torch's autocast and GradScaler, bitwise."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from helpers import EventLog, on, raising
from loopkit_testing import check_plugin, tiny_problem
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils._python_dispatch import TorchDispatchMode

from loopkit import CancelStep, Event, Learner, Phase, TrainingPhase, hookimpl
from loopkit.errors import PhaseError, PluginConflict, PluginError
from loopkit.plugins.gradients import ClipGradNorm, GradNorm
from loopkit.plugins.mixed_precision import MixedPrecision
from loopkit.plugins.schedule import Schedule

SIZES = (4, 4, 4, 4, 4, 4, 4, 3)  # a tail of two steps in windows of 3
DTYPES = ["float32", "bfloat16", "float16"]
OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
}
SCALE = 1024.0
"""Low enough that nothing overflows by itself."""
HUGE = 1e30
"""Times a loss of about 1: finite in float32, infinite in float16."""


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 2))


def make_batches(sizes=SIZES, seed=2):
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(n, 5, generator=generator), torch.randn(n, 2, generator=generator)) for n in sizes]


class Spiked(TrainingPhase):
    """Multiplies the loss of these steps, ``{index: factor}``."""

    def __init__(self, spikes):
        super().__init__()
        self.spikes = spikes

    def loss(self, learner, outputs, targets):
        return super().loss(learner, outputs, targets) * self.spikes.get(learner.current.epoch.current.index, 1.0)


def by_hand(model, optimizer, data, dtype, *, epochs=2, k=1, spikes=None, clip=None, scaler=None):
    """torch's recipe: autocast around the forward part, scale, unscale, clip, step, update the scale."""
    dtype = getattr(torch, dtype)
    scaler = scaler or torch.amp.GradScaler("cpu", enabled=dtype == torch.float16, init_scale=SCALE)
    model.train()
    for _ in range(epochs):
        weights = []
        for i, (inputs, targets) in enumerate(data):
            if not weights:
                optimizer.zero_grad()
            with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
                loss = mse_loss(model(inputs), targets) * (spikes or {}).get(i, 1.0)
            weights.append(len(inputs))
            scaler.scale(loss * (weights[-1] / weights[0] / k)).backward()
            if len(weights) == k or i == len(data) - 1:
                factor = k * weights[0] / sum(weights)
                if factor != 1:
                    for p in model.parameters():
                        p.grad.mul_(factor)
                scaler.unscale_(optimizer)
                if clip is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), clip)
                scaler.step(optimizer)
                scaler.update()
                weights = []
    optimizer.zero_grad()
    return scaler


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


def make_learner(*plugins, model=None, optimizer=OPTIMIZERS["adamw"], spikes=None, phases=None, **options):
    options.setdefault("standard", False)
    model = make_model() if model is None else model
    return Learner(model, mse_loss, optimizer, plugins=plugins, phases=phases or [Spiked(spikes or {})], **options)


@pytest.mark.parametrize("around", ["fit", "fits", "loop"])
def test_autocast_around_the_whole_training_sees_each_update(around):
    data = make_batches()
    hand = make_model()
    optimizer = OPTIMIZERS["adamw"](hand.parameters())
    learner = make_learner(phases=[TrainingPhase()])
    with torch.autocast("cpu", torch.bfloat16):
        torch.manual_seed(3)
        for inputs, targets in data * 2:
            torch.clear_autocast_cache()  # or each forward has the weights of the first one
            optimizer.zero_grad()
            mse_loss(hand(inputs), targets).backward()
            optimizer.step()
        torch.manual_seed(3)
        if around == "loop":
            for _ in learner.rounds(2):
                learner.run("train", data)
        else:
            for _ in range(2 if around == "fits" else 1):
                learner.fit(data, epochs=1 if around == "fits" else 2)
    assert_same(learner.model.state_dict(), hand.state_dict())


def compare(dtype, *, optimizer=OPTIMIZERS["adamw"], plugins=(), k=1, spikes=None, clip=None, standard=False):
    """Train by hand and with a learner; all parameters, buffers, optimizer states and scales are the same."""
    model, data = make_model(), make_batches()
    hand_optimizer = optimizer(model.parameters())
    torch.manual_seed(3)
    scaler = by_hand(model, hand_optimizer, data, dtype, k=k, spikes=spikes, clip=clip)
    mixed = MixedPrecision(dtype, init_scale=SCALE)
    learner = make_learner(mixed, *plugins, optimizer=optimizer, spikes=spikes, accumulate=k, standard=standard)
    torch.manual_seed(3)
    learner.fit(data, epochs=2)
    assert_same(learner.model.state_dict(), model.state_dict())
    assert_same(learner.optimizer.state_dict(), hand_optimizer.state_dict())
    assert mixed.loss_scale == scaler.get_scale()
    return learner


# Against the loop by hand


@pytest.mark.parametrize("standard", [False, True], ids=["bare", "standard"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_training_equals_the_loop_by_hand(dtype, k, optimizer, standard):
    compare(dtype, optimizer=optimizer, k=k, standard=standard)


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_training_with_clipping_equals_the_loop_by_hand(dtype, k):
    compare(dtype, k=k, clip=0.05, plugins=[ClipGradNorm(0.05), GradNorm()])


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("at", [0, 2, 4, 7])
def test_training_with_an_overflow_equals_the_loop_by_hand(at, k):
    learner = compare("float16", k=k, spikes={at: HUGE})
    assert learner.plugins["mixed_precision"].skipped == 2  # one in each of the two epochs


def test_precisions_give_different_parameters():
    trained = [compare(dtype).model[0].weight for dtype in DTYPES]
    assert not torch.equal(trained[0], trained[1])
    assert not torch.equal(trained[0], trained[2])
    assert not torch.equal(trained[1], trained[2])


@pytest.mark.parametrize("dtype", ["bfloat16", torch.bfloat16, "auto"])
def test_dtype_can_be_given_in_several_ways(dtype):
    mixed = MixedPrecision(dtype, init_scale=SCALE)
    learner = make_learner(mixed)
    learner.fit(make_batches(), epochs=1)
    assert mixed.dtype == torch.bfloat16


def test_scaling_with_bfloat16_equals_the_loop_by_hand():
    model, data = make_model(), make_batches()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    torch.manual_seed(3)
    by_hand(model, optimizer, data, "bfloat16", scaler=torch.amp.GradScaler("cpu"))
    learner = make_learner(MixedPrecision("bfloat16", scaling=True))
    torch.manual_seed(3)
    learner.fit(data, epochs=2)
    assert_same(learner.model.state_dict(), model.state_dict())


@pytest.mark.filterwarnings("ignore:MixedPrecision. the parameters of model 'model' are float64")
@pytest.mark.parametrize("dtype", DTYPES)
def test_float64_model_equals_the_loop_by_hand(dtype):
    model = make_model().double()
    own = copy.deepcopy(model)
    data = [(x.double(), y.double()) for x, y in make_batches()]
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    torch.manual_seed(3)
    by_hand(model, optimizer, data, dtype, k=3)
    learner = make_learner(
        MixedPrecision(dtype, init_scale=SCALE), model=own, optimizer=OPTIMIZERS["sgd"], accumulate=3
    )
    torch.manual_seed(3)
    learner.fit(data, epochs=2)
    assert_same(own.state_dict(), model.state_dict())


def test_growth_of_the_scale_equals_torch():
    options = {"init_scale": 256.0, "growth_interval": 3, "growth_factor": 4.0, "backoff_factor": 0.25}
    model, data = make_model(), make_batches()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    torch.manual_seed(3)
    scaler = by_hand(model, optimizer, data, "float16", scaler=torch.amp.GradScaler("cpu", **options), spikes={5: HUGE})
    mixed = MixedPrecision("float16", **options)
    learner = make_learner(mixed, optimizer=OPTIMIZERS["sgd"], spikes={5: HUGE})
    torch.manual_seed(3)
    learner.fit(data, epochs=2)
    assert mixed.loss_scale == scaler.get_scale() != 256.0
    assert mixed.state_dict()["scaler"] == scaler.state_dict()
    assert_same(learner.model.state_dict(), model.state_dict())


# What an overflow leaves alone


class Average:
    """A running average of the parameters, moved by each update."""

    def __init__(self):
        self.moves = 0

    @hookimpl(reads=("params",))
    def update_end(self):
        self.moves += 1


def snapshot(learner):
    return copy.deepcopy((list(learner.model.parameters()), learner.optimizer.state_dict()["state"]))


@pytest.mark.parametrize("factor", [HUGE, math.inf])
@pytest.mark.parametrize("k", [1, 3])
def test_overflow_moves_nothing(k, factor):
    """The second update overflows: parameters, Adam's step count, schedule, average and counters stay."""
    steps = {"before": k - 1, "after": 2 * k - 1}
    seen = {}
    average, schedule = Average(), Schedule(lambda k: 1 / (1 + k))
    log = EventLog()
    mixed = MixedPrecision("float16", init_scale=SCALE)

    def look(learner, step, **_):
        for when, index in steps.items():
            if step.index == index:
                lr = learner.optimizer.param_groups[0]["lr"]
                seen[when] = (*snapshot(learner), schedule.count, lr, average.moves, learner.progress.updates)

    learner = make_learner(mixed, average, schedule, log, on("step_end", look), spikes={k: factor}, accumulate=k)
    learner.fit(make_batches([4] * (2 * k)), epochs=1)
    assert_same(seen["before"], seen["after"])
    assert seen["after"][2] == seen["after"][4] == seen["after"][5] == 1
    assert {float(state["step"]) for state in seen["after"][1].values()} == {1.0}
    assert log.count("update_skipped") == log.count("update_end") == 1
    assert mixed.loss_scale == SCALE / 2


def test_overflow_leaves_no_gradient_behind():
    gradients = []
    learner = make_learner(MixedPrecision("float16", init_scale=SCALE), spikes={1: HUGE})
    learner.add(on("step_end", lambda learner, **_: gradients.append([p.grad for p in learner.model.parameters()])))
    learner.fit(make_batches([4] * 3), epochs=1)
    assert all(grad is None for grads in gradients for grad in grads)


def test_overflow_is_counted_in_the_metrics():
    learner = make_learner(MixedPrecision("float16", init_scale=SCALE), spikes={1: HUGE, 3: HUGE})
    learner.fit(make_batches(), epochs=1)
    assert learner.metrics == {"train/loss_scale": SCALE / 4, "train/skipped": 2.0}


def test_metrics_come_with_scaling_alone():
    learner = make_learner(MixedPrecision("bfloat16"))
    learner.fit(make_batches(), epochs=1)
    assert learner.metrics == {}


def test_overflow_in_the_update_that_closes_the_epoch_lowers_the_scale():
    """Without a length the engine itself updates after the last step."""
    mixed = MixedPrecision("float16", init_scale=SCALE)
    learner = make_learner(mixed, accumulate=3, spikes={3: HUGE})
    learner.fit(iter(make_batches([4] * 4)), epochs=1)
    assert mixed.skipped == 1
    assert mixed.loss_scale == learner.metrics["train/loss_scale"] == SCALE / 2


def test_scale_never_falls_below_its_floor():
    mixed = MixedPrecision("float16", init_scale=4.0, min_scale=1.5)
    learner = make_learner(mixed, spikes=dict.fromkeys(range(8), HUGE))
    scales = []
    learner.add(on("step_end", lambda **_: scales.append(mixed.loss_scale), after=("mixed_precision",)))
    learner.fit(make_batches(), epochs=1)
    assert scales == [2.0, *[1.5] * 7]


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_loss_of_a_step_is_never_scaled(dtype, k):
    losses = {hook: [] for hook in ("backward_begin", "backward_end", "update_begin", "step_end")}
    watchers = [
        on(hook, lambda step, hook=hook, **_: losses[hook].append(step.loss.item()), f"watch_{hook}") for hook in losses
    ]
    learner = make_learner(
        MixedPrecision(dtype, init_scale=SCALE), *watchers, optimizer=lambda p: torch.optim.SGD(p, lr=0.0), accumulate=k
    )
    data = make_batches([4] * 6)
    torch.manual_seed(3)
    learner.fit(data, epochs=1)
    model = make_model()
    torch.manual_seed(3)
    expected = []
    for inputs, targets in data:
        with torch.autocast("cpu", getattr(torch, dtype), enabled=dtype != "float32"):
            expected.append(mse_loss(model(inputs), targets).item())
    assert losses["backward_begin"] == losses["backward_end"] == losses["step_end"] == expected
    assert losses["update_begin"] == expected[k - 1 :: k]


# Several optimizers and losses


class DuelBegin(Event):
    """The rivals have met; their backwards follow."""


class GAN(Phase):
    """Two networks, two losses, two optimizers; ``spikes`` multiply a loss, ``{(index, name): factor}``.

    The generator takes part in every ``every``-th step.
    """

    name = "train"
    training = True
    emits = (DuelBegin,)

    def __init__(self, spikes=None, every=1):
        super().__init__()
        self.spikes, self.every = spikes or {}, every

    def step(self, learner, step):
        real = step.batch[0]
        generator, critic = learner.model["generator"], learner.model["critic"]
        fake = generator(torch.randn(len(real), 3))
        loss = critic(fake.detach()).square().mean() + (critic(real) - 1).square().mean()
        step.emit(DuelBegin)
        step.backward(loss * self.spikes.get((step.index, "critic"), 1.0), "critic")
        step.update("critic")
        if step.index % self.every == self.every - 1:
            loss = (critic(fake) - 1).square().mean()
            step.backward(loss * self.spikes.get((step.index, "generator"), 1.0), "generator")
            step.update("generator")


GAN_OPTIMIZERS = {
    "generator": lambda params: torch.optim.AdamW(params, lr=0.01),
    "critic": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.5),
}


def gan_models():
    torch.manual_seed(1)
    return {"generator": nn.Linear(3, 5), "critic": nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))}


def gan_by_hand(data, dtype, k, spikes, every, scaler):
    """torch's recipe for several optimizers: step each, and update the scale once, when no window is open."""
    dtype = getattr(torch, dtype)
    autocast = lambda: torch.autocast("cpu", dtype, enabled=dtype != torch.float32)  # noqa: E731
    models = gan_models()
    optimizers = {name: make(models[name].parameters()) for name, make in GAN_OPTIMIZERS.items()}
    generator, critic = models.values()
    counts = dict.fromkeys(models, 0)
    stepped = set()
    torch.manual_seed(3)

    def learn(name, loss, last):
        if counts[name] == 0:
            optimizers[name].zero_grad()
        counts[name] += 1
        scaler.scale(loss / k).backward(inputs=list(models[name].parameters()))
        if counts[name] == k or last:
            if counts[name] != k:
                for p in models[name].parameters():
                    p.grad.mul_(k / counts[name])
            scaler.unscale_(optimizers[name])
            scaler.step(optimizers[name])
            counts[name] = 0
            stepped.add(name)

    for i, (real, _) in enumerate(data):
        last = i == len(data) - 1
        with autocast():
            fake = generator(torch.randn(len(real), 3))
            loss = critic(fake.detach()).square().mean() + (critic(real) - 1).square().mean()
            loss = loss * spikes.get((i, "critic"), 1.0)
        learn("critic", loss, last)
        if i % every == every - 1:
            with autocast():
                loss = (critic(fake) - 1).square().mean() * spikes.get((i, "generator"), 1.0)
            learn("generator", loss, last)
        if stepped and not any(counts.values()):
            scaler.update()
            stepped.clear()
    return models, optimizers


SPIKES = {
    "none": {},
    "critic": {(2, "critic"): HUGE},
    "generator": {(3, "generator"): HUGE},
    "both": {(2, "critic"): HUGE, (2, "generator"): HUGE},
}


@pytest.mark.parametrize("spikes", SPIKES.values(), ids=SPIKES)
@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_two_optimizers_equal_the_loop_by_hand(dtype, k, spikes):
    spikes = {} if dtype != "float16" else spikes
    data = make_batches([4] * 8)
    scaler = torch.amp.GradScaler("cpu", enabled=dtype == "float16", init_scale=SCALE, growth_interval=2)
    models, optimizers = gan_by_hand(data, dtype, k, spikes, 1, scaler)
    mixed = MixedPrecision(dtype, init_scale=SCALE, growth_interval=2)
    learner = Learner(
        gan_models(), None, GAN_OPTIMIZERS, plugins=[mixed], phases=[GAN(spikes)], accumulate=k, standard=False
    )
    torch.manual_seed(3)
    learner.fit(data, epochs=1)
    for name in models:
        assert_same(learner.models[name].state_dict(), models[name].state_dict(), name)
        assert_same(learner.optimizers[name].state_dict(), optimizers[name].state_dict(), name)
    assert mixed.loss_scale == scaler.get_scale()
    assert mixed.skipped == len(spikes)


def test_overflow_of_one_optimizer_lets_the_other_update():
    moved = {}
    before = gan_models()

    def look(learner, step, **_):
        for name in before:
            moved[name] = not torch.equal(next(learner.models[name].parameters()), next(before[name].parameters()))

    plugins = [MixedPrecision("float16", init_scale=SCALE), on("step_end", look)]
    phases = [GAN({(0, "critic"): HUGE})]
    learner = Learner(copy.deepcopy(before), None, GAN_OPTIMIZERS, plugins=plugins, phases=phases, standard=False)
    learner.run("train", make_batches([4]))
    assert moved == {"generator": True, "critic": False}


def test_scale_adapts_once_for_two_overflows_of_a_step():
    mixed = MixedPrecision("float16", init_scale=SCALE)
    phases = [GAN({(0, "critic"): HUGE, (0, "generator"): HUGE})]
    learner = Learner(gan_models(), None, GAN_OPTIMIZERS, plugins=[mixed], phases=phases, standard=False)
    learner.run("train", make_batches([4]))
    assert mixed.skipped == 2
    assert mixed.loss_scale == 512.0


def test_scale_waits_for_a_window_that_is_open():
    """The generator's windows are twice as long: gradients of two scales must never meet in one."""
    mixed = MixedPrecision("float16", init_scale=SCALE)
    scales = []
    phases = [GAN({(1, "critic"): HUGE}, every=2)]
    learner = Learner(gan_models(), None, GAN_OPTIMIZERS, plugins=[mixed], phases=phases, accumulate=2, standard=False)
    learner.add(on("step_end", lambda **_: scales.append(mixed.loss_scale), after=("mixed_precision",)))
    learner.run("train", make_batches([4] * 8))
    # the critic overflows in step 1 and updates again in step 3, with which the generator's first window closes
    assert scales == [1024.0, 1024.0, 1024.0, *[512.0] * 5]
    assert mixed.skipped == 1


class Twice(TrainingPhase):
    """Two updates in one step, each with a forward of its own."""

    def step(self, learner, step):
        step.inputs, step.targets = step.batch
        for factor in (self.spike(step, 0), self.spike(step, 1)):
            step.outputs = learner.model(step.inputs)
            step.loss = learner.loss_fn(step.outputs, step.targets) * factor
            step.backward(step.loss)
            step.update()

    def spike(self, step, turn):
        return HUGE if (step.index, turn) in self.spikes else 1.0

    def __init__(self, spikes=()):
        super().__init__()
        self.spikes = spikes


@pytest.mark.parametrize("dtype", DTYPES)
def test_second_update_of_a_step_sees_the_weights_of_the_first(dtype):
    model, data = make_model(), make_batches()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    scaler = torch.amp.GradScaler("cpu", enabled=dtype == "float16", init_scale=SCALE)
    model.train()
    torch.manual_seed(3)
    for inputs, targets in data:
        for _ in range(2):
            optimizer.zero_grad()
            with torch.autocast("cpu", getattr(torch, dtype), enabled=dtype != "float32"):
                loss = mse_loss(model(inputs), targets)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    learner = make_learner(MixedPrecision(dtype, init_scale=SCALE), optimizer=OPTIMIZERS["sgd"], phases=[Twice()])
    torch.manual_seed(3)
    learner.fit(data, epochs=1)
    assert_same(learner.model.state_dict(), model.state_dict())


@pytest.mark.parametrize("turn", [0, 1])
def test_overflow_in_either_update_of_a_step_lowers_the_scale_once(turn):
    mixed = MixedPrecision("float16", init_scale=SCALE)
    learner = make_learner(mixed, phases=[Twice([(0, turn)])])
    learner.fit(make_batches([4, 4]), epochs=1)
    assert mixed.loss_scale == SCALE / 2
    assert learner.progress.updates == 3


# Fused optimizers


def test_fused_optimizer_skips_on_the_device():
    fused = lambda params: torch.optim.AdamW(params, lr=0.01, fused=True)  # noqa: E731
    model, data = make_model(), make_batches()
    optimizer = fused(model.parameters())
    torch.manual_seed(3)
    scaler = by_hand(model, optimizer, data, "float16", epochs=1, spikes={2: HUGE})
    mixed = MixedPrecision("float16", init_scale=SCALE)
    learner = make_learner(mixed, optimizer=fused, spikes={2: HUGE})
    torch.manual_seed(3)
    learner.fit(data, epochs=1)
    assert_same(learner.model.state_dict(), model.state_dict())
    assert_same(learner.optimizer.state_dict(), optimizer.state_dict())
    assert mixed.loss_scale == scaler.get_scale() == SCALE / 2
    assert mixed.skipped == learner.metrics["train/skipped"] == 1
    assert learner.progress.updates == 8  # the host does not know


@pytest.mark.parametrize("hook", ["update_begin", "update_end"])
def test_fused_optimizer_does_not_keep_its_flag(hook):
    fused = lambda params: torch.optim.AdamW(params, fused=True)  # noqa: E731
    learner = make_learner(MixedPrecision("float16", init_scale=SCALE), optimizer=fused)
    learner.add(raising(hook, ValueError("broken")))
    with pytest.raises(ValueError, match="broken"):
        learner.fit(make_batches(), epochs=1)
    assert not hasattr(learner.optimizer, "found_inf")


def test_fused_optimizer_is_not_waited_for():
    def problem():
        made = tiny_problem()
        made.optimizer = lambda params: torch.optim.AdamW(params, fused=True)
        return made

    class Strict(MixedPrecision):
        syncs = ()

    check_plugin(lambda: Strict("float16"), problem=problem, checks=["no_device_sync"])


# Control flow


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    "hook", ["step_begin", "forward_begin", "loss_begin", "backward_begin", "backward_end", "update_begin"]
)
def test_cancelled_step_equals_the_loop_that_leaves_it_out(hook, dtype):
    """Without dropout and batch norm, for which the forward of a cancelled step counts."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2))
    own = copy.deepcopy(model)
    data = make_batches()
    by_hand(model, OPTIMIZERS["sgd"](model.parameters()), data[:2] + data[3:], dtype, epochs=1)
    learner = make_learner(MixedPrecision(dtype, init_scale=SCALE), model=own, optimizer=OPTIMIZERS["sgd"])
    learner.add(raising(hook, CancelStep("not this one"), at=2, name="z_last"))
    learner.fit(data, epochs=1)
    assert learner.progress.updates == 7
    assert_same(own.state_dict(), model.state_dict())


def test_cancelled_step_that_overflowed_lowers_the_scale():
    """Else a plugin that cancels every such step would cancel for ever."""
    mixed = MixedPrecision("float16", init_scale=SCALE)
    scales = []

    def cancel(step, **_):
        if step.skip_reason:
            raise CancelStep("overflow")

    learner = make_learner(mixed, on("update_begin", cancel, reads=("grads",)), spikes={1: HUGE})
    learner.add(on("step_begin", lambda **_: scales.append(mixed.loss_scale), "scales"))
    learner.fit(make_batches([4] * 3), epochs=1)
    assert scales == [SCALE, SCALE, SCALE / 2]


@pytest.mark.parametrize(
    ("hook", "name"),
    [("backward_end", "a"), ("update_begin", "a"), ("update_begin", "z"), ("update_skipped", "a"), ("step_end", "a")],
)
def test_fit_after_an_error_equals_a_fresh_one(hook, name):
    """The error comes, before or after the plugin's own hook, in a step that overflowed."""
    learner = make_learner(MixedPrecision("float16", init_scale=SCALE), spikes={1: HUGE})
    learner.add(raising(hook, ValueError("broken"), at=1, name=name))
    start = copy.deepcopy(learner.model.state_dict())
    with pytest.raises(ValueError, match="broken"):
        learner.fit(make_batches(), epochs=1)
    learner.model.load_state_dict(start)
    learner.optimizer.state.clear()
    fresh = make_learner(MixedPrecision("float16", init_scale=SCALE))
    learner.phases["train"].spikes = {}
    for each in (learner, fresh):
        torch.manual_seed(3)
        each.fit(make_batches(), epochs=1)
    assert_same(learner.model.state_dict(), fresh.model.state_dict())
    assert learner.metrics["train/loss_scale"] == fresh.metrics["train/loss_scale"] == SCALE


# Closures


class Closure(TrainingPhase):
    def step(self, learner, step):
        step.inputs, step.targets = step.batch

        def closure():
            step.outputs = learner.model(step.inputs)
            self.dtypes.append(step.outputs.dtype)
            step.loss = learner.loss_fn(step.outputs, step.targets)
            step.backward(step.loss)
            return step.loss

        step.update(closure=closure)

    def __init__(self):
        super().__init__()
        self.dtypes = []


LBFGS = lambda params: torch.optim.LBFGS(params, lr=0.1, max_iter=4)  # noqa: E731


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_closure_equals_the_loop_by_hand(dtype):
    model, data = make_model(), make_batches([6, 6])
    optimizer = LBFGS(model.parameters())
    model.train()
    torch.manual_seed(3)
    for inputs, targets in data:

        def closure(inputs=inputs, targets=targets):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
                loss = mse_loss(model(inputs), targets)
            loss.backward()
            return loss

        optimizer.step(closure)
    phase = Closure()
    learner = make_learner(MixedPrecision(dtype, init_scale=SCALE), optimizer=LBFGS, phases=[phase])
    torch.manual_seed(3)
    learner.fit(data, epochs=1)
    assert_same(learner.model.state_dict(), model.state_dict())
    assert len(phase.dtypes) > 2
    assert set(phase.dtypes) == {getattr(torch, dtype)}


@pytest.mark.parametrize("options", [{"dtype": "float16"}, {"dtype": "bfloat16", "scaling": True}])
def test_closure_is_refused_with_scaling(options):
    learner = make_learner(MixedPrecision(**options), optimizer=LBFGS, phases=[Closure()])
    before = copy.deepcopy(list(learner.model.parameters()))
    with pytest.raises(PhaseError, match=r"phase 'train': an update with a closure .* MixedPrecision\('bfloat16'\)"):
        learner.fit(make_batches(), epochs=1)
    assert_same(list(learner.model.parameters()), before)


# State


@pytest.mark.parametrize("done", [1, 3, 5, 7])
def test_state_goes_on_in_mid_epoch(done):
    options = {"init_scale": 1024.0, "growth_interval": 2}
    spikes = {2: HUGE, 6: HUGE}
    data = make_batches([4] * 8)
    model = lambda: nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2))  # noqa: E731
    torch.manual_seed(1)
    straight = make_learner(MixedPrecision("float16", **options), model=model(), spikes=spikes)
    states = []

    def save(learner, **_):
        mixed = learner.plugins["mixed_precision"].state_dict()
        states.append(copy.deepcopy((learner.model.state_dict(), learner.optimizer.state_dict(), mixed)))

    straight.add(on("step_end", save, reads=("*",)))
    straight.fit(data, epochs=1)
    mixed = MixedPrecision("float16", init_scale=SCALE)
    later = {index - done: factor for index, factor in spikes.items()}
    resumed = make_learner(mixed, model=model(), spikes=later)
    for part, state in zip((resumed.model, resumed.optimizer, mixed), states[done - 1], strict=True):
        part.load_state_dict(state)
    resumed.fit(data[done:], epochs=1)
    assert_same(resumed.model.state_dict(), straight.model.state_dict())
    assert mixed.state_dict() == straight.plugins["mixed_precision"].state_dict()
    assert mixed.skipped == 2


def test_state_holds_an_overflow_that_the_scale_has_not_followed():
    def make(*plugins):
        phases, mixed = [GAN({(1, "critic"): HUGE}, every=2)], MixedPrecision("float16", init_scale=SCALE)
        options = {"phases": phases, "accumulate": 2, "standard": False}
        return Learner(gan_models(), None, GAN_OPTIMIZERS, plugins=[mixed, *plugins], **options)

    states, data = [], make_batches([4] * 8)
    learner = make(on("step_end", lambda learner: states.append(copy.deepcopy(learner.state_dict())), reads=("*",)))
    learner.run("train", data)
    stores = [state["epochs"][0]["stores"].get("mixed_precision") for state in states]
    found = [None if store is None else bool(store["found"]) for store in stores]
    assert found == [None, True, True, None, None, False, False, None]
    other = make()
    other.load_state_dict(states[1])
    other.run("train", data)
    assert_same(other.state_dict()["plugins"], learner.state_dict()["plugins"])
    assert_same(other.state_dict()["models"], learner.state_dict()["models"])


def test_state_of_a_plugin_that_was_not_used_is_kept():
    state = {"scaler": torch.amp.GradScaler("cpu").state_dict(), "skipped": 3}
    mixed = MixedPrecision("float16")
    mixed.load_state_dict(state)
    assert mixed.state_dict() == state
    make_learner(mixed)
    assert mixed.state_dict() == state


# Where autocast reaches


class Operations(TorchDispatchMode):
    """Notes the dtypes that matrix products ran in."""

    def __init__(self):
        super().__init__()
        self.dtypes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.addmm, torch.ops.aten.mm):
            self.dtypes.append(result.dtype)
        return result


@pytest.mark.parametrize("dtype", DTYPES)
def test_matrix_products_run_in_the_dtype(dtype):
    learner = make_learner(MixedPrecision(dtype, init_scale=SCALE))
    with Operations() as operations:
        learner.fit(make_batches([4]), make_batches([4]), epochs=1)
    assert len(operations.dtypes) >= 7  # two layers: 2 forward and at least 3 backward in training, 2 in validation
    assert set(operations.dtypes) == {getattr(torch, dtype)}


@pytest.mark.parametrize("dtype", DTYPES)
def test_validation_and_prediction_run_in_the_dtype(dtype):
    learner = make_learner(MixedPrecision(dtype, init_scale=SCALE))
    seen = []
    learner.add(on("loss_begin", lambda step, **_: seen.append(step.outputs.dtype)))
    data = make_batches([4, 4])
    learner.evaluate(data)
    assert seen == [getattr(torch, dtype)] * 2
    outputs = learner.predict(data)
    assert outputs.dtype == getattr(torch, dtype)
    model = learner.model.eval()
    with torch.no_grad(), torch.autocast("cpu", getattr(torch, dtype), enabled=dtype != "float32"):
        assert torch.equal(outputs, torch.cat([model(x) for x, _ in data]))


def test_hooks_of_an_update_run_without_autocast():
    states = {}
    hooks = (
        "step_begin",
        "forward_begin",
        "loss_begin",
        "backward_begin",
        "backward_end",
        "update_begin",
        "update_end",
        "step_end",
    )
    watchers = [
        on(hook, lambda hook=hook, **_: states.update({hook: torch.is_autocast_enabled("cpu")}), f"watch_{hook}")
        for hook in hooks
    ]
    make_learner(MixedPrecision("bfloat16"), *watchers).fit(make_batches([4]), epochs=1)
    inside = ("forward_begin", "loss_begin", "backward_begin", "backward_end")
    assert states == {hook: hook in inside for hook in hooks}


def test_autocast_is_off_after_a_fit_and_after_an_error():
    learner = make_learner(MixedPrecision("bfloat16"))
    learner.fit(make_batches(), epochs=1)
    assert not torch.is_autocast_enabled("cpu")
    learner.add(raising("loss_begin", ValueError("broken")))
    with pytest.raises(ValueError, match="broken"):
        learner.fit(make_batches(), epochs=1)
    assert not torch.is_autocast_enabled("cpu")


def with_a_pass_inside(hook, inside, dtype):
    """A fit of a GAN in which ``inside(learner)`` is called at a hook of every training step."""
    states = []

    def nest(learner, phase, **_):
        if phase.training:
            before = (
                torch.is_autocast_enabled("cpu"),
                torch.get_autocast_dtype("cpu"),
                torch.is_autocast_cache_enabled(),
            )
            inside(learner)
            after = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()
            states.append(before == after)

    plugins = [MixedPrecision(dtype, init_scale=SCALE, growth_interval=2), on(hook, nest)]
    learner = Learner(gan_models(), None, GAN_OPTIMIZERS, plugins=plugins, phases=[GAN(), Score()], standard=False)
    torch.manual_seed(3)
    learner.fit(make_batches(), epochs=1)
    return learner, states


class Score(Phase):
    """Both models on a batch, as a validation of the rivals."""

    name = "val"

    def step(self, learner, step):
        step.outputs = learner.model["critic"](step.batch[0]), learner.model["generator"](step.batch[0][:, :3])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "hook", ["step_begin", "duel_begin", "backward_begin", "backward_end", "update_begin", "update_end", "step_end"]
)
def test_a_pass_inside_another_changes_no_bit_and_leaves_autocast_as_it_was(hook, dtype):
    data = make_batches([4, 4], seed=9)
    plain, _ = with_a_pass_inside(hook, lambda learner: None, dtype)
    nested, unchanged = with_a_pass_inside(hook, lambda learner: learner.evaluate(data), dtype)
    assert unchanged
    assert all(unchanged)
    for name in plain.models:
        assert_same(nested.models[name].state_dict(), plain.models[name].state_dict(), f"{hook} {name}")
    assert nested.plugins["mixed_precision"].loss_scale == plain.plugins["mixed_precision"].loss_scale


def test_a_pass_inside_another_sees_weights_that_were_swapped():
    """Averaged weights stand in for the raw ones during validation, whose casts are still in the cache."""
    outputs = {}

    class Swap:
        @hookimpl(updates=("params",))
        def epoch_context(self, learner, phase):
            return None if phase.training else Zeroed(learner.models["critic"])

        @hookimpl(phase=Score, reads=("outputs",))
        def step_end(self, step):
            outputs["nested"] = step.outputs[0]

    class Zeroed:
        def __init__(self, model):
            self.params = list(model.parameters())

        def __enter__(self):
            self.raw = [p.detach().clone() for p in self.params]
            for p in self.params:
                p.data.zero_()

        def __exit__(self, *error):
            for p, raw in zip(self.params, self.raw, strict=True):
                p.data.copy_(raw)

    data = make_batches([4])
    plugins = [MixedPrecision("bfloat16"), Swap(), on("duel_begin", lambda learner, **_: learner.evaluate(data))]
    learner = Learner(gan_models(), None, GAN_OPTIMIZERS, plugins=plugins, phases=[GAN(), Score()], standard=False)
    learner.run("train", data)
    assert outputs["nested"].count_nonzero() == 0


# Clipping


def test_clipping_under_float16_nears_clipping_under_float32():
    trained = {}
    for dtype in ("float32", "float16"):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2))
        learner = make_learner(
            MixedPrecision(dtype, init_scale=SCALE),
            ClipGradNorm(0.1),
            model=model,
            optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        )
        learner.fit(make_batches(), epochs=1)
        trained[dtype] = learner.model.state_dict()
    for name, value in trained["float32"].items():
        # 8 updates of at most 0.1 * 0.1, each off by a few float16 roundings of 2 ** -11: 8 * 0.01 * 4 / 2048 = 1.6e-4
        torch.testing.assert_close(trained["float16"][name], value, rtol=0, atol=1.6e-4)


def test_clipping_sees_unscaled_gradients():
    norms = []
    learner = make_learner(MixedPrecision("float16", init_scale=SCALE), ClipGradNorm(0.01))
    look = lambda step, **_: norms.append(float(nn.utils.get_total_norm([p.grad for p in step.params])))  # noqa: E731
    learner.add(on("update_end", look))
    learner.fit(make_batches(), epochs=1)
    assert norms == pytest.approx([0.01] * 8, rel=1e-3)  # torch's 1e-6 in the norm, float32


# What is refused


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_parameters_are_refused(dtype):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1).to(dtype))
    with pytest.raises(PluginError) as refused:
        make_learner(MixedPrecision("bfloat16"), model=model)
    message = str(refused.value)
    assert message.startswith(f"MixedPrecision: parameter '1.weight' of model 'model' is {dtype}; small updates")
    assert "Keep the model in float32 (no .half() or .bfloat16())" in message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"dtype": "bf16"},
            r"dtype='bf16'\): it is 'auto', 'bfloat16', 'float16', 'float32' \(did you mean 'bfloat16'\?\)",
        ),
        ({"dtype": "fp16"}, r"did you mean 'float16'\?"),
        ({"dtype": "BF16"}, r"did you mean 'bfloat16'\?"),
        ({"dtype": "bfloat61"}, r"did you mean 'bfloat16'\?"),
        ({"dtype": torch.float64}, r"dtype=torch.float64\)"),
        ({"init_scale": 0.0}, "init_scale=0.0 must be above 0"),
        ({"init_scale": math.inf}, "init_scale=inf must be above 0"),
        ({"init_scale": math.nan}, "init_scale=nan must be above 0"),
        ({"growth_factor": 1.0}, "growth_factor=1.0 above 1"),
        ({"backoff_factor": 1.0}, "backoff_factor=1.0 between 0 and 1"),
        ({"backoff_factor": 0.0}, "backoff_factor=0.0 between 0 and 1"),
        ({"growth_interval": 0}, "growth_interval=0 at least 1"),
        ({"min_scale": -1.0}, "min_scale=-1.0"),
        ({"init_scale": 2.0, "min_scale": 4.0}, r"min_scale=4.0\): it is between 0 and init_scale=2.0"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(PluginError, match=message):
        MixedPrecision(**options)


def test_two_of_them_are_refused():
    class Other(MixedPrecision):
        name = "other"

    with pytest.raises(PluginConflict) as refused:
        make_learner(MixedPrecision(), Other())
    assert str(refused.value) == "'mixed_precision' and 'other' both own \"grads.scale\": keep one of them"


@pytest.mark.parametrize(
    "dtype", [*(pytest.param(kind, marks=pytest.mark.slow) for kind in ("float32", "bfloat16")), "float16"]
)
def test_plugin_keeps_the_contract(dtype):
    check_plugin(lambda: MixedPrecision(dtype, init_scale=SCALE))


@pytest.mark.slow
def test_plugin_keeps_the_contract_with_a_fused_optimizer():
    def problem():
        made = tiny_problem()
        made.optimizer = lambda params: torch.optim.AdamW(params, fused=True)
        return made

    check_plugin(lambda: MixedPrecision("float16", init_scale=16.0), problem=problem)


def test_resumed_pass_that_only_closes_its_window_unscales():
    batches = [(torch.randn(4, 3), torch.randn(4, 1)) for _ in range(3)]
    states = []

    def keep(learner, phase, step):
        if step.index == 2:
            states.append(copy.deepcopy(learner.state_dict()))

    def make(*plugins):
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        scaled = MixedPrecision("float16", init_scale=16.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return Learner(model, mse_loss, optimizer, plugins=[scaled, *plugins], accumulate=2, standard=False)

    whole = make(on("step_end", keep))
    whole.fit(lambda: iter(batches), epochs=1)  # without a length: the last window is open after the last step
    resumed = make()
    resumed.load_state_dict(states[0])
    resumed.fit(lambda: iter(batches), epochs=1)
    assert resumed.progress.updates == 2
    assert torch.equal(whole.model.weight, resumed.model.weight)


def test_model_of_float64_is_warned_of():
    with pytest.warns(UserWarning, match=r"parameters of model 'model' are float64, which autocast leaves as they are"):
        Learner(make_model().double(), plugins=[MixedPrecision("bfloat16")], standard=False)


def test_model_with_one_parameter_of_float64_is_not_warned_of():
    model = make_model()
    model.register_parameter("scale", nn.Parameter(torch.ones(1, dtype=torch.float64)))
    Learner(model, plugins=[MixedPrecision("bfloat16")], standard=False)
