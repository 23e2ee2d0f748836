"""SAM and ASAM against loops written by hand."""

import contextlib
import itertools

import pytest
import torch
import torch.distributed as dist
from distributed.processes import run
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from loopkit import CancelStep, Learner, TrainingPhase, every, hookimpl
from loopkit.data import TensorLoader
from loopkit.errors import LoopkitError, PluginError
from loopkit.plugins import DDP, Checkpoint, ClipGradNorm, MixedPrecision, Schedule, StopOnNonFinite
from loopkit.schedules import cosine
from loopkit_recipes import ASAM, SAM

LR, CLIP = 0.1, 0.05
PLUGINS = {"sam": lambda: SAM(rho=0.2), "asam": lambda: ASAM(rho=0.8, eta=0.02)}


def make_model(norm=True, dropout=0.2):
    torch.manual_seed(0)
    parts = [nn.Linear(6, 8), *([nn.BatchNorm1d(8)] if norm else []), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 3)]
    return nn.Sequential(*parts)


def samples(count=48):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, 6, generator=generator), torch.randint(0, 3, (count,), generator=generator)


def make_optimizer(params):
    return torch.optim.SGD(params, lr=LR, momentum=0.9)


def make_learner(*plugins, model=None, **options):
    options.setdefault("standard", False)
    return Learner(model or make_model(), nn.CrossEntropyLoss(), make_optimizer, plugins=plugins, **options)


def loader():
    return TensorLoader(*samples(), batch_size=8)


def move(model, grads, which):
    """The formulas of the two papers."""
    if which == "sam":
        norm = torch.stack([grad.norm() for grad in grads]).norm() + 1e-12
        moves = [grad * (0.2 / norm) for grad in grads]
    else:
        sizes = [
            torch.ones_like(p) if name.endswith("bias") else p.abs() + 0.02 for name, p in model.named_parameters()
        ]
        scaled = [size * grad for size, grad in zip(sizes, grads, strict=True)]
        norm = torch.stack([grad.norm() for grad in scaled]).norm() + 1e-12
        moves = [size * grad * (0.8 / norm) for size, grad in zip(sizes, scaled, strict=True)]
    for p, by in zip(model.parameters(), moves, strict=True):
        p.add_(by)


def by_hand(model, wrapped, batches, which, *, clip=False, accumulate=1, dtype=None, no_sync=contextlib.nullcontext):
    optimizer, loss_fn, params = make_optimizer(model.parameters()), nn.CrossEntropyLoss(), list(model.parameters())

    def loss_of(call, x, y):
        with torch.autocast("cpu", dtype, cache_enabled=False) if dtype else contextlib.nullcontext():
            return loss_fn(call(x), y)

    for index, (x, y) in enumerate(batches):
        if index % accumulate == 0:
            optimizer.zero_grad()
        grads = torch.autograd.grad(loss_of(model, x, y), params)
        kept, buffers = [p.detach().clone() for p in params], [b.clone() for b in model.buffers()]
        with torch.no_grad():
            move(model, grads, which)
        last = (index + 1) % accumulate == 0
        with contextlib.nullcontext() if last else no_sync():
            (loss_of(wrapped, x, y) / accumulate).backward()
        with torch.no_grad():
            for there, own in (*zip(params, kept, strict=True), *zip(model.buffers(), buffers, strict=True)):
                there.copy_(own)
        if last:
            if clip:
                nn.utils.clip_grad_norm_(params, CLIP)
            optimizer.step()
    return model.state_dict()


def stack(which, clip, dtype):
    return [PLUGINS[which](), *([ClipGradNorm(CLIP)] if clip else []), *([MixedPrecision("bfloat16")] if dtype else [])]


def differing(one, other):
    assert list(one) == list(other)
    return [name for name in one if not torch.equal(one[name], other[name])]


CASES = list(itertools.product(PLUGINS, [False, True], [1, 2], [None, torch.bfloat16]))


