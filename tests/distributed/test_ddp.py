"""DDP against loops written by hand with torch's DistributedDataParallel, in forked processes on loopback."""

from __future__ import annotations

import contextlib
from functools import partial

import pytest
import torch
import torch.distributed as dist
from helpers import halved
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from distributed.processes import run
from loopkit import Learner, TrainingPhase, every, hookimpl
from loopkit.data import TensorLoader
from loopkit.distributed import join
from loopkit.errors import CancelStep, LoopkitError, StateError, WorldError
from loopkit.metrics import Accuracy
from loopkit.plugins import DDP, Checkpoint, ClipGradNorm, Freeze, Metrics, MixedPrecision, SaveOptions, WeightAverage

LR = 0.1


def make_model(seed=0, norm=True):
    torch.manual_seed(seed)
    parts = [nn.Linear(6, 8), *([nn.BatchNorm1d(8)] if norm else []), nn.ReLU(), nn.Linear(8, 3)]
    return nn.Sequential(*parts)


def samples(count=96):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, 6, generator=generator), torch.randint(0, 3, (count,), generator=generator)


def make_learner(*plugins, model=None, accumulate=1, **more):
    return Learner(
        model or make_model(),
        nn.CrossEntropyLoss(),
        lambda params: torch.optim.AdamW(params, lr=LR),
        plugins=plugins,
        accumulate=accumulate,
        standard=False,
        **more,
    )


def weights(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def equal(one, other):
    return list(one) == list(other) and all(torch.equal(one[name], other[name]) for name in one)


def by_hand(rank, world, batches, *, clip=None, accumulate=1, dtype=None, decay=None, hook=None):
    """The loop that a careful person writes; returns the weights, and those of the average."""
    dist.init_process_group("gloo")
    model = make_model()
    wrapped = DistributedDataParallel(model)
    if hook is not None:
        compress = getattr(default_hooks, hook)
        wrapped.register_comm_hook(None, lambda group, bucket: compress(group, bucket))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    average = None if decay is None else AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))
    loss_fn = nn.CrossEntropyLoss()
    for index, (inputs, targets) in enumerate(batches):
        last = (index + 1) % accumulate == 0
        if index % accumulate == 0:
            optimizer.zero_grad()
        with contextlib.nullcontext() if last else wrapped.no_sync():
            with torch.autocast("cpu", dtype) if dtype else contextlib.nullcontext():
                loss = loss_fn(wrapped(inputs), targets)
            (loss / accumulate if accumulate > 1 else loss).backward()
        if last:
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            if average is not None:
                average.update_parameters(model)
    averaged = {} if average is None else {name: p.detach().clone() for name, p in average.module.named_parameters()}
    return weights(model), averaged


def parts_of(rank, world, size=4, epochs=2):
    inputs, targets = samples()
    for _ in range(epochs):
        for low in range(rank * size, len(inputs), world * size):
            yield inputs[low : low + size], targets[low : low + size]


OPTIONS = {
    "plain": {},
    "clip": {"clip": 0.3},
    "accumulate": {"accumulate": 3},
    "bfloat16": {"dtype": torch.bfloat16},
    "fp16 sent": {"hook": "fp16_compress_hook"},
    "bf16 sent": {"hook": "bf16_compress_hook"},
    "all": {"clip": 0.3, "accumulate": 2, "dtype": torch.bfloat16, "decay": 0.9},
}


def ours(rank, world, options, **ddp):
    plugins = [DDP(**ddp)]
    if "clip" in options:
        plugins.append(ClipGradNorm(options["clip"]))
    if "dtype" in options:
        plugins.append(MixedPrecision(options["dtype"]))
    if "decay" in options:
        plugins.append(WeightAverage(options["decay"]))
    learner = make_learner(*plugins, accumulate=options.get("accumulate", 1))
    assert (learner.world.rank, learner.world.size) == (rank, world)
    learner.fit(TensorLoader(*samples(), batch_size=4), epochs=2)
    averaged = {}
    if "decay" in options:
        with learner.plugins["weight_average"].averaged(learner):
            averaged = {name: p.detach().clone() for name, p in learner.model.named_parameters()}
    return weights(learner.model), averaged


