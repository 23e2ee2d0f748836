from __future__ import annotations

import copy
import io
import json
import threading
import time
from types import SimpleNamespace

import pytest
import torch
import torch._dynamo  # what optimizers import: once here, not in every child
import torch.distributed as dist
from distributed.processes import run
from helpers import on
from small import learner_of, make_data, make_model, same, sgd, values
from torch import nn
from torch.nn.functional import mse_loss

from loopkit import CancelEpoch, CancelStep, Learner, TrainingPhase, every, hookimpl
from loopkit.data import TensorLoader
from loopkit.distributed import join
from loopkit.errors import EmptyDataError, PeerError, PluginConflict, PluginError, WorldError
from loopkit.plugins import WeightAverage
from loopkit_local import (
    AverageParameters,
    Cadence,
    Collective,
    Controller,
    EverySteps,
    Free,
    Rounds,
    ThroughHost,
    average_parameters,
    averaging,
)
from loopkit_local.averaging import Average, Parts, distance, weighted_mean

# The average itself


def _mean(rank, size):
    join()
    generator = torch.Generator().manual_seed(rank)
    tensors = [torch.randn(3, 2, generator=generator), torch.randn(5, generator=generator, dtype=torch.float64)]
    tensors += [torch.randn(4, generator=generator).bfloat16(), torch.complex(tensors[0], 2 * tensors[0])]
    if rank == 2:
        tensors[0].fill_(torch.nan)
    return tensors, weighted_mean(tensors, [0.25, 0.75, 0.0][rank])


def test_mean_is_weighted_and_equal_everywhere():
    results = run(_mean, 3, 3)
    assert all(same(means, results[0][1]) for _, means in results)
    for a, b, mean in list(zip(results[0][0], results[1][0], results[0][1], strict=True)):
        wide = a.dtype if a.element_size() >= 4 else torch.float32
        assert mean.dtype == wide
        torch.testing.assert_close(mean, 0.25 * a.to(wide) + 0.75 * b.to(wide))  # sums in another order


def _bucketed(rank):
    join()
    tensors = [torch.full((50,), float(rank + i)) for i in range(5)]
    averaging.BUCKET_BYTES = 450
    return [mean[0].item() for mean in weighted_mean(tensors, 0.5)]


def test_mean_of_many_buckets():
    assert run(_bucketed, 2) == [[0.5, 1.5, 2.5, 3.5, 4.5]] * 2


def test_distance_is_that_of_all_tensors_together():
    before, after = [torch.tensor([3.0, 0.0]), torch.tensor([1.0])], [torch.tensor([0.0, 4.0]), torch.tensor([3.0])]
    assert distance(before, after) == pytest.approx((9 + 16 + 4) ** 0.5 / 5, rel=1e-12)  # two square roots
    assert distance(after, after) == 0.0
    assert distance([torch.ones(2)], [torch.zeros(2)]) == float("inf")


class Clock:
    """Replaces the clock of what measures, in a process of a test; only what is said to takes time."""

    def __init__(self):
        self.ms = 0.0
        averaging.time = average_parameters.time = SimpleNamespace(perf_counter=lambda: self.ms / 1e3)

    def slow(self, name, ms):
        """Let a collective take so many milliseconds."""
        original = getattr(dist, name)

        def slowly(*args, **options):
            self.ms += ms
            return original(*args, **options)

        setattr(dist, name, slowly)


def _separated(rank):
    """Rank 1 is late: what it was waited for is in the exchange of rank 0, not in the average."""
    join()
    control = dist.new_group(backend="gloo")
    clock = Clock()
    clock.slow("all_gather", 0.0 if rank else 600.0)
    clock.slow("all_reduce", 1.0)
    average = Average(Parts([torch.ones(10)]), [1.0 + rank, 7.0], control=control)
    return average.exchange_ms, average.reduce_ms, average.table


def test_waiting_for_the_slowest_is_not_the_average():
    table = [[1.0, 7.0], [2.0, 7.0]]
    early, late = run(_separated, 2)
    assert early == (pytest.approx(600), pytest.approx(1), table)  # rounded seconds
    assert late == (0, pytest.approx(1), table)


