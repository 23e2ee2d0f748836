import json
import re

import pytest

from loopkit_monitor import views
from loopkit_monitor.store import Store, UnknownRun


@pytest.fixture
def store(tmp_path, writer):
    writer.begin(
        hyperparameters={"lr": 0.1, "seed": 1}, config="[fit]", planned={"epochs": 2, "steps": 40, "updates": None}
    )
    writer.values(20)
    writer.other("run/plan", "table", columns=["phase"], rows=[["old"]])
    writer.other("run/plan", "table", columns=["phase"], rows=[["train"]])
    writer.other("run/model", "graph", modules=[{"name": "", "type": "Linear"}])
    writer.other("run/warning", "text", text="slow")
    writer.other("run/checkpoint", "text", text='{"path": "x"}')
    writer.other("hp", "hyperparameters", values={"width": 3})
    for index in range(5):
        writer.other("note", "text", text=f"note {index}")
    made = Store(tmp_path / "runs")
    made.poll()
    return made


def test_a_run_says_all_that_the_page_shows(store):
    said = views.run(store, "a")
    assert said["hyperparameters"] == {"lr": 0.1, "seed": 1, "width": 3}
    assert (said["config"], said["total_steps"], said["status"], said["step"]) == ("[fit]", 40, "live", 20)
    assert said["plan"]["rows"] == [["train"]]
    assert said["model"]["modules"] == [{"name": "", "type": "Linear"}]
    assert (said["cost"], said["profile"], said["end"]) == (None, None, None)
    assert [each["text"] for each in said["warnings"]] == ["slow"]
    assert [each["text"] for each in said["checkpoints"]] == ['{"path": "x"}']
    assert {each["name"]: (each["kind"], each["count"]) for each in said["names"]}["note"] == ("text", 5)
    assert {each["name"]: (each["kind"], each["count"]) for each in said["names"]}["lr"] == ("value", 20)
    assert said["seq"] == f"{store.boot}.{store.last_id}"


def test_epochs_are_told_by_the_step_that_completed_them(tmp_path, writer):
    writer.begin()
    for epoch, step in ((0, 2), (1, 5), (1, 7), (2, 10), (1, 8), (2, 9)):  # it went back, and went on
        writer.value("train/loss", 1.0, epoch=epoch, step=step)
    made = Store(tmp_path / "runs")
    made.poll()
    assert views.run(made, "a")["epochs"] == [(0, 2), (1, 5), (2, 9)]


def test_the_helper_of_a_plugin_is_part_of_it(store, writer):
    columns = ("phase", "hook", "position", "plugin", "access", "reasons", "note")
    writer.other(
        "run/plan",
        "table",
        columns=columns,
        rows=[
            ["", "fit_begin", 1, "~monitor", "", "", ""],
            ["", "fit_begin", 2, "log_to", "writes *", "'log_to' says after 'a'; '~monitor' says before 'log_to'", ""],
            ["", "fit_begin", 3, "monitor", "", "", ""],
        ],
    )
    rows = [["", "fit_begin", "~monitor", 1, 0.25], ["", "fit_begin", "monitor", 1, 0.5], ["", "x", "~monitor", 2, 1.0]]
    writer.other("run/cost", "table", columns=("phase", "hook", "plugin", "calls", "seconds"), rows=rows)
    store.poll()
    said = views.run(store, "a")
    assert said["plan"]["rows"] == [
        ["", "fit_begin", 1, "log_to", "writes *", "'log_to' says after 'a'", ""],
        ["", "fit_begin", 2, "monitor", "", "", ""],
    ]
    assert said["cost"]["rows"] == [["", "fit_begin", "monitor", 1, 0.75], ["", "x", "monitor", 2, 1.0]]


@pytest.mark.parametrize("rows", [None, 1, [1], [["", "x"]], [[{}, None, "~m", "nan", "nan"], [{}, None, "m", 1, 2]]])
def test_a_cost_that_is_no_table_of_plugins_does_no_harm(store, writer, rows):
    writer.other("run/cost", "table", columns=("phase", "hook", "plugin", "calls", "seconds"), rows=rows)
    store.poll()
    assert views.run(store, "a")["cost"]["kind"] == "table"