def hand(rank, world, options):
    return by_hand(rank, world, parts_of(rank, world), **options)


@pytest.mark.parametrize(
    ("name", "world"),
    [
        *((name, 2) for name in ("plain", "fp16 sent", "bf16 sent", "all")),
        ("all", 4),
        *(pytest.param(name, 2, marks=pytest.mark.slow) for name in ("clip", "accumulate", "bfloat16")),
        *(pytest.param(name, 4, marks=pytest.mark.slow) for name in OPTIONS if name != "all"),
    ],
)
def test_training_is_bitwise_that_of_a_loop_by_hand(name, world):
    compression = {"compression": OPTIONS[name]["hook"][:4]} if "hook" in OPTIONS[name] else {}
    mine = run(partial(ours, **compression), world, world, OPTIONS[name])
    (theirs, average), *_ = run(hand, world, world, OPTIONS[name])
    for rank in range(world):
        for key, value in theirs.items():
            if not key.startswith("1.running"):  # after the epoch's last step these are each process's own by hand
                assert torch.equal(mine[rank][0][key], value), (rank, key)
        assert equal(mine[rank][1], average)
        assert bool(average) == ("decay" in OPTIONS[name])


def averaged_here(rank):
    return ours(rank, 2, OPTIONS["all"], overlap=False)[0]


def test_average_at_update_begin_is_bitwise_that_of_the_reducer():
    mine = run(averaged_here, 2)
    theirs = run(hand, 2, 2, OPTIONS["all"])
    for key in mine[0]:
        if "num_batches" not in key and "running" not in key:
            assert torch.equal(mine[0][key], mine[1][key])
            assert torch.equal(mine[0][key], theirs[0][0][key])


@pytest.mark.parametrize("compression", ["fp16", "bf16"])
def test_compressed_averages_are_bitwise_equal_with_and_without_overlap(compression):
    one = run(partial(ours, compression=compression), 2, 2, {})
    other = run(partial(ours, compression=compression, overlap=False), 2, 2, {})
    for key in one[0][0]:
        assert torch.equal(one[0][0][key], other[0][0][key]), key