# Rounds


def rounds(loader, size, **options):
    controllers = [Controller(Cadence(**options), size) for _ in range(size)]
    return [Rounds(loader, controllers[rank], rank, size) for rank in range(size)]


def go_through(parts, speeds):
    """A pass of all ranks, in which they report these milliseconds per step; the batches of each, by round."""
    iterators = [iter(part) for part in parts]
    taken = [[[]] for _ in parts]
    running = set(range(len(parts)))
    while running:
        for rank in sorted(running):
            for batch in iterators[rank]:
                taken[rank][-1].append(batch)
                if parts[rank].ended:
                    break
            else:
                running.discard(rank)
        if running:
            counts = [len(each[-1]) for each in taken]
            for part in parts:
                part._controller.report([n * ms for n, ms in zip(counts, speeds, strict=True)], counts, 0.0)
            for each in taken:
                each.append([])
    return taken


@pytest.mark.parametrize("samples", [8, 23, 100, 161])
@pytest.mark.parametrize("speeds", [(1.0, 3.0), (1.0, 1.0), (2.0, 1.0, 7.0)])
def test_rounds_give_each_sample_once_in_every_epoch(samples, speeds):
    parts = rounds(TensorLoader(torch.arange(samples), batch_size=2, shuffle=True), len(speeds), anchor=3)
    orders = []
    for _ in range(2):
        taken = go_through(parts, speeds)
        seen = torch.cat([batch for each in zip(*taken, strict=True) for batches in each for batch in batches])
        assert sorted(seen.tolist()) == list(range(samples))
        orders.append(seen)
    loader = TensorLoader(torch.arange(samples), batch_size=2, shuffle=True)
    assert [torch.equal(order, torch.cat(list(loader))) for order in orders] == [True, True]  # in the epoch's order


def test_rounds_take_the_samples_that_were_chosen_from_the_next_epoch_on_and_save_them():
    def part():
        return rounds(TensorLoader(torch.arange(12), batch_size=2), 2, anchor=2)[0]

    plain, made, again = part(), part(), part()
    batches = iter(made)
    first = next(batches)
    made.source.set_indices([7] * 12)
    again.load_state_dict(json.loads(json.dumps(made.state_dict())))
    rest = [batch.tolist() for batch in batches]
    assert [first.tolist(), *rest] == [batch.tolist() for batch in plain]
    assert [batch.tolist() for batch in again] == rest
    assert [batch.tolist() for batch in again] == [batch.tolist() for batch in made] == [[7, 7] for _ in plain]


def test_rounds_follow_the_speed():
    taken = go_through(rounds(TensorLoader(torch.arange(400), batch_size=1), 2, anchor=5), (1.0, 3.0))
    assert [[len(batches) for batches in each[:4]] for each in taken] == [[5, 15, 15, 15], [5, 5, 5, 5]]


def test_rounds_of_a_mapped_loader_draw_as_a_single_process_does():
    def noisy():
        data = TensorLoader(torch.zeros(20), batch_size=2)
        return data.map(lambda x, generator: x + torch.rand(len(x), generator=generator), seed=5)

    taken = go_through(rounds(noisy(), 2, anchor=2), (1.0, 1.0))
    merged = torch.cat([batch for each in zip(*taken, strict=True) for batches in each for batch in batches])
    assert torch.equal(merged, torch.cat(list(noisy())))


def test_rounds_with_accumulation_count_updates():
    controllers = [Controller(Cadence(anchor=2), 2) for _ in range(2)]
    loader = TensorLoader(torch.arange(22), batch_size=1)
    parts = [Rounds(loader, controllers[rank], rank, 2, 3) for rank in range(2)]
    assert [[int(batch) for batch in part] for part in parts] == [
        [0, 1, 2, 3, 4, 5, 12, 13, 14, 15, 16, 17],
        [6, 7, 8, 9, 10, 11, 18, 19, 20, 21],
    ]