@pytest.mark.parametrize(("which", "clip", "accumulate", "dtype"), CASES)
def test_training_is_bitwise_that_of_a_loop_by_hand(which, clip, accumulate, dtype):
    learner = make_learner(*stack(which, clip, dtype), accumulate=accumulate)
    torch.manual_seed(2)
    learner.fit(loader(), epochs=2)
    model = make_model()
    torch.manual_seed(2)
    batches = [*loader(), *loader()]
    hand = by_hand(model, model, batches, which, clip=clip, accumulate=accumulate, dtype=dtype)
    assert differing(learner.model.state_dict(), hand) == []


def parts(rank, size):
    x, y = samples()
    for low in range(rank * 4, len(x), size * 4):
        yield x[low : low + 4], y[low : low + 4]


def in_processes(rank, which, clip, accumulate, dtype, overlap):
    learner = make_learner(
        *stack(which, clip, dtype), DDP(overlap=overlap), model=make_model(dropout=0.0), accumulate=accumulate
    )
    learner.fit(TensorLoader(*samples(), batch_size=4), epochs=1)
    return learner.model.state_dict()


def in_processes_by_hand(rank, which, clip, accumulate, dtype):
    dist.init_process_group("gloo")
    model = make_model(dropout=0.0)
    wrapped = DistributedDataParallel(model)
    options = {"clip": clip, "accumulate": accumulate, "dtype": dtype}
    return by_hand(model, wrapped, parts(rank, 2), which, no_sync=wrapped.no_sync, **options)


@pytest.mark.parametrize(
    ("which", "clip", "accumulate", "dtype"),
    [("sam", False, 1, None), ("asam", True, 2, torch.bfloat16), ("sam", True, 2, None)],
)
def test_two_processes_are_bitwise_a_loop_by_hand(which, clip, accumulate, dtype):
    hand = run(in_processes_by_hand, 2, which, clip, accumulate, dtype, timeout=60)
    for overlap in (True, False):
        mine = run(in_processes, 2, which, clip, accumulate, dtype, overlap, timeout=60)
        assert differing(mine[0], mine[1]) == []
        # statistics of rank 0, of which a process by hand has its own
        assert [name for name in differing(mine[1], hand[1]) if "running" not in name] == []
        assert differing(mine[0], hand[0]) == []


class Killed(BaseException):
    pass


@pytest.mark.parametrize("which", PLUGINS)
def test_a_killed_run_goes_on_with_the_same_bits(which, tmp_path):
    class Kill:
        @hookimpl
        def backward_end(self, learner, step):
            if learner.progress.steps == 8:
                raise Killed

    def fit(*more, resume=None):
        save = Checkpoint(tmp_path, save=every(updates=3), resume=resume)
        learner = make_learner(*stack(which, True, None), save, *more, accumulate=2)
        torch.manual_seed(2)
        learner.fit(loader(), epochs=2)
        return learner.model.state_dict()

    with pytest.raises(Killed):
        fit(Kill())
    resumed = fit(resume="auto")
    learner = make_learner(*stack(which, True, None), accumulate=2)
    torch.manual_seed(2)
    learner.fit(loader(), epochs=2)
    assert differing(resumed, learner.model.state_dict()) == []


@pytest.mark.parametrize("hook", ["forward_begin", "loss_begin", "backward_begin", "backward_end"])
@pytest.mark.parametrize("error", [CancelStep("no"), ValueError("no")], ids=["cancel", "error"])
def test_the_weights_are_back_after_a_step_without_end(hook, error):
    def act(self):
        raise error

    stop = type("Stop", (), {hook: hookimpl(act)})
    learner = make_learner(SAM(rho=10.0), stop())
    before = {name: value.clone() for name, value in learner.model.named_parameters()}
    with contextlib.suppress(ValueError):
        learner.fit(loader(), epochs=1)
    assert differing(dict(learner.model.named_parameters()), before) == []