class Exact(nn.Module):
    """Arithmetic on small integers and powers of two, which floats do without rounding."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 2, bias=False)
        with torch.no_grad():
            self.linear.weight.copy_(torch.arange(8.0).reshape(2, 4) - 4)

    def forward(self, inputs):
        return self.linear(inputs)


def whole_numbers():
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randint(-2, 3, shape, generator=generator).float()  # noqa: E731
    return draw(16, 4), draw(16, 2)


def exact(rank, size, overlap, weighted=False):
    learner = Learner(
        Exact(),
        lambda outputs, targets: ((outputs - targets) * outputs.detach().sign()).sum(1).mean(),
        lambda params: torch.optim.SGD(params, lr=0.5),
        plugins=[DDP(overlap=overlap, weighted=weighted)],
        standard=False,
    )
    learner.fit(TensorLoader(*whole_numbers(), batch_size=size), epochs=1)
    return weights(learner.model)


@pytest.mark.parametrize(("world", "overlap"), halved([2, 4], [True, False]))
def test_exact_arithmetic_equals_one_process_with_the_global_batch(world, overlap):
    alone = exact(0, 8, overlap)
    for each in run(exact, world, 8 // world, overlap):
        assert equal(each, alone)


def uneven(rank, size, accumulate, options):
    learner = Learner(
        make_model(norm=False),
        nn.CrossEntropyLoss(),
        lambda params: torch.optim.SGD(params, lr=0.1),
        plugins=[DDP(**options)],
        accumulate=accumulate,
        standard=False,
    )
    learner.fit(TensorLoader(*samples(31), batch_size=size, shuffle=True), epochs=2)
    return weights(learner.model)


@pytest.mark.parametrize(
    ("accumulate", "options"), halved([1, 2], [{}, {"overlap": False}, {"weighted": True}]), ids=str
)
def test_average_of_uneven_shards_is_the_gradient_of_the_global_batch(options, accumulate):
    alone = uneven(0, 12, accumulate, {})
    for each in run(uneven, 3, 4, accumulate, options):
        for name, value in alone.items():
            assert torch.allclose(each[name], value, rtol=0, atol=1e-6)  # sums of terms below 1, in another order


class Tokens(TrainingPhase):
    """Its weights are not those of the samples; those of the first steps are, if it begins late."""

    def __init__(self, late=False):
        super().__init__("train")
        self.late = late

    def step(self, learner, step):
        if not self.late or step.index > 1:
            inputs, _ = step.batch
            step.weight = 9.0 if self.late else float(inputs[:, 0].gt(0).sum() + 1)
        super().step(learner, step)


def by_tokens(rank, size, late, overlap):
    phase = Tokens(late)
    loss_fn = Exactly(size)
    learner = Learner(
        make_model(norm=False),
        loss_fn,
        lambda params: torch.optim.SGD(params, lr=0.1),
        plugins=[DDP(overlap=overlap), loss_fn],
        phases=[phase],
        standard=False,
    )
    learner.fit(TensorLoader(*samples(36), batch_size=size), epochs=2)
    return weights(learner.model)


class Exactly:
    """The mean over the parts of a batch for three processes, by the weights that `Tokens` gives each of them."""

    def __init__(self, size):
        self.parts = 3 if size == 12 else 1

    @hookimpl
    def step_begin(self, step):
        self.inputs, _ = step.batch

    def __call__(self, outputs, targets):
        losses = nn.functional.cross_entropy(outputs, targets, reduction="none").chunk(self.parts)
        counts = [part.gt(0).sum() + 1 for part in self.inputs[:, 0].chunk(self.parts)]
        return sum(count * loss.mean() for count, loss in zip(counts, losses, strict=True)) / sum(counts)


@pytest.mark.parametrize("overlap", [True, False])
def test_average_goes_by_the_weights_that_a_phase_sets(overlap):
    alone = by_tokens(0, 12, False, overlap)
    for each in run(by_tokens, 3, 4, False, overlap):
        for name, value in alone.items():
            assert torch.allclose(each[name], value, rtol=0, atol=1e-6)  # sums of terms below 1, in another order


def sets_weight_late(rank):
    with pytest.raises(WorldError, match=r"weight of 1 steps is .* Give DDP\(weighted=True\)"):
        by_tokens(rank, 4, True, True)


def test_weights_that_come_after_the_first_update_are_refused():
    run(sets_weight_late, 2)


def with_norm(rank):
    learner = make_learner(DDP())
    learner.fit(TensorLoader(*samples(28), batch_size=4), epochs=1)  # 12, and 16 in parts of 6, 5 and 5
    return learner.progress.steps, learner.progress.samples


def test_tail_of_one_sample_a_process_joins_the_batch_before():
    assert run(with_norm, 3) == [(2, 10), (2, 9), (2, 9)]


class Weightless(TrainingPhase):
    """Nothing in its batches counts."""

    def step(self, learner, step):
        step.weight = torch.tensor(0)
        super().step(learner, step)


def weightless(rank, overlap):
    learner = make_learner(
        DDP(overlap=overlap, weighted=True), model=make_model(norm=False), phases=[Weightless()], accumulate=2
    )
    grads = []

    class Keep:
        @hookimpl(reads=("grads",))
        def update_begin(self, step):
            grads.extend(p.grad.clone() for p in step.params)

    learner.add(Keep())
    before = learner.model[0].weight.clone()
    learner.fit(TensorLoader(*samples(16), batch_size=4), epochs=1)
    assert learner.progress.updates == 0
    assert torch.equal(learner.model[0].weight, before)
    return grads


class OnOne(TrainingPhase):
    """Nothing counts in the batches of rank 0."""

    def step(self, learner, step):
        step.weight = torch.tensor(float(learner.world.rank))
        super().step(learner, step)


def on_one(rank):
    learner = make_learner(DDP(weighted=True), model=make_model(norm=False), phases=[OnOne()])
    learner.fit(TensorLoader(*samples(16), batch_size=4), epochs=1)
    return learner.progress.updates, learner.model[0].weight.sum().item()


def test_update_without_weight_in_one_process_is_that_of_the_others():
    one, other = run(on_one, 2)
    assert one == other
    assert one[0] == 2


def own_updates(rank):
    learner = make_learner(DDP(), model=make_model(norm=False), phases=[ByItself()])
    try:
        learner.fit(TensorLoader(*samples(16), batch_size=4), epochs=1)
    except ValueError as refused:
        return str(refused)
    return ""


class ByItself(TrainingPhase):
    own_updates = True


def test_phase_with_own_updates_is_refused_in_several_processes():
    for said in run(own_updates, 2):
        assert "plugin 'ddp' acts by" in said
        assert "ByItself.own_updates is True" in said


@pytest.mark.parametrize("overlap", [True, False])
def test_gradients_are_zero_where_the_weights_of_all_processes_are(overlap):
    for grads in run(weightless, 2, overlap):
        assert len(grads) == 4
        assert not any(grad.count_nonzero() for grad in grads)


class Twice(TrainingPhase):
    """Calls the model twice before its backward."""

    def step(self, learner, step):
        inputs, targets = self.unpack(step.batch)
        outputs = learner.model(inputs) + learner.model(-inputs)
        step.loss = learner.loss_fn(outputs, targets)
        step.backward(step.loss)
        step.update()


class Kept:
    """Keeps the gradients of an update until the next one."""

    def __init__(self):
        self.kept, self.unchanged = [], []

    @hookimpl(reads=("grads",))
    def update_begin(self, step):
        if self.kept:
            self.unchanged.append(all(torch.equal(grad, was) for grad, was in self.kept))
        self.kept = [(p.grad, p.grad.clone()) for p in step.params]


def kept(rank, overlap):
    keeps = Kept()
    learner = make_learner(DDP(overlap=overlap), keeps, model=make_model(norm=False))
    learner.fit(TensorLoader(*samples(32), batch_size=4), epochs=1)
    return keeps.unchanged


@pytest.mark.parametrize("overlap", [True, False])
def test_gradients_that_a_plugin_keeps_do_not_change(overlap):
    assert run(kept, 2, overlap) == [[True] * 3] * 2


def views_change(rank):
    """What a plugin keeps of an update would change in the next if gradients were views of the reducer's buckets."""
    dist.init_process_group("gloo")
    model = make_model(norm=False)
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    kept = []
    for inputs, targets in [batch for batch, _ in zip(parts_of(rank, 2), range(4), strict=False)]:
        model.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(wrapped(inputs), targets).backward()
        kept.append((model[0].weight.grad, model[0].weight.grad.clone()))
    return [torch.equal(grad, was) for grad, was in kept]


