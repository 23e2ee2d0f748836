"""Each kind, written through a fit and read back by TensorBoard's own reader."""

import io
import math
import wave

import matplotlib.figure
import numpy as np
import pytest
import torch
from conftest import LogLoss, LogOnce
from PIL import Image as Picture
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.compat.proto.graph_pb2 import GraphDef
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
from torch import nn

from loopkit import TrainingPhase, hookimpl
from loopkit.logs import Audio, Figure, File, Graph, Histogram, Hyperparameters, Image, Table, Text
from loopkit.plugins import LogMetrics, LogTo, Metrics
from loopkit_tensorboard import TensorBoard


@pytest.fixture
def logged(make_learner, batches, tmp_path, read):
    """Log values in a step of a fit, and read them."""

    def fit(**values):
        make_learner(LogOnce(step=3, **values), LogTo(TensorBoard(tmp_path))).fit(batches, epochs=1)
        return read(tmp_path)

    return fit


def texts(events, tag):
    return [b.decode() for b in events.Tensors(tag)[0].tensor_proto.string_val]


@pytest.mark.parametrize("value", [0.25, -0.0, math.inf, -math.inf, 3, torch.tensor(1.5), 1e300])
def test_a_scalar(logged, value):
    (event,) = logged(x=value).Scalars("train/x")
    assert event.step == 3
    expected = float(np.float32(float(value))) if float(value) != 1e300 else math.inf
    assert (event.value, math.copysign(1, event.value)) == (expected, math.copysign(1, expected))


def test_a_scalar_that_is_undefined(logged):
    assert math.isnan(logged(x=math.nan).Scalars("train/x")[0].value)


def test_a_histogram(logged):
    (event,) = logged(x=Histogram.of_counts([1, 0, 3], [-1.0, 0.0, 1.0, 2.0])).Histograms("train/x")
    histogram = event.histogram_value
    assert (event.step, histogram.min, histogram.max, histogram.num) == (3, -1, 2, 4)
    assert (histogram.bucket_limit, histogram.bucket) == ([0, 1, 2], [1, 0, 3])
    assert (histogram.sum, histogram.sum_squares) == (-0.5 + 3 * 1.5, 0.25 + 3 * 2.25)


def test_a_histogram_of_a_tensor(logged):
    histogram = logged(x=Histogram(torch.linspace(0, 1, 100))).Histograms("train/x")[0].histogram_value
    assert (histogram.min, histogram.max, histogram.num, len(histogram.bucket)) == (0, 1, 100, 64)


def test_a_histogram_of_nothing_finite(logged):
    assert logged(x=Histogram(torch.full((3,), math.nan))).Histograms("train/x")[0].histogram_value.num == 0


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_an_image(logged, channels):
    pixels = torch.arange(2 * 5 * channels, dtype=torch.uint8).reshape(2, 5, channels).numpy()
    (event,) = logged(x=Image(pixels, "a caption")).Images("train/x")
    assert (event.step, event.height, event.width) == (3, 2, 5)
    assert np.array_equal(np.asarray(Picture.open(io.BytesIO(event.encoded_image_string))).reshape(2, 5, -1), pixels)


def test_a_figure(logged):
    figure = matplotlib.figure.Figure((2, 1), dpi=50)
    figure.subplots().plot([1, 2])
    (event,) = logged(x=Figure(figure)).Images("train/x")
    assert (event.height, event.width) == (50, 100)
    assert Picture.open(io.BytesIO(event.encoded_image_string)).size == (100, 50)


@pytest.mark.parametrize("channels", [1, 2])
def test_audio(logged, channels):
    samples = torch.sin(torch.arange(channels * 100) / 10).reshape(channels, 100)
    (event,) = logged(x=Audio(samples, 8000)).Tensors("train/x")
    (data, label) = event.tensor_proto.string_val
    assert (event.step, label) == (3, b"")
    with wave.open(io.BytesIO(data)) as sound:
        assert sound.getframerate() == 8000
        heard = np.frombuffer(sound.readframes(100), "<i2").reshape(100, channels).T
    assert np.array_equal(heard, np.rint(samples.double().numpy() * 32767))


def test_text(logged):
    events = logged(x=Text("# A *text* \N{FIRE} <b>"))
    assert texts(events, "train/x") == ["# A *text* \N{FIRE} <b>"]
    assert events.SummaryMetadata("train/x").plugin_data.plugin_name == "text"


def test_text_with_half_a_character(logged):
    assert texts(logged(x=Text("half \ud800")), "train/x") == ["half ?"]


def test_a_table(logged):
    table = Table(["name", "a|b"], [["<one>\ntwo", 1.5], [None, True]])
    assert texts(logged(x=table), "train/x") == [
        "| name | a\\|b |\n| --- | --- |\n| &lt;one&gt; two | 1.5 |\n| None | True |"
    ]


def test_a_graph_of_modules(logged):
    graph = GraphDef.FromString(
        logged(x=Graph(nn.Sequential(nn.Linear(3, 1), nn.ReLU())), y=1.0).Graph().SerializeToString()
    )
    assert [(node.name, node.op) for node in graph.node] == [("0", "Linear"), ("1", "ReLU")]


def test_a_graph_that_is_traced(logged):
    graph = logged(x=Graph(nn.Linear(3, 1), torch.ones(2, 3))).Graph()
    assert [node.op for node in graph.node] == ["Input", "Parameter", "Parameter", "linear", "Output"]


def test_a_graph_that_cannot_be_traced_shows_modules(logged):
    class Looks(nn.Linear):
        def forward(self, x):
            return super().forward(x) if x.sum() > 0 else x

    with pytest.warns(UserWarning, match="the graph of Looks shows only its modules.*DataDependent"):
        graph = logged(x=Graph(Looks(3, 1), torch.ones(2, 3))).Graph()
    assert [node.op for node in graph.node] == ["Looks"]


