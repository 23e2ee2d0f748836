"""History: a row per epoch, the losses of steps, plots and state."""

import copy
import sys
import time

import pytest
import torch
from helpers import batches, differences, make_learner, on
from test_metrics import Reads

from loopkit import CancelFit, every, hookimpl
from loopkit.plugins import History, Metrics

COUNTS = ("phase", "epoch", "steps", "updates", "samples")


def counts(rows):
    return [tuple(row[key] for key in COUNTS) for row in rows]


class Clock:
    """Replaces ``time.monotonic``."""

    def __init__(self, monkeypatch):
        self.now = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)

    def per_step(self, seconds):
        def tick(**_):
            self.now += seconds

        return on("step_end", tick, name="tick")


def test_history_makes_a_row_for_each_pass():
    history = History()
    make_learner(history, accumulate=2).fit(batches(3), batches(1), epochs=2)
    assert counts(history.rows) == [
        ("train", 1, 3, 2, 12),
        ("val", 1, 3, 2, 12),
        ("train", 2, 6, 4, 24),
        ("val", 2, 6, 4, 24),
    ]


def test_history_row_holds_the_metrics_of_its_phase_alone():
    history = History()
    learner = make_learner(history, Metrics())
    learner.fit(batches(3), batches(1), epochs=1)
    train, val = history.rows
    assert {key for key in train if "/" in key} == {"train/loss"}
    assert train["train/loss"] == learner.metrics["train/loss"]
    assert {key for key in val if "/" in key} == {"val/loss"}
    assert val["val/loss"] == learner.metrics["val/loss"]


def test_history_measures_seconds_by_the_monotonic_clock(monkeypatch):
    clock, history = Clock(monkeypatch), History()
    monkeypatch.setattr(time, "time", lambda: -clock.now)
    make_learner(history, clock.per_step(2.0)).fit(batches(3), batches(1), epochs=1)
    assert [row["seconds"] for row in history.rows] == [6.0, 2.0]


def test_history_of_a_validation_inside_training(monkeypatch):
    clock, history = Clock(monkeypatch), History()
    learner = make_learner(history, clock.per_step(1.0))
    learner.fit(batches(3), batches(2), epochs=1, validate=every(updates=2))
    assert counts(history.rows) == [("val", 1, 2, 2, 8), ("train", 1, 3, 3, 12), ("val", 1, 3, 3, 12)]
    assert [row["seconds"] for row in history.rows] == [2.0, 5.0, 2.0]


def test_history_of_a_phase_inside_itself(monkeypatch):
    def inside(learner, step, **_):
        if step.index == 1 and len(learner.plugins["history"].rows) == 0:
            learner.evaluate(batches(1, seed=1))

    clock, history = Clock(monkeypatch), History(steps=True)
    learner = make_learner(history, on("step_begin", inside), clock.per_step(1.0))
    learner.evaluate(batches(3))
    assert [row["seconds"] for row in history.rows] == [1.0, 4.0]
    assert [row["step"] for row in history.step_rows] == [0, 0, 1, 2]


def test_history_keeps_the_loss_of_every_step():
    losses = []
    history = History(steps=True)
    log = on("step_end", lambda phase, step, **_: losses.append((phase.name, step.index, step.loss.item())))
    make_learner(history, log).fit(batches(3), batches(2), epochs=2)
    rows = [(row["phase"], row["step"], row[f"{row['phase']}/loss"]) for row in history.step_rows]
    assert len(rows) == 10
    assert rows == losses
    assert [row["epoch"] for row in history.step_rows] == [1] * 5 + [2] * 5


def test_history_reads_losses_once_at_the_end_of_the_epoch():
    seen = []
    learner = make_learner(History(steps=True))
    with Reads() as reads:
        learner.add(on("step_end", lambda **_: seen.append(len(reads.calls)), after=("history",)))
        learner.fit(batches(3), epochs=1)
    assert seen == [0, 0, 0]
    assert reads.calls == ["item"] * 3  # each once


def test_history_keeps_no_steps_by_default():
    history = History()
    make_learner(history).fit(batches(3), epochs=1)
    assert history.step_rows == []


def test_history_of_steps_without_a_loss():
    history = History(steps=True)
    make_learner(history).predict(batches(2))
    assert history.step_rows == []
    assert counts(history.rows) == [("predict", 0, 0, 0, 0)]