def test_gradients_that_are_views_of_buckets_would_change_where_they_are_kept():
    assert [all(same) for same in run(views_change, 2)] == [False, False]


class Storages(Kept):
    """How many pieces of memory the gradients of each update lie in."""

    @hookimpl(reads=("grads",))
    def update_begin(self, step):
        self.unchanged.append(len({p.grad.untyped_storage().data_ptr() for p in step.params}))


def viewed(rank, **options):
    storages = Storages()
    learner = make_learner(DDP(**options), storages, model=make_model(norm=False), accumulate=2)
    learner.fit(TensorLoader(*samples(32), batch_size=4), epochs=2)
    return storages.unchanged, weights(learner.model)


def compared(rank):
    return viewed(rank), viewed(rank, bucket_views=True)


def test_gradients_can_be_views_of_buckets_with_the_same_bits():
    for (apart, expected), (together, found) in run(compared, 2):
        assert min(apart) > max(together)
        assert equal(found, expected)


class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.idle = nn.Linear(6, 3), nn.Linear(2, 2)

    def forward(self, inputs):
        return self.used(inputs)


def idle(rank, **options):
    learner = make_learner(DDP(**options), model=Part())
    before = weights(learner.model)
    learner.fit(TensorLoader(*samples(), batch_size=4), epochs=1)
    after = weights(learner.model)
    return [name for name in before if not torch.equal(before[name], after[name])], after


def named(rank):
    with pytest.raises(WorldError, match=r"no gradient came for parameters idle\.weight, idle\.bias") as caught:
        idle(rank)
    return str(caught.value)


