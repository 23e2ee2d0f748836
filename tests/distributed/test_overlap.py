"""Gradients of steps of one's own, sent in their backward: bitwise those of a loop by hand, whatever a step does."""

from __future__ import annotations

import contextlib
import io

import pytest
import torch
import torch.distributed as dist
from torch import nn

from distributed.processes import run, run_each
from distributed.test_ddp import At, by_hand, equal, make_learner, make_model, parts_of, samples, weights
from loopkit import Learner, TrainingPhase, hookimpl
from loopkit.data import TensorLoader
from loopkit.distributed import buckets, join
from loopkit.errors import CancelStep, PhaseError
from loopkit.plugins import DDP, ClipGradNorm, Freeze, MixedPrecision

SMALL = 1e-6  # MiB: each parameter has a bucket of its own


class Own(TrainingPhase):
    """One call and one backward; ``other(learner, step, outputs)`` may return another loss, or None."""

    def __init__(self, other=None):
        super().__init__("train")
        self.other = other

    def step(self, learner, step):
        inputs, targets = self.unpack(step.batch)
        outputs = learner.model(inputs)
        step.loss = learner.loss_fn(outputs, targets)
        if self.other is None or not self.other(learner, step):
            step.backward(step.loss)
        step.update()


class InBackward:
    """Counts what is sent within the backwards of each step."""

    def __init__(self):
        self.name = "in_backward"
        self.steps, self.inside = [], False

    def __enter__(self):
        self.before = before = dist.all_reduce

        def all_reduce(tensor, *args, **kwargs):
            if self.inside:
                self.steps[-1] += 1
            return before(tensor, *args, **kwargs)

        dist.all_reduce = all_reduce
        return self

    def __exit__(self, *error):
        dist.all_reduce = self.before

    @hookimpl
    def step_begin(self, phase):
        if phase.training:
            self.steps.append(0)

    @hookimpl
    def backward_begin(self):
        self.inside = True

    @hookimpl
    def backward_end(self):
        self.inside = False


def trained(overlap, phase, plugins=(), epochs=2, accumulate=1, count=96, model=None, norm=False, **options):
    """Weights, what was sent within backwards of each step, and what was printed of it."""
    sent, printed = InBackward(), io.StringIO()
    ddp = DDP(overlap=overlap, bucket_mb=SMALL, timeout=60, **options)
    model = model or make_model(norm=norm)
    learner = make_learner(ddp, sent, *plugins, model=model, phases=[phase], accumulate=accumulate)
    with sent, contextlib.redirect_stderr(printed):
        learner.fit(TensorLoader(*samples(count), batch_size=4), epochs=epochs)
    said = [line for line in printed.getvalue().splitlines() if "averaged after the backward" in line]
    return weights(learner.model), sent.steps, said


# The loop by hand


def own(rank, options):
    plugins = [ClipGradNorm(0.3)] * ("clip" in options) + [MixedPrecision(torch.bfloat16)] * ("dtype" in options)
    compression = {"compression": "fp16"} if "hook" in options else {}
    accumulate = options.get("accumulate", 1)
    found, steps, said = trained(True, Own(), plugins, norm=True, accumulate=accumulate, **compression)
    assert said == []
    first = 2 * accumulate - 1  # the first update shows it; 5 of the 6 parameters are ready within a backward
    assert steps == [5 * (index >= first and index % accumulate == accumulate - 1) for index in range(24)]
    return found


OPTIONS = [{}, {"clip": 0.3, "accumulate": 3, "dtype": torch.bfloat16}, {"hook": "fp16_compress_hook"}]


def hand(rank, options):
    return by_hand(rank, 2, parts_of(rank, 2), **options)[0]


def test_own_phases_are_bitwise_a_loop_by_hand_and_send_in_the_backward_from_the_second_update_on():
    mine = run_each(own, 2, [(options,) for options in OPTIONS])
    for options, (one, other) in zip(OPTIONS, mine, strict=True):
        theirs, _ = run(hand, 2, options)
        for name, value in theirs.items():
            if not name.startswith("1.running"):  # after the epoch's last step these are each process's own by hand
                assert torch.equal(one[name], value), (options, name)
                assert torch.equal(other[name], value), (options, name)


# Steps that differ


def twice(learner, step):
    """Two calls, one backward."""
    inputs, targets = step.batch
    step.loss = step.loss + learner.loss_fn(learner.model(-inputs), targets)


def at(index, ranks, change):
    def other(learner, step):
        return step.index == index and learner.world.rank in ranks and change(learner, step)

    return other


