from __future__ import annotations

import copy
import math
import os
import re
import signal
from contextlib import contextmanager

import pytest
import torch
from helpers import Gap, batches, make_learner, on
from loopkit_testing import check_plugin, tiny_problem

from loopkit import CancelEpoch, every, hookimpl
from loopkit.checkpoint import best, listing
from loopkit.checkpoint.bundle import read_state
from loopkit.criteria import (
    InvalidValue,
    NumberLimit,
    NumberSinceBest,
    Patience,
    Threshold,
    TimeLimit,
    warmup,
)
from loopkit.errors import PluginError
from loopkit.metrics import F1, Accuracy
from loopkit.plugins import Checkpoint, Metrics, Plateau
from loopkit.plugins.early_stopping import EarlyStopping

NAN = math.nan


class Script:
    """Makes the metric ``<phase>/score`` of these values, one per pass, the last one for ever."""

    def __init__(self, *values, phase="val", name="script"):
        self.name = name
        self.phase = phase
        self.values = list(values)
        self.passes = 0

    @hookimpl(writes=lambda plugin: (f"metrics.{plugin.phase}/score",))
    def epoch_end(self, learner, phase):
        if phase.name == self.phase:
            learner.metrics[f"{phase.name}/score"] = self.values[min(self.passes, len(self.values) - 1)]
            self.passes += 1

    def state_dict(self):
        return {"passes": self.passes}

    def load_state_dict(self, state):
        self.passes = state["passes"]


class Snapshots:
    """Keeps the parameters and buffers at the end of each pass of a phase, while its contexts are entered."""

    def __init__(self, phase="val"):
        self.name = "snapshots"
        self.phase = phase
        self.taken = []

    @hookimpl(reads=("params", "buffers"))
    def epoch_end(self, learner, phase):
        if phase.name == self.phase:
            self.taken.append(copy.deepcopy(learner.model.state_dict()))


class Averaged:
    """Halves the parameters for each validation pass, as a plugin would that puts averaged weights in place."""

    name = "averaged"
    provides = "average"
    owns = ("weights",)

    @hookimpl(updates=("params",))
    def epoch_context(self, learner, phase):
        return None if phase.training else self.swapped(learner.model)

    def averaged(self, learner):
        return self.swapped(learner.model)

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass

    @contextmanager
    def swapped(self, model):
        raw = [p.detach().clone() for p in model.parameters()]
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.5)
        try:
            yield
        finally:
            with torch.no_grad():
                for p, value in zip(model.parameters(), raw, strict=True):
                    p.copy_(value)


def run(*plugins, epochs=20, standard=False, **options):
    """Fit the tiny problem; the learner and the result."""
    problem = tiny_problem()
    learner = problem.learner(plugins=plugins, standard=standard)
    torch.manual_seed(0)
    return learner, learner.fit(problem.train, problem.val, epochs=epochs, **options)


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


# Stopping


@pytest.mark.parametrize(
    ("options", "values", "epochs"),
    [
        ({"patience": 2}, [5, 4, 5, 4, 3, 3], 4),
        ({"patience": 1}, [5, 4, 3, 3, 1], 4),
        ({"patience": 2, "mode": "max"}, [1, 2, 1, 1, 3], 4),
        ({"patience": 2, "min_delta": 0.5}, [4, 3.75, 3.5, 1], 3),
        ({"patience": 2}, [NAN, 1, NAN, 0.5, NAN, NAN, 0.1], 6),
        ({"patience": 2}, [1, 0.0, 0.0, 0.0, -1], 4),
        ({"criterion": Patience(2)}, [5, 6, 5, 6, 7, 1], 5),
        ({"criterion": Threshold(0.5)}, [0.7, 0.6, 0.5], 3),
        ({"criterion": Threshold(0.5), "mode": "max"}, [0.1, 0.4, 0.6], 3),
        ({"criterion": InvalidValue() | NumberLimit(4)}, [1, 2, NAN], 3),
        ({"criterion": InvalidValue() | NumberLimit(4)}, [1, 2, 1], 4),
        ({"criterion": warmup(NumberSinceBest(2), 2)}, [0, 0, 5, 4, 5, 6], 6),
    ],
)
def test_fit_ends_in_the_epoch_in_which_the_criterion_fires(options, values, epochs):
    learner, result = run(EarlyStopping("val/score", **{"mode": "min", **options}), Script(*values))
    assert (result.reason, result.by) == ("stop", "early_stopping")
    assert result.epochs == learner.progress.epochs == epochs


