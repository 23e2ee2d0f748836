"""Reports: the page in one file, tables and pictures."""

import csv
import json
import math
import os
import re
import warnings
from html.parser import HTMLParser

import pytest
import torch
from support import Writer
from training import On, batches, make_learner

from loopkit.logs import Image, Table, Text, read_log
from loopkit.plugins import Checkpoint, LogMetrics, LogTo, Metrics
from loopkit_monitor import Monitor, Report, commands, report
from loopkit_monitor.commands import report as command
from loopkit_monitor.store import Store

PAYLOADS = [
    "<script>alert(1)</script>",
    "</script><script>alert(1)</script>",
    "</SCRIPT ><script>alert(1)</script>",
    "</script\n><script>alert(1)</script>",
    "<!--<script>",
    "--><script>alert(1)</script>",
    "<!-- <script> </script> --> <script>alert(1)</script>",
    "]]><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "<svg onload=alert(1)>",
    "<svg><script>alert(1)</script></svg>",
    "<body onload=alert(1)>",
    "<iframe src=javascript:alert(1)>",
    "<iframe srcdoc='<script>alert(1)</script>'>",
    "<a href=javascript:alert(1)>a</a>",
    "<math><mi xlink:href=javascript:alert(1)>",
    "<object data=javascript:alert(1)>",
    "<embed src=javascript:alert(1)>",
    "<form action=javascript:alert(1)><input type=submit>",
    "<input autofocus onfocus=alert(1)>",
    "<details open ontoggle=alert(1)>",
    "<video><source onerror=alert(1)>",
    "<style>@import 'http://evil'</style>",
    "</style><script>alert(1)</script>",
    "<link rel=stylesheet href=http://evil>",
    "<base href=http://evil/>",
    "<meta http-equiv=refresh content='0;url=http://evil'>",
    "</title><script>alert(1)</script>",
    "</textarea><script>alert(1)</script>",
    "</noscript><script>alert(1)</script>",
    '"><script>alert(1)</script>',
    "'><script>alert(1)</script>",
    "' onmouseover='alert(1)",
    '" onmouseover="alert(1)',
    "&lt;script&gt;alert(1)&lt;/script&gt;",
    "&#60;script&#62;alert(1)",
    "\\u003cscript\\u003ealert(1)",
    "${alert(1)}{{alert(1)}}",
    "\u2028alert(1)\u2029",
    "javascript:alert(1)//\x00\x1b[2J\ud800",
]


