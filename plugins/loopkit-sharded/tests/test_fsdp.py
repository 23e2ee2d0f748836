"""FSDP: two processes that hold a part of each parameter train as the loop written by hand does."""

from __future__ import annotations

import copy
import io
import math

import pytest
import torch
import torch._dynamo  # fully_shard does, which takes seconds in each process
import torch.distributed as dist
from distributed.processes import run, run_each
from helpers import on
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from loopkit import CancelStep, Learner, TrainingPhase, checkpoint, hookimpl
from loopkit.checkpoint.structure import structure
from loopkit.data import TensorLoader
from loopkit.distributed import join
from loopkit.errors import PhaseError, PluginError, WorldError
from loopkit.plugins import ClipGradNorm, GradNoise, GradNorm, MixedPrecision, WeightAverage
from loopkit_sharded import FSDP

LIMIT = 120.0


def net(seed=1):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3), nn.Tanh(), nn.Linear(3, 1))


def tensors(samples=24):
    generator = torch.Generator().manual_seed(3)
    return torch.randn(samples, 5, generator=generator), torch.randn(samples, 1, generator=generator)


def batches(rank, count=5, size=4):
    """Those of one rank, when each global batch of two is cut into two parts."""
    x, y = tensors(2 * count * size)
    return list(zip(x.split(size), y.split(size), strict=True))[rank::2]


def adam(params):
    return torch.optim.AdamW(params, lr=0.05)


def make(*plugins, model=None, optimizer=adam, **options):
    """A learner with FSDP over every Linear."""
    fsdp = {"wrap": nn.Linear, "shard": False, "timeout": LIMIT, **options.pop("fsdp", {})}
    model = net() if model is None else model
    return Learner(model, nn.MSELoss(), optimizer, plugins=[FSDP(**fsdp), *plugins], standard=False, **options)


def full(params):
    return [p.detach().full_tensor() if isinstance(p, DTensor) else p.detach().clone() for p in params]