def test_rounds_saved_between_two_go_on_with_any_number_of_processes():
    loader = TensorLoader(torch.arange(40), batch_size=1, shuffle=True)
    for part in rounds(loader, 2, anchor=3):
        iterator = iter(part)
        done = [next(iterator) for _ in range(3)]
        assert part.ended
        state = part.state_dict()
        assert (state["position"], state["round"]) == (6, None)
    assert len(done) == 3
    parts = rounds(loader, 3, anchor=3)
    for part in parts:
        part.load_state_dict(state)
    taken = go_through(parts, (1.0, 1.0, 1.0))
    rest = torch.cat([batch for each in zip(*taken, strict=True) for batches in each for batch in batches])
    whole = torch.cat(list(loader))
    assert torch.equal(rest, whole[6:])


def test_rounds_saved_in_the_middle_of_one_go_on_in_the_same_process_alone():
    loader = TensorLoader(torch.arange(40), batch_size=1)
    part = rounds(loader, 2, anchor=3)[1]
    iterator = iter(part)
    for _ in range(4):
        next(iterator)
    state = part.state_dict()
    again = rounds(loader, 2, anchor=3)
    again[1].load_state_dict(state)
    assert [int(batch) for batch in again[1]] == [int(batch) for batch in iterator]
    with pytest.raises(ValueError, match="saved by rank 1 of 2 in the middle of a round"):
        again[0].load_state_dict(state)


def test_rounds_refuse_too_few_batches_and_parts():
    loader = TensorLoader(torch.arange(4), batch_size=2)
    with pytest.raises(EmptyDataError, match="2 batches for 3 processes"):
        rounds(loader, 3)
    with pytest.raises(ValueError, match="a part already"):
        rounds(loader.shard(0, 2), 2)


# The plugin


@pytest.mark.parametrize("accumulate", [1, 2])
def test_alone_nothing_happens(accumulate):
    bare = Learner(make_model(), mse_loss, sgd, standard=False, accumulate=accumulate)
    averaged = learner_of(AverageParameters(), accumulate=accumulate)
    for learner in (bare, averaged):
        learner.fit(make_data(shuffle=True), make_data(), epochs=2)
    assert same(values(bare.model), values(averaged.model))
    assert averaged.world.size == 1
    assert averaged.progress == bare.progress


def _fit(rank, options, fit_options=None, seed=False, norm=False, optimizer=sgd, accumulate=1, sleep=0.0):
    made = AverageParameters(**options)
    slow = on("step_begin", lambda **_: time.sleep(sleep if rank else 0.0))
    learner = learner_of(
        made, slow, model=make_model(seed=rank if seed else 1, norm=norm), optimizer=optimizer, accumulate=accumulate
    )
    learner.fit(make_data(shuffle=True), **(fit_options or {"epochs": 2}))
    return values(learner.model), [b.clone() for b in learner.model.buffers()], learner.progress


def single(batch_size, epochs=2):
    learner = Learner(make_model(), mse_loss, sgd, standard=False)
    learner.fit(make_data(batch_size=batch_size, shuffle=True), epochs=epochs)
    return values(learner.model)


@pytest.mark.parametrize("how", [Collective(), ThroughHost(delay=0)])
def test_average_after_every_step_of_plain_sgd_is_that_of_gradients(how):
    (one, _, progress), (other, _, _) = run(_fit, 2, {"when": EverySteps(1), "how": how})
    assert same(one, other)
    assert progress.steps == 12
    for mine, theirs in zip(one, single(batch_size=8), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)  # averaged after the step, not before


def test_processes_begin_with_the_parameters_of_rank_0():
    (one, _, _), (other, _, _) = run(_fit, 2, {"when": EverySteps(1)}, {"epochs": 1}, True)
    again = run(_fit, 2, {"when": EverySteps(1)}, {"epochs": 1})
    assert same(one, other)
    assert not same(one, again[0][0])  # seed 0, not 1


WAYS = [
    {"when": EverySteps(4)},
    {"when": EverySteps(3), "how": ThroughHost()},
    {"when": EverySteps(3), "how": Collective(delay=2)},
    {"when": Cadence(anchor=2)},
    {"when": Cadence(anchor=2), "how": ThroughHost(delay=1)},
    {"when": Free(anchor=2), "how": ThroughHost()},
    {"when": Free(anchor=2), "how": Collective(delay=None)},
]


