"""When a fit validates, and on what: intervals, several sets, kills and resumes in the midst of one, two processes."""

import copy
import math
import time

import pytest
import torch
from distributed.processes import run
from torch import nn

from engine.life.runs import (
    SAVERS,
    STEPS,
    at,
    end,
    kill,
    killed,
    make,
    rows,
    same,
    saved,
    script,
    sigterm,
    tensors,
    train,
    val,
)
from loopkit import Learner, Phase, PredictionPhase, TrainingPhase, ValidationPhase, every, hookimpl
from loopkit.checkpoint.upgrade import upgrade
from loopkit.data import TensorLoader
from loopkit.errors import PhaseError
from loopkit.plugins import DDP, EarlyStopping, Metrics


class Order:
    """Logs the updates at which each epoch of a phase that does not train has ended."""

    def __init__(self):
        self.seen = []

    @hookimpl
    def phase_end(self, learner, phase):
        if not phase.training:
            self.seen.append((phase.name, learner.progress.updates))


def ood():
    return TensorLoader(*tensors(9, 3), batch_size=4, shuffle=True, seed=5)


def order(val, *plugins, epochs=2, **options):
    """Which sets a fit validates on, after which update."""
    seen = Order()
    learner = make(seen, *plugins)
    learner.fit(train(), val, epochs=epochs, **options)
    return seen.seen


# Intervals


def test_several_sets_are_run_in_their_order_after_each_epoch():
    assert order({"ood": ood(), "val": val()}) == [("ood", 4), ("val", 4), ("ood", 8), ("val", 8)]


def test_each_set_has_its_own_interval():
    sets = {"val": val(), "ood": ood()}
    intervals = {"val": every(updates=3), "ood": every(epochs=2)}
    expected = [("val", 3), ("val", 6), ("val", 8), ("ood", 8)]
    assert order(sets, validate=intervals) == expected


def test_one_interval_counts_for_all_sets_and_a_set_that_is_not_named_has_the_default():
    assert order({"val": val(), "ood": ood()}, validate=every(updates=4), epochs=1) == [("val", 4), ("ood", 4)]
    both = order({"val": val(), "ood": ood()}, validate={"ood": every(epochs=2)})
    assert both == [("val", 4), ("val", 8), ("ood", 8)]


def test_metrics_of_a_set_have_its_name_and_are_those_of_evaluate():
    learner = make()
    result = learner.fit(train(), {"val": val(), "ood": ood()}, epochs=1)
    assert result.metrics["ood/loss"] == learner.evaluate(ood(), "ood")["ood/loss"] != result.metrics["val/loss"]
    assert type(learner.phases["ood"]) is ValidationPhase


def test_standard_name_wins_where_a_phase_is_asked_for():
    learner = make()
    learner.fit(train(), {"ood": ood(), "val": val()}, epochs=1)
    assert list(learner.evaluate(ood())) == ["val/loss"]
    other = make()
    other.fit(train(), {"ood": ood()}, epochs=1)
    assert list(other.evaluate(ood())) == ["val/loss"]


def test_first_validation_comes_before_the_first_update_and_is_in_the_history():
    learner = make()
    before = make().evaluate(val())["val/loss"]
    learner.fit(train(), val(), epochs=1, validate=every(epochs=1, first=True))
    assert [(row["phase"], row["updates"]) for row in rows(learner)] == [("val", 0), ("train", 4), ("val", 4)]
    assert rows(learner)[0]["val/loss"] == before


def test_first_validation_changes_nothing_of_the_training():
    ends = []
    for first in (False, True):
        learner = make()
        learner.fit(train(), val(), epochs=2, validate=every(epochs=1, first=first))
        ends.append(learner.state_dict()["models"])
    same(*ends)


@pytest.mark.parametrize("when", [every(epochs=5), every(updates=100), every(minutes=60)], ids=repr)
@pytest.mark.parametrize(
    "limit", [{"epochs": 2}, {"epochs": math.inf, "max_steps": 6}, {"epochs": 9, "max_updates": 6}]
)
def test_last_weights_are_validated_once(when, limit):
    assert [name for name, _ in order(val(), validate=when, **limit)] == ["val"]


def test_last_weights_of_a_fit_that_is_stopped_are_validated_on_every_set():
    stop = at(lambda learner: learner.stop("enough"), index=1)
    assert order({"val": val(), "ood": ood()}, stop, validate=every(updates=100)) == [("val", 2), ("ood", 2)]