def test_result_history_holds_the_rows_of_its_fit():
    history = History()
    learner = make_learner(history)
    first = learner.fit(batches(3), epochs=2)
    learner.evaluate(batches(1))
    second = learner.fit(batches(3), batches(1), epochs=1)
    assert [row["phase"] for row in first.history] == ["train", "train"]
    assert [row["phase"] for row in second.history] == ["train", "val"]
    assert [row["phase"] for row in history.rows] == ["train", "train", "val", "train", "val"]


def test_result_history_of_a_cancelled_fit():
    def cancel(learner, step, **_):
        if learner.progress.epochs == 1 and step.index == 1:
            raise CancelFit("enough")

    result = make_learner(History(), on("step_begin", cancel)).fit(batches(3), epochs=3)
    assert counts(result.history) == [("train", 1, 3, 3, 12), ("train", 2, 4, 4, 16)]


def failing_once(hook="step_begin"):
    raised = []

    def fail(learner, **given):
        if not raised and ("step" not in given or given["step"].index == 1):
            raised.append(1)
            raise RuntimeError("deliberate")

    return on(hook, fail, name="a_failing")


@pytest.mark.parametrize("hook", ["step_begin", "phase_end"])
def test_history_has_no_row_of_a_pass_that_failed(hook):
    history = History(steps=True)
    learner = make_learner(history, failing_once(hook))
    with pytest.raises(RuntimeError, match="deliberate"):
        learner.fit(batches(3), epochs=1)
    assert history.rows == []
    learner.fit(batches(2, seed=1), epochs=1)
    assert [row["step"] for row in history.step_rows] == [0, 1]


def test_history_forgets_an_epoch_that_failed_outside_a_fit():
    history = History(steps=True)
    learner = make_learner(history, failing_once())
    with pytest.raises(RuntimeError, match="deliberate"):
        learner.run("train", batches(3))
    assert history.state_dict() == {"rows": [], "step_rows": [], "first": 0}
    assert learner.state_dict()["epochs"] == []


def test_history_added_in_mid_epoch():
    def add(learner, step, **_):
        if step.index == 1:
            learner.add(history)

    history = History(steps=True)
    make_learner(on("step_end", add)).fit(batches(4), epochs=1)
    assert counts(history.rows) == [("train", 1, 4, 4, 16)]
    assert [row["step"] for row in history.step_rows] == [2, 3]


def test_history_values_are_those_of_one_metric():
    history = History()
    make_learner(history, Metrics()).fit(batches(3), batches(1), epochs=3)
    assert history.values("val/loss") == [row["val/loss"] for row in history.rows if row["phase"] == "val"]
    assert len(history.values("val/loss")) == 3
    assert history.values("val/other") == []


# State


def test_history_goes_on_from_its_state():
    history, resumed = History(steps=True), History(steps=True)
    make_learner(history, Metrics()).fit(batches(3), epochs=1)
    resumed.load_state_dict(history.state_dict())
    assert resumed.rows == history.rows
    assert resumed.step_rows == history.step_rows
    result = make_learner(resumed, Metrics()).fit(batches(3), epochs=1)
    assert resumed.rows[:1] == history.rows
    assert resumed.rows[1:] == result.history
    assert len(result.history) == 1


def test_history_state_is_a_copy():
    history = History()
    make_learner(history).fit(batches(3), epochs=1)
    state = history.state_dict()
    history.rows[0]["phase"] = "other"
    assert state["rows"][0]["phase"] == "train"


def long_history(rows):
    history = History(steps=True)
    for i in range(rows):
        history.rows.append(
            {"phase": "train", "epoch": i, "seconds": i / 3, "train/loss": float("nan") if i % 7 else 0.1}
        )
        history.rows.append({"phase": "val", "epoch": i, "val/accuracy": i / 7, "seconds": 0.5})
    history.step_rows += [{"phase": "train", "step": i} for i in range(rows)]
    return history


def test_history_of_many_rows_is_packed_once_and_comes_back_as_it_was():
    history, resumed = long_history(1200), History(steps=True)
    state = history.state_dict()
    assert [len(state[name]) for name in ("rows", "step_rows")] == [400, 200]
    history.rows.append({"phase": "train", "epoch": 1200})
    again = history.state_dict()
    assert len(again["rows"]) == 401
    for name, count in (("rows", 2), ("step_rows", 1)):
        assert len(again["packed"][name]) == count
        for one, other in zip(state["packed"][name], again["packed"][name], strict=True):
            assert one["text"] is other["text"]  # it is not made again
    resumed.load_state_dict(again)
    assert list(differences(resumed.rows, history.rows, leave_out=())) == []
    assert [list(row) for row in resumed.rows] == [list(row) for row in history.rows]
    assert resumed.step_rows == history.step_rows
    later = resumed.state_dict()
    assert list(differences(later, again, leave_out=())) == []
    assert later["packed"]["rows"][1]["text"] is again["packed"]["rows"][1]["text"]