@pytest.mark.parametrize("options", WAYS, ids=str)
def test_every_way_ends_a_pass_with_equal_models(options):
    (one, buffers, progress), (other, theirs, more) = run(_fit, 2, options, None, False, True)
    assert same(one, other)
    assert same(buffers, theirs)
    assert progress.samples + more.samples == 96
    assert all(p.isfinite().all() for p in one)


def test_through_host_equals_collective_when_training_waits():
    results = [run(_fit, 2, {"when": EverySteps(3), "how": how})[0][0] for how in (Collective(), ThroughHost(delay=0))]
    assert same(*results)


def _local_sgd(k, sizes, epochs=1):
    """By hand: two models, averaged by samples after every k steps and at the end; the averages, in order."""
    models = [make_model(), make_model()]
    optimizers = [sgd(model.parameters()) for model in models]
    weights, averages = [0, 0], []

    def average():
        total = sum(weights)
        for params in zip(*(model.parameters() for model in models), strict=True):
            mean = sum(w / total * p.detach() for w, p in zip(weights, params, strict=True))
            for p in params:
                p.data.copy_(mean)
        averages.append(values(models[0]))
        weights[:] = [0, 0]

    x, y = make_data()._tensors
    for _ in range(epochs):
        low = 0
        for number, pair in enumerate(sizes, 1):
            for rank, size in enumerate(pair):
                optimizers[rank].zero_grad()
                mse_loss(models[rank](x[low : low + size]), y[low : low + size]).backward()
                optimizers[rank].step()
                weights[rank] += size
                low += size
            if number % k == 0:
                average()
        if any(weights):
            average()
    return averages


def _fit_uneven(rank):
    x, y = make_data()._tensors
    learner = learner_of(AverageParameters(EverySteps(2)))
    learner.fit(TensorLoader(x[:37], y[:37], batch_size=4), epochs=1)
    return values(learner.model)


def test_average_weighs_by_samples():
    one, other = run(_fit_uneven, 2)
    expected = _local_sgd(2, [(4, 4)] * 4 + [(3, 2)])[-1]
    assert same(one, other)
    for mine, theirs in zip(one, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)  # weights are rounded in another place


def _fit_cancelled(rank):
    def cancel(step, **_):
        if rank and step.index in (1, 2, 4):
            raise CancelStep("not here")

    learner = learner_of(AverageParameters(EverySteps(2)), on("step_begin", cancel))
    learner.fit(make_data(), epochs=1)
    return values(learner.model), learner.progress


def test_steps_that_one_process_cancels_do_not_set_the_processes_apart():
    (one, progress), (other, less) = run(_fit_cancelled, 2)
    assert same(one, other)
    assert (progress.steps, less.steps) == (6, 3)


def _fit_skipped(rank):
    skip = on("update_begin", lambda step, **_: step.skip_update("no") if rank else None)
    learner = learner_of(AverageParameters(EverySteps(2)), skip, accumulate=2)
    learner.fit(make_data(), epochs=1)
    return values(learner.model), learner.progress.updates


def test_updates_that_one_process_skips_do_not_set_the_processes_apart():
    (one, made), (other, none) = run(_fit_skipped, 2)
    assert same(one, other)
    assert (made, none) == (3, 0)


# An average that is under way


class Counts:
    """A collective of the user's own after each step, in the default group."""

    volatile = ("*",)

    def __init__(self):
        self.found = []

    @hookimpl(reads=("params",))
    def step_end(self, phase):
        if phase.training:
            total = torch.ones(1)
            dist.all_reduce(total)
            self.found.append(total.item())


def _beside(rank):
    made = averaging.weighted_mean
    began = threading.Event()

    def late(*args):  # in rank 0 before the collective of the step, in rank 1 after it
        if rank:
            time.sleep(0.3)
        began.set()
        return made(*args)

    averaging.weighted_mean = late
    counts = Counts()
    begin = Average.__init__

    def begun(self, *args, **given):
        begin(self, *args, **given)
        assert rank or began.wait(10)
        if not rank:
            time.sleep(0.1)

    Average.__init__ = begun
    plugin = AverageParameters(EverySteps(3), Collective(delay=None), timeout=20)
    learner = learner_of(plugin, counts)
    learner.fit(make_data(), epochs=1)
    return counts.found, values(learner.model)