def second_backward(learner, step):
    inputs, targets = step.batch
    step.backward(step.loss)
    step.backward(learner.loss_fn(learner.model(-inputs), targets))
    return True


def sends_between(learner, step):
    """Collectives of the user's own between the backward and the update, and a second backward in one process."""
    (second_backward if learner.world.rank else lambda learner, step: step.backward(step.loss))(learner, step)
    learner.world.highest(1.0)
    dist.all_reduce(torch.ones(1))
    return True


def changes(learner, step):
    step.backward(step.loss)
    step.frame.windows[0].params[0].grad.mul_(3.0)
    return True


def replaces(learner, step):
    step.backward(step.loss)
    p = step.frame.windows[0].params[-1]
    p.grad = 3.0 * p.grad
    return True


def not_a_number(learner, step):
    step.loss = step.loss * torch.nan


class Skip:
    """Skips updates that have no finite gradients."""

    @hookimpl(reads=("grads",))
    def update_begin(self, step):
        if not all(p.grad.isfinite().all() for p in step.params):
            step.skip_update("nan")


def cancels(learner, step):
    """Each process at another place."""
    if learner.world.rank:
        step.backward(step.loss)
    raise CancelStep


def begins(learner, step):
    """Cancelled before a backward, in both."""
    raise CancelStep


def evaluates(learner, step):
    learner.evaluate(TensorLoader(*samples(8), batch_size=4))
    step.backward(step.loss)
    learner.evaluate(TensorLoader(*samples(8), batch_size=4))
    return True


CASES = {
    # name: what a step does at its index, in these ranks; updates of 12 after which nothing is sent in the backward
    "two calls": (twice, 11, 0),
    "two calls at a step": (at(3, (0, 1), twice), 11, 0),
    "a second backward in all": (at(3, (0, 1), second_backward), 3, 1),
    "a second backward in one": (at(3, (1,), second_backward), 3, 1),
    "collectives of one's own": (at(3, (0, 1), sends_between), 3, 1),
    "a gradient is changed in one": (at(3, (1,), changes), 3, 1),
    "a gradient is replaced in all": (at(5, (0, 1), replaces), 5, 1),
    "two backwards in the first": (at(0, (1,), second_backward), 0, 1),
    "the last one": (at(11, (0,), second_backward), 11, 1),
    "evaluations in a step": (at(4, (0, 1), evaluates), 11, 0),
    "not a number": (at(3, (1,), not_a_number), 11, 0),
    "cancelled at different places": (at(3, (0, 1), cancels), 11, 0),
    "cancelled before a backward": (at(3, (0, 1), begins), 11, 0),
}


def deviates(rank, name):
    other, last, lines = CASES[name]
    plugins = [Skip()] * (name == "not a number")
    found, steps, said = trained(True, Own(other), plugins)
    expected, none, _ = trained(False, Own(other), plugins)
    assert none == [0] * 24
    assert equal(found, expected)
    assert not any(value.isnan().any() for value in found.values())
    early = [index for index in range(12) if steps[index]]
    cancelled = {3} if name.startswith("cancelled") and not (rank and "different" in name) else set()
    assert early == [index for index in range(1, last + 1) if index not in cancelled], (name, steps)
    assert len(said) == (lines if rank == 0 else 0)
    assert bool(steps[13]) == (name != "two backwards in the first"), "each epoch begins anew"
    return said, weights_hash(found)


def weights_hash(found):
    return [float(value.double().sum()) for value in found.values()]


def test_whatever_a_later_step_does_the_bits_are_those_of_averages_after_the_backward():
    by_name = dict(zip(CASES, run_each(deviates, 2, [(name,) for name in CASES]), strict=True))
    for (_, one), (_, other) in by_name.values():
        assert one == other
    (said, _), _ = by_name["a second backward in one"]
    assert said == [
        "loopkit: phase 'train': gradients are averaged after the backward for now: step 3 of rank 1 made a second "
        "backward"
    ]
    (said, _), _ = by_name["a gradient is changed in one"]
    assert said[0].endswith("step 3 of rank 1 changed its gradients after the backward")


