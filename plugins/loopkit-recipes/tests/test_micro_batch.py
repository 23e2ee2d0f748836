"""Steps in parts: bitwise the loop by hand, and, after an out-of-memory error, the run with the size that fits."""

import warnings

import pytest
import torch
from distributed.processes import run
from helpers import EventLog, on
from loopkit_testing import check_plugin
from torch import nn

from loopkit import Learner, TrainingPhase
from loopkit.data import TensorLoader
from loopkit.errors import PhaseError, PluginError
from loopkit.metrics import Accuracy
from loopkit.plugins import DDP, ClipGradNorm, Freeze, Metrics, MixedPrecision
from loopkit_recipes import MicroBatch, micro_batch

INPUTS = torch.randn(44, 6, generator=torch.Generator().manual_seed(0))
TARGETS = (INPUTS.sum(1) > 0).long()


class Small(nn.Module):
    """Memory for so many samples, in the forward or in the backward."""

    def __init__(self, most, where="forward"):
        super().__init__()
        self.most, self.where, self.seen = most, where, []

    def forward(self, x):
        self.seen.append(len(x))
        if len(x) > self.most and self.where == "forward":
            raise torch.OutOfMemoryError("out of memory")
        if len(x) > self.most and x.requires_grad:
            x = x * 1.0
            x.register_hook(self.fail)
        return x

    def fail(self, grad):
        raise torch.OutOfMemoryError("out of memory")


def adamw(params):
    return torch.optim.AdamW(params, 0.1)


def data(samples=44, batch_size=20):
    return TensorLoader(INPUTS[:samples], TARGETS[:samples], batch_size=batch_size)


def made(*plugins, most=1000, where="forward", noisy=True, phase=None, **options):
    torch.manual_seed(0)
    small = Small(most, where)
    parts = [nn.BatchNorm1d(8), nn.Dropout(0.3)] if noisy else []
    model = nn.Sequential(nn.Linear(6, 8), *parts, small, nn.ReLU(), nn.Linear(8, 3))
    phases = {} if phase is None else {"phases": [phase]}
    learner = Learner(model, nn.CrossEntropyLoss(), adamw, plugins=plugins, standard=False, **phases, **options)
    learner.small = small.seen
    return learner


def fit(learner, loader=None, epochs=2):
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        learner.fit(loader or data(), epochs=epochs)
    return learner


def bits(learner):
    moments = [value for state in learner.optimizer.state.values() for value in state.values()]
    tensors = [*learner.model.state_dict().values(), *moments, torch.get_rng_state()]
    return [tensor.tolist() for tensor in tensors], learner.metrics, learner.progress.updates


def test_parts_are_bitwise_the_loop_by_hand():
    learner, by_hand = fit(made(MicroBatch(8))), made()
    torch.manual_seed(1)
    model, optimizer = by_hand.model, by_hand.optimizer
    for _ in range(2):
        for inputs, targets in data():
            for first in range(0, len(inputs), 8):
                part = slice(first, first + 8)
                loss = nn.functional.cross_entropy(model(inputs[part]), targets[part])
                loss.backward(torch.full((), len(inputs[part]) / len(inputs)))
            optimizer.step()
            optimizer.zero_grad()
    by_hand.progress.updates = learner.progress.updates
    assert bits(learner) == bits(by_hand)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_gradient_is_that_of_the_whole_batch(reduction):
    whole, parts = made(noisy=False), made(MicroBatch(7), noisy=False)
    grads = []
    for learner in (whole, parts):
        learner.loss_fn = nn.CrossEntropyLoss(reduction=reduction)
        learner.add(on("update_begin", lambda step: grads.append(torch.cat([p.grad.flatten() for p in step.params]))))
        fit(learner, data(20), epochs=1)
    assert torch.allclose(*grads, rtol=1e-5, atol=1e-7)  # the sums are of other parts
    assert parts.small == [7, 7, 6]