def test_average_under_way_is_apart_from_what_the_steps_send():
    one, other = run(_beside, 2, timeout=60)
    assert set(one[0]) == set(other[0]) == {2.0}
    assert same(one[1], other[1])


def _delayed(rank):
    """Rank r adds r + 1 at each step: with the average of every 2 steps taken over 1 step later."""
    seen = []

    class Add(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {})

        @torch.no_grad()
        def step(self, closure=None):
            for p in self.param_groups[0]["params"]:
                p.add_(0.1 * (rank + 1))

    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    plugin = AverageParameters(EverySteps(2), ThroughHost(delay=1))
    log = on("step_end", lambda **_: seen.append(model.weight.detach().clone()), name="zz_log", reads=("params",))
    learner = learner_of(plugin, log, model=model, optimizer=Add)
    learner.fit(
        [torch.zeros(2, 1), torch.zeros(2, 1)] * 0
        or TensorLoader(torch.zeros(24, 1), torch.zeros(24, 1), batch_size=2),
        epochs=1,
    )
    return seen, model.weight.detach().clone()


def test_delayed_average_keeps_what_was_trained_meanwhile():
    ranks = run(_delayed, 2)
    local = [torch.zeros(1, 1), torch.zeros(1, 1)]
    snapshots = mean = None
    for step in range(6):
        for rank in range(2):
            local[rank] = local[rank] + 0.1 * (rank + 1)
        if mean is not None:
            local = [mine + (mean - old) for mine, old in zip(local, snapshots, strict=True)]
            mean = None
        if step % 2:
            snapshots = list(local)
            mean = 0.5 * local[0] + 0.5 * local[1]
        for rank in range(2):
            assert torch.equal(ranks[rank][0][step], local[rank])
    assert torch.equal(ranks[0][1], ranks[1][1])


# Moments


def _moments(rank, moments, optimizer):
    snapshots = []
    model = make_model()
    plugin = AverageParameters(EverySteps(3), moments=moments)
    learner = learner_of(plugin, model=model, optimizer=optimizer)

    def look(**_):
        state = learner.optimizer.state
        snapshots.append(
            [{k: v.clone() for k, v in state[p].items()} if p in state else {} for p in model.parameters()]
        )

    learner.add(on("step_end", look, name="zz_look", reads=("optimizer.state",)))
    learner.fit(make_data(), epochs=1)
    return snapshots


def adam(params):
    return torch.optim.Adam(params, lr=0.01)


def momentum(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


@pytest.mark.parametrize("optimizer", [adam, momentum])
def test_moments_are_local_averaged_or_reset(optimizer):
    local, averaged, reset = (run(_moments, 2, how, optimizer) for how in ("local", "average", "reset"))
    key = "exp_avg_sq" if optimizer is adam else "momentum_buffer"
    assert not torch.equal(local[0][2][0][key], local[1][2][0][key])
    for ranks in range(2):
        assert torch.equal(averaged[ranks][1][0][key], local[ranks][1][0][key])  # before the first average
    mean = 0.5 * local[0][2][0][key] + 0.5 * local[1][2][0][key]
    assert torch.equal(averaged[0][2][0][key], averaged[1][2][0][key])
    assert torch.equal(averaged[0][2][0][key], mean)
    if optimizer is adam:
        assert averaged[0][2][0]["step"] == 3
    assert [bool(states[0]) for states in reset[0]] == [True, True, False, True, True, False]


# Buffers


def _buffers(rank):
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2))
    model.register_buffer("words", torch.tensor([rank, 7]))
    learner = learner_of(AverageParameters(EverySteps(100)), model=model)
    local = []
    learner.add(on("step_end", lambda **_: local.append(model[0].running_mean.clone()), name="zz", reads=("buffers",)))
    learner.fit(make_data(), epochs=1)
    return local[-1], model[0].running_mean, model.words