class Page(HTMLParser):
    """The elements of a page, and what is in its scripts."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.scripts, self.attributes = [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.elements.append(tag)
        self.attributes += [(tag, *attribute) for attribute in attributes]
        if tag == "script":
            self.scripts.append((dict(attributes), ""))

    def handle_data(self, data):
        if self.elements and self.elements[-1] == "script":
            about, text = self.scripts.pop()
            self.scripts.append((about, text + data))

    @property
    def data(self):
        (text,) = [text for about, text in self.scripts if about.get("id") == "loopkit-data"]
        return json.loads(text)


def make(store, path):
    report.write_html(store, path)
    return Page(path.read_text())


def hostile(path, texts):
    """A log with a text in every field that has one."""
    writer = Writer(path)
    for text in texts:
        writer.begin(
            hyperparameters={text: text}, argv=[text], config=text, torch=text, loopkit=text, planned={text: text}
        )
        writer.value(text, 1.0, phase=text)
        writer.value(f"{text}/loss", text)
        for name in (text, "run/warning", "run/checkpoint"):
            writer.other(name, "text", text=text)
        writer.other(text, text, text=text)
        writer.other("run/plan", "table", columns=["phase", "hook", "plugin", "note", text], rows=[[text] * 5])
        writer.other("run/cost", "table", columns=["phase", "hook", "plugin", text], rows=[[text] * 4])
        writer.other("run/module_profile", "table", columns=["module", text], rows=[[text] * 2])
        modules = [{"name": text, "type": text, "parameters": {text: [1]}}]
        writer.other("run/model", "graph", modules=modules)
        writer.other("table " + text, "table", columns=[text], rows=[[text]])
        writer.other("figure " + text, "image", caption=text, file=text)
        writer.other("hyper " + text, "hyperparameters", values={text: text})
        writer.end(reason=text, message=text, by=text, error=text, notes=[text], traceback=text)
    return writer


def test_there_are_40_payloads():
    assert len(set(PAYLOADS)) == 40


@pytest.mark.parametrize("number", range(40))
def test_no_text_of_a_log_becomes_markup(tmp_path, number):
    text = PAYLOADS[number]
    hostile(tmp_path / "plain" / "log.jsonl", ["harmless"])
    hostile(tmp_path / "hostile" / "log.jsonl", [text])
    plain, page = (make(Store(tmp_path / name), tmp_path / f"{name}.html") for name in ("plain", "hostile"))
    assert page.elements == plain.elements
    assert page.attributes == plain.attributes
    assert [script for about, script in page.scripts if "id" not in about] == [
        script for about, script in plain.scripts if "id" not in about
    ]
    (raw,) = [script for about, script in page.scripts if "id" in about]
    assert not set("<>&") & set(raw)
    details = page.data["details"]["."]
    assert details["warnings"][0]["text"] == text
    assert details["end"]["notes"] == [text]
    assert details["hyperparameters"][text] == text


def test_page_asks_for_nothing(tmp_path):
    hostile(tmp_path / "log.jsonl", PAYLOADS)
    page = make(Store(tmp_path), tmp_path / "report.html")
    links = [(tag, value) for tag, name, value in page.attributes if name in ("src", "href", "action", "srcset")]
    assert links == [("link", "data:,")]
    (policy,) = [value for tag, name, value in page.attributes if tag == "meta" and "default-src" in (value or "")]
    assert "default-src 'none'" in policy
    assert not re.search(r"unsafe|https?:|\*", policy)


def test_report_has_what_the_log_has(tmp_path):
    def log(learner):
        learner.log("picture", Image(torch.rand(4, 4), caption="a cat"))
        learner.log("note", Text("hello"))
        learner.log("rows", Table(["a"], [[1]]))
        learner.log("odd", math.nan)

    path = tmp_path / "out" / "report.html"
    plugins = Report(path), LogTo(tmp_path / "a"), LogMetrics(every=1), Metrics(), On("phase_end", log)
    make_learner(*plugins).fit(batches(5), epochs=3)
    data = Page(path.read_text()).data
    (run,) = data["runs"]["runs"]
    assert (run["id"], run["name"], run["status"], run["step"]) == (".", "a", "finished", 15)
    known = read_log(tmp_path / "a")
    series = data["series"]["."]
    assert series["train/loss/step"]["value"] == known.values("train/loss/step")
    assert series["odd"]["value"] == ["nan"] * 3
    media = data["media"]["."]
    assert [(item["text"], item["step"]) for item in media["note"]["items"]] == [
        ("hello", 5),
        ("hello", 10),
        ("hello", 15),
    ]
    assert media["picture"]["items"][0]["caption"] == "a cat"
    files = data["files"]["."]
    assert len(files) == 3
    assert all(url.startswith("data:image/png;base64,iVBOR") for url in files.values())


def test_report_is_written_after_an_error(tmp_path):
    def fail(learner):
        raise ValueError("too bad")

    path = tmp_path / "report.html"
    plugins = Report(path), LogTo(tmp_path / "a"), LogMetrics(every=1), On("phase_end", fail, "wrong")
    with pytest.raises(ValueError, match="too bad"):
        make_learner(*plugins).fit(batches(2), epochs=1)
    details = Page(path.read_text()).data["details"]["."]
    assert (details["status"], details["end"]["error"]) == ("crashed", "ValueError: too bad")
    assert "loopkit: in phase_end of plugin 'wrong', phase 'train', epoch 1" in details["end"]["notes"]


@pytest.mark.parametrize("first", ["monitor", "report"])
def test_report_has_the_checkpoint_of_the_end(tmp_path, first):
    plugins = [Monitor(tmp_path / "a"), Report(tmp_path / "r.html")]
    save = Checkpoint(tmp_path / "checkpoints")
    make_learner(*(plugins if first == "monitor" else reversed(plugins)), save).fit(batches(4), epochs=1)
    (detail,) = Page((tmp_path / "r.html").read_text()).data["details"].values()
    assert [each["rows"][0][1] for each in detail["checkpoints"]] == ["epoch", "end"]


def test_report_and_monitor_need_no_checkpoint(tmp_path):
    learner = make_learner(Monitor(tmp_path / "a"), Report(tmp_path / "r.html"))
    assert sorted(learner.plugins) == ["log_metrics", "log_to", "monitor", "report"]
    learner.fit(batches(4), epochs=1)
    assert Page((tmp_path / "r.html").read_text()).data["runs"]["runs"][0]["status"] == "finished"


def test_report_alone_has_metrics(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_learner(Report(), Metrics()).fit(batches(20), epochs=1)
    data = Page((tmp_path / "report.html").read_text()).data
    assert data["runs"]["runs"][0]["name"] == "run"
    assert data["series"]["."].keys() == {"train/loss", "train/loss/step", "train/loss/running", "lr"}


def test_report_that_cannot_be_written_is_a_warning(tmp_path):
    (tmp_path / "file").write_text("")
    plugins = Report(tmp_path / "file" / "report.html"), LogTo(tmp_path / "a")
    with pytest.warns(UserWarning, match=r"was not written: \w+Error: .*'loopkit report .*/a' tries again"):
        result = make_learner(*plugins).fit(batches(2), epochs=1)
    assert result.steps == 2


def test_report_without_a_log_is_a_warning(tmp_path):
    def remove(learner):
        (tmp_path / "a" / "log.jsonl").unlink()

    after_the_log = On("fit_end", remove, after=("log",), before=("report",))
    plugins = Report(tmp_path / "report.html"), LogTo(tmp_path / "a"), after_the_log
    with pytest.warns(UserWarning, match="was not written: FileNotFoundError"):
        make_learner(*plugins).fit(batches(2), epochs=1)


@pytest.mark.timeout(60)
def test_a_sparse_log_is_reported(tmp_path):
    writer = Writer(tmp_path / "run")
    writer.begin()
    writer.values(2)
    with open(writer.path, "r+b") as log:
        log.seek(3 << 40)  # a hole, which takes no room; to read it takes an hour
        log.write(b"\n")
    writer.values(2)
    os.truncate(writer.path, 4 << 40)
    assert command([str(tmp_path / "run"), "--csv", str(tmp_path / "a.csv"), "-o", str(tmp_path / "a.html")]) == 0
    with open(tmp_path / "a.csv", newline="") as file:
        assert [row["step"] for row in csv.DictReader(file) if row["name"] == "lr"] == ["1", "2", "3", "4"]


def test_a_report_replaces_the_one_before_whole_or_not_at_all(tmp_path, monkeypatch):
    writer = Writer(tmp_path / "a" / "log.jsonl")
    writer.values(3)
    path = tmp_path / "report.html"
    path.write_text("before")

    def full(source, target):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.replace", full)
        with pytest.raises(OSError, match="No space"):
            report.write_html(Store(tmp_path / "a"), path)
    assert path.read_text() == "before"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a", "report.html"]
    report.write_html(Store(tmp_path / "a"), path)
    assert path.read_text().startswith("<!doctype html>")


def test_files_are_kept_up_to_a_size_the_latest_first(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "MOST_BYTES", 4500)
    writer = Writer(tmp_path / "log.jsonl")
    files = [writer.media(bytes([number]) * 1000, ".png") for number in range(5)]
    data = report.collect(Store(tmp_path))
    assert list(data["files"]["."]) == [files[4], files[3], files[2]]
    picture = data["media"]["."]["picture"]
    assert ([item["index"] for item in picture["items"]], picture["first"], picture["total"]) == ([2, 3, 4], 2, 5)


def test_only_files_that_the_log_names_are_in_the_report(tmp_path):
    writer = Writer(tmp_path / "runs" / "a" / "log.jsonl")
    writer.media(b"there", ".png")
    (tmp_path / "secret.png").write_text("secret")
    (tmp_path / "runs" / "a" / "media" / "link.png").symlink_to(tmp_path / "secret.png")
    for file in (
        "../../secret.png",
        str(tmp_path / "secret.png"),
        "media/../../../secret.png",
        "media/link.png",
        "log.jsonl",
    ):
        writer.other("picture", "image", caption="", file=file)
    data = report.collect(Store(tmp_path / "runs"))
    (url,) = data["files"]["a"].values()
    assert url == "data:image/png;base64,dGhlcmU="


def test_many_long_curves_stay_small(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "MOST_POINTS", 1000)
    writer = Writer(tmp_path / "log.jsonl")
    writer.values(1000, *(f"n{number}" for number in range(10)))
    series = report.collect(Store(tmp_path))["series"]["."]
    assert {len(each["step"]) for each in series.values()} <= set(range(50, 101))
    assert {each["total"] for each in series.values()} == {1000}


def test_phases_that_log_one_name_have_a_curve_each(tmp_path):
    writer = Writer(tmp_path / "log.jsonl")
    for _ in range(3):
        writer.values(1, "acc")
        writer.value("acc", 100.0, phase="val")
    series = report.collect(Store(tmp_path))["series"]["."]
    assert (max(series["acc"]["value"]) < 2, series["val/acc"]["value"]) == (True, [100.0] * 3)


def test_what_is_listed_is_of_the_whole_log(tmp_path):
    writer = Writer(tmp_path / "runs" / "a" / "log.jsonl")
    writer.begin()
    writer.value("val/early", 0.5)
    for _ in range(300):
        writer.other("note", "text", text="x" * 1000)
    writer.end()
    (run,) = report.collect(Store(tmp_path / "runs"))["runs"]["runs"]
    assert run["metrics"] == {"val/early": 0.5}


# Tables and pictures


def test_csv_has_every_scalar_as_it_is_in_the_log(tmp_path):
    writer = Writer(tmp_path / "runs" / "a" / "log.jsonl")
    writer.begin()
    writer.values(3)
    writer.value('odd, "name"\n=1', 0.1 + 0.2)
    writer.value("x", "nan")
    writer.value("x", "-inf")
    writer.other("text", "text", text="no scalar")
    writer.raw(b'{"garbage\n[1]\n{"values": {"torn": 1')
    second = Writer(tmp_path / "runs" / "b" / "log.jsonl")
    second.value("y", 1)
    assert report.write_csv(Store(tmp_path / "runs"), tmp_path / "out" / "all.csv") == 10
    with (tmp_path / "out" / "all.csv").open(newline="") as file:
        header, *rows = csv.reader(file)
    assert header == ["run", "name", "value", "phase", "epoch", "step", "update", "time"]
    assert rows[0] == ["a", "train/loss", repr((7919 % 1000) / 997), "train", "0", "1", "1", "1763800000.013"]
    assert [row[:3] for row in rows[6:]] == [
        ["a", 'odd, "name"\n=1', "0.30000000000000004"],
        ["a", "x", "nan"],
        ["a", "x", "-inf"],
        ["b", "y", "1.0"],
    ]


@pytest.mark.parametrize("text", ["=1+1", "+1-cmd|' /C calc'!A0", "-2+3", "@SUM(1)", "\t=1", "\r=1", "=HYPERLINK()"])
def test_csv_has_no_text_that_a_spreadsheet_runs(tmp_path, text):
    writer = Writer(tmp_path / "runs" / "=a" / "log.jsonl")
    writer.value(text, -0.5, phase=text)
    writer.value("-1", "-inf")
    writer.value(f"x\r{text}", 1.0)
    writer.value("no place", 1.0, epoch=text)
    report.write_csv(Store(tmp_path / "runs"), tmp_path / "all.csv")
    with (tmp_path / "all.csv").open(newline="") as file:
        _, *rows = csv.reader(file)
    assert rows == [
        ["'=a", f"'{text}", "-0.5", f"'{text}", "0", "0", "0", "1763800000.0"],
        ["'=a", "-1", "-inf", "train", "0", "0", "0", "1763800000.0"],
        ["'=a", f"x\r{text}", "1.0", "train", "0", "0", "0", "1763800000.0"],
    ]


def test_csv_of_one_run_has_its_name(tmp_path):
    Writer(tmp_path / "runs" / "a" / "log.jsonl").value("y", 1)
    report.write_csv(Store(tmp_path / "runs" / "a"), tmp_path / "a.csv")
    assert (tmp_path / "a.csv").read_text().splitlines()[1].startswith("a,y,1.0,")


def test_png_has_a_picture_for_each_chart(tmp_path):
    for name in ("a", "b"):
        writer = Writer(tmp_path / "runs" / name / "log.jsonl")
        writer.values(20, "train/loss", "train/loss/step", "lr")
        writer.value("val/loss", 0.5, phase="val")
        writer.value("train/$x_{", "nan")
        writer.value("../../evil", 1.0)
        writer.value("_hidden", "inf")
        writer.value("final/val/loss", 0.5, phase="")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        written = report.write_png(Store(tmp_path / "runs"), tmp_path / "png")
    names = ["evil.png", "hidden.png", "loss.png", "loss_within_the_epoch.png", "lr.png", "x.png"]
    assert sorted(path.name for path in written) == names
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written)
    assert sorted(tmp_path.iterdir()) == [tmp_path / "png", tmp_path / "runs"]


# The command


def test_command_writes_what_it_is_asked_for(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Writer(tmp_path / "runs" / "a" / "log.jsonl").values(3)
    assert command(["runs/a"]) == 0
    assert (tmp_path / "report.html").is_file()
    assert command(["runs", "--csv", "a.csv", "--png", "charts"]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == ["a.csv: 6 rows", "charts: 2 pictures"]
    assert command(["runs/a/log.jsonl", "-o", "b.html", "--csv", "b.csv"]) == 0
    assert Page((tmp_path / "b.html").read_text()).data["runs"]["runs"][0]["name"] == "a"
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "a.csv",
        "b.csv",
        "b.html",
        "charts",
        "report.html",
        "runs",
    ]


@pytest.mark.parametrize("path", ["absent", "empty"])
def test_command_without_a_log_says_so(tmp_path, capsys, path):
    (tmp_path / "empty").mkdir()
    assert command([str(tmp_path / path), "-o", str(tmp_path / "r.html")]) == 2
    assert "loopkit report: error: " in capsys.readouterr().err
    assert not (tmp_path / "r.html").exists()


def test_runs_are_listed_the_latest_first(tmp_path, capsys):
    for name, reason in (("one", None), ("two", "ValueError: no")):
        writer = Writer(tmp_path / name / "log.jsonl")
        writer.begin()
        writer.together({"val/loss": 0.25, "lr": 0.1, "train/loss": 0.5}, epoch=1, step=3)
        writer.end(error=reason)
    assert commands.runs([str(tmp_path)]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["run", "state", "epoch", "step", "metrics"]
    assert {line.split()[0]: line.split()[1:6] for line in lines} == {
        "one": ["finished", "1", "3", "val/loss", "0.25"],
        "two": ["crashed", "1", "3", "val/loss", "0.25"],
    }
    assert commands.runs([str(tmp_path), "--json"]) == 0
    assert {run["id"] for run in json.loads(capsys.readouterr().out)["runs"]} == {"one", "two"}
    (tmp_path / "empty").mkdir()
    assert commands.runs([str(tmp_path / "empty")]) == 1
    assert "holds no log" in capsys.readouterr().out