def test_parameters_without_a_gradient_are_named():
    assert all("find_unused_parameters=True" in text for text in run(named, 2))


def without(rank, options):
    changed, after = idle(rank, **options)
    assert changed == ["used.weight", "used.bias"]
    return after


@pytest.mark.parametrize("options", [{"find_unused_parameters": True}, {"overlap": False}], ids=["reducer", "here"])
def test_parameters_without_a_gradient_stay_where_that_is_meant(options):
    one, other = run(without, 2, options)
    assert equal(one, other)


class Adversarial(TrainingPhase):
    """Two models and optimizers, each updated by name."""

    def step(self, learner, step):
        inputs, _ = step.batch
        made = learner.model["maker"](inputs)
        step.backward(learner.model["judge"](made.detach()).mean() - learner.model["judge"](inputs).mean(), "judge")
        step.update("judge")
        step.backward(-learner.model["judge"](made).mean(), "maker")
        step.update("maker")


def adversaries(rank):
    torch.manual_seed(rank)  # made different, and begun equal all the same
    models = {"maker": nn.Linear(6, 6), "judge": nn.Linear(6, 1)}
    factory = lambda params: torch.optim.SGD(params, lr=LR)  # noqa: E731
    learner = Learner(
        models,
        None,
        {"maker": factory, "judge": factory},
        plugins=[DDP()],
        phases=[Adversarial()],
        standard=False,
    )
    learner.fit(TensorLoader(*samples(), batch_size=4), epochs=2)
    return {f"{name}.{key}": value for name, model in models.items() for key, value in weights(model).items()}


def test_several_models_and_optimizers():
    one, other = run(adversaries, 2)
    assert equal(one, other)


def test_one_process_alone_trains_as_without():
    learners = [make_learner(*plugins) for plugins in ([], [DDP()])]
    for learner in learners:
        learner.fit(TensorLoader(*samples(), batch_size=4), epochs=2)
    assert equal(*(weights(learner.model) for learner in learners))
    assert learners[1].world.size == 1


def without_own_graph(rank):
    return ours(rank, 2, OPTIONS["plain"], static_graph=True)[0]


def test_static_graph_changes_no_bits():
    static, plain = run(without_own_graph, 2), run(hand, 2, 2, OPTIONS["plain"])
    assert all(torch.equal(static[0][key], plain[0][0][key]) for key in static[0] if "running" not in key)


def batch_norm_over_all(rank):
    with pytest.raises(WorldError, match="is on a CPU"):
        make_learner(DDP(sync_batch_norm=True))


def test_batch_norm_over_all_processes_is_refused_on_a_cpu():
    run(batch_norm_over_all, 2)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"overlap": "probe"}, "overlap is 'probe'"),
        ({"compression": "int8"}, "compression is 'int8'"),
        ({"bucket_mb": 0}, "bucket_mb is 0"),
        ({"overlap": False, "bucket_views": True}, "bucket_views=True"),
        ({"static_graph": True, "fixed_buckets": True}, "static_graph=True"),
        ({"weighted": "yes"}, "weighted is 'yes'"),
        ({"tail": "wrap"}, "tail is 'wrap'"),
        ({"timeout": 0}, "timeout is 0"),
    ],
)
def test_options_out_of_range_are_refused(options, text):
    with pytest.raises(LoopkitError, match=text):
        DDP(**options)


def differing(rank, what):
    plugins = [DDP(), *([ClipGradNorm(1.0)] if what == "plugins" and rank else [])]
    model = make_model() if what != "model" or not rank else nn.Linear(6, 3)
    join()
    learner = make_learner(*plugins, model=make_model())
    if what == "model":
        learner.model.register_buffer("own", torch.zeros(rank + 1))
    if what == "optimizer":
        learner.optimizer.param_groups[0]["lr"] = 0.1 * (rank + 1)
    if what == "accumulate":
        learner.accumulate = rank + 1
    if what == "trained":
        learner.model[0].requires_grad_(rank == 0)
    if what == "progress":  # one has loaded a state
        learner.progress.steps = rank
    with pytest.raises(WorldError, match="rank 1 is not set up as rank 0") as caught:
        learner.fit(TensorLoader(*samples(), batch_size=4), epochs=1)
    assert model is not None
    return str(caught.value)


