"""Plugins that decide something take the same decisions in all processes, although these see different batches."""

from __future__ import annotations

import copy
import math
import warnings

import pytest
import torch
from helpers import halved
from loopkit_testing import ContractError, check_plugin
from torch import nn

from distributed.processes import run
from loopkit import Learner, hookimpl
from loopkit.data import TensorLoader
from loopkit.distributed import World
from loopkit.errors import NonFiniteError, PluginError, WorldError
from loopkit.plugins import (
    DDP,
    ClipGradNorm,
    EarlyStopping,
    EvalMode,
    Freeze,
    GradNoise,
    MixedPrecision,
    Schedule,
    SkipSpikes,
    StopOnNonFinite,
    WeightAverage,
    call_on,
    throttle,
)
from loopkit.schedules import cosine

SIZE = 4  # samples of a process in a step
STEPS = 10


class Net(nn.Module):
    """With dropout, whose masks differ from process to process, and running statistics."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2))
        self.head = nn.Linear(8, 3)

    def forward(self, inputs):
        return self.head(self.encoder(inputs))


def samples(changed=()):
    """Those of `STEPS` steps of two processes; ``changed`` holds (rank, step, factor of the inputs)."""
    generator = torch.Generator().manual_seed(1)
    count = 2 * SIZE * STEPS
    inputs = torch.randn(count, 6, generator=generator)
    for rank, step, factor in changed:
        first = (2 * step + rank) * SIZE
        inputs[first : first + SIZE] *= factor
    return inputs, torch.randint(0, 3, (count,), generator=generator)


def linear():
    """Whose loss follows the size of the inputs."""
    torch.manual_seed(0)
    return nn.Linear(6, 3)


class Log:
    """What became of each step and update, and the loss."""

    def __init__(self):
        self.cancelled, self.skipped, self.losses = [], [], []

    @hookimpl(reads=("loss",))
    def backward_begin(self, step):
        self.losses.append(step.loss.item())

    @hookimpl
    def step_cancelled(self, step):
        self.cancelled.append(step.index)

    @hookimpl
    def update_skipped(self, step):
        self.skipped.append(step.index)


def make_learner(rank, *plugins, accumulate=1, sync=DDP, model=None, lr=0.05):
    torch.manual_seed(0)
    model = Net() if model is None else model
    log = Log()
    learner = Learner(
        model,
        nn.CrossEntropyLoss(),
        lambda params: torch.optim.AdamW(params, lr=lr),
        plugins=[sync(), log, *plugins],
        accumulate=accumulate,
        standard=False,
    )
    torch.manual_seed(100 + rank)
    return learner, log


def whole(value):
    return value.full_tensor() if hasattr(value, "full_tensor") else value.clone()


def params(learner):
    for module in learner.model.modules():
        if hasattr(module, "reshard"):
            module.reshard()
    return {name: whole(p.detach()) for name, p in learner.model.named_parameters()}


def train(rank, make, changed=(), epochs=1, **options):
    """The parameters and what happened, after a fit with the plugins of ``make(rank)``."""
    learner, log = make_learner(rank, *make(rank), **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        learner.fit(TensorLoader(*samples(changed), batch_size=SIZE), epochs=epochs)
    said = [str(each.message) for each in caught if "skipped" in str(each.message) or "back to" in str(each.message)]
    return params(learner), log, said, dict(learner.metrics), learner.progress


def check_equal(one, other):
    assert list(one) == list(other)
    for name, value in one.items():
        assert torch.isfinite(value).all(), name
        assert torch.equal(value, other[name]), name


# Parameters stay equal with every plugin that changes or decides something

KINDS = {
    "nothing": lambda rank: [],
    "clip": lambda rank: [ClipGradNorm(0.1)],
    "noise": lambda rank: [GradNoise(0.1)],
    "freeze": lambda rank: [Freeze("encoder.0")],
    "eval_mode": lambda rank: [EvalMode("encoder.3")],
    "mixed_precision": lambda rank: [MixedPrecision("bfloat16")],
    "scaling": lambda rank: [MixedPrecision("float32", scaling=True, init_scale=2.0**127, growth_interval=2)],
    "schedule": lambda rank: [Schedule(cosine())],
    "average": lambda rank: [WeightAverage(0.9)],
    "spikes": lambda rank: [SkipSpikes(0.5, warmup=2)],
    "skip": lambda rank: [StopOnNonFinite("skip")],
    "rollback": lambda rank: [StopOnNonFinite("rollback", snapshot_every=2)],
    "throttle": lambda rank: [throttle(GradNoise(0.1), every=3)],
}


@pytest.mark.parametrize(
    ("name", "accumulate"),
    [
        pytest.param(name, accumulate, marks=() if (i + accumulate) % 2 else pytest.mark.slow)
        for i, name in enumerate(KINDS)
        for accumulate in (1, 2)
    ],
)
def test_parameters_stay_bitwise_equal(name, accumulate):
    def each(rank):
        result = train(rank, KINDS[name], accumulate=accumulate)
        return *result, torch.rand(4).tolist()

    one, other = run(each, 2)
    check_equal(one[0], other[0])
    assert one[1].losses != other[1].losses  # or nothing would be tested
    assert one[5] != other[5]
    assert (one[1].cancelled, one[1].skipped) == (other[1].cancelled, other[1].skipped)
    assert (one[1].cancelled != [], one[1].skipped != []) == (name == "spikes", name == "scaling" and accumulate == 1)


def test_parameters_thawed_in_the_middle_stay_bitwise_equal():
    one, other = run(lambda rank: train(rank, lambda rank: [Freeze({"encoder.0": 1})], epochs=2), 2)
    check_equal(one[0], other[0])


# SkipSpikes


def mean_spike(rank, changed, sync, accumulate=1):
    make = lambda rank: [SkipSpikes(8.0, warmup=3)]  # noqa: E731
    return train(rank, make, changed, sync=sync, accumulate=accumulate, model=linear(), lr=1e-4)


@pytest.mark.parametrize(
    ("sync", "accumulate"), halved([DDP, lambda: DDP(overlap=False), lambda: DDP(weighted=True)], [1, 2])
)
def test_spike_of_one_process_is_skipped_in_all(sync, accumulate):
    one, other = run(mean_spike, 2, [(1, 5, 1000.0), (0, 8, 1000.0)], sync, accumulate)
    check_equal(one[0], other[0])
    assert one[1].cancelled == other[1].cancelled == [5, 8]


def trace(rank, spikes):
    """Four steps an update, with unequal weights, of which the last is at first a spike."""
    sync = lambda: DDP(weighted=True, shard=False)  # noqa: E731
    plugin = SkipSpikes(8.0, warmup=2)
    learner, log = make_learner(rank, plugin, accumulate=4, model=linear(), lr=1e-3, sync=sync)
    inputs, targets = samples()
    batches = []
    for step in range(8):
        first, size = (2 * step + rank) * SIZE, 1 + (step + rank) % 3
        batches.append((inputs[first : first + size], targets[first : first + size]))
    if spikes:
        batches.insert(3, (1000 * inputs[:SIZE], targets[:SIZE]))
    learner.run("train", batches)
    return params(learner), log


def test_skipped_step_leaves_no_trace_in_what_is_accumulated():
    one, other = run(trace, 2, True)
    without, _ = run(trace, 2, False)
    assert one[1].cancelled == other[1].cancelled == [3]
    check_equal(one[0], other[0])
    check_equal(one[0], without[0])


def test_loss_that_is_not_finite_in_one_process_counts_in_none():
    def each(rank):
        plugin = SkipSpikes(5.0, warmup=3)
        train(rank, lambda rank: [plugin, StopOnNonFinite("skip")], [(1, 4, math.nan)])
        return plugin.state_dict()

    one, other = run(each, 2)
    assert one == other
    assert len(one["losses"]["train"]) == STEPS - 1


# StopOnNonFinite


def bad_loss(rank, policy, sync, accumulate=1):
    plugin = StopOnNonFinite(policy, snapshot_every=2)
    return *train(rank, lambda rank: [plugin], [(1, 4, math.nan)], sync=sync, accumulate=accumulate), plugin


SYNCS = {"ddp": DDP, "ddp_at_update": lambda: DDP(overlap=False)}


@pytest.mark.parametrize(("policy", "sync", "accumulate"), halved(["skip", "rollback"], SYNCS, [1, 2]))
def test_bad_loss_of_one_process_has_one_consequence_in_all(policy, sync, accumulate):
    def each(rank):
        params, log, said, _, progress, plugin = bad_loss(rank, policy, SYNCS[sync], accumulate)
        return params, log, said, progress, plugin.rollbacks

    one, other = run(each, 2)
    check_equal(one[0], other[0])
    assert one[1].cancelled == other[1].cancelled == [4]
    assert one[3] == other[3]
    assert one[4] == other[4] == (policy == "rollback")
    assert one[2] == []
    (said,) = other[2]  # the process that has the bad loss, alone, shows it
    assert said.startswith("the loss is nan (phase 'train', epoch 1, step 4; batch:")


def rolled_back(rank, sync):
    """The parameters and rollbacks of a run that rolls back, straight on and after its state was loaded."""

    def again(state=None):
        learner, log = make_learner(rank, StopOnNonFinite("rollback", snapshot_every=100), sync=sync)
        if state is not None:
            learner.load_state_dict(state)
        return learner, log

    whole_run, _ = again()
    whole_run.run("train", TensorLoader(*samples(), batch_size=SIZE))
    state = copy.deepcopy(whole_run.state_dict())
    found = []
    for learner, log in ((whole_run, None), again(state)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it says what it does
            learner.run("train", TensorLoader(*samples([(1, 2, math.nan)]), batch_size=SIZE))
        assert log is None or log.cancelled == [2]
        found.append((params(learner), learner.plugins["stop_on_non_finite"].rollbacks))
    return found


@pytest.mark.parametrize("sync", SYNCS)
def test_rollback_goes_back_to_what_a_loaded_state_holds(sync):
    for straight, resumed in run(rolled_back, 2, SYNCS[sync]):
        check_equal(straight[0], resumed[0])
        assert straight[1] == resumed[1] == 1


class Gradient(nn.Module):
    """A gradient that is not finite where an input is large, although the loss is finite."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, inputs):
        outputs = self.first(inputs).clamp(-5, 5) + self.second(inputs).clamp(-5, 5)
        if inputs.abs().max() > 500:
            outputs = outputs + (self.second.weight * 0).abs().sqrt().sum()
        return outputs