def test_scalars_beside_a_graph_are_kept(logged):
    events = logged(a=1.0, x=Graph(nn.Linear(3, 1)), b=2.0)
    assert {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in ("train/a", "train/b")} == {
        "train/a": [(3, 1.0)],
        "train/b": [(3, 2.0)],
    }


def test_a_file_is_left_out_with_one_warning(make_learner, batches, tmp_path):
    (tmp_path / "file").write_text("text")
    learner = make_learner(LogOnce(x=File(tmp_path / "file")), LogTo(TensorBoard(tmp_path / "log")))
    with pytest.warns(UserWarning, match=r"'tensorboard' cannot write File \('x'\)") as caught:
        learner.fit(batches, epochs=1)
    assert len(caught) == 1


def test_kinds_of_one_name_are_told_apart(make_learner, batches, tmp_path, read):
    plugins = [LogOnce(1, x=1.0), LogOnce(2, x=Text("two")), LogOnce(3, x=Histogram(torch.ones(3)))]
    for plugin in plugins:
        plugin.name = f"log_{plugin.step}"
    make_learner(*plugins, LogTo(TensorBoard(tmp_path))).fit(batches, epochs=1)
    tags = read(tmp_path).Tags()
    assert (tags["scalars"], tags["histograms"]) == (["train/x"], ["train/x (histogram)"])
    assert "train/x (text)" in tags["tensors"]


def hparams(events, tag):
    return HParamsPluginData.FromString(events.SummaryMetadata(f"_hparams_/{tag}").plugin_data.content)


def test_hyperparameters(logged):
    events = logged(x=Hyperparameters({"rate": 0.5, "deep": True, "name": "a", "none": None}))
    start = hparams(events, "session_start_info").session_start_info
    found = {name: getattr(value, value.WhichOneof("kind")) for name, value in start.hparams.items()}
    own = {name: found.pop(name) for name in ("rate", "deep", "name")}
    assert own == {"rate": 0.5, "deep": True, "name": "a"}
    assert (found["optimizer"], found["optimizer.lr"], "none" in found) == ("SGD", 0.1, False)
    assert texts(events, "train/x")[0].endswith("| rate | 0.5 |\n| deep | True |\n| name | a |\n| none | None |")


def test_hyperparameters_hide_passwords(logged):
    events = logged(x=Hyperparameters({"password": "hidden", "url": "ftp://me:hidden@host"}))
    start = hparams(events, "session_start_info").session_start_info
    assert start.hparams["password"].string_value == "***"
    assert start.hparams["url"].string_value == "ftp://me:***@host"
    assert "hidden" not in texts(events, "train/x")[0]


@pytest.mark.parametrize(("error", "status"), [(None, 1), (ValueError("no"), 2)])
def test_how_a_run_ended(make_learner, batches, tmp_path, read, error, status):
    class Fail:
        @hookimpl
        def phase_end(self):
            if error is not None:
                raise error

    learner = make_learner(LogLoss(), Fail(), LogTo(TensorBoard(tmp_path)))
    if error is None:
        learner.fit(batches, epochs=1)
    else:
        with pytest.raises(ValueError, match="no"):
            learner.fit(batches, epochs=1)
    assert hparams(read(tmp_path), "session_end_info").session_end_info.status == status


def test_metrics_of_the_end_are_there_though_nobody_logged_them(make_learner, batches, tmp_path, read):
    learner = make_learner(Metrics(), LogTo(TensorBoard(tmp_path)))
    result = learner.fit(batches, batches, epochs=2)
    assert {tag: [(e.step, e.value) for e in read(tmp_path).Scalars(tag)] for tag in ("train/loss", "val/loss")} == {
        name: [(10, float(np.float32(result.metrics[name])))] for name in ("train/loss", "val/loss")
    }


def test_metrics_that_were_logged_are_there_once(make_learner, batches, tmp_path, read):
    learner = make_learner(Metrics(), LogMetrics(), LogTo(TensorBoard(tmp_path)))
    learner.fit(batches, batches, epochs=2)
    assert [event.step for event in read(tmp_path).Scalars("val/loss")] == [5, 10]


def test_names_of_any_kind(make_learner, batches, tmp_path, read):
    class LogNames:
        @hookimpl(phase=TrainingPhase)
        def step_end(self, learner):
            for name in ("a\nb", "a\tb", "<b>", "\N{FIRE}", "x" * 10_000, "\ud800", "val/loss"):
                learner.log(name, 1.0)

    make_learner(LogNames(), LogTo(TensorBoard(tmp_path))).fit(batches, epochs=1)
    scalars = read(tmp_path).Tags()["scalars"]
    assert len(scalars) == 7
    assert {"train/<b>", "train/\N{FIRE}", "val/loss"} <= set(scalars)


def test_the_multiplexer_of_tensorboard_shows_what_plugins_ask_for(logged, tmp_path):
    logged(x=1.0, y=Text("t"), z=Histogram(torch.ones(2)), i=Image(np.zeros((2, 2), np.uint8)), a=Audio(np.zeros(9), 8))
    multiplexer = EventMultiplexer().AddRunsFromDirectory(str(tmp_path)).Reload()
    found = {
        plugin: sorted(multiplexer.PluginRunToTagToContent(plugin).get(".", {}))
        for plugin in ("scalars", "text", "histograms", "images", "audio")
    }
    assert found == {
        "scalars": ["train/x"],
        "text": ["train/y"],
        "histograms": ["train/z"],
        "images": ["train/i"],
        "audio": ["train/a"],
    }