def test_history_whose_rows_are_taken_out_is_packed_anew():
    history, resumed = long_history(1200), History()
    history.state_dict()
    del history.rows[100:200]
    resumed.load_state_dict(history.state_dict())
    assert list(differences(resumed.rows, history.rows, leave_out=())) == []
    history.rows.clear()
    resumed.load_state_dict(history.state_dict())
    assert resumed.rows == []
    assert len(resumed.step_rows) == 1200


def test_history_of_many_steps_is_shared_out_by_rows():
    states = [long_history(1200).state_dict() for _ in range(3)]
    resumed = History(steps=True)
    resumed.load_state_dict(resumed.reshard(states, 0, 2))
    assert len(resumed.step_rows) == 2400
    assert len(resumed.rows) == 2400


def test_history_of_many_rows_that_were_saved_without_packs():
    history, resumed = long_history(1200), History(steps=True)
    resumed.load_state_dict({"rows": history.rows, "step_rows": history.step_rows, "first": 3})
    assert list(differences(resumed.rows, history.rows, leave_out=())) == []
    assert resumed.step_rows == history.step_rows


@pytest.mark.parametrize("order", [{"before": ("history",)}, {"after": ("history",)}])
def test_history_loaded_at_the_begin_of_a_fit_hands_over_the_rows_of_that_fit(order):
    def save(learner):
        if learner.progress.epochs == 3:
            states.append(copy.deepcopy(learner.state_dict()))

    states, data = [], batches(3)
    learner = make_learner(History(), on("phase_end", save, after=("history",)))
    learner.fit(data, epochs=1)
    learner.fit(data, epochs=3)
    load = on("fit_begin", lambda learner: learner.load_state_dict(states[0]), **order)
    resumed = make_learner(History(), load)
    result = resumed.fit(data, epochs=3)
    assert counts(resumed.plugins["history"].rows) == counts(learner.plugins["history"].rows)
    assert result.history == resumed.plugins["history"].rows[1:]


def test_history_goes_on_in_mid_epoch(monkeypatch):
    def save(learner, phase, step):
        if phase.name == "val" and step.index == 1:
            states.append(copy.deepcopy(learner.state_dict()))

    clock, states = Clock(monkeypatch), []
    history, resumed = History(steps=True), History(steps=True)
    saver = on("step_end", save, after=("history", "tick"))
    make_learner(history, clock.per_step(2.0), saver).fit(batches(2), batches(4), epochs=1)
    clock.now += 500.0
    learner = make_learner(resumed, clock.per_step(2.0))
    learner.load_state_dict(states[0])
    learner.fit(batches(2), batches(4), epochs=1)
    assert [row["seconds"] for row in resumed.rows] == [4.0, 8.0]
    assert resumed.step_rows == history.step_rows


def test_history_of_a_phase_inside_itself_is_kept_apart(monkeypatch):
    def inside(learner, step):
        if step.epoch.depth == 0 and step.index == 1:
            learner.evaluate(batches(1))

    clock, history = Clock(monkeypatch), History(steps=True)
    acting = on("step_end", inside, after=("tick",))
    make_learner(history, clock.per_step(2.0), acting).evaluate(batches(3))
    assert [row["seconds"] for row in history.rows] == [2.0, 8.0]
    assert [row["step"] for row in history.step_rows] == [0, 0, 1, 2]


# Plots


@pytest.fixture
def plt():
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    yield plt
    plt.close("all")


def lines(axis):
    return {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axis.lines}


def test_plot_draws_a_panel_per_metric_with_the_phases_in_it(plt):
    history = History()
    far = lambda outputs, targets: (outputs - targets).abs()  # noqa: E731 - its name is given below
    make_learner(history, Metrics(mae=far)).fit(batches(3), batches(1), epochs=2)
    loss, mae = history.plot().axes
    assert (loss.get_title(), mae.get_title()) == ("loss", "mae")
    assert loss.get_xlabel() == "epochs"
    assert lines(loss) == {
        "train": ([1, 2], history.values("train/loss")),
        "val": ([1, 2], history.values("val/loss")),
    }