def test_the_phase_runs_where_the_loss_is_larger():
    class Compare:
        losses = ()

        @hookimpl(reads=("loss", "params"))
        def backward_begin(self, learner, step):
            self.at = torch.cat([p.detach().flatten() for p in learner.model.parameters()])
            self.moved = step.loss.item()

        @hookimpl(reads=("params",))
        def step_end(self, learner, step):
            self.losses += ((step.index, self.moved),)

    data = [samples(16)]
    learner = make_learner(SAM(rho=0.3), compare := Compare(), model=make_model(norm=False, dropout=0.0))
    own = torch.cat([p.detach().flatten() for p in learner.model.parameters()])
    loss = learner.loss_fn(learner.model(data[0][0]), data[0][1]).item()
    learner.fit(data, epochs=1)
    assert (compare.at - own).norm().item() == pytest.approx(0.3, rel=1e-5)  # sums of float32
    assert compare.moved > loss + 0.01


def test_statistics_of_batch_norms_are_those_of_the_first_forward():
    learner = make_learner(SAM(rho=5.0), model=make_model(dropout=0.0))
    data, twin = [samples(16)], make_model(dropout=0.0)
    twin(data[0][0])  # at the weights themselves, and once
    learner.fit(data, epochs=1)
    assert differing(dict(learner.model.named_buffers()), dict(twin.named_buffers())) == []
    assert learner.model[1].num_batches_tracked == 1


def test_frozen_and_unused_parameters_stay_where_they_are():
    class Reach:
        @hookimpl(reads=("params",))
        def backward_begin(self, learner):
            self.seen = {name: p.detach().clone() for name, p in learner.model.named_parameters()}

    model = make_model(norm=False)
    model[0].weight.requires_grad_(False)
    model[1].register_parameter("unused", nn.Parameter(torch.ones(2)))
    learner = make_learner(SAM(), reach := Reach(), model=model)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    learner.fit([samples(8)], epochs=1)
    moved = [name for name, p in before.items() if not torch.equal(reach.seen[name], p)]
    assert moved == ["0.bias", "3.weight", "3.bias"]


def test_asam_does_not_see_how_layers_are_scaled_against_each_other():
    def moved(scale):
        class Loss:
            @hookimpl(reads=("loss",))
            def backward_begin(self, step):
                self.value = step.loss.detach()

        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.ReLU(), nn.Linear(8, 3, bias=False))
        with torch.no_grad():
            model[0].weight.mul_(scale)
            model[2].weight.div_(scale)
        make_learner(ASAM(rho=0.5, eta=0.0), loss := Loss(), model=model).fit([samples(16)], epochs=1)
        return loss.value

    torch.testing.assert_close(moved(8.0), moved(1.0), rtol=1e-5, atol=0)  # sums of other sizes


def test_an_override_of_the_phase_is_used_in_both_forwards():
    class Halves(TrainingPhase):
        calls = 0
        volatile = ("calls",)

        def forward(self, learner, inputs):
            self.calls += 1
            return learner.model(inputs / 2)

    learner = make_learner(SAM(), phases=[phase := Halves()])
    learner.fit(loader(), epochs=1)
    assert phase.calls == 12


def test_the_standard_stack_is_one_plan_with_it():
    plugins = [ClipGradNorm(1.0), MixedPrecision("bfloat16"), StopOnNonFinite(), Schedule(cosine()), DDP()]
    plans = {make_learner(*order, standard=True).explain("train") for order in ([SAM(), *plugins], [*plugins, SAM()])}
    assert len(plans) == 1


def test_both_at_once_are_refused():
    with pytest.raises(LoopkitError, match="both update 'params'"):
        make_learner(SAM(), ASAM())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SAM(rho=0), r"SAM: rho is 0: it is a number above 0"),
        (lambda: ASAM(rho=float("nan")), r"ASAM: rho is nan"),
        (lambda: SAM(rho="0.1"), r"SAM: rho is '0.1'"),
        (lambda: ASAM(eta=-1), r"ASAM: eta is -1: it is a number, from 0"),
    ],
)
def test_bad_options_are_refused(make, message):
    with pytest.raises(PluginError, match=message):
        make()