def test_result_says_which_criterion_fired_with_what_values():
    _, result = run(EarlyStopping("val/score", patience=2, mode="min"), Script(0.5, 0.25, 0.75, 1.0))
    assert result.message == 'val/score: 0.25 was not improved in 2 values (mode "min"), the last is 1'


@pytest.mark.parametrize(
    "plugin",
    [
        lambda path: EarlyStopping("val/acc", mode="min"),
        lambda path: Checkpoint(path, best="val/acc", mode="min"),
        lambda path: Plateau("val/acc", mode="min"),
        lambda path: EarlyStopping("val/f1/0", mode="min"),
    ],
    ids=["stopping", "checkpoint", "plateau", "one of several"],
)
def test_lowest_of_a_metric_that_is_better_where_it_is_higher_is_warned_about_once(plugin, tmp_path):
    made = plugin(tmp_path / "run")
    makers = Metrics(F1(average=None), acc=Accuracy())
    with pytest.warns(UserWarning, match="mode") as caught:
        run(made, makers, epochs=2)
    text = f'{type(made).__name__}: {made.monitor} is better where it is higher, and mode is "min": leave it out'
    assert [str(each.message) for each in caught] == [text]


def test_each_of_two_plugins_of_a_class_is_warned_about():
    made = (EarlyStopping(f"val/{name}", mode="min", name=name, patience=9) for name in ("acc", "other"))
    with pytest.warns(UserWarning, match="mode") as caught:
        run(*made, Metrics(acc=Accuracy(), other=Accuracy()), epochs=1)
    assert [str(each.message).split()[1] for each in caught] == ["val/acc", "val/other"]


def test_nothing_is_warned_about_where_the_mode_is_right_or_the_metric_does_not_say():
    function = Metrics(Accuracy(), own=lambda outputs, targets: outputs.mean())
    run(
        EarlyStopping("val/accuracy", mode="max"),
        EarlyStopping("val/own", name="second", mode="min"),
        function,
        epochs=1,
    )


class Constant:
    """A metric in the manner of torchmetrics."""

    def __init__(self, higher_is_better):
        self.higher_is_better = higher_is_better

    def update(self, outputs, targets):
        """Sees nothing."""

    def compute(self):
        return 1.0

    def reset(self):
        """Keeps nothing."""

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        """Has kept nothing."""


@pytest.mark.parametrize("higher", [True, False])
def test_mode_is_that_of_the_metric(higher, tmp_path):
    made = EarlyStopping("val/own", patience=1), Plateau("val/own"), Checkpoint(tmp_path, best="val/own")
    assert all(plugin.mode is None for plugin in made)
    _, result = run(*made, Metrics(own=Constant(higher)), epochs=2)
    mode = "max" if higher else "min"
    assert result.message == f'val/own: 1 was not improved in 1 value (mode "{mode}"), the last is 1'
    assert [scheduler["mode"] for scheduler in made[1].state_dict()["schedulers"].values()] == [mode]
    assert best(tmp_path).about["monitored"]["mode"] == mode


@pytest.mark.parametrize("name", ["val/loss", "val/d_loss"])
def test_loss_is_better_where_it_is_lower_whoever_makes_it(name):
    makes = on("epoch_end", lambda learner: learner.metrics.update({name: 1.0}), "makes", writes=(f"metrics.{name}",))
    _, result = run(EarlyStopping(name, patience=1), makes)
    assert 'mode "min"' in result.message