def bad_gradient(rank, policy, sync):
    torch.manual_seed(0)
    plugin = StopOnNonFinite(policy, snapshot_every=2)
    return train(rank, lambda rank: [plugin], [(1, 4, 1000.0)], sync=sync, model=Gradient())


@pytest.mark.parametrize(("policy", "sync"), halved(["skip", "rollback"], SYNCS))
def test_bad_gradient_of_one_process_has_one_consequence_in_all(policy, sync):
    one, other = run(bad_gradient, 2, policy, SYNCS[sync])
    check_equal(one[0], other[0])
    happened = one[1].skipped if policy == "skip" else one[1].cancelled
    assert happened == (other[1].skipped if policy == "skip" else other[1].cancelled) == [4]
    assert one[4] == other[4]
    assert len(one[2]) == 1
    assert other[2] == []


def test_both_end_at_the_bound_together():
    def each(rank):
        changed = [(rank_of, step, math.nan) for step, rank_of in enumerate([0, 1, 0], 4)]
        with pytest.raises(NonFiniteError) as caught:
            train(rank, lambda rank: [StopOnNonFinite("skip", max_skips=2)], changed)
        return str(caught.value)

    one, other = run(each, 2)
    assert one.startswith("the loss is nan")
    assert other.startswith("the loss of rank 0 is infinite or not a number (phase 'train', epoch 1, step 6)")
    assert "2 in a row were skipped (max_skips=2)" in one
    assert "2 in a row were skipped (max_skips=2)" in other