def test_floating_buffers_are_averaged_and_the_others_those_of_rank_0():
    (a, one, words), (b, other, others) = run(_buffers, 2)
    assert not torch.equal(a, b)
    assert torch.equal(one, 0.5 * a + 0.5 * b)
    assert torch.equal(one, other)
    assert words.tolist() == others.tolist() == [0, 7]


# The outer optimizer


def nesterov(params):
    return torch.optim.SGD(params, lr=0.7, momentum=0.9, nesterov=True)


def _diloco(rank, how):
    learner = learner_of(AverageParameters(EverySteps(2), how, outer=nesterov), optimizer=adam)
    learner.fit(make_data(), epochs=2)
    return values(learner.model)


def by_hand_diloco():
    inner, outer = [make_model(), make_model()], make_model()
    optimizers, slow = [adam(model.parameters()) for model in inner], nesterov(outer.parameters())
    batches = list(make_data())
    for _ in range(2):
        for number in range(6):
            for rank in range(2):
                x, y = batches[2 * number + rank]
                optimizers[rank].zero_grad()
                mse_loss(inner[rank](x), y).backward()
                optimizers[rank].step()
            if number % 2:
                for p, a, b in zip(outer.parameters(), inner[0].parameters(), inner[1].parameters(), strict=True):
                    p.grad = p.detach() - (0.5 * a.detach() + 0.5 * b.detach())
                slow.step()
                for model in inner:
                    model.load_state_dict(outer.state_dict())
    return values(outer)


@pytest.mark.parametrize("how", [Collective(), ThroughHost(delay=0)])
def test_outer_optimizer_equals_diloco_by_hand(how):
    one, other = run(_diloco, 2, how)
    assert same(one, other)
    assert same(one, by_hand_diloco())


# State


def _resumed(rank, options, epochs):
    whole = learner_of(AverageParameters(**options), optimizer=momentum)
    data = make_data(shuffle=True)
    whole.fit(data, epochs=epochs)
    first = learner_of(AverageParameters(**options), optimizer=momentum)
    data = make_data(shuffle=True)
    first.fit(data, epochs=1)
    state = first.state_dict()
    second = learner_of(AverageParameters(**options), optimizer=momentum, model=make_model(seed=9))
    second.load_state_dict(state)
    data = make_data(shuffle=True)
    data.set_epoch(1)
    second.fit(data, epochs=epochs - 1)
    return values(whole.model), values(second.model)


@pytest.mark.parametrize(
    "options",
    [
        {"when": EverySteps(2), "moments": "average", "outer": nesterov},
        {"when": EverySteps(2), "how": ThroughHost(), "outer": nesterov},
    ],
    ids=["collective", "through_host"],
)
def test_state_goes_on_bitwise_between_passes(options):
    for whole, resumed in run(_resumed, 2, options, 3):
        assert same(whole, resumed)


def _resumed_in_a_pass(rank, options, at):
    saved = {}

    def save(learner, step, **_):
        if learner.progress.steps == at and not saved:
            saved.update(copy.deepcopy(learner.state_dict()))

    whole = learner_of(AverageParameters(**options), on("step_end", save, name="zz", reads=("*",)), optimizer=momentum)
    whole.fit(make_data(shuffle=True), epochs=2)
    second = learner_of(AverageParameters(**options), on("step_end", lambda **_: None, name="zz"), optimizer=momentum)
    second.load_state_dict(saved)
    second.fit(make_data(shuffle=True), epochs=2)
    return values(whole.model), values(second.model)


@pytest.mark.parametrize("at", [2, 3, 4])
@pytest.mark.parametrize("how", [Collective(), ThroughHost(), ThroughHost(delay=1)])
def test_state_of_each_process_goes_on_bitwise_in_the_middle_of_a_pass(how, at):
    options = {"when": EverySteps(2), "how": how, "moments": "average", "outer": nesterov}
    for whole, resumed in run(_resumed_in_a_pass, 2, options, at):
        assert same(whole, resumed)


# Processes of different speed