def test_step_has_afterwards_what_the_whole_batch_would_have():
    seen, log = [], EventLog()
    look = on("step_end", lambda step: seen.append((step.inputs, step.targets, step.outputs, step.loss)))
    plugins = [MicroBatch(8), look, log, Metrics(Accuracy())]
    learner = fit(made(*plugins, noisy=False), data(20), epochs=1)
    (inputs, targets, outputs, loss) = seen[0]
    assert torch.equal(inputs, INPUTS[:20])
    assert torch.equal(targets, TARGETS[:20])
    assert outputs.shape == (20, 3)
    assert not outputs.requires_grad
    assert torch.allclose(loss, nn.functional.cross_entropy(outputs, targets))  # the mean of parts is rounded otherwise
    assert learner.metrics["train/accuracy"] == (outputs.argmax(1) == targets).sum().item() / 20
    part = "forward_begin loss_begin backward_begin backward_end"
    assert f"train 0: step_begin {part} {part} {part} update_begin update_end step_end" in log.lines


def test_batch_that_fits_is_bitwise_the_phases_own_step():
    assert bits(fit(made(MicroBatch("auto"), Metrics()))) == bits(fit(made(Metrics())))


STACKS = {
    "alone": lambda: [],
    "clipped": lambda: [ClipGradNorm(0.1), Metrics(Accuracy())],
    "mixed": lambda: [MixedPrecision("bfloat16")],
}


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("stack", STACKS)
def test_run_out_of_memory_is_bitwise_the_run_with_the_size_that_fits(stack, accumulate, where, capsys):
    tried = made(MicroBatch("auto"), *STACKS[stack](), most=7, where=where, accumulate=accumulate)
    fixed = made(MicroBatch(5), *STACKS[stack](), accumulate=accumulate)
    assert bits(fit(tried)) == bits(fit(fixed))
    assert tried.small[:3] == [20, 10, 5]
    assert max(tried.small[2:]) == 5
    assert capsys.readouterr().err.splitlines() == [
        "loopkit: a part of 20 samples does not fit in memory: from now on they are of 10",
        "loopkit: a part of 10 samples does not fit in memory: from now on they are of 5",
    ]


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_step_with_gradients_before_it_is_repeated_with_them(where):
    def growing(learner):
        loader = [(INPUTS[:6], TARGETS[:6]), (INPUTS[6:18], TARGETS[6:18])]
        return fit(learner, loader, epochs=3)

    tried = growing(made(MicroBatch("auto"), most=7, where=where, accumulate=2))
    assert bits(tried) == bits(growing(made(MicroBatch(6), accumulate=2)))