def test_series_can_be_zoomed(store):
    said = views.series(store, "a", ["lr", "none", "lr"], low=5, high=8)["series"]
    assert list(said) == ["lr"]
    assert (said["lr"]["step"], said["lr"]["total"]) == ([5, 6, 7, 8], 4)
    assert len(views.series(store, "a", ["lr"], points=5)["series"]["lr"]["step"]) <= 5
    assert views.series(store, "a", ["lr"], low=100)["series"]["lr"]["step"] == []


def test_phases_that_log_one_name_have_a_curve_each(store, writer):
    writer.value("acc", 0.5)
    writer.value("acc", 100.0, phase="val")
    store.poll()
    names = {each["name"]: each["phase"] for each in views.run(store, "a")["names"] if each["kind"] == "value"}
    assert (names["acc"], names["val/acc"]) == ("train", "val")
    said = views.series(store, "a", ["acc", "val/acc"])["series"]
    assert (said["acc"]["value"], said["val/acc"]["value"]) == ([0.5], [100.0])


def test_numbers_that_json_has_not_are_strings(store, writer):
    store.get("a")
    for value in ("nan", "inf", "-inf"):
        writer.value("lr", value)
    store.poll()
    said = json.loads(views.encode(views.series(store, "a", ["lr"])))["series"]["lr"]["value"]
    assert said[-3:] == ["nan", "inf", "-inf"]
    assert json.loads(views.encode(views.runs(store)))["runs"][0]["metrics"]["lr"] == "-inf"
    assert json.loads(views.encode(store.changes[-1].data))["series"]["lr"][0][1] == "nan"


def test_media_are_the_latest_or_one(store):
    said = views.media(store, "a", "note", limit=2)
    assert ([item["text"] for item in said["items"]], said["total"]) == (["note 3", "note 4"], 5)
    assert [item["index"] for item in said["items"]] == [3, 4]
    assert [item["text"] for item in views.media(store, "a", "note", 0)["items"]] == ["note 0"]
    assert views.media(store, "a", "note", 5)["items"] == []
    assert views.media(store, "a", "none")["total"] == 0


def test_what_was_cut_off_is_not_shown_as_something_else(store, writer):
    views.run(store, "a")
    writer.cut(writer.size - 30)
    assert views.media(store, "a", "note", 4)["items"] == []


def test_hyperparameters_that_are_none_are_left_out(store, writer):
    writer.begin(hyperparameters="no mapping")
    store.poll()
    assert views.run(store, "a")["hyperparameters"] == {"width": 3}


def test_a_run_that_is_none_is_an_error(store):
    for id in ("none", "", "..", "a/", "a/log"):
        with pytest.raises(UnknownRun):
            views.run(store, id)


def test_json_can_stand_in_a_page():
    encoded = views.encode({"<a>": "&<!--\u2028\ud800", "n": [float("nan"), {"x": float("inf")}]})
    assert json.loads(encoded) == {"<a>": "&<!--\u2028\ud800", "n": ["nan", {"x": "inf"}]}
    assert not re.search(rb"[<>&\x80-\xff]", encoded)


def test_answers_are_bounded(store, writer, monkeypatch):
    monkeypatch.setattr(views, "MOST_BYTES", 1000)
    for index in range(10):
        writer.other("long", "text", text=f"{index}" * 300)
        writer.other("run/warning", "text", text=f"{index}" * 300)
    writer.other("huge", "text", text="x" * 5000)
    store.poll()
    said = views.media(store, "a", "long")
    assert ([item["index"] for item in said["items"]], said["total"]) == ([8, 9], 10)
    assert len(views.run(store, "a")["warnings"]) == 2
    assert len(views.media(store, "a", "huge")["items"]) == 1
    monkeypatch.setattr(views, "MOST_POINTS", 20)
    assert len(views.series(store, "a", ["lr", "train/loss"])["series"]["lr"]["step"]) <= 10


def test_the_figures_of_the_head_are_there_among_many_metrics(tmp_path, writer):
    writer.begin()
    shown = {"val/loss", "run/time_left", "run/throughput/steps_per_second", "run/throughput/samples_per_second"}
    writer.values(1, *(f"val/{number:02}" for number in range(60)), *shown)
    store = Store(tmp_path / "runs")
    store.poll()
    (run,) = views.runs(store)["runs"]
    assert shown < set(run["metrics"])
    assert len(run["metrics"]) == 40