def _paced(rank, when, how, slow_ms, slow_collective):
    torch.manual_seed(0)
    plugin, clock = AverageParameters(when, how), Clock()
    learner = learner_of(plugin, on("step_begin", lambda **_: setattr(clock, "ms", clock.ms + slow_ms[rank])))
    clock.slow("all_reduce", slow_collective)
    learner.fit(make_data(samples=480, batch_size=2), epochs=1)
    controller = plugin.controller
    return learner.progress.steps, controller.state_dict(), values(learner.model)


@pytest.mark.parametrize(
    ("when", "how"),
    [
        (Cadence(anchor=4, guard=None), Collective()),
        (Cadence(anchor=4, guard=None), ThroughHost()),
        (Free(anchor=4, guard=None), ThroughHost()),
    ],
    ids=str,
)
def test_a_slow_process_makes_fewer_steps_and_each_sample_is_seen_once(when, how):
    (fast, state, one), (slow, same_state, other) = run(_paced, 2, when, how, (3.0, 12.0), 0)
    assert fast + slow == 240
    assert fast > 2 * slow
    assert same(one, other)
    assert state["counts"] == same_state["counts"]
    assert state["anchor"] == same_state["anchor"]


def test_anchor_grows_with_a_slow_collective():
    when = Cadence(anchor=10, guard=None)
    (_, quick, _), _ = run(_paced, 2, when, Collective(), (5.0, 5.0), 0)
    (_, slow, _), _ = run(_paced, 2, when, Collective(), (5.0, 5.0), 40.0)
    assert slow["anchor"] >= 40  # 40 ms are 10 % of 80 steps of 5 ms; the data ends before
    assert slow["anchor"] > quick["anchor"]


def _guarded(rank):
    plugin = AverageParameters(Cadence(anchor=4, guard=1e-9))
    learner = learner_of(plugin)
    learner.fit(make_data(samples=96, batch_size=2), epochs=1)
    return plugin.controller.state_dict()


def test_divergence_is_measured_and_equal_in_all_processes():
    one, other = run(_guarded, 2)
    assert one["divergences"] == other["divergences"]
    assert one["lowered"] == other["lowered"]
    assert one["lowered"] or 0 < one["divergences"][-1] < 1


def _stopped(rank, options, how):
    def act(learner, step, **_):
        if rank and step.index == 3:
            if how == "stop":
                learner.stop("enough", by="test")
            else:
                raise CancelEpoch("enough")

    learner = learner_of(AverageParameters(**options), on("step_end", act))
    result = learner.fit(make_data(samples=480, batch_size=2), epochs=2)
    return result.reason, learner.progress.steps, values(learner.model)


@pytest.mark.parametrize("how", ["stop", "cancel"])
@pytest.mark.parametrize("options", [WAYS[0], WAYS[3], WAYS[5]], ids=str)
def test_what_one_process_asks_for_happens_in_all(options, how):
    (reason, steps, one), (same_reason, more, other) = run(_stopped, 2, options, how)
    assert reason == same_reason == ("stop" if how == "stop" else "epochs")
    assert steps + more < (240 if how == "stop" else 480)
    assert same(one, other)


def _validated(rank, options):
    learner = learner_of(AverageParameters(**options))
    seen = []
    learner.add(on("epoch_begin", lambda phase, **_: seen.append((phase.name, values(learner.model))), name="zz"))
    learner.fit(make_data(), make_data(samples=8), epochs=1)
    return dict(seen)["val"]


@pytest.mark.parametrize("options", [WAYS[0], WAYS[1], WAYS[3]], ids=str)
def test_all_processes_validate_the_same_model(options):
    one, other = run(_validated, 2, options)
    assert same(one, other)


def _saved_at_a_round(rank):
    plugin = AverageParameters(Cadence(anchor=3, guard=None))
    seen, saved = [], {}

    def look(learner, step, **_):
        if not saved:
            seen.extend(step.batch[1].flatten().tolist())
            if plugin.synced and learner.progress.steps > 3:
                saved.update(copy.deepcopy(learner.state_dict()))

    learner = learner_of(plugin, on("step_end", look, name="zz", reads=("*",)), model=nn.Linear(1, 1))
    learner.fit(numbers(), epochs=1)
    packed = io.BytesIO()
    torch.save(saved, packed)
    return seen, packed.getvalue()