def test_raise_names_the_process_to_the_others():
    def each(rank):
        with pytest.raises((NonFiniteError, WorldError)) as caught:
            train(rank, lambda rank: [StopOnNonFinite()], [(1, 4, math.nan)])
        return type(caught.value).__name__, str(caught.value)

    one, other = run(each, 2)
    assert other[0] == "NonFiniteError"
    assert other[1].startswith("the loss is nan")
    assert one[0] == "PeerError"
    assert "rank 1 failed" in one[1]
    assert "the loss is nan" in one[1]


def test_gradients_are_looked_at_when_they_are_averaged():
    def each(rank):
        learner, _ = make_learner(rank, StopOnNonFinite(gradients=True), MixedPrecision("float32", scaling=True))
        plan = str(learner.explain("train"))
        update = plan[plan.index("update_begin") :]
        return [update.index(name) for name in ("ddp", "mixed_precision", "stop_on_non_finite")]

    one, other = run(each, 2)
    assert one == other == sorted(one)


# What monitors see


class Local:
    """A metric that each process makes up."""

    def __init__(self, rank):
        self.values = iter([3.0, 1.0, 0.5, 2.0] if rank else [1.0, 2.0, 3.0, 4.0])

    @hookimpl(writes=("metrics.train/own",))
    def epoch_end(self, learner):
        learner.metrics["train/own"] = next(self.values)