@pytest.mark.parametrize("what", ["plugins", "model", "optimizer", "accumulate", "trained", "progress"])
def test_processes_that_differ_are_refused_before_the_first_step(what):
    words = {"plugins": "list of plugins", "model": "model", "optimizer": "lr", "accumulate": "2 steps"}
    words |= {"trained": "choice of trained parameters", "progress": "its progress differs (0 epochs, 1 steps"}
    assert all(words[what] in text for text in run(differing, 2, what))


def thawed(rank, overlap):
    learner = make_learner(DDP(overlap=overlap), Freeze({"0": 1}), model=make_model(norm=False))
    learner.fit(TensorLoader(*samples(), batch_size=4), epochs=3)
    return weights(learner.model)


def test_parameters_that_are_thawed_are_averaged():
    one, other = run(thawed, 2, True)
    assert equal(one, other)
    frozen = weights(make_model(norm=False))
    assert not torch.equal(one["0.weight"], frozen["0.weight"])


class At:
    """Does something once at a hook of a training step."""

    def __init__(self, hook, index, act):
        self.name = f"at_{hook}"
        self.index, self.act = index, act

        def call(learner, step):
            if step.index == index and learner.current.epoch.phase.training:
                act(learner)

        setattr(self, hook, hookimpl(call))


def shown_states(learner):
    return weights(learner.model), learner.progress.updates


def interrupted(rank, hook, what, overlap, weighted=False, accumulate=2):
    inputs, targets = samples(42)  # uneven parts at the end of each epoch

    def act(learner):
        if what == "evaluate":
            learner.evaluate([(inputs[:4], targets[:4])])
        elif what == "forward":
            with torch.no_grad():
                learner.model(inputs[:4])
        else:
            raise CancelStep

    learner = Learner(
        make_model(norm=False),
        nn.CrossEntropyLoss(),
        lambda params: torch.optim.SGD(params, LR),
        plugins=[DDP(overlap=overlap, weighted=weighted), At(hook, 5, act)],
        accumulate=accumulate,
        standard=False,
        order=["ddp", f"at_{hook}"],
    )
    learner.fit(TensorLoader(inputs, targets, batch_size=4), epochs=2)
    return shown_states(learner)


def interrupt_evaluation(rank, overlap, weighted):
    inputs, targets = samples(42)

    def act(learner):
        learner.evaluate(TensorLoader(inputs[:8], targets[:8], batch_size=4))

    learner = make_learner(
        DDP(overlap=overlap, weighted=weighted),
        At("loss_begin", 5, act),
        model=make_model(norm=False),
        accumulate=1 if weighted else 2,
    )
    learner.fit(TensorLoader(inputs, targets, batch_size=4), epochs=2)
    return shown_states(learner)


@pytest.mark.parametrize("weighted", [False, True])
def test_evaluation_inside_a_step_leaves_its_sync_alone(weighted):
    reducer, here = (run(interrupt_evaluation, 2, overlap, weighted) for overlap in (True, False))
    for one, other in zip(reducer, here, strict=True):
        assert one[1] == other[1] > 0
        for name, value in one[0].items():
            assert torch.allclose(value, other[0][name], rtol=0, atol=1e-6)
    assert equal(reducer[0][0], reducer[1][0])


@pytest.mark.parametrize(("what", "hook"), halved(["forward", "cancel"], ["loss_begin", "backward_begin"]))
def test_step_that_is_interrupted_in_all_processes_leaves_the_sync_alone(what, hook):
    reducer, here = (run(interrupted, 2, hook, what, overlap) for overlap in (True, False))
    for one, other in zip(reducer, here, strict=True):
        assert one[1] == other[1] > 0
        for name, value in one[0].items():
            assert torch.allclose(value, other[0][name], rtol=0, atol=1e-6), name
    assert equal(reducer[0][0], reducer[1][0])


def skips_alone(rank):
    def act(learner):
        if rank == 1:
            learner.current.epoch.current.skip_update("mine")

    learner = make_learner(DDP(), At("update_begin", 1, act), model=make_model(norm=False))
    with pytest.raises(WorldError, match="updates") as caught:
        learner.fit(TensorLoader(*samples(), batch_size=4), epochs=1)
    return str(caught.value)