def same(one, other):
    assert len(one) == len(other)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def equal(one, other):
    """Whether two states hold the same bits."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    return one == other


def by_hand(rank, accumulate=1, clip=None, policy=None, outer=None, count=5, epochs=2):
    """The loop that one writes with ``fully_shard``; the parameters at its end."""
    join(timeout=LIMIT)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = net()
    for module in model:
        if isinstance(module, nn.Linear):
            fully_shard(module, mesh=mesh, mp_policy=policy or MixedPrecisionPolicy())
    fully_shard(model, mesh=mesh, mp_policy=outer or policy or MixedPrecisionPolicy())
    optimizer = adam(model.parameters())
    for _ in range(epochs):
        for index, (x, y) in enumerate(batches(rank, count)):
            last = index == count - 1
            due = last or (index + 1) % accumulate == 0
            window = count % accumulate if last and count % accumulate else accumulate
            model.set_requires_gradient_sync(due)
            (nn.functional.mse_loss(model(x), y) / window).backward()
            if due:
                if clip is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                optimizer.zero_grad()
    return full(model.parameters())


# Training


def trains_as_by_hand(rank, accumulate, clip, options):
    plugins = [] if clip is None else [ClipGradNorm(clip)]
    learner = make(*plugins, accumulate=accumulate, fsdp=options)
    learner.fit(batches(rank), epochs=2)
    policy = outer = None
    if "mixed_precision" in options:
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        outer = MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32)
    same(full(learner.model.parameters()), by_hand(rank, accumulate, clip, policy, outer))
    return learner.progress.updates


@pytest.mark.parametrize(
    ("accumulate", "clip", "options"),
    [
        pytest.param(1, None, {}, marks=pytest.mark.slow),
        pytest.param(1, 0.1, {"reshard_after_forward": False}, marks=pytest.mark.slow),
        pytest.param(2, None, {}, marks=pytest.mark.slow),
        (2, 0.1, {"wrap": lambda path, module: isinstance(module, nn.Linear)}),
        pytest.param(1, None, {"mixed_precision": torch.bfloat16}, marks=pytest.mark.slow),
        (2, None, {"mixed_precision": torch.bfloat16}),
    ],
)
def test_training_is_bitwise_the_loop_by_hand(accumulate, clip, options):
    updates = run(trains_as_by_hand, 2, accumulate, clip, options, timeout=LIMIT)
    assert updates == [2 * math.ceil(5 / accumulate)] * 2


def train_one(epochs=2, size=8, count=10, **options):
    learner = Learner(net(), nn.MSELoss(), adam, standard=False, **options)
    x, y = tensors(4 * count)
    learner.fit(TensorLoader(x, y, batch_size=size), epochs=epochs)
    return learner


def train_shared(rank, options, given):
    learner = make(fsdp={"shard": True, **given}, **options)
    x, y = tensors(40)
    learner.fit(TensorLoader(x, y, batch_size=4), epochs=2)
    assert len({id(p) for p in learner.model.parameters()}) == 6
    return full(learner.model.parameters()), [type(p) for p in learner.model.parameters()]


@pytest.mark.parametrize(
    ("options", "given"), [({}, {}), ({"accumulate": 2}, {"sync_each_step": True}), ({"accumulate": 2}, {"wrap": None})]
)
def test_two_processes_train_as_one_with_the_global_batch(options, given):
    one = [p.detach() for p in train_one(**options).model.parameters()]
    for params, kinds in run(train_shared, 2, options, given, timeout=LIMIT):
        assert kinds == [DTensor] * 6
        for mine, other in zip(params, one, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)  # Adam's division makes sums' last bits more


def starts_from_rank_0(rank):
    learner = make(model=net(seed=rank))
    same(full(learner.model.parameters()), [p.detach() for p in net(seed=0).parameters()])


def test_training_starts_from_the_parameters_of_rank_0():
    run(starts_from_rank_0, 2, timeout=LIMIT)


def sums(rank, each_step):
    seen = []

    class Summed:
        name = "summed"

        @hookimpl(reads=("grads",))
        def backward_end(self, step):
            seen.append(all(p.grad is not None for p in learner.model.parameters()))

    learner = make(Summed(), accumulate=2, fsdp={"sync_each_step": each_step})
    learner.fit(batches(rank), epochs=1)
    return seen


def test_gradients_are_summed_in_the_last_step_of_a_window_or_in_each():
    last, each = run_each(sums, 2, [(False,), (True,)], timeout=LIMIT)
    assert last == ([False, True, False, True, True],) * 2
    assert each == ([True] * 5,) * 2


def closes_open_window(rank):
    learner = make(accumulate=2)
    learner.fit(lambda: iter(batches(rank)), epochs=2)  # no length: the last window is open when the pass ends
    assert learner.progress.updates == 6
    for mine, other in zip(full(learner.model.parameters()), by_hand(rank, 2), strict=True):
        torch.testing.assert_close(mine, other)


def test_window_that_is_open_at_the_end_of_a_pass_is_summed():
    run(closes_open_window, 2, timeout=LIMIT)


WEIGHTS = [[3.0, 5.0, 1.0, 1.0, 7.0], [4.0, 4.0, 2.0, 6.0, 1.0]]


class Weighing(TrainingPhase):
    """Sets the weights of steps, which differ from process to process."""

    def step(self, learner, step):
        step.weight = WEIGHTS[learner.world.rank][step.index]
        super().step(learner, step)


def weighs(rank, size, length, cancelled):
    sgd = lambda params: torch.optim.SGD(params, lr=0.5)  # noqa: E731
    plugins = [on("backward_begin", lambda step: cancel_at(step, cancelled))]
    learner = make(*plugins, optimizer=sgd, phases=[Weighing()], accumulate=size)
    given = batches(rank)
    learner.fit(given if length else lambda: iter(given), epochs=1)
    return full(learner.model.parameters())


def cancel_at(step, index):
    if step.index == index:
        raise CancelStep


@pytest.mark.parametrize(("length", "cancelled"), [(True, None), (False, None), (True, 3)])
def test_each_process_counts_the_same_whatever_its_weights_are(length, cancelled):
    trained = run(weighs, 2, 2, length, cancelled, timeout=LIMIT)
    model = net()
    steps = [index for index in range(5) if index != cancelled]
    for window in (steps[:2], steps[2:4], steps[4:]):
        sums = [torch.zeros_like(p) for p in model.parameters()]
        for rank in (0, 1) if window else ():
            whole = sum(WEIGHTS[rank][index] for index in window)
            for index in window:
                x, y = batches(rank)[index]
                loss = nn.functional.mse_loss(model(x), y) * (WEIGHTS[rank][index] / whole / 2)
                for total, grad in zip(sums, torch.autograd.grad(loss, list(model.parameters())), strict=True):
                    total += grad
        with torch.no_grad():
            for p, total in zip(model.parameters(), sums, strict=True):
                p -= 0.5 * total
    for params in trained:
        for mine, other in zip(params, model.parameters(), strict=True):
            torch.testing.assert_close(mine, other.detach())  # summed in another order


def weighs_in_each_step(rank):
    with pytest.raises(WorldError, match=r"weights that differ from process to process .*FSDP\(sync_each_step=False\)"):
        make(phases=[Weighing()], accumulate=2, fsdp={"sync_each_step": True}).fit(batches(rank), epochs=1)


def test_weights_that_differ_are_refused_where_each_step_is_summed():
    run(weighs_in_each_step, 2, timeout=LIMIT)


class CancelAt:
    """Cancels the step of one index, before or after its backward."""

    name = "cancel_at"

    def __init__(self, index, hook):
        self.index, self.hook = index, hook

    @hookimpl
    def loss_begin(self, step):
        if step.index == self.index and self.hook == "loss_begin":
            raise CancelStep("asked for")

    @hookimpl
    def backward_end(self, step):
        if step.index == self.index and self.hook == "backward_end":
            raise CancelStep("asked for")


def cancels(rank, hook, left):
    given = batches(rank, count=6)
    learner = make(CancelAt(1, hook), accumulate=2)
    learner.fit(given, epochs=1)
    other = make(accumulate=2)
    other.fit([given[index] for index in left], epochs=1)
    same(full(learner.model.parameters()), full(other.model.parameters()))


def test_cancelled_step_leaves_what_the_window_had_or_drops_it():
    run_each(cancels, 2, [("loss_begin", (0, 2, 3, 4, 5)), ("backward_end", (2, 3, 4, 5))], timeout=LIMIT)


class Fails(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = net()
        self.failing = False

    def forward(self, x):
        x = self.inner[:3](x)
        if self.failing:
            raise RuntimeError("asked for")
        return self.inner[3:](x)


def goes_on(rank):
    learner = make(model=Fails())
    learner.fit(batches(rank), epochs=1)
    learner.model.failing = True
    for act in (lambda: learner.fit(batches(rank), epochs=1), lambda: learner.evaluate(batches(rank))):
        with pytest.raises(RuntimeError, match="asked for"):
            act()
    learner.model.failing = False
    learner.fit(batches(rank), epochs=1)
    same(full(learner.model.inner.parameters()), by_hand(rank))


def test_learner_goes_on_after_an_error_in_forward():
    run(goes_on, 2, timeout=LIMIT)


# Gradients


class Look:
    """Keeps the whole gradients and the norms of the first update."""

    name = "look"
    volatile = ("*",)

    def __init__(self):
        self.grads = None

    @hookimpl(reads=("grads",), before=("clip",))
    def update_begin(self, step):
        self.grads = self.grads or [p.grad.full_tensor() for p in step.params]


def norms(rank, norm_type):
    look, norm, clip = Look(), GradNorm(norm_type), ClipGradNorm(0.01, norm_type)
    after = GradNorm(norm_type, clipped=True, name="after")
    learner = make(look, norm, clip, after)
    learner.fit(batches(rank, count=1), epochs=1)
    expected = nn.utils.get_total_norm(look.grads, norm_type)
    torch.testing.assert_close(clip.norm, expected)
    assert type(clip.norm) is torch.Tensor
    assert learner.metrics["train/grad_norm"] == clip.norm.item()
    assert learner.metrics["train/after"] == pytest.approx(0.01, rel=1e-3)
    return clip.norm.item()


def test_norm_is_that_of_the_whole_gradient():
    for one, other in run_each(norms, 2, [(2.0,), (1.0,), (math.inf,)], timeout=LIMIT):
        assert one == other


def noise(rank):
    look = Look()
    learner = make(GradNoise(1.0), look, optimizer=lambda params: torch.optim.SGD(params, lr=0.0))
    x, y = batches(rank, count=1)[0]
    learner.fit([(x * 0, y * 0)], epochs=1)
    return [grad.clone() for grad in look.grads]


def test_noise_is_that_of_the_whole_gradient():
    one, other = run(noise, 2, timeout=LIMIT)
    same(one, other)
    assert one[0][0].ne(one[0][4]).all()  # rows of different ranks


def overflows(rank):
    scaling = MixedPrecision("float32", scaling=True, init_scale=2.0)
    learner = make(scaling)
    given = batches(rank)
    if rank == 1:
        given[2] = (given[2][0] * math.inf, given[2][1])
    learner.fit(given, epochs=1)
    other = make()
    other.fit([batch for index, batch in enumerate(batches(rank)) if index != 2], epochs=1)
    same(full(learner.model.parameters()), full(other.model.parameters()))  # powers of 2 are scaled without rounding
    return scaling.skipped, scaling.loss_scale, learner.progress.updates


def test_overflow_in_one_process_skips_the_update_in_all():
    assert run(overflows, 2, timeout=LIMIT) == [(1, 1.0, 4)] * 2


def computes_in_half(rank):
    learner = make(fsdp={"mixed_precision": torch.bfloat16})
    seen = {}
    learner.model[0].register_forward_hook(lambda module, inputs, output: seen.update(inner=output.dtype))
    learner.fit(batches(rank, 1), epochs=1)
    assert seen["inner"] == torch.bfloat16
    assert learner.predict(batches(rank, 1)).dtype == torch.float32
    assert {p.dtype for p in learner.model.parameters()} == {torch.float32}


def test_bfloat16_is_for_computing_alone():
    run(computes_in_half, 2, timeout=LIMIT)


# Passes that do not train


def evaluates(rank, reshard):
    learner = make(fsdp={"reshard_after_forward": reshard})
    learner.evaluate(batches(rank))
    assert all(isinstance(p, DTensor) for p in learner.model.parameters())
    learner.fit(batches(rank), batches(rank, 2), epochs=2)
    same(full(learner.model.parameters()), by_hand(rank))
    alone = net()
    alone.load_state_dict(learner.state_dict()["models"]["model"])
    expected = torch.cat([alone(x) for x, _ in batches(rank, 2)])
    torch.testing.assert_close(learner.predict(batches(rank, 2)), expected.detach())


def test_evaluation_is_that_of_the_whole_model_and_changes_nothing():
    run_each(evaluates, 2, [(True,), (False,)], timeout=LIMIT)


def statistics(rank):
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    learner = make(model=model)
    learner.fit(batches(rank), epochs=1)
    before = model[1].running_mean.clone()
    learner.evaluate(batches(rank))
    return before, model[1].running_mean, learner.state_dict()["models"]["model"]["1.running_mean"]


def test_evaluation_uses_the_buffers_of_rank_0():
    (first, used, saved), (second, used_too, _) = run(statistics, 2, timeout=LIMIT)
    assert not torch.equal(first, second)
    same([first, first, first], [used, used_too, saved])


# State


def packed(state):
    """A state as bytes: pickle cannot read all tensors of it."""
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def unpacked(data):
    return torch.load(io.BytesIO(data), weights_only=False)


def state_of(rank, options, epochs=1):
    learner = make(fsdp={"shard": True}, **options)
    x, y = tensors(40)
    learner.fit(TensorLoader(x, y, batch_size=4), epochs=epochs)
    return packed(learner.state_dict())


def shapes(value):
    """The structure of a state, with shapes and dtypes in the place of tensors, and types of others."""
    if isinstance(value, torch.Tensor):
        assert type(value) is torch.Tensor
        return value.dtype, tuple(value.shape)
    if isinstance(value, dict):
        return {key: shapes(item) for key, item in value.items()}
    return [shapes(item) for item in value] if isinstance(value, (list, tuple)) else type(value)


def test_state_has_the_keys_and_shapes_of_one_without_fsdp():
    one, other = map(unpacked, run(state_of, 2, {}, timeout=LIMIT))
    alone = train_one(epochs=1).state_dict()
    assert shapes(one["models"]) == shapes(alone["models"])
    assert shapes(one["optimizers"]) == shapes(alone["optimizers"])
    assert equal(one["models"], other["models"])
    assert equal(one["optimizers"], other["optimizers"])


def loaded(rank, state):
    learner = make(fsdp={"shard": True})
    learner.load_state_dict(state)
    again = learner.state_dict()
    assert equal(again["models"], state["models"])
    assert equal(again["optimizers"], state["optimizers"])
    x, y = tensors(40)
    learner.fit(TensorLoader(x, y, batch_size=8 // dist.get_world_size()), epochs=1)
    return full(learner.model.parameters())


@pytest.mark.parametrize("processes", [2, 4])
def test_state_of_one_process_loads_in_several(processes):
    learner = train_one(epochs=1)
    state = learner.state_dict()
    expected = train_one(epochs=2)
    for params in run(loaded, processes, state, timeout=LIMIT):
        for mine, other in zip(params, expected.model.parameters(), strict=True):
            torch.testing.assert_close(mine, other.detach(), rtol=1e-4, atol=1e-5)  # sums in another order


def test_state_of_two_processes_loads_in_one():
    state = unpacked(run(state_of, 2, {}, timeout=LIMIT)[0])
    learner = Learner(net(), nn.MSELoss(), adam, standard=False)
    learner.load_state_dict(state)
    same([p.detach() for p in learner.model.parameters()], list(state["models"]["model"].values()))
    x, y = tensors(40)
    learner.fit(TensorLoader(x, y, batch_size=8), epochs=1)
    for mine, other in zip(learner.model.parameters(), train_one(epochs=2).model.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)  # sums in another order


class SaveAfter:
    """Keeps the state after some steps."""

    name = "save_after"
    volatile = ("*",)

    def __init__(self, steps):
        self.steps, self.state = steps, None

    @hookimpl(phase=TrainingPhase, reads=("*",))
    def step_end(self, learner):
        if learner.progress.steps == self.steps:
            self.state = copy.deepcopy(learner.state_dict())


def interrupted(rank, steps, options):
    saver = SaveAfter(steps)
    plain = make(accumulate=2, fsdp=options)
    plain.fit(batches(rank), epochs=2)
    whole = make(saver, accumulate=2, fsdp=options)
    whole.fit(batches(rank), epochs=2)
    same(full(whole.model.parameters()), full(plain.model.parameters()))  # saving changes nothing
    resumed = make(accumulate=2, fsdp=options)
    resumed.load_state_dict(saver.state)
    resumed.fit(batches(rank), epochs=2)
    ours, theirs = full(resumed.model.parameters()), full(plain.model.parameters())
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)
    return all(torch.equal(mine, other) for mine, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(
    ("steps", "options"),
    [
        pytest.param(2, {}, marks=pytest.mark.slow),
        (3, {"sync_each_step": True}),
        (5, {}),
        pytest.param(8, {"sync_each_step": True}, marks=pytest.mark.slow),
    ],
)
def test_resumed_run_is_bitwise_the_one_that_was_not_interrupted(steps, options):
    assert run(interrupted, 2, steps, options, timeout=LIMIT) == [True, True]


def test_run_resumed_inside_a_window_differs_in_rounding_alone():
    run(interrupted, 2, 3, {}, timeout=LIMIT)


def files(rank, directory):
    learner = make(fsdp={"shard": True})
    x, y = tensors(40)
    learner.fit(TensorLoader(x, y, batch_size=4), epochs=1)
    assert structure(learner.model) == structure(net())
    checkpoint.save(learner, directory / str(rank))
    again = make(fsdp={"shard": True})
    checkpoint.load(again, directory / str(1 - rank))
    same(full(again.model.parameters()), full(learner.model.parameters()))
    return full(learner.model.parameters())


def test_checkpoint_has_the_format_of_one_without_fsdp(tmp_path):
    params = run(files, 2, tmp_path, timeout=LIMIT)[0]
    learner = Learner(net(), nn.MSELoss(), adam, standard=False)
    manifest = checkpoint.load(learner, tmp_path / "0")
    same([p.detach() for p in learner.model.parameters()], params)
    assert manifest.about["structure"] == {"model": structure(net()).hash}


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 1)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.last(self.second(self.first(x)).tanh())


def tied(rank):
    torch.manual_seed(0)
    model = Tied()
    ties = structure(model).ties
    learner = make(model=model, fsdp={"wrap": lambda path, module: path == "last"})
    learner.fit(batches(rank, 2), epochs=1)
    state = learner.state_dict()["models"]["model"]
    assert state["first.weight"] is state["second.weight"]
    assert structure(model).ties == ties == (("first.weight", "second.weight"),)
    with pytest.raises(
        PluginError, match=r"'first\.weight' of a unit \(Linear\) is used by another one, too \(Linear\)"
    ):
        make(model=Tied())


def test_tied_parameters_stay_so_and_are_in_one_unit():
    run(tied, 2, timeout=LIMIT)


# Averages


def averages(rank):
    average = WeightAverage(0.5)
    learner = make(average)
    expected, trained = None, []

    class Follow:
        name = "follow"

        @hookimpl(reads=("params",))
        def update_end(self, step):
            nonlocal expected
            now = full(step.params)
            trained[:] = now
            expected = now if expected is None else [0.5 * a + 0.5 * b for a, b in zip(expected, now, strict=True)]

    class Inside:
        name = "inside"

        @hookimpl(reads=("params",))
        def epoch_end(self, learner, phase):
            if phase.name == "val":
                self.values = full(learner.model.parameters())

    inside = Inside()
    learner.add(Follow(), inside)
    learner.fit(batches(rank), batches(rank, 1), epochs=1)
    for mine, other in zip(inside.values, expected, strict=True):
        torch.testing.assert_close(mine, other)
    same(full(learner.model.parameters()), trained)
    state = learner.state_dict()
    same(list(state["models"]["model"].values()), trained)
    same(list(state["plugins"]["weight_average"]["model"]["tensors"].values()), inside.values)
    same(list(average.model_state(learner).values()), inside.values)
    learner.evaluate(batches(rank, 1))
    same(full(learner.model.parameters()), trained)
    learner.evaluate(batches(rank, 1))
    assert average.state_dict()["model"]["count"] == 5  # it was not dropped
    again = make(WeightAverage(0.5))
    again.load_state_dict(state)
    torch.testing.assert_close(again.predict(batches(rank, 1)), learner.predict(batches(rank, 1)), rtol=0, atol=0)
    return packed(state)


def test_average_is_kept_in_parts_and_saved_whole():
    state = unpacked(run(averages, 2, timeout=LIMIT)[0])
    alone = Learner(net(), nn.MSELoss(), adam, plugins=[WeightAverage(0.5)], standard=False)
    alone.load_state_dict(state)
    assert len(alone.predict(batches(0, 1))) == 4


# What is refused


def refused(rank):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(PhaseError, match="before the parameters were replaced: give a factory"):
        make(model=model, optimizer=optimizer)
    with pytest.raises(PluginError, match="model 'model' is sharded already"):
        make(model=model)
    with pytest.raises(PluginError, match=r"wrap fits no module .* made of Linear, Sequential, Tanh"):
        make(fsdp={"wrap": nn.Conv2d})
    with pytest.raises(PluginError, match=r"'0\.weight' is on the meta device"):
        make(model=net().to("meta"))
    later = Learner(net(), nn.MSELoss(), adam, standard=False)
    with pytest.raises(PluginError, match="added to a learner whose optimizers hold the whole parameters"):
        later.add(FSDP())
    image = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)
    with pytest.raises(PluginError, match="'weight' is not contiguous"):
        make(model=image, fsdp={"wrap": None})

    class Named(TrainingPhase):
        def step(self, learner, step):
            step.inputs, step.targets = step.batch
            step.backward(learner.loss_fn(learner.model(step.inputs), step.targets), "optimizer")
            step.update()

    named = make(phases=[Named()])
    with pytest.raises(PhaseError, match="no gradient came to any parameter of optimizer 'optimizer'"):
        named.fit(batches(rank), epochs=1)


def test_what_cannot_be_sharded_is_refused():
    run(refused, 2, timeout=LIMIT)


@pytest.mark.parametrize(
    "options",
    [
        {"wrap": (int,)},
        {"wrap": "Linear"},
        {"wrap": [nn.Linear]},
        {"mixed_precision": "bfloat16"},
        {"mixed_precision": torch.int8},
        {"timeout": 0},
    ],
)
def test_options_out_of_range_are_refused(options):
    with pytest.raises(PluginError, match=rf"FSDP(\(|: ){next(iter(options))}(=| is)"):
        FSDP(**options)


# Alone


def test_one_process_is_as_if_it_were_not_there():
    model = net()
    learner = Learner(model, nn.MSELoss(), adam, plugins=[FSDP(wrap=nn.Linear)], standard=False)
    x, y = tensors(40)
    learner.fit(TensorLoader(x, y, batch_size=8), epochs=2)
    assert not any(isinstance(module, FSDPModule) for module in model.modules())
    same([p.detach() for p in model.parameters()], [p.detach() for p in train_one().model.parameters()])