def resumed(rank):
    """Three processes, whose sums depend on their order: whole, paused after the third step, and deviating."""
    found = []
    for overlap, pause, other in ((True, 0, None), (True, 3, None), (False, 0, None), (True, 3, "deviates")):
        phase = Own(at(2, (1,), second_backward) if other else None)
        make = lambda: make_learner(  # noqa: E731
            DDP(overlap=overlap, bucket_mb=SMALL),  # noqa: B023
            model=make_model(norm=False),
            phases=[phase],  # noqa: B023
        )
        learner, data = make(), lambda: TensorLoader(*samples(90), batch_size=4, shuffle=True, seed=3)
        with contextlib.redirect_stderr(io.StringIO()):
            if pause:
                learner.add(At("step_end", pause, lambda learner: learner.pause("test")))
                learner.fit(data(), epochs=2, on_interrupt="return")
                state, learner = learner.state_dict(), make()
                learner.load_state_dict(state)
            learner.fit(data(), epochs=2)
        found.append(weights(learner.model))
    return found


def test_a_resumed_run_of_three_processes_ends_with_the_same_bits():
    for whole, cut, after, other in run(resumed, 3):
        assert equal(whole, cut)
        assert equal(whole, after)
        assert not equal(whole, other)


def thawed(rank):
    found, steps, _ = trained(True, Own(), [Freeze({"0": 1})], epochs=3)
    expected, _, _ = trained(False, Own(), [Freeze({"0": 1})], epochs=3)
    assert steps[1] == 1
    assert steps[-1] == 3
    return equal(found, expected)


def test_parameters_that_are_thawed_are_sent_in_the_backward_from_the_next_epoch_on():
    assert run(thawed, 2) == [True, True]


# What cannot be averaged


class Part(nn.Module):
    """Its last layer is left out at will."""

    def __init__(self):
        super().__init__()
        self.one, self.other, self.both = nn.Linear(6, 3), nn.Linear(6, 3), True

    def forward(self, inputs):
        return self.one(inputs) + self.other(inputs) if self.both else self.one(inputs)


class Leaves(TrainingPhase):
    def step(self, learner, step):
        inputs, targets = self.unpack(step.batch)
        learner.model.both = step.index < 3 or learner.world.rank == 0
        step.loss = learner.loss_fn(learner.model(inputs), targets)
        step.backward(step.loss)
        step.update()


def without_gradient(rank):
    trained(True, Leaves(), model=Part())


def without_backward(rank):
    def nothing(learner, step):
        return True

    trained(True, Own(at(3, (1,), nothing)))


@pytest.mark.parametrize(
    ("fn", "text"),
    [
        (without_gradient, "gets a gradient in some updates or processes, and in others it gets none"),
        (without_backward, "step 3"),
    ],
)
def test_a_step_that_cannot_be_averaged_in_one_process_ends_all_with_its_name(fn, text):
    waiting, failed = run(fn, 2, check=False, timeout=60)
    assert (waiting.code, failed.code) == (1, 1)
    assert text in failed.error
    assert "rank 1 failed" in waiting.error + waiting.output
    assert waiting.seconds < 20


def on_a_device(rank):
    """Where to look at what was sent would mean to wait for a device."""
    finish = buckets.Overlap.finish
    buckets.Overlap.finish = lambda self, grads: (finish(self, grads)[0], None)
    with pytest.raises(PhaseError, match=r"phase 'train', step 3, made a second backward.* DDP\(overlap=False\)"):
        trained(True, Own(at(3, (0, 1), second_backward)))


def test_a_step_that_differs_is_refused_where_a_look_would_wait_for_a_device():
    run(on_a_device, 2)


def several_models(rank):
    torch.manual_seed(0)

    class Two(TrainingPhase):
        def step(self, learner, step):
            inputs, targets = step.batch
            step.loss = learner.loss_fn(learner.models["head"](learner.models["body"](inputs)), targets)
            step.backward(step.loss)
            step.update()

    join()
    found = []
    for overlap in (True, False):
        torch.manual_seed(0)
        models = {"body": nn.Linear(6, 8), "head": nn.Linear(8, 3)}
        optimizer = torch.optim.SGD([p for model in models.values() for p in model.parameters()], lr=0.1)
        learner = Learner(
            models,
            nn.CrossEntropyLoss(),
            optimizer,
            plugins=[DDP(overlap=overlap, bucket_mb=SMALL), sent := InBackward()],
            phases=[Two()],
            standard=False,
        )
        with sent:
            learner.fit(TensorLoader(*samples(), batch_size=4), epochs=1)
        assert all(sent.steps[1:]) == (overlap)
        found.append(
            {f"{name}.{key}": value for name, model in models.items() for key, value in weights(model).items()}
        )
    return equal(*found)


def test_several_models_of_one_optimizer_are_sent_in_the_backward():
    assert run(several_models, 2) == [True, True]