def test_update_that_is_skipped_in_one_process_is_an_error():
    assert any("an update skipped" in text for text in run(skips_alone, 2))


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(6, 3), nn.Linear(6, 3)


class OneHead(TrainingPhase):
    """Uses another part of the model in its first step than later on."""

    def step(self, learner, step):
        inputs, targets = self.unpack(step.batch)
        head = learner.model.other if step.index == 0 else learner.model.one
        step.loss = learner.loss_fn(head(inputs), targets)
        step.backward(step.loss)
        step.update()


def heads(rank, options):
    learner = make_learner(DDP(**options), model=Heads(), phases=[OneHead()])
    learner.fit(TensorLoader(*samples(24), batch_size=4), epochs=1)
    return weights(learner.model)


def heads_refused(rank):
    with pytest.raises(WorldError, match="gets a gradient in some updates or processes"):
        heads(rank, {})


def test_gradients_that_come_and_go_are_refused_or_left_out():
    run(heads_refused, 2)
    one, other = run(heads, 2, {"find_unused_parameters": True})
    assert equal(one, other)


def buffers_seen(rank):
    seen = []

    class Look(TrainingPhase):
        def step(self, learner, step):
            seen.append(learner.model[1].running_mean.clone())
            super().step(learner, step)

    learner = make_learner(DDP(overlap=False), phases=[Look()])
    learner.fit(TensorLoader(*samples(), batch_size=4), epochs=1)
    return seen


def test_buffers_are_those_of_rank_0_in_each_synced_step():
    one, other = run(buffers_seen, 2)
    assert len(one) > 2
    assert all(map(torch.equal, one, other))


def different_at_once(rank, plugin):
    model = nn.Linear(6, 3 + rank)
    with pytest.raises(WorldError, match="model 'model' of rank 1 differs from rank 0") as caught:
        make_learner(plugin(), model=model)
    return str(caught.value)


def test_different_models_are_refused_before_anything_is_sent():
    assert all("(4, 6)" in text and "(3, 6)" in text for text in run(different_at_once, 2, DDP))


def predicted(rank):
    inputs, targets = samples(11)
    learner = make_learner(DDP(tail="drop"), model=make_model(norm=False))
    outputs = learner.predict(TensorLoader(inputs, targets, batch_size=4))
    of_first = learner.predict(TensorLoader(inputs, targets, batch_size=4), everywhere=False)
    assert of_first is None if rank else torch.equal(of_first, outputs)
    learner.model.eval()
    with torch.no_grad():
        return torch.equal(outputs, learner.model(inputs)), len(outputs)


def evaluated(rank, tail):
    inputs, targets = samples(11)
    rows = list(zip(inputs, targets, strict=True))
    learner = make_learner(DDP(tail=tail), Metrics(Accuracy()), model=make_model(norm=False))
    sampler = torch.utils.data.DistributedSampler(rows, num_replicas=3, rank=rank, shuffle=False)
    distributed = torch.utils.data.DataLoader(rows, 2, sampler=sampler)
    plain = torch.utils.data.DataLoader(rows, 2)
    found = [(learner.evaluate(data), learner.predict(data)) for data in (distributed, plain)]
    with torch.no_grad():
        outputs = learner.model.eval()(inputs)
        loss = nn.functional.cross_entropy(outputs, targets).item()
    correct = outputs.argmax(1).eq(targets).sum().item()
    for metrics, predicted in found:
        assert metrics["val/accuracy"] == correct / 11
        assert metrics["val/loss"] == pytest.approx(loss, rel=1e-6)  # summed in another order
        torch.testing.assert_close(predicted, outputs)  # computed in other batches


@pytest.mark.parametrize("tail", ["uneven", "pad", "drop"])
def test_each_sample_is_evaluated_and_predicted_once(tail):
    run(evaluated, 3, tail)


def test_tail_that_is_left_out_in_training_is_predicted_in_rank_0_alone_if_asked():
    assert run(predicted, 2) == [(True, 11), (True, 11)]