def test_stop_in_the_first_of_two_sets_still_runs_the_second():
    stop = at(lambda learner: learner.stop("enough"), phase="val", epochs=1, index=0)
    assert order({"val": val(), "ood": ood()}, stop) == [("val", 4), ("ood", 4)]
    in_mid_epoch = at(lambda learner: learner.stop("enough"), phase="val", epochs=0, index=0)
    sets = {"val": val(), "ood": ood()}
    assert order(sets, in_mid_epoch, validate=every(updates=2)) == [("val", 2), ("ood", 2)]


def test_early_stopping_watches_the_set_that_it_names():
    learner = make(EarlyStopping("ood/loss", patience=1, min_delta=100.0))
    result = learner.fit(train(), {"val": val(), "ood": ood()}, epochs=9)
    assert (result.reason, result.epochs) == ("stop", 2)


def test_minutes_are_counted_from_the_end_of_the_last_validation(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    class Slow:
        @hookimpl
        def step_end(self, phase):
            now[0] += 25 if phase.training else 500

    assert order(val(), Slow(), validate=every(minutes=1)) == [("val", 3), ("val", 6), ("val", 8)]


# What is refused


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (
            {"validate": {"vall": every(epochs=1)}},
            ValueError,
            r"validate names 'vall' \(did you mean 'val'\?\)",
        ),
        ({"validate": 3}, ValueError, r"validate is 3: write every\(epochs=1\)"),
        ({"val": None, "validate": every(epochs=2)}, ValueError, "but there is no data for it"),
        ({"val": {}}, PhaseError, "val is an empty mapping"),
        ({"val": {"train": 1}}, PhaseError, "val is {'train': ...}, but that phase trains: give the name of another"),
        ({"val": {"predict": 1}}, PhaseError, "but that phase predicts"),
        ({"val": {3: 1}}, PhaseError, "no phase is called 3"),
        ({"train": {"gan": 1}}, PhaseError, "no phase is called 'gan'"),
        ({"train": {"train": 1, "gan": 2}}, PhaseError, "train is a mapping of 2 names: one phase trains"),
    ],
)
def test_data_or_interval_that_fits_no_phase_is_refused(given, error, message):
    with pytest.raises(error, match=message):
        make().fit(**{"train": train(), "val": val(), "epochs": 1, **given})


def test_train_says_which_of_several_phases_trains():
    learner = make(phases=[TrainingPhase("coarse"), TrainingPhase("fine")])
    with pytest.raises(PhaseError, match=r"\('coarse', 'fine'\): say which with fit\(\{name: data\}\)"):
        learner.fit(train(), epochs=1)
    learner.fit({"fine": train()}, epochs=1)
    assert [row["phase"] for row in rows(learner)] == ["fine"]


def test_sets_can_be_phases_of_the_learner():
    class Halved(ValidationPhase):
        def loss(self, learner, outputs, targets):
            return super().loss(learner, outputs, targets) / 2

    metrics = make(phases=[Halved("half")]).fit(train(), {"half": val(), "val": val()}, epochs=1).metrics
    assert metrics["half/loss"] == metrics["val/loss"] / 2


# Kills and resumes


SETS = {"val": val, "ood": ood}
FITS = {
    "after_each_epoch": {},
    "in_mid_epoch": {"validate": every(updates=3)},
    "each_its_own": {"validate": {"val": every(updates=2, first=True), "ood": every(updates=3)}},
    "before_the_first_update": {"validate": every(epochs=1, first=True)},
}


def fitted(learner, fit):
    return learner.fit(train(), {name: make_set() for name, make_set in SETS.items()}, epochs=2, **FITS[fit])


TIMES = {"after_each_epoch": 2, "in_mid_epoch": 3, "each_its_own": 3, "before_the_first_update": 3}
"""How often each fit validates on the second set."""


@pytest.mark.parametrize(("fit", "number"), [(fit, number) for fit, times in TIMES.items() for number in range(times)])
@pytest.mark.parametrize("index", [0, 2])
def test_run_that_sigterm_ends_in_the_middle_of_the_second_set_goes_on_bit_for_bit(tmp_path, fit, number, index):
    whole = make()
    fitted(whole, fit)

    class Ends:
        volatile = ("validations",)
        validations = 0

        @hookimpl
        def step_end(self, learner, phase, step):
            if phase.name == "ood":
                self.validations += step.index == 0
                if (self.validations, step.index) == (number + 1, index):
                    sigterm(learner)

    first = script(tmp_path, Ends())
    with pytest.raises(SystemExit):
        fitted(first, fit)
    assert saved(tmp_path)
    again = script(tmp_path, again=True)
    fitted(again, fit)
    same(end(again), end(whole))


