from __future__ import annotations

import copy
import math
import statistics

import pytest
import torch
from helpers import EventLog, batches, make_learner

from loopkit import TrainingPhase, ValidationPhase, hookimpl
from loopkit.errors import PluginError
from loopkit.plugins import SkipSpikes
from loopkit.plugins.mixed_precision import MixedPrecision


def scaled(losses):
    """A learner whose loss in step i is ``losses[i]``, with a gradient."""
    return [(torch.full((1, 3), value), torch.zeros(1, 1)) for value in losses]


def level(outputs, targets):
    return outputs.mean()


def run(losses, plugin, learner=None):
    if learner is None:
        learner = make_learner(plugin, EventLog(), lr=0.0)
        learner.loss_fn = level
        with torch.no_grad():
            learner.model.weight.fill_(1 / 3)
            learner.model.bias.zero_()
    learner.run("train", scaled(losses))
    return learner


def skipped_steps(learner):
    lines = learner.plugins["event_log"].lines
    return [int(line.split(":")[0].split()[1]) for line in lines if "step_cancelled" in line]


def test_a_loss_above_mean_and_so_many_deviations_is_skipped():
    good = [1.0, 2.0, 3.0, 4.0]
    edge = statistics.fmean(good) + 2 * statistics.pstdev(good)
    assert skipped_steps(run([*good, edge + 0.01, 2.0], SkipSpikes(2.0, warmup=4))) == [4]
    assert skipped_steps(run([*good, edge - 0.01, 2.0], SkipSpikes(2.0, warmup=4))) == []


def test_nothing_is_skipped_before_the_warmup_is_over():
    assert skipped_steps(run([1.0, 1.5, 1.0, 50.0], SkipSpikes(2.0, warmup=4))) == []
    assert skipped_steps(run([1.0, 1.5, 1.0, 50.0], SkipSpikes(2.0, warmup=3))) == [3]


def test_low_losses_are_never_spikes():
    assert skipped_steps(run([1.0, 1.5, 1.0, 1.5, -50.0], SkipSpikes(2.0, warmup=4))) == []


def test_spikes_do_not_move_what_is_compared_with():
    plugin = SkipSpikes(2.0, warmup=4)
    run([1.0, 2.0, 1.0, 2.0, 90.0, 1.0], plugin)
    assert plugin.state_dict()["losses"]["train"] == pytest.approx([1.0, 2.0, 1.0, 2.0, 1.0])  # float32 losses
    assert plugin.skipped == 1


def test_only_the_window_is_remembered():
    plugin = SkipSpikes(1e9, warmup=2, window=3)
    run([1.0, 2.0, 3.0, 4.0, 5.0], plugin)
    assert plugin.state_dict()["losses"]["train"] == pytest.approx([3.0, 4.0, 5.0])  # float32 losses


def test_equal_losses_may_rise_by_what_one_percent_allows():
    assert skipped_steps(run([2.0, 2.0, 2.05], SkipSpikes(3.0, warmup=2))) == []
    assert skipped_steps(run([2.0, 2.0, 2.07], SkipSpikes(3.0, warmup=2))) == [2]


def test_a_new_level_is_accepted_after_so_many_skips_in_a_row():
    learner = run([1.0, 2.0, 9.0, 9.0, 9.0, 9.0, 90.0], SkipSpikes(3.0, warmup=2, max_skips=2))
    assert skipped_steps(learner) == [2, 3, 6]


def test_a_good_step_ends_the_row():
    learner = run([1.0, 2.0, 9.0, 9.0, 1.0, 9.0, 9.0], SkipSpikes(3.0, warmup=2, max_skips=2))
    assert skipped_steps(learner) == [2, 3, 5, 6]


def test_losses_that_are_not_finite_are_left_alone():
    plugin = SkipSpikes(3.0, warmup=2)
    learner = run([1.0, 2.0, math.nan, 1.0], plugin)
    assert skipped_steps(learner) == []
    assert plugin.state_dict() == {"losses": {"train": pytest.approx([1.0, 2.0])}, "row": 0, "skipped": 0}


def test_training_is_as_if_the_batch_had_not_been_there():
    data = batches(30)
    spike = (data[25][0] * 100, data[25][1])
    one = make_learner(SkipSpikes(), lr=0.01)
    one.run("train", [*data[:25], spike, *data[26:]])
    other = make_learner(lr=0.01)
    other.run("train", [*data[:25], *data[26:]])
    assert one.plugins["skip_spikes"].skipped == 1
    assert torch.equal(one.model.weight, other.model.weight)