def test_distributed_sampler_of_one_process_is_told_the_epoch():
    data = torch.utils.data.TensorDataset(*samples(16))
    sampler = torch.utils.data.DistributedSampler(data, num_replicas=1, rank=0)
    learner = make_learner(DDP(), model=make_model(norm=False))
    learner.fit(torch.utils.data.DataLoader(data, batch_size=4, sampler=sampler), epochs=3)
    assert sampler.epoch == 2


class FromOne(torch.utils.data.DistributedSampler):
    """Its first epoch is 1."""

    def set_epoch(self, epoch):
        super().set_epoch(epoch + 1)


def test_order_of_a_sampler_that_counts_from_1_is_the_same_after_a_resume(tmp_path):
    class Sees:
        def __init__(self, stop=None):
            self.stop, self.seen = stop, []

        @hookimpl
        def step_begin(self, learner, phase, step):
            if learner.progress.steps == self.stop:
                raise KeyboardInterrupt
            if phase.training:
                self.seen.append(step.batch[0].tolist())

    data = torch.utils.data.TensorDataset(*samples(16))
    expected = []
    for epoch in (1, 2, 3):
        sampler = torch.utils.data.DistributedSampler(data, num_replicas=1, rank=0)
        sampler.set_epoch(epoch)
        expected += [batch[0].tolist() for batch in torch.utils.data.DataLoader(data, 4, sampler=sampler)]
    sees, val = [Sees(stop=6), Sees()], FromOne(data, num_replicas=1, rank=0)
    for each in sees:
        sampler = FromOne(data, num_replicas=1, rank=0)
        save = Checkpoint(tmp_path, save=every(updates=6), resume="auto", options=SaveOptions(replay=True))
        learner = make_learner(DDP(), save, each, model=make_model(norm=False))
        loaders = (torch.utils.data.DataLoader(data, batch_size=4, sampler=order) for order in (sampler, val))
        with contextlib.suppress(KeyboardInterrupt):
            learner.fit(*loaders, epochs=3)
    assert [len(each.seen) for each in sees] == [6, 6]
    assert sees[0].seen + sees[1].seen == expected
    assert val.epoch == 0


def window_open(rank):
    learner = make_learner(DDP(), model=make_model(norm=False), accumulate=2)
    with learner.epoch("train", length=4) as epoch:
        epoch.step(samples(4))
        with pytest.raises(StateError, match="inside an accumulation window"):
            learner.state_dict()


def test_state_inside_a_window_is_refused():
    run(window_open, 2)


def stopped_among_evaluations(rank):
    inputs, targets = samples()
    learner = make_learner(DDP(), model=make_model(norm=False))

    class Stops:
        @hookimpl
        def step_end(self, learner, phase, step):
            if phase.training and step.index == 1 and rank == 1:
                learner.stop("enough")

    learner.add(Stops())
    data, val = TensorLoader(inputs, targets, batch_size=2), TensorLoader(inputs, targets, batch_size=24)
    result = learner.fit(data, val, epochs=1, validate=every(updates=1))
    return result.steps, result.message


def test_stop_among_evaluations_is_agreed_on_in_time():
    results = run(stopped_among_evaluations, 2)
    assert results[0] == results[1]
    assert results[0][0] < 10
    assert results[0][1] == "enough"


def in_two_stages(rank, size):
    torch.manual_seed(0)
    plugins = [DDP()] if size > 1 else []
    learner = make_learner(*plugins, model=nn.Linear(6, 3).double())
    inputs, targets = samples()
    data = TensorLoader(inputs.double(), targets, batch_size=8 // size)
    learner.fit(data, epochs=1)
    learner.set_optimizer(lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9))
    learner.fit(data, epochs=1)
    return learner.progress.updates, weights(learner.model)


def test_another_optimizer_between_fits_is_that_of_one_process():
    (updates, alone), (first, other) = in_two_stages(0, 1), run(in_two_stages, 2, 2)
    assert updates == first[0] == other[0]
    assert equal(first[1], other[1])
    for name, value in alone.items():
        torch.testing.assert_close(first[1][name], value, rtol=1e-10, atol=1e-12)  # sums in another order