@pytest.mark.parametrize("saver", SAVERS)
@pytest.mark.parametrize("fit", FITS)
@pytest.mark.parametrize("phase", ["val", "ood"])
def test_run_that_is_killed_in_a_set_goes_on_bit_for_bit(tmp_path, fit, saver, phase):
    whole = make()
    fitted(whole, fit)
    epochs = 1 if fit in ("in_mid_epoch", "each_its_own") else 2
    with killed():
        fitted(script(tmp_path, at(kill, phase=phase, epochs=epochs, index=1), **saver), fit)
    again = script(tmp_path, again=True, **saver)
    fitted(again, fit)
    same(end(again), end(whole))


def test_what_is_due_is_saved_between_two_sets():
    learner = make()
    states = []
    learner.add(at(lambda learner: states.append(learner.state_dict()["fit"]), "phase_end", "val", 1))
    fitted(learner, "after_each_epoch")
    assert (states[0]["due"], states[0]["mid_epoch"], states[0]["validated"]) == (["ood"], False, {"val": STEPS})


def test_state_with_one_validation_in_the_older_form_goes_on():
    whole, states = make(), []
    whole.fit(train(), val(), epochs=2, validate=every(updates=3))
    learner = make()
    take = lambda learner: states.append(copy.deepcopy(learner.state_dict()))  # noqa: E731
    learner.add(at(take, phase="val", index=1, reads=("*",)))
    learner.fit(train(), val(), epochs=2, validate=every(updates=3))
    (state,) = states
    fit = state["fit"]
    older = {key: value for key, value in fit.items() if key not in ("due", "mid_epoch", "clock")}
    older.update(validate=False, validating=True, validated=fit["validated"]["val"])
    older = {**state, "versions": {**state["versions"], "fit": 1}, "fit": older}
    again = make(seed=9)
    again.load_state_dict(upgrade(older))
    again.fit(train(), val(), epochs=2, validate=every(updates=3))
    same(end(again), end(whole))


# Two processes


def make_two(*plugins, size=2):
    torch.manual_seed(0)
    return Learner(
        nn.Linear(3, 1),
        nn.MSELoss(),
        lambda params: torch.optim.SGD(params, lr=0.05),
        plugins=[*([DDP(timeout=60)] if size > 1 else []), Metrics(), *plugins],
        standard=False,
    )


def by_the_clock(rank, whose):
    """One rank's clock runs, the others' stands still."""
    seen = Order()
    learner = make_two(seen)
    if rank != whose:
        time.monotonic = lambda now=time.monotonic(): now  # noqa: B008 - it stands still
    data = TensorLoader(*tensors(4000), batch_size=2)
    result = learner.fit(data, {"val": val(), "ood": ood()}, epochs=1, validate=every(minutes=1e-4))
    return {"seen": seen.seen, "metrics": result.metrics, "weights": [p.detach() for p in learner.model.parameters()]}


def test_minutes_go_by_the_clock_of_rank_0_in_all_processes():
    one, other = run(by_the_clock, 2, 0)
    same(one, other)
    assert len(one["seen"]) >= 4
    assert [name for name, _ in one["seen"]] == ["val", "ood"] * (len(one["seen"]) // 2)


def several(rank, size=2):
    seen = Order()
    learner = make_two(seen, size=size)
    result = learner.fit(
        TensorLoader(*tensors(40), batch_size=4 // size),
        {"val": val(), "ood": ood()},
        epochs=2,
        validate={"val": every(updates=3), "ood": every(epochs=2, first=True)},
    )
    return seen.seen, result.metrics


def test_two_processes_validate_on_several_sets_as_one_does():
    one, other = run(several, 2)
    same(one, other)
    seen, metrics = several(0, size=1)
    assert one[0] == seen
    assert one[1] == pytest.approx(metrics, rel=1e-5)  # sums over the processes are rounded elsewhere


def test_a_phase_of_ones_own_that_predicts_is_no_set():
    class Own(PredictionPhase):
        name = "own"

    assert isinstance(Own(), Phase)
    with pytest.raises(PhaseError, match="but that phase predicts"):
        make(phases=[Own()]).fit(train(), {"own": val()}, epochs=1)
