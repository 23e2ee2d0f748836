"""A plugin in the place of the phase's own step, and what it hands back to the engine."""

from __future__ import annotations

import pytest
import torch
from helpers import EventLog, on
from torch import nn

from loopkit import CancelStep, Learner, TrainingPhase, hookimpl, metrics
from loopkit.errors import PluginConflict, PluginError, StepResultError
from loopkit.plugins import GradNorm, Metrics, throttle
from loopkit.plugins.schedule import Schedule
from loopkit.schedules import cosine


def make(*plugins, phase=None, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    phases = {"phases": [phase]} if phase is not None else {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return Learner(model, nn.CrossEntropyLoss(), optimizer, standard=False, plugins=plugins, **phases, **options)


def batches(count=5, size=6):
    rng = torch.Generator().manual_seed(0)
    return [(torch.randn(size, 4, generator=rng), torch.arange(size) % 3) for _ in range(count)]


class ByHand:
    """The step as a script would have it."""

    name = "by_hand"

    def __init__(self, skipped=()):
        self.skipped = skipped
        self.taken = 0

    @hookimpl(phase=TrainingPhase)
    def take_step(self, learner, step, default):
        if (state := step.window_state[0]).seed is None:
            default()
            return
        self.taken += 1
        inputs, targets = step.batch
        outputs = learner.model(inputs)
        loss = learner.loss_fn(outputs, targets)
        params = list(learner.model.parameters())
        grads = torch.autograd.grad(loss, params, torch.full_like(loss, state.seed))
        if state.steps:
            grads = [p.grad + grad for p, grad in zip(params, grads, strict=True)]
        applied = step.index not in self.skipped
        if state.due and applied:
            for p, grad in zip(params, grads, strict=True):
                p.grad = grad
            learner.optimizer.step()
        values = {"inputs": inputs, "targets": targets, "outputs": outputs, "loss": loss}
        step.applied(values, {state.name: grads}, applied)


def stack():
    return Metrics(metrics.Accuracy()), Schedule(cosine(20))


@pytest.mark.parametrize("accumulate", [1, 2, 3])
def test_step_taken_by_a_plugin_is_bitwise_the_phases_own(accumulate):
    plain, taken, by_hand = make(*stack(), accumulate=accumulate), None, ByHand()
    taken = make(*stack(), by_hand, accumulate=accumulate)
    for learner in (plain, taken):
        learner.fit(batches(), epochs=2)
    for one, other in zip(plain.model.parameters(), taken.model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert plain.progress == taken.progress
    assert plain.metrics == taken.metrics
    assert plain.optimizer.param_groups[0]["lr"] == taken.optimizer.param_groups[0]["lr"]
    assert by_hand.taken == (10 if accumulate == 1 else 8)  # the last window stays short: its gradients are rescaled


@pytest.mark.filterwarnings("ignore:phase 'train'. TrainingPhase.emits lists")  # events inside the step do not come
def test_step_taken_by_a_plugin_fires_what_comes_after_it():
    log = EventLog()
    make(ByHand(skipped=(1,)), log).fit(batches(2), epochs=1)
    steps = [line for line in log.lines if line.startswith("train ")]
    assert steps == ["train 0: step_begin update_end step_end", "train 1: step_begin update_skipped step_end"]


def test_skipped_update_is_not_counted_and_its_gradients_are_gone():
    learner, reasons = (
        make(ByHand(skipped=(1,)), on("update_skipped", lambda step: reasons.append(step.skip_reason))),
        [],
    )
    learner.fit(batches(3), epochs=1)
    assert (learner.progress.steps, learner.progress.updates) == (3, 2)
    assert reasons == ["the parameters were left as they are"]
    assert all(p.grad is None for p in learner.model.parameters())


def test_gradients_are_there_when_the_update_has_been_made():
    seen = []
    look = on("update_end", lambda step: seen.append([p.grad is not None for p in step.params]))
    make(ByHand(), look).fit(batches(1), epochs=1)
    assert seen == [[True] * 4]


def test_window_state_says_what_a_step_finds():
    seen = []

    def look(step, default, **_):
        seen.extend((state.steps, state.due, state.seed) for state in step.window_state)
        default()

    make(on("take_step", look, phase=TrainingPhase), accumulate=2).fit([*batches(4), *batches(1, size=3)], epochs=1)
    assert seen == [(0, False, 0.5), (1, True, 0.5), (0, False, 0.5), (1, True, 0.5), (0, True, None)]
    seen.clear()
    make(on("take_step", look, phase=TrainingPhase), accumulate=2).fit([*batches(1), *batches(1, size=3)], epochs=1)
    assert seen == [(0, False, 0.5), (1, True, None)]


def test_default_is_the_phases_own_step():
    plain, taken = make(), make(on("take_step", lambda default, **_: default()))
    for learner in (plain, taken):
        learner.fit(batches(), batches(2), epochs=1)
    for one, other in zip(plain.model.parameters(), taken.model.parameters(), strict=True):
        assert torch.equal(one, other)


class Broken(TrainingPhase):
    def __init__(self, act):
        super().__init__()
        self.act = act

    def step(self, learner, step):
        return self.act()


def test_error_of_the_phase_is_not_said_to_be_the_plugins():
    def act():
        raise ValueError("oh")

    with pytest.raises(ValueError, match="oh") as caught:
        make(on("take_step", lambda default, **_: default()), phase=Broken(act)).fit(batches(1), epochs=1)
    assert [note for note in caught.value.__notes__ if "Broken.step, phase 'train'" in note and "batch" in note]


def test_cancel_of_the_phase_is_the_phases():
    by = []

    def act():
        cancel = CancelStep("enough")
        by.append(cancel)
        raise cancel

    learner = make(on("take_step", lambda default, **_: default()), phase=Broken(act))
    learner.run("train", batches(1))
    assert [cancel.by for cancel in by] == ["phase train"]


def test_result_of_the_phase_is_refused_although_the_plugin_drops_it():
    with pytest.raises(StepResultError, match=r"Broken.step returned int"):
        make(on("take_step", lambda default, **_: default()), phase=Broken(lambda: 3)).fit(batches(1), epochs=1)


def test_error_of_the_plugin_is_its_own():
    def act(**_):
        raise ValueError("oh")

    with pytest.raises(ValueError, match="oh") as caught:
        make(on("take_step", act)).fit(batches(1), epochs=1)
    assert caught.value.__notes__ == ["loopkit: in take_step of plugin 'acting', phase 'train', epoch 1, step 0"]


def test_two_plugins_in_the_place_of_the_step_are_refused():
    with pytest.raises(PluginConflict, match="'a' and 'b' both implement take_step in phase 'train': keep one"):
        make(*(on("take_step", lambda default, **_: default(), name) for name in "ab"))


def test_taken_step_that_trains_nothing_is_refused():
    with pytest.raises(StepResultError, match=r"called no step.backward\(loss\)"):
        make(on("take_step", lambda **_: None)).fit(batches(1), epochs=1)


# What may be recorded


def test_traced_is_a_tuple_of_names():
    with pytest.raises(PluginError, match=r"hookimpl\(traced=...\) is the string 'norm': write a tuple, \('norm',\)"):
        hookimpl(traced="norm")


def test_traced_is_kept_with_the_other_options():
    assert GradNorm.update_begin.loopkit_options.traced == ("last", "_measured")
    assert GradNorm.update_end.loopkit_options.traced is None


def test_throttled_hook_is_not_to_be_recorded():
    assert throttle(GradNorm(), every=2).update_begin.loopkit_options.traced is None


RECORDED = [
    metrics.Mean("loss"),
    metrics.FunctionMetric(lambda outputs, targets: outputs.sum(1), "sums"),
    metrics.Accuracy(),
    metrics.Accuracy(ignore_index=1),
]


def feed(metric, inputs, targets):
    if isinstance(metric, metrics.Mean):
        metric.add(inputs.sum(), len(inputs))
    else:
        metric.update(inputs, targets)


@pytest.mark.parametrize("metric", RECORDED, ids=lambda metric: metric.name)
@pytest.mark.parametrize("at", [0, 2])
def test_metric_whose_state_is_tensors_has_the_same_value(metric, at):
    values = []
    for as_tensors in (False, True):
        metric.reset()
        for number, (inputs, targets) in enumerate(batches(4)):
            if as_tensors and number == at:
                state = metric.tensors()
                assert state.keys() == metric.state_dict().keys()
                assert all(isinstance(value, torch.Tensor) for value in state.values())
            feed(metric, inputs, targets)
        values.append(float(metric.compute()))
    assert values[0] == values[1]


def test_binary_accuracy_as_tensors_has_the_same_value():
    metric, values = metrics.BinaryAccuracy(from_logits=True), []
    for as_tensors in (False, True):
        metric.reset()
        if as_tensors:
            metric.tensors()
        metric.update(torch.tensor([1.0, -1.0, 2.0]), torch.tensor([1, 1, 0]))
        values.append(float(metric.compute()))
    assert values == [1 / 3, 1 / 3]


def test_metric_that_says_nothing_of_tensors_has_to_be_called():
    assert metrics.F1().tensors() is None
    asked = []

    def ask(plugin):
        return on("step_end", lambda learner, epoch, **_: asked.append(plugin.traced_metrics(learner, epoch)))

    for plugin in (Metrics(metrics.Accuracy()), Metrics(metrics.Accuracy(), metrics.F1())):
        make(plugin, ask(plugin)).run("train", batches(1))
    assert [None if each is None else [metric.name for metric in each] for each in asked] == [
        ["loss", "accuracy"],
        None,
    ]