def test_plot_draws_the_metrics_that_are_named(plt):
    history = History()
    make_learner(history, Metrics()).fit(batches(3), batches(1), epochs=2)
    (axis,) = history.plot("val/loss").axes
    assert lines(axis).keys() == {"val"}


def test_plot_of_several_validations_in_an_epoch_is_over_steps(plt):
    history = History()
    make_learner(history, Metrics()).fit(batches(4), batches(1), epochs=1, validate=every(updates=2))
    (axis,) = history.plot().axes
    assert axis.get_xlabel() == "steps"
    assert lines(axis)["val"] == ([2, 4], history.values("val/loss"))


def test_plot_refuses_an_unknown_metric(plt):
    history = History()
    make_learner(history, Metrics()).fit(batches(3), epochs=1)
    with pytest.raises(ValueError, match=r"no metric is called 'train/los' \(did you mean 'train/loss'\?\)"):
        history.plot("train/los")


def test_plot_without_rows_is_empty(plt):
    (axis,) = History().plot().axes
    assert axis.lines[:] == []
    assert axis.get_title() == "no epoch has run"


def test_plot_of_a_metric_before_a_fit_says_so(plt):
    with pytest.raises(ValueError, match="no epoch has run, so there is no metric 'val/loss' to plot"):
        History().plot("val/loss")


def test_plot_of_rows_without_metrics_says_so(plt):
    history = History()
    make_learner(history).fit(batches(1), epochs=1)
    (axis,) = history.plot().axes
    assert axis.get_title() == "no metric in the rows"


def test_plot_without_matplotlib_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(ImportError) as caught:
        History().plot()
    assert str(caught.value) == "History.plot needs matplotlib: pip install matplotlib"


def test_history_leaves_training_bitwise_alone():
    one, other = make_learner(History(steps=True)), make_learner()
    for learner in (one, other):
        learner.fit(batches(3), batches(1), epochs=2)
    assert torch.equal(one.model.weight, other.model.weight)


def test_history_of_fewer_processes_has_the_steps_of_all():
    def state(loss):
        row = {"phase": "train", "epoch": 1, "step": 0, "train/loss": loss}
        return {"rows": [{"phase": "train", "epoch": 1}], "step_rows": [row], "first": 1}

    def store(loss):
        return {"running": {"seconds": 1.0, "steps": [0, 1], "losses": [loss, loss]}}

    states = [state(loss) for loss in (0.0, 1.0, 2.0)]
    history = History(steps=True)
    assert [[row["train/loss"] for row in history.reshard(states, rank, 2)["step_rows"]] for rank in (0, 1)] == [
        [0.0, 2.0],
        [1.0],
    ]
    stores = [store(loss) for loss in (0.0, 1.0, 2.0)]
    running = history.reshard_store(stores, 0, 2)["running"]
    assert running == {"seconds": 1.0, "steps": [0, 1, 0, 1], "losses": [0.0, 0.0, 2.0, 2.0]}
    assert history.reshard(states, 3, 4) == {**states[0], "step_rows": []}
    assert history.reshard_store(stores, 3, 4) == {"running": {"seconds": 1.0, "steps": [], "losses": []}}
    assert history.reshard_store([{}, {}], 0, 1) == {}
    assert not hasattr(History(), "reshard")  # nothing is collected from all
    assert not hasattr(History(), "reshard_store")


def test_history_as_a_frame_has_a_row_an_epoch_and_phase():
    pandas = pytest.importorskip("pandas")
    history = History()
    make_learner(Metrics(), history).fit(batches(3), batches(2), epochs=2)
    frame = history.frame()
    assert isinstance(frame, pandas.DataFrame)
    assert list(frame.columns) == ["phase", "epoch", "steps", "updates", "samples", "seconds", "loss"]
    assert frame[frame.phase == "val"].loss.tolist() == history.values("val/loss")
    assert not frame.isna().any().any()


def test_history_without_pandas_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match="pip install pandas"):
        History().frame()


def test_subclass_may_listen_to_steps():
    class Counting(History):
        seen = 0

        @hookimpl
        def step_end(self, step):
            self.seen += 1

    learner = make_learner(Counting())
    learner.fit(batches(3), epochs=1)
    assert learner.plugins["history"].seen == 3