def _resumed_at_a_round(rank, state):
    seen = []
    log = on("step_end", lambda step, **_: seen.extend(step.batch[1].flatten().tolist()), name="zz", reads=("batch",))
    learner = learner_of(AverageParameters(Cadence(anchor=3, guard=None)), log, model=nn.Linear(1, 1))
    learner.load_state_dict(torch.load(io.BytesIO(state)))
    learner.fit(numbers(), epochs=1)
    return seen, values(learner.model)


def numbers():
    x = torch.arange(60.0)[:, None] / 100
    return TensorLoader(x, x, batch_size=2, shuffle=True)


def test_state_of_one_process_at_the_end_of_a_round_fits_all():
    (mine, state), (theirs, _) = run(_saved_at_a_round, 2)
    (rest, one), (others, other) = run(_resumed_at_a_round, 2, state)
    whole = sorted(numbers()._tensors[0].flatten().tolist())
    assert 0 < len(mine) + len(theirs) < 60
    assert sorted([*mine, *theirs, *rest, *others]) == whole
    assert same(one, other)


# What is refused


def test_owns_what_ddp_owns():
    class Other:
        owns = ("grads.sync",)

        @hookimpl(phase=TrainingPhase)
        def step_end(self):
            pass

    with pytest.raises(PluginConflict, match=r"grads\.sync"):
        learner_of(AverageParameters(), Other())


def test_goes_together_with_weight_average():
    learner_of(AverageParameters(), WeightAverage()).fit(make_data(), make_data(), epochs=1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"when": 8}, "when is 8"),
        ({"how": "collective"}, "how is 'collective'"),
        ({"moments": "mean"}, "moments is 'mean'"),
        ({"outer": 3}, "outer is 3"),
        ({"when": Free()}, "does not wait for an average"),
        ({"when": Cadence(), "shard": False}, "shares the data out itself"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options, words):
    with pytest.raises(PluginError, match=words):
        AverageParameters(**options)


@pytest.mark.parametrize("delay", [-1, 1.5, True])
def test_delay_out_of_range_is_refused(delay):
    with pytest.raises(PluginError, match="delay is"):
        ThroughHost(delay=delay)


def _refused(rank, what):
    try:
        if what == "data":
            learner_of(AverageParameters(Cadence())).fit(list(make_data()), epochs=1)
        elif what == "middle":
            learner = learner_of(AverageParameters(Cadence(anchor=2)))
            learner.fit(make_data(), make_data(), epochs=1, validate=every(updates=2))
        else:
            learner_of(AverageParameters(EverySteps(2 + rank))).fit(make_data(), epochs=1)
    except WorldError as error:
        return str(error)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("data", "which list cannot give"),
        ("middle", "in the middle of a training epoch"),
        ("different", "its option when of plugin 'average_parameters' differs"),
    ],
)
def test_what_cannot_work_is_refused_in_all_processes(what, words):
    assert all(words in said for said in run(_refused, 2, what))


def _different_at_once(rank):
    with pytest.raises(WorldError, match="model 'model' of rank 1 differs from rank 0") as caught:
        learner_of(AverageParameters(), model=nn.Linear(6, 3 + rank))
    return str(caught.value)


def test_different_models_are_refused_before_anything_is_sent():
    assert all("(4, 6)" in text and "(3, 6)" in text for text in run(_different_at_once, 2))


def _failing(rank, options):
    def fail(step, **_):
        if rank and step.index == 5:
            raise ArithmeticError("broken")

    learner = learner_of(AverageParameters(**options), on("step_begin", fail))
    try:
        learner.fit(make_data(samples=480, batch_size=2), epochs=1)
    except ExceptionGroup as group:
        return next((type(error).__name__, str(error)) for error in group.exceptions if isinstance(error, PeerError))
    except (ArithmeticError, PeerError) as error:
        return type(error).__name__, str(error)


@pytest.mark.clock
@pytest.mark.parametrize("options", WAYS[:6], ids=str)
def test_when_one_process_fails_the_others_name_it(options):
    (kind, said), (own, _) = run(_failing, 2, options, timeout=60)
    assert (kind, own) == ("PeerError", "ArithmeticError")
    assert "rank 1" in said