def test_run_goes_on_with_what_has_fitted():
    whole = made(MicroBatch("auto"), most=7)
    fit(whole)
    first = made(MicroBatch("auto"), most=7)
    first.add(on("step_end", lambda learner: learner.progress.steps == 4 and learner.pause("test"), "pausing"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(1)
        first.fit(data(), epochs=2, on_interrupt="return")
        first.remove("pausing")
        again = made(MicroBatch("auto"), most=7)
        again.load_state_dict(first.state_dict())
        again.fit(data(), epochs=2)
    assert max(again.small) == 5
    assert bits(again) == bits(whole)


def test_one_sample_that_does_not_fit_is_an_error():
    with pytest.raises(torch.OutOfMemoryError):
        made(MicroBatch("auto"), most=0, noisy=False).fit(data(), epochs=1)


def test_update_that_does_not_fit_is_not_repeated():
    def fail():
        raise torch.OutOfMemoryError("out of memory")

    learner = made(MicroBatch("auto"), on("optimizer_step", fail), noisy=False)
    with pytest.raises(torch.OutOfMemoryError):
        learner.fit(data(), epochs=1)
    assert learner.small == [20]


def test_fixed_size_that_does_not_fit_is_an_error():
    with pytest.raises(torch.OutOfMemoryError):
        made(MicroBatch(10), most=7, noisy=False).fit(data(), epochs=1)


def test_model_that_sees_a_batch_as_one_is_warned_of_once():
    with pytest.warns(
        UserWarning, match="in parts of 8, and the model has BatchNorm1d and Dropout: it is not"
    ) as caught:
        made(MicroBatch(8)).fit(data(), epochs=2)
    assert len(caught) == 1
    made(MicroBatch(8), noisy=False).fit(data(), epochs=1)
    made(MicroBatch("auto")).fit(data(), epochs=1)  # nothing is split


class OwnStep(TrainingPhase):
    def step(self, learner, step):
        super().step(learner, step)


class Weighs(TrainingPhase):
    def loss(self, learner, outputs, targets):
        self.running.weight = 3.0
        return super().loss(learner, outputs, targets)


def test_phase_with_a_step_of_its_own_is_refused():
    with pytest.raises(PluginError, match=r"OwnStep has its own step: give smaller batches"):
        made(MicroBatch(8), phase=OwnStep()).fit(data(), epochs=1)


def test_weights_of_the_phase_are_refused():
    phase = Weighs()
    keep = on("step_begin", lambda step: setattr(phase, "running", step))
    with pytest.raises(PhaseError, match=r"sets step.weight"):
        made(MicroBatch(8), keep, phase=phase, noisy=False).fit(data(), epochs=1)


def test_batch_that_cannot_be_split_is_refused():
    with pytest.raises(PhaseError, match=r"batch of 4 samples cannot be split: it holds Tensor\[3\]"):
        made(MicroBatch(2), noisy=False).fit([(INPUTS[:4], TARGETS[:3])], epochs=1)


class Scalars(TrainingPhase):
    def forward(self, learner, inputs):
        outputs = learner.model(inputs)
        return {"all": [outputs, None], "mean": outputs.mean()}

    def loss(self, learner, outputs, targets):
        return learner.loss_fn(outputs["all"][0], targets)


def test_outputs_that_cannot_be_joined_are_refused():
    with pytest.raises(PhaseError, match=r"step.outputs is Tensor\[\] float32 cpu, and MicroBatch cannot join"):
        made(MicroBatch(8), phase=Scalars(), noisy=False).fit(data(), epochs=1)


@pytest.mark.parametrize("size", [0, -1, True, 2.0, "all"])
def test_size_is_refused(size):
    with pytest.raises(PluginError, match="it is a whole number, from 1, or 'auto'"):
        MicroBatch(size)


def test_plugin_keeps_the_contract():  # which takes seconds: all of its checks, but for the phases that are refused
    check_plugin(MicroBatch, skip=("unknown_phases",))


@pytest.mark.filterwarnings("ignore:plugin 'micro_batch' takes batches in parts")
def test_parts_declare_what_they_use():
    check_plugin(lambda: MicroBatch(2), checks=("declared_access",))


def in_process(rank, size, most, accumulate):
    learner = made(DDP(), MicroBatch(size), Metrics(), most=most if rank else 1000, accumulate=accumulate)
    return bits(fit(learner)), learner.small[:3]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_processes_take_smaller_parts_together(accumulate):
    tried = run(in_process, 2, "auto", 3, accumulate)
    fixed = run(in_process, 2, 2, 1000, accumulate)
    assert [small for _, small in tried] == [[20, 10, 10], [20, 10, 5]]
    for rank in (0, 1):
        assert tried[rank][0][1:] == fixed[rank][0][1:]
        assert tried[rank][0][0] == fixed[rank][0][0]


def test_sharded_parameters_are_refused(monkeypatch):
    monkeypatch.setattr(micro_batch.sharded, "is_sharded", lambda value: True)
    with pytest.raises(PluginError, match="the parameters are sharded"):
        fit(made(MicroBatch(2)))


def with_synced_norms(rank, size, trains):
    """What a fit of two processes says, one of whose layers waits for the other process in a forward that trains."""
    model = nn.Sequential(nn.Linear(6, 8), nn.SyncBatchNorm(8), nn.Linear(8, 3))
    plugins = [DDP(overlap=False), MicroBatch(size), *([] if trains else [Freeze("1")])]
    learner = Learner(model, nn.CrossEntropyLoss(), adamw, plugins=plugins, standard=False)
    try:
        fit(learner, epochs=1)
    except (PluginError, ValueError) as error:
        return str(error)
    return "fitted"


def test_synced_norms_are_refused_where_sizes_are_found():
    for said in run(with_synced_norms, 2, "auto", True):
        assert said.startswith(
            "plugin 'micro_batch', phase 'train': layer '1' of model 'model' is a SyncBatchNorm. Where memory runs out"
        )
    assert run(with_synced_norms, 2, "auto", False) == ["fitted", "fitted"]
    for said in run(with_synced_norms, 2, 2, True):  # torch has no synced norm on a CPU
        assert "SyncBatchNorm expected input tensor to be on GPU" in said