def test_early_stopping_decides_and_restores_by_rank_0():
    def each(rank):
        stopping = EarlyStopping("train/own", patience=2, restore_best=True, mode="min")
        params, _, _, _, progress = train(rank, lambda rank: [Local(rank), stopping], epochs=4)
        return params, stopping.best, stopping.best_epoch, stopping.reason, progress.epochs

    one, other = run(each, 2)
    check_equal(one[0], other[0])
    assert one[1:] == other[1:]
    assert one[4] == 3


# One process alone


class Joins:
    """Sets the world without being what syncs."""

    @hookimpl(updates=("model",))
    def setup_model(self, learner, model):
        learner.world = World()
        return model


def test_only_what_syncs_may_set_the_world():
    with pytest.raises(ContractError, match=r"changes 'learner\.world', which it does not declare"):
        check_plugin(Joins, checks=["declared_access"])


def check_alone(sync, accumulate):
    """One process is as none."""
    learners = [make_learner(0, accumulate=accumulate, sync=each)[0] for each in (sync, Nothing)]
    for learner in learners:
        torch.manual_seed(3)
        data = TensorLoader(*samples(), batch_size=SIZE)
        learner.fit(data, data, epochs=2)
    check_equal(*map(params, learners))
    assert learners[0].world.size == 1
    assert learners[0].progress == learners[1].progress


@pytest.mark.parametrize("accumulate", [1, 2])
def test_one_process_alone_trains_bitwise_as_without(accumulate):
    check_alone(DDP, accumulate)


class Nothing:
    """In the place of what syncs."""

    @hookimpl
    def fit_begin(self):
        pass


# What is refused


def test_throttle_and_call_on_take_the_same_steps_by_counts_and_are_refused_by_seconds():
    def each(rank):
        seen = []

        def tell(learner, step):  # a collective, which would hang if one process were elsewhere
            seen.append((step.index, *learner.world.gather(rank)))

        plugins = lambda rank: [  # noqa: E731
            throttle(GradNoise(0.1), when=lambda step: step.index % 4 == 1),
            throttle(call_on("step_end", tell, name="thrice"), every=3),
            call_on("step_end", tell, name="at", at=(2, STEPS + 3)),
        ]
        trained = train(rank, plugins, epochs=2)
        with pytest.raises(PluginError, match=r"throttle\(seconds=5\) of plugin 'grad_noise'.*every=") as caught:
            train(rank, lambda rank: [throttle(GradNoise(), seconds=5)])
        return trained[0], seen, str(caught.value)

    one, other = run(each, 2)
    check_equal(one[0], other[0])
    assert one[1:] == other[1:]
    thirds = [n % STEPS for n in range(0, 2 * STEPS, 3)]
    assert sorted(one[1]) == sorted((index, 0, 1) for index in (*thirds, 1, 2))
