"""The peak of memory goes from the device through metrics and logs to whoever looks, in MiB."""

import csv
import io
import json
import shutil
import subprocess

import pytest
from training import batches, make_learner

from loopkit.author import devices
from loopkit.logs import read_log
from loopkit.plugins import LogMetrics, LogTo, Metrics, Progress
from loopkit_monitor import report, terminal, views
from loopkit_monitor.page import STATIC
from loopkit_monitor.store import Store

PEAK = 412.5 * 2**20
LOOK = """
import { chartsOf } from "%(views)s";
import { bytes, figure, unitOf } from "%(dom)s";
const detail = JSON.parse(process.argv[1]);
const run = { id: "a", name: "a", names: detail.names.map((each) => each.name ?? each) };
const charts = chartsOf([run], "metrics", () => ({}));
const chart = charts.find((each) => each.title === "peak_memory");
const said = [figure("val/peak_memory", %(peak)s), figure("val/loss", 0.25)];
console.log(JSON.stringify([chart.unit, bytes(%(peak)s), ...said, unitOf("val/loss")]));
"""


@pytest.fixture
def store(tmp_path, monkeypatch):
    """A run of two epochs on a device that tells its peak."""
    peak_memory = pytest.importorskip("loopkit_insight").PeakMemory()
    monkeypatch.setattr(devices, "take_peak", lambda device: int(PEAK))
    out = io.StringIO()
    plugins = [peak_memory, Metrics(), LogMetrics(), LogTo(tmp_path / "a"), Progress(bar=False, file=out)]
    learner = make_learner(*plugins)
    learner.fit(batches(3), batches(1), epochs=2)
    assert learner.metrics["val/peak_memory"] == PEAK
    assert out.getvalue().count("val/peak_memory") == 2
    store = Store(tmp_path)
    store.poll()
    return store


def test_peak_is_in_the_log_in_bytes(store, tmp_path):
    assert read_log(tmp_path / "a").values("train/peak_memory") == [PEAK, PEAK]
    report.write_csv(store, tmp_path / "all.csv")
    with (tmp_path / "all.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["name"] == "val/peak_memory"]
    assert [(float(row["value"]), row["epoch"]) for row in rows] == [(PEAK, "1"), (PEAK, "2")]


def test_peak_is_shown_in_mebibytes_in_a_terminal(store, tmp_path):
    out = io.StringIO()
    assert terminal.main([str(tmp_path / "a")], out) == 0
    lines = [line for line in out.getvalue().splitlines() if line.startswith("epoch ")]
    assert len(lines) == 2
    for line in lines:
        assert "  train/peak_memory 412.5 MiB  " in line
        assert "  val/peak_memory 412.5 MiB  " in line


def test_peak_is_drawn_in_mebibytes(store, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    drawn, draw = {}, report._draw

    def keep(title, *rest):
        drawn[title] = draw(title, *rest)
        return drawn[title]

    monkeypatch.setattr(report, "_draw", keep)
    report.write_png(store, tmp_path / "png")
    (axes,) = drawn["peak_memory"].axes
    assert axes.get_ylabel() == "MiB"
    assert [list(line.get_ydata()) for line in axes.lines] == [[412.5, 412.5]] * 2
    assert drawn["loss"].axes[0].get_ylabel() == ""


def test_peak_is_shown_in_mebibytes_on_the_page(store):
    if (node := shutil.which("node")) is None:
        pytest.skip("there is no node")
    detail = json.dumps(views.run(store, "a"))
    files = {name: (STATIC / f"{name}.js").as_uri() for name in ("views", "dom")}
    script = LOOK % {**files, "peak": PEAK}
    done = subprocess.run(
        [node, "--input-type=module", "-e", script, detail], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == ["bytes", "413 MiB", "413 MiB", "0.25", "value"]