def test_only_the_first_backward_of_a_step_counts():
    class Twice(TrainingPhase):
        def step(self, learner, step):
            for factor in (1.0, 100.0):
                step.loss = learner.model(step.batch[0]).mean() * factor
                step.backward(step.loss)
            step.update()

    plugin = SkipSpikes(2.0, warmup=2)
    learner = make_learner(plugin, phases=[Twice()], lr=0.0)
    learner.run("train", batches(4))
    assert len(plugin.state_dict()["losses"]["train"]) + plugin.skipped == 4


def test_state_goes_on_exactly():
    losses = [1.0, 2.0, 9.0, 9.0, 9.0, 9.0, 90.0, 9.0, 9.5, 99.0]
    straight = run(losses, SkipSpikes(3.0, warmup=2, max_skips=2))
    for cut in range(1, len(losses)):
        first, second = SkipSpikes(3.0, warmup=2, max_skips=2), SkipSpikes(3.0, warmup=2, max_skips=2)
        run(losses[:cut], first)
        state = first.state_dict()
        kept = copy.deepcopy(state)
        second.load_state_dict(state)
        run(losses[cut:], second)
        assert second.state_dict() == straight.plugins["skip_spikes"].state_dict()
        assert state == kept


def test_the_loss_on_an_accelerator_is_read_only_if_asked_for():
    learner = make_learner(SkipSpikes(), MixedPrecision("float32"), model=torch.nn.Linear(3, 1, device="meta"))
    data = [(x.to("meta"), y.to("meta")) for x, y in batches(1)]
    with pytest.raises(PluginError, match=r"the loss is on meta.*give wait=True"):
        learner.run("train", data)


@pytest.mark.parametrize(
    "options", [{"threshold": 0}, {"threshold": math.inf}, {"warmup": 1}, {"warmup": 9, "window": 8}, {"max_skips": 0}]
)
def test_arguments_out_of_range_are_refused(options):
    with pytest.raises(PluginError, match=str(next(iter(options)))):
        SkipSpikes(**options)


class TwoBackwards(TrainingPhase):
    def step(self, learner, step):
        step.inputs, step.targets = step.batch
        step.outputs = learner.model(step.inputs)
        step.loss = step.outputs.mean()
        step.backward(step.loss, retain_graph=True)
        step.backward(100 * step.loss)
        step.update()


class Evaluates:
    """Evaluates in the middle of a step's end."""

    name = "a_probe"

    @hookimpl(phase="training")
    def step_end(self, learner):
        learner.evaluate(scaled([7.0]))


def test_the_first_backward_counts_even_if_a_hook_evaluates():
    plugin = SkipSpikes(3.0, warmup=2)
    learner = make_learner(plugin, Evaluates(), lr=0.0, phases=[TwoBackwards(), ValidationPhase()])
    learner.loss_fn = level
    with torch.no_grad():
        learner.model.weight.fill_(1 / 3)
        learner.model.bias.zero_()
    learner.run("train", scaled([1.0, 2.0, 3.0]))
    assert plugin.state_dict()["losses"]["train"] == pytest.approx([1.0, 2.0, 3.0])


def test_the_first_three_skips_are_told(capsys):
    run([1.0, 2.0, 9.0, 9.0, 9.0, 9.0], SkipSpikes(3.0, warmup=2, max_skips=9))
    lines = [line for line in capsys.readouterr().err.splitlines() if "is a spike" in line]
    assert len(lines) == 3
    assert lines[0] == (
        "loopkit: skip_spikes: the loss 9 is a spike: the last good ones are 1.5 +- 0.5; the step is skipped (1 so far)"
    )


class ByHand:
    """Takes the step without the events inside it."""

    @hookimpl(phase="training")
    def take_step(self, learner, step):
        inputs, targets = step.batch
        loss = learner.loss_fn(learner.model(inputs), targets)
        step.applied({"inputs": inputs, "targets": targets, "loss": loss}, {})


def test_loss_that_nobody_has_compared_is_not_remembered():
    plugin = SkipSpikes(3.0, warmup=2)
    learner = make_learner(plugin, ByHand(), lr=0.0)
    learner.loss_fn = level
    learner.run("train", scaled([1.0, 2.0, 3.0]))
    assert plugin.state_dict()["losses"].get("train", []) == []