@pytest.mark.parametrize("make", [EarlyStopping, Plateau, lambda name: Checkpoint("run", best=name)])
def test_metric_of_which_nobody_says_when_it_is_better_is_refused_at_the_begin(make, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plugin = make("val/score")
    text = (
        f"plugin {plugin.name!r}: it is unknown whether 'val/score' is better where it is lower or higher: "
        f'give mode="min" or mode="max"'
    )
    made = tiny_problem().learner(plugins=[plugin, Script(1.0)], standard=False)
    with pytest.raises(PluginError, match=re.escape(text)):
        made.fit(tiny_problem().train, tiny_problem().val, epochs=1)
    assert made.progress.steps == 0


def test_criterion_that_does_not_go_by_a_mode_asks_for_none():
    criterion = InvalidValue() | TimeLimit(9e9) | warmup(NumberLimit(2), 1)
    result = run(plugin := EarlyStopping("val/score", criterion=criterion), Script(1.0, 2.0, 3.0), epochs=9)[1]
    assert (result.reason, result.epochs, plugin.best) == ("stop", 3, None)
    for asks in (
        EarlyStopping("val/score", criterion=criterion | Patience(9)),
        EarlyStopping("val/score", criterion=criterion, restore_best=True),
    ):
        with pytest.raises(PluginError, match="it is unknown whether"):
            run(asks, Script(1.0))


def test_checkpoints_that_are_to_be_overwritten_stay_where_a_mode_is_missing(tmp_path):
    tiny_problem().learner(plugins=[Checkpoint(tmp_path)], standard=False).fit(tiny_problem().train, epochs=1)
    before = {path.name for path in tmp_path.iterdir()}
    made = [Checkpoint(tmp_path, overwrite=True), EarlyStopping("val/score"), Script(1.0)]
    with pytest.raises(PluginError, match="it is unknown whether"):
        tiny_problem().learner(plugins=made, standard=False).fit(tiny_problem().train, tiny_problem().val, epochs=1)
    assert {path.name for path in tmp_path.iterdir()} == before


def test_result_is_by_the_plugin_of_its_name():
    stopping = EarlyStopping("val/score", criterion=NumberLimit(1), name="other", mode="min")
    assert run(stopping, Script(1.0))[1].by == "other"


def test_plain_form_is_number_since_best():
    values = [5.0, 4.5, 4.25, 3.0, 3.5, 2.75, 4.0]
    plain = run(EarlyStopping("val/score", patience=2, min_delta=0.5, mode="min"), Script(*values))[1]
    given = run(EarlyStopping("val/score", criterion=NumberSinceBest(2, 0.5), mode="min"), Script(*values))[1]
    assert (plain.epochs, plain.message) == (given.epochs, given.message)


def test_fit_without_a_reason_to_stop_ends_at_its_limit():
    _, result = run(EarlyStopping("val/score", patience=2, mode="min"), Script(3, 2, 1, 0), epochs=4)
    assert (result.reason, result.by, result.epochs) == ("epochs", "", 4)


def test_stop_by_mean_loss_of_the_standard_plugins():
    stopping = EarlyStopping(criterion=NumberLimit(2))
    learner, result = run(stopping, Metrics())
    assert (result.reason, result.epochs) == ("stop", 2)
    assert stopping.best is not None
    assert learner.metrics["val/loss"] >= stopping.best


def test_metric_of_the_training_phase_can_be_monitored():
    _, result = run(EarlyStopping("train/score", patience=1, mode="min"), Script(1, 2, phase="train"))
    assert (result.reason, result.epochs) == ("stop", 2)


def test_validation_in_mid_epoch_stops_before_the_next_step():
    _, result = run(
        EarlyStopping("val/score", criterion=NumberLimit(2), mode="min"), Script(1), validate=every(updates=1)
    )
    assert (result.reason, result.updates, result.steps) == ("stop", 2, 2)


def test_loop_of_ones_own_is_told_to_stop():
    problem = tiny_problem()
    learner = problem.learner(
        plugins=[EarlyStopping("val/score", patience=2, mode="min"), Script(3, 2, 2)], standard=False
    )
    for _ in learner.rounds(epochs=20):
        learner.run("train", problem.train)
        learner.evaluate(problem.val)
    assert learner.progress.epochs == 4


def test_criterion_that_needs_it_is_given_the_training_series():
    training, values = [4, 3, 2, 2.5, 2, 2], [3, 2, 1, 3, 2.75, 2]
    stopping = EarlyStopping("val/score", criterion=Gap(0.5), training="train/score", mode="min")
    _, result = run(stopping, Script(*values), Script(*training, phase="train", name="training"))
    assert (result.epochs, result.message) == (5, "val/score: 2.75 is above 2")


def test_time_limit_counts_from_the_begin_of_the_fit(monkeypatch):
    import loopkit.criteria

    now = [0.0]
    monkeypatch.setattr(loopkit.criteria.time, "monotonic", lambda: now[0])

    class Slow:
        @hookimpl
        def epoch_begin(self, phase):
            now[0] += 10 * phase.training

    _, result = run(EarlyStopping("val/score", criterion=TimeLimit(25), mode="min"), Script(1), Slow())
    assert (result.epochs, result.message) == (3, "val/score: took 30.0 s, the limit is 25 s")


def test_two_plugins_with_one_criterion_do_not_share_its_state():
    shared = NumberLimit(3)
    first = EarlyStopping("val/score", criterion=shared, mode="min")
    second = EarlyStopping("train/score", criterion=shared, name="second", mode="min")
    _, result = run(first, second, Script(1), Script(1, phase="train", name="training"))
    assert result.epochs == 3


def test_validation_in_which_a_stop_comes_is_looked_at_whole():
    class Stopper:
        @hookimpl
        def step_end(self, learner, phase):
            if phase.name == "val" and learner.progress.epochs == 2:
                learner.stop("enough")

    stopping = EarlyStopping("val/score", restore_best=True, mode="min")
    run(stopping, Script(1.0, 0.5), Stopper())
    assert (stopping.best, stopping.best_epoch) == (0.5, 2)


def test_pass_without_a_step_is_not_looked_at():
    class Canceller:
        @hookimpl
        def epoch_begin(self, learner, phase):
            if phase.name == "val" and learner.progress.epochs == 1:
                raise CancelEpoch

    stopping = EarlyStopping(criterion=NumberLimit(2))
    _, result = run(stopping, Metrics(), Canceller())
    assert result.epochs == 3


def test_fit_after_one_that_it_ended_starts_from_nothing():
    problem = tiny_problem()
    stopping = EarlyStopping("val/score", patience=2, mode="min")
    learner = problem.learner(plugins=[stopping, Script(1, 2, 2, 5, 4, 4, 4)], standard=False)
    first = learner.fit(problem.train, problem.val, epochs=20)
    second = learner.fit(problem.train, problem.val, epochs=20)
    assert (first.epochs, second.epochs) == (3, 4)
    assert (stopping.best, stopping.best_epoch) == (4, 5)


def test_fit_after_one_that_reached_its_limit_goes_on():
    problem = tiny_problem()
    stopping = EarlyStopping("val/score", patience=3, mode="min")
    learner = problem.learner(plugins=[stopping, Script(1, 2)], standard=False)
    assert learner.fit(problem.train, problem.val, epochs=2).reason == "epochs"
    second = learner.fit(problem.train, problem.val, epochs=20)
    assert (second.reason, second.epochs) == ("stop", 2)


# The metric


def test_metric_that_nobody_makes_is_refused_before_the_first_step():
    problem = tiny_problem()
    learner = problem.learner(plugins=[EarlyStopping("val/acuracy"), Metrics(accuracy=lambda o, t: 1.0)])
    with pytest.raises(PluginError, match=r"metrics.val/acuracy', which no plugin makes \(did you mean 'val/accuracy'"):
        learner.fit(problem.train, problem.val, epochs=1)
    assert learner.progress.steps == 0


def test_metric_that_a_pass_did_not_make_is_an_error_that_lists_those_there_are():
    class Forgetful(Script):
        @hookimpl(writes=("metrics.val/score", "metrics.val/scores"))
        def epoch_end(self, learner, phase):
            learner.metrics[f"{phase.name}/scores"] = 1.0

    message = r"'early_stopping': the epoch of phase 'val' made no metric 'val/score' \(did you mean 'val/scores'\?\); "
    with pytest.raises(PluginError, match=message + r"there are: train/scores, val/scores") as caught:
        run(EarlyStopping("val/score", mode="min"), Forgetful())
    assert "phase_end of plugin 'early_stopping'" in caught.value.__notes__[0]


def test_nan_never_becomes_the_best():
    stopping = EarlyStopping("val/score", patience=9, mode="min")
    run(stopping, Script(NAN, 2.0, NAN, 3.0), epochs=4)
    assert (stopping.best, stopping.best_epoch) == (2.0, 2)


def test_metric_that_is_always_nan_leaves_no_best_and_restores_nothing():
    stopping, snapshots = EarlyStopping("val/score", patience=3, restore_best=True, mode="min"), Snapshots()
    learner, result = run(stopping, snapshots, Script(NAN))
    assert stopping.best is None
    assert result.message == "val/score: there was no finite one among 3 values, the last is nan"
    assert same(learner.model.state_dict(), snapshots.taken[-1])


@pytest.mark.parametrize(("mode", "values"), [("min", [1.0, 0.0, 0.5]), ("max", [-1.0, 0.0, -0.5])])
def test_zero_is_a_value_and_can_be_the_best(mode, values):
    stopping, snapshots = EarlyStopping("val/score", mode=mode, patience=9, restore_best=True), Snapshots()
    learner, _ = run(stopping, snapshots, Script(*values), epochs=3)
    assert (stopping.best, stopping.best_epoch) == (0.0, 2)
    assert same(learner.model.state_dict(), snapshots.taken[1])


def test_fit_that_does_not_run_the_monitored_phase_is_refused_before_the_first_step():
    problem = tiny_problem()
    learner = problem.learner(plugins=[EarlyStopping("val/score", mode="min"), Script(1.0)], standard=False)
    with pytest.raises(PluginError, match=r"'early_stopping', phase_end: reads the metric 'val/score', but this fit"):
        learner.fit(problem.train, epochs=1)
    assert learner.progress.steps == 0


# Restoring


@pytest.mark.parametrize("device", [None, "cpu"])
@pytest.mark.parametrize(("values", "best"), [([3, 1, 2, 2], 1), ([3, 1, 0.5], 2), ([1, 2, 3], 0)])
def test_restore_best_puts_back_what_was_measured_bitwise(device, values, best):
    stopping = EarlyStopping("val/score", patience=9, restore_best=True, best_device=device, mode="min")
    snapshots = Snapshots()
    learner, _ = run(stopping, snapshots, Script(*values), epochs=len(values))
    assert same(learner.model.state_dict(), snapshots.taken[best])
    assert not any(same(snapshots.taken[best], other) for i, other in enumerate(snapshots.taken) if i != best)


def test_without_restore_best_the_last_parameters_stay():
    snapshots = Snapshots()
    learner, _ = run(EarlyStopping("val/score", patience=2, mode="min"), snapshots, Script(1, 2))
    assert same(learner.model.state_dict(), snapshots.taken[-1])


def test_restore_best_restores_the_best_value_even_if_it_was_better_by_less_than_min_delta():
    stopping, snapshots = (
        EarlyStopping("val/score", patience=9, min_delta=1.0, restore_best=True, mode="min"),
        Snapshots(),
    )
    learner, _ = run(stopping, snapshots, Script(1.0, 0.9, 0.95), epochs=3)
    assert same(learner.model.state_dict(), snapshots.taken[1])


def test_restore_best_under_averaged_weights_restores_the_averaged_ones():
    stopping, snapshots = EarlyStopping("val/score", patience=9, restore_best=True, mode="min"), Snapshots()
    learner, _ = run(stopping, Averaged(), snapshots, Script(3, 1, 2), epochs=3)
    assert same(learner.model.state_dict(), snapshots.taken[1])
    raw, _ = run(Averaged(), Script(3, 1), epochs=2)
    halves = [0.5 * p for p in raw.model.parameters()]
    assert all(torch.equal(p, half) for p, half in zip(learner.model.parameters(), halves, strict=True))


def test_restore_best_covers_every_model_and_shared_parameters():
    problem = tiny_problem()
    problem.model[4].weight = torch.nn.Parameter(torch.randn(3, 8))
    models = {"body": problem.model, "shared": problem.model[4]}

    class Both(type(problem.learner().phases["train"])):
        def forward(self, learner, inputs):
            return learner.models["body"](inputs)

    class Val(type(problem.learner().phases["val"])):
        forward = Both.forward

    stopping = EarlyStopping("val/score", patience=9, restore_best=True, mode="min")
    problem.model, optimizer = models, torch.optim.SGD(models["body"].parameters(), lr=0.1)
    problem.optimizer = optimizer
    kept = []

    class Keep:
        @hookimpl
        def epoch_end(self, learner, phase):
            if phase.name == "val":
                kept.append(copy.deepcopy(models["body"].state_dict()))

    plugins = [stopping, Keep(), Script(1, 2)]
    learner = problem.learner(plugins=plugins, phases=[Both(), Val()], standard=False)
    learner.fit(problem.train, problem.val, epochs=2)
    assert same(models["body"].state_dict(), kept[0])


def test_restore_best_keeps_one_copy_during_training():
    stopping = EarlyStopping("val/score", patience=9, restore_best=True, mode="min")
    seen = []

    def look(epoch):
        if not epoch.trains:
            seen.append((stopping._best is not None, "measured" in epoch.keep(stopping)))

    looks = [on(hook, look, f"look_{hook}", after=("early_stopping",)) for hook in ("epoch_end", "phase_end")]
    run(stopping, *looks, Script(1, 2), epochs=2)
    assert seen == [(False, True), (True, False), (True, True), (True, False)]


def test_error_leaves_the_parameters_as_they_were():
    class Failing:
        @hookimpl
        def step_begin(self, learner, phase):
            if phase.training and learner.progress.epochs == 2:
                raise RuntimeError("broken")

    problem, snapshots = tiny_problem(), Snapshots()
    stopping = EarlyStopping("val/score", restore_best=True, mode="min")
    learner = problem.learner(plugins=[stopping, Failing(), snapshots, Script(1, 2)], standard=False)
    with pytest.raises(RuntimeError, match="broken"):
        learner.fit(problem.train, problem.val, epochs=9)
    assert same(learner.model.state_dict(), snapshots.taken[1])


def test_model_that_was_changed_since_is_refused_and_left_as_it_is():
    class Swap:
        @hookimpl(updates=("model",))
        def epoch_begin(self, learner, phase):
            if phase.training and learner.progress.epochs == 1:
                learner.model[4] = torch.nn.Linear(8, 1)

    problem = tiny_problem()
    problem.loss_fn = lambda outputs, targets: outputs.float().square().mean()
    learner = problem.learner(
        plugins=[EarlyStopping("val/score", restore_best=True, mode="min"), Swap(), Script(1, 2)], standard=False
    )
    with pytest.raises(PluginError, match=r"'model.4.weight' was kept with shape \(3, 8\) and has shape \(1, 8\) now"):
        learner.fit(problem.train, problem.val, epochs=2)


# State


@pytest.mark.parametrize("cut", [1, 2, 3, 4, 5])
@pytest.mark.parametrize(
    "options", [{"patience": 3}, {"criterion": Patience(3) | NumberLimit(5)}, {"patience": 3, "best_device": "cpu"}]
)
def test_fit_resumed_between_epochs_equals_an_uninterrupted_one(options, cut):
    values = [3, 1, 2, 2.5, 1.5, 4]
    make = lambda: (EarlyStopping("val/score", restore_best=True, **{"mode": "min", **options}), Script(*values))  # noqa: E731
    straight, expected = run(*make())

    problem, plugins = tiny_problem(), make()
    before = problem.learner(plugins=plugins, standard=False)
    saved = {}

    class Save:
        name = "~save"

        @hookimpl(reads=("*",))
        def phase_end(self, learner, phase):
            if phase.name == "val" and learner.progress.epochs == cut:
                saved.update(
                    copy.deepcopy(
                        {
                            "model": learner.model.state_dict(),
                            "optimizer": learner.optimizer.state_dict(),
                            "rng": torch.get_rng_state(),
                            "plugins": [plugin.state_dict() for plugin in plugins],
                        }
                    )
                )

    before.add(Save())
    torch.manual_seed(0)
    before.fit(problem.train, problem.val, epochs=cut)

    problem, plugins = tiny_problem(), make()
    after = problem.learner(plugins=plugins, standard=False)
    after.model.load_state_dict(saved["model"])
    after.optimizer.load_state_dict(saved["optimizer"])
    for plugin, state in zip(plugins, saved["plugins"], strict=True):
        plugin.load_state_dict(state)
    after.progress.epochs = cut
    torch.set_rng_state(saved["rng"])
    result = after.fit(problem.train, problem.val, epochs=20)
    assert (result.reason, result.message, result.epochs + cut) == ("stop", expected.message, expected.epochs)
    assert same(after.model.state_dict(), straight.model.state_dict())
    assert plugins[0].best_epoch == 2


def test_state_holds_plain_values_and_tensors():
    stopping = EarlyStopping("val/score", patience=2, restore_best=True, mode="min")
    run(stopping, Script(0.5, 1, 2))
    state = stopping.state_dict()
    assert state.pop("parameters").keys() == {f"model.{name}" for name in tiny_problem().model.state_dict()}
    assert state == {
        "criterion": {"best": 0.5, "count": 2},
        "best": 0.5,
        "best_epoch": 1,
        "reason": 'val/score: 0.5 was not improved in 2 values (mode "min"), the last is 2',
        "ended": True,
    }


def test_state_of_another_criterion_is_refused():
    state = EarlyStopping(criterion=Patience(2)).state_dict()
    with pytest.raises(PluginError, match="it was saved by another criterion"):
        EarlyStopping().load_state_dict(state)


# Refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"monitor": "loss"}, r"monitor is 'loss': it is '<phase>/<metric>', such as 'val/loss'"),
        ({"monitor": "val/"}, r"monitor is 'val/'"),
        ({"monitor": "/loss"}, r"monitor is '/loss'"),
        ({"monitor": "*/loss"}, r"monitor is '\*/loss'"),
        ({"monitor": None}, r"monitor is None"),
        ({"training": "loss"}, r"training is 'loss'"),
        ({"patience": 0}, r"patience is 0 and min_delta is 0\.0: patience is a whole number, from 1"),
        ({"patience": 1.5}, r"patience is 1\.5"),
        ({"patience": True}, r"patience is True"),
        ({"min_delta": -0.1}, r"min_delta is -0\.1"),
        ({"min_delta": NAN}, r"min_delta is nan"),
        ({"mode": "lower"}, r"mode is 'lower': it is 'min' \(lower is better\) or 'max'"),
        ({"criterion": 3}, r"criterion is 3; give an instance of one of loopkit\.criteria"),
        ({"criterion": Patience}, r"criterion is <class .*Patience'>; give an instance"),
        ({"criterion": Patience(2), "patience": 3}, r"criterion takes the place of patience and min_delta"),
        ({"criterion": Patience(2), "min_delta": 0.1}, r"criterion takes the place of patience and min_delta"),
        ({"best_device": "cpu"}, r"best_device is 'cpu' without restore_best=True"),
        ({"restore_best": True, "best_device": "gqu"}, r"best_device is 'gqu': it is a torch device"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(PluginError, match=message):
        EarlyStopping(**options)


# The contract of plugins


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: EarlyStopping(patience=2), marks=pytest.mark.slow),
        lambda: EarlyStopping("val/loss", patience=1, restore_best=True, best_device="cpu"),
        pytest.param(
            lambda: EarlyStopping(criterion=Gap(1e9) | warmup(TimeLimit(1000), 1)),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["plain", "restore", "criterion"],
)
def test_plugin_keeps_the_contract(make):
    check_plugin(lambda: (make(), Metrics()))


def interrupting(how, at):
    """A plugin that interrupts the fit in a training step."""

    def act(learner):
        if learner.progress.steps == at:
            learner.pause("enough") if how == "pause" else os.kill(os.getpid(), how)

    return on("step_end", act)


def trained(*plugins):
    problem = tiny_problem()
    torch.manual_seed(0)
    stopping = EarlyStopping("val/score", patience=9, restore_best=True, mode="min")
    learner = problem.learner(plugins=[stopping, Script(3.0, 1.0, 2.0, 4.0), *plugins], standard=False)
    return problem, learner


@pytest.mark.parametrize("how", ["pause", signal.SIGINT, signal.SIGTERM], ids=str)
@pytest.mark.parametrize("at", [9, 11])
def test_restore_best_waits_for_the_end_of_a_run_that_is_interrupted(how, at):
    problem, whole = trained()
    whole.fit(problem.train, problem.val, epochs=4)
    problem, learner = trained(interrupting(how, at))
    result = learner.fit(problem.train, problem.val, epochs=4, on_interrupt="return")
    assert result.reason == ("pause" if how == "pause" else "signal")
    learner.remove("acting")
    learner.fit(problem.train, problem.val, epochs=4)
    assert same(learner.model.state_dict(), whole.model.state_dict())
    assert learner.progress == whole.progress


@pytest.mark.parametrize("save", [every(epochs=1), every(updates=3), every(updates=100)], ids=str)
def test_newest_checkpoint_has_the_weights_that_were_put_back(save, tmp_path):
    problem, learner = trained(Checkpoint(tmp_path, save=save))
    learner.fit(problem.train, problem.val, epochs=4)
    saved = read_state(listing(tmp_path)[0])
    assert same(saved["models"]["model"], learner.model.state_dict())


def test_newest_checkpoint_has_weights_that_another_plugin_has_changed_at_the_end(tmp_path):
    @torch.no_grad()
    def change(learner):
        for p in learner.model.parameters():
            p.fill_(0.5)

    problem, learner = trained(Checkpoint(tmp_path), on("fit_end", change, updates=("params",)))
    learner.remove("early_stopping")
    learner.fit(problem.train, problem.val, epochs=1)
    assert same(read_state(listing(tmp_path)[0])["models"]["model"], learner.model.state_dict())


def test_end_of_a_fit_without_a_change_saves_nothing_more(tmp_path):
    problem, learner = trained(Checkpoint(tmp_path, keep=9))
    learner.remove("early_stopping")
    learner.fit(problem.train, problem.val, epochs=2)
    assert [manifest.about["reason"] for manifest in listing(tmp_path)] == ["epoch", "epoch"]


@pytest.mark.parametrize("criterion", [Patience(2), NumberSinceBest(2), Threshold(0.0)], ids=repr)
def test_evaluation_outside_of_a_fit_moves_nothing(criterion):
    stopping = EarlyStopping(criterion=criterion)
    learner = make_learner(stopping, Metrics())
    learner.fit(batches(4), val=batches(2), epochs=1)
    before = copy.deepcopy(stopping.state_dict())
    for _ in range(3):
        learner.evaluate([(10 * x, y) for x, y in batches(1)])
    assert stopping.state_dict() == before
    assert stopping.reason == ""
