"""A plugin with a state belongs to one learner."""

from __future__ import annotations

import copy
import gc
import threading

import pytest
import torch
from helpers import batches, make_learner, on

from loopkit import CancelStep, fresh, hookimpl
from loopkit.criteria import NumberSinceBest, TimeLimit
from loopkit.errors import PluginConflict
from loopkit.plugins import (
    Checkpoint,
    EarlyStopping,
    History,
    LogTo,
    Metrics,
    Plateau,
    Schedule,
    SkipSpikes,
    TorchSchedule,
    WeightAverage,
    throttle,
)
from loopkit.schedules import cosine

BELONGS = r"belongs to one learner: it was used by another learner.*fresh\(plugin\)"


class Counts:
    """A plugin of the user's own with a state."""

    def __init__(self) -> None:
        self.count = 0

    @hookimpl
    def step_end(self):
        self.count += 1

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


def steps(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 1)


STATEFUL = {
    "early stopping": lambda path: EarlyStopping("val/loss", restore_best=True),
    "criterion": lambda path: EarlyStopping("val/loss", criterion=NumberSinceBest(3) | TimeLimit(60.0)),
    "schedule": lambda path: Schedule(cosine()),
    "torch's schedule": lambda path: TorchSchedule(steps),
    "plateau": lambda path: Plateau("val/loss"),
    "average": lambda path: WeightAverage(0.9),
    "spikes": lambda path: SkipSpikes(),
    "history": lambda path: History(),
    "checkpoint": lambda path: Checkpoint(path / "run"),
    "throttled": lambda path: throttle(Counts(), every=1),
    "own": lambda path: Counts(),
}


def learner_of(plugin):
    return make_learner(plugin, *([] if isinstance(plugin, Metrics) else [Metrics()]))


def fit(learner):
    learner.fit(batches(3), batches(2), epochs=1)
    return learner


@pytest.mark.parametrize("make", STATEFUL.values(), ids=STATEFUL)
def test_plugin_with_a_state_raises_in_the_fit_of_a_second_learner(make, tmp_path):
    plugin = make(tmp_path)
    first = fit(learner_of(plugin))
    second = learner_of(plugin)
    with pytest.raises(PluginConflict, match=BELONGS):
        fit(second)
    assert second.current is None
    fit(first)  # which it belongs to


@pytest.mark.parametrize("make", STATEFUL.values(), ids=STATEFUL)
def test_plugin_that_was_removed_is_free(make, tmp_path):
    plugin = make(tmp_path)
    first = fit(learner_of(plugin))
    first.remove(next(name for name, each in first.plugins.items() if each is plugin))
    if isinstance(plugin, (TorchSchedule, Plateau, WeightAverage, Checkpoint)):
        plugin = fresh(plugin)  # of the other model, or with its checkpoints
        if isinstance(plugin, Checkpoint):
            plugin = Checkpoint(tmp_path / "other")
    fit(learner_of(plugin))


@pytest.mark.parametrize("make", STATEFUL.values(), ids=STATEFUL)
def test_plugin_of_a_learner_that_was_never_fitted_can_be_used_by_another(make, tmp_path):
    plugin = make(tmp_path)
    learner_of(plugin)
    fit(learner_of(plugin))


@pytest.mark.parametrize("make", [each for name, each in STATEFUL.items() if name != "checkpoint"])
def test_fresh_plugins_train_a_sweep_as_plugins_made_by_hand_do(make, tmp_path):
    plugin = make(tmp_path)
    ends = [fit(learner_of(each)).model.weight for each in (plugin, fresh(plugin), make(tmp_path))]
    assert torch.equal(ends[0], ends[1])
    assert torch.equal(ends[0], ends[2])


def test_plugin_in_a_for_loop_raises_though_the_first_learner_is_gone():
    plugin = Counts()
    fit(learner_of(plugin))
    gc.collect()
    with pytest.raises(PluginConflict, match=BELONGS):
        fit(learner_of(plugin))


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_copy_of_a_plugin_that_was_used_raises_in_another_learner(copied):
    plugin = Counts()
    fit(learner_of(plugin))
    with pytest.raises(PluginConflict, match=BELONGS):
        fit(learner_of(copied(plugin)))


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_copy_of_a_plugin_that_was_not_used_is_another_one(copied):
    plugin = Counts()
    first = learner_of(plugin)
    fit(learner_of(copied(plugin)))
    fit(first)


def test_plugin_raises_while_another_learner_uses_it_in_another_thread():
    plugin, inside, done = Counts(), threading.Event(), threading.Event()

    def wait(**_):
        inside.set()
        assert done.wait(20)

    first = make_learner(plugin, on("fit_begin", wait))
    thread = threading.Thread(target=lambda: first.fit(batches(1), epochs=1, on_interrupt=None))
    thread.start()
    try:
        assert inside.wait(20)
        with pytest.raises(PluginConflict, match="another learner uses it in a fit that is running"):
            make_learner(plugin).fit(batches(1), epochs=1)
    finally:
        done.set()
        thread.join()


def test_plugin_raises_if_it_is_added_in_a_fit():
    plugin = Counts()
    fit(learner_of(plugin))
    learner = make_learner(Metrics())
    added = []

    def add(**_):
        with pytest.raises(PluginConflict, match=BELONGS):
            learner.add(plugin)
        added.append(True)

    learner.add(on("epoch_begin", add))
    learner.fit(batches(1), epochs=1)
    assert added
    assert "counts" not in learner.plugins


def test_plugin_that_an_evaluation_has_moved_belongs_to_its_learner():
    plugin = Counts()
    learner_of(plugin).evaluate(batches(2))
    with pytest.raises(PluginConflict, match=BELONGS):
        fit(learner_of(plugin))


def test_plugin_that_says_so_is_shared(tmp_path):
    class Budget(Counts):
        shared = True

        @hookimpl
        def step_begin(self):
            if self.count >= 4:
                raise CancelStep("the budget is spent")

    budget, log = Budget(), LogTo(tmp_path / "log.jsonl")
    for _ in range(2):
        make_learner(budget, log).fit(batches(3), epochs=1)
    assert budget.count == 4


def test_metrics_of_a_second_learner_start_from_nothing():
    metrics = Metrics()
    values = [make_learner(metrics).evaluate(batches(2)) for _ in range(2)]
    assert values[0] == values[1]


def test_state_of_a_plugin_that_was_loaded_by_hand_is_used():
    plugin = Counts()
    learner = learner_of(plugin)
    plugin.load_state_dict({"count": 5})
    fit(learner)
    assert plugin.count == 5 + 3 + 2
