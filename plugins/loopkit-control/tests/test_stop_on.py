"""Criteria on updates: what they are asked, when the fit ends, and that a run goes on between two questions."""

import pytest
import torch
from helpers import on
from loopkit_testing import check_plugin
from torch import nn
from training import INPUTS, TARGETS, bits, data, made

from loopkit.criteria import Criterion, Divergence, InvalidValue, NumberLimit, NumberSinceBest
from loopkit.data import TensorLoader
from loopkit.errors import PluginError
from loopkit_control import ProgressQuotient, StopOn


class Seen(Criterion):
    """Notes the values, and never stops."""

    fields = ("values",)

    def __init__(self):
        self.values = []

    def update(self, value, mode="min"):
        self.values = [*self.values, value]
        return ""


@pytest.mark.parametrize("accumulate", [1, 2])
def test_criterion_sees_the_mean_of_the_steps_of_so_many_updates(accumulate):
    losses = []
    note = on("step_end", lambda step: losses.append(step.loss.double().item()), "note")
    plugin = StopOn(Seen(), every=3)
    made(plugin, note, accumulate=accumulate).fit(data(), epochs=1)
    size = 3 * accumulate
    means = [sum(losses[low : low + size]) / size for low in range(0, len(losses) - size + 1, size)]
    assert plugin.criterion.values == pytest.approx(means, rel=1e-12)  # sums in another order


def test_uneven_batches_count_by_their_samples():
    plugin = StopOn(Seen(), every=3)
    learner = made(plugin)
    learner.optimizer.param_groups[0]["lr"] = 0.0
    learner.remove("sanity_check")  # it warns of a rate of 0
    learner.fit(TensorLoader(INPUTS[:5], TARGETS[:5], batch_size=2), epochs=1)
    with torch.no_grad():
        whole = nn.functional.mse_loss(learner.model(INPUTS[:5]), TARGETS[:5])
    assert plugin.criterion.values == pytest.approx([whole.item()], rel=1e-6)  # float32


def test_divergence_ends_the_fit_in_mid_epoch():
    learner = made(StopOn(Divergence(0.5, relative=True) | InvalidValue(), every=2))
    learner.optimizer.param_groups[0]["lr"] = 3.0
    result = learner.fit(data(), epochs=9)
    assert (result.reason, result.by) == ("stop", "stop_on")
    assert result.updates % 2 == 0 < result.updates % len(data())
    assert "more than 50 % worse than the best" in result.message
    assert result.message.startswith(f"loss after update {result.updates}: ")


@pytest.mark.parametrize("at", [4, 12])
def test_run_goes_on_between_two_questions(at):
    def plugin():
        return StopOn(NumberSinceBest(3, 0.01, relative=True), every=5)

    whole, first, again = made(plugin()), made(plugin()), made(plugin())
    ended = whole.fit(data(), epochs=9)
    assert ended.reason == "stop"
    first.add(on("step_end", lambda learner: learner.progress.steps == at and learner.pause("test"), "pausing"))
    first.fit(data(), epochs=9, on_interrupt="return")
    first.remove("pausing")
    again.load_state_dict(first.state_dict())
    assert again.fit(data(), epochs=9).message == ended.message
    assert bits(whole) == bits(again)


def test_fit_after_one_that_it_ended_begins_anew():
    learner = made(StopOn(NumberLimit(2), every=4))
    assert [learner.fit(data(), epochs=9).updates for _ in range(2)] == [8, 8]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"criterion": 5}, "criterion is 5: give one of loopkit.criteria"),
        ({"criterion": NumberLimit(1), "every": 0}, "every is 0: it is a whole number, from 1"),
        ({"criterion": NumberLimit(1), "mode": "least"}, "mode is 'least'"),
        ({"criterion": ProgressQuotient()}, "compares two series: give it to EarlyStopping"),
    ],
)
def test_stop_on_refuses(given, text):
    with pytest.raises(PluginError, match=text):
        StopOn(**given)


def test_plugin_keeps_the_contract():
    check_plugin(lambda: StopOn(NumberLimit(1000), every=2))


def test_mode_is_asked_for_where_the_number_is_no_loss():
    with pytest.raises(PluginError, match="'reward' is better where it is lower"):
        StopOn(Divergence(5.0), attribute="reward")
    assert StopOn(Divergence(5.0), attribute="critic_loss").mode == "min"
