"""Kinds: what they take, what they refuse, and what backends get of them."""

from __future__ import annotations

import io
import struct
import wave
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import loopkit.logs.kinds
from loopkit.errors import LogError
from loopkit.logs import Audio, Figure, File, Graph, Histogram, Hyperparameters, Image, Table, Text, Value


def decoded(png: bytes) -> np.ndarray:
    """The pixels of a PNG file without filters, ``(H, W, C)``."""
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    chunks, at = {}, 8
    while at < len(png):
        size, name = struct.unpack(">I4s", png[at : at + 8])
        data = png[at + 8 : at + 8 + size]
        assert struct.unpack(">I", png[at + 8 + size : at + 12 + size])[0] == zlib.crc32(name + data)
        chunks[name] = data
        at += size + 12
    width, height, bits, color = struct.unpack(">IIBB", chunks[b"IHDR"][:10])
    channels = {0: 1, 2: 3, 6: 4}[color]
    assert bits == 8
    lines = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(height, 1 + width * channels)
    assert not lines[:, 0].any()
    return lines[:, 1:].reshape(height, width, channels)


# Scalars


@pytest.mark.parametrize(
    "given",
    [
        2,
        2.0,
        np.float32(2),
        np.int64(2),
        np.array([2.0]),
        torch.tensor(2),
        torch.tensor([2.0]),
        torch.tensor(2.0).half(),
    ],
)
def test_value_is_a_float_whatever_number_it_was(given: object) -> None:
    value = Value(given).value
    assert type(value) is float
    assert value == 2.0


def test_value_of_a_boolean_is_one_or_zero() -> None:
    assert [Value(x).value for x in (True, False, torch.tensor(True), np.bool_(False))] == [1.0, 0.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("given", "fix"),
    [
        (torch.zeros(2), r"Tensor\[2\] float32 cpu: log a scalar, such as \.mean\(\), or Histogram"),
        (np.zeros(3), r"log a scalar"),
        (torch.tensor(1j), r"log a real number, such as \.abs\(\)"),
        ("0.5", r"log Text\(\.\.\.\)"),
        (None, r"log only where there is a value, or float\('nan'\)"),
        ({"a": 1}, r"log its values one by one, or Hyperparameters"),
        (object(), r"log a number, a scalar tensor or a kind"),
        (1j, r"log a number"),
        (10**400, r"log its logarithm"),
        (Text, r"Text is a class: give an instance, Text\(\.\.\.\)"),
    ],
)
def test_value_refuses(given: object, fix: str) -> None:
    with pytest.raises(LogError, match=fix):
        Value(given)


# Images


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_image_png_has_the_pixels(channels: int) -> None:
    pixels = np.arange(5 * 7 * channels, dtype=np.uint8).reshape(5, 7, channels)
    assert np.array_equal(decoded(Image(pixels).png()), pixels)
    assert np.array_equal(Image(pixels).array(), pixels)


def test_image_of_two_dimensions_is_grey() -> None:
    pixels = torch.arange(6, dtype=torch.uint8).reshape(2, 3)
    assert Image(pixels).array().tolist() == [[[0], [1], [2]], [[3], [4], [5]]]


def test_image_channels_may_come_first() -> None:
    pixels = torch.arange(3 * 5 * 7, dtype=torch.uint8).reshape(3, 5, 7)
    assert np.array_equal(Image(pixels).array(), pixels.permute(1, 2, 0).numpy())
    assert np.array_equal(Image(pixels.numpy()).array(), pixels.permute(1, 2, 0).numpy())


def test_image_that_could_be_either_goes_by_its_type() -> None:
    pixels = torch.arange(3 * 2 * 3, dtype=torch.uint8).reshape(3, 2, 3)
    assert np.array_equal(Image(pixels).array(), pixels.permute(1, 2, 0).numpy())
    assert np.array_equal(Image(pixels.numpy()).array(), pixels.numpy())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_image_of_floats_is_rounded(dtype: torch.dtype) -> None:
    assert Image(torch.tensor([[0.0, 0.5, 1.0]], dtype=dtype)).array().ravel().tolist() == [0, 128, 255]


def test_image_keeps_a_copy() -> None:
    pixels = torch.zeros(2, 2, requires_grad=True)
    image = Image(pixels)
    with torch.no_grad():
        pixels.fill_(1)
    assert not image.array().any()
    assert not image.pixels.requires_grad


@pytest.mark.parametrize(
    ("pixels", "fix"),
    [
        (torch.zeros(2, 3, 5, 5), r"have the shape \(2, 3, 5, 5\).*one by one"),
        (torch.zeros(5), r"have the shape \(5,\)"),
        (torch.zeros(5, 5, 2), r"with 1, 3 or 4 channels"),
        (torch.zeros(0, 5), r"shape \(0, 5\)"),
        (torch.zeros(2, 2, dtype=torch.int64), r"are torch.int64: they are uint8, or floats"),
        (torch.full((2, 2), 255.0), r"reach 255: floats are in \[0, 1\]; divide by 255"),
        (np.full((2, 2), -1.0), r"reach -1"),
        ("cat.png", r"is no tensor or array of numbers"),
    ],
)
def test_image_refuses(pixels: object, fix: str) -> None:
    with pytest.raises(LogError, match=fix):
        Image(pixels)


def test_figure_is_drawn_when_it_is_logged() -> None:
    from matplotlib.figure import Figure as Drawing

    drawing = Drawing(figsize=(1, 1), dpi=20)
    drawing.subplots().plot([1, 2])
    figure = Figure(drawing)
    before = figure.png()
    drawing.clf()
    assert before[:8] == b"\x89PNG\r\n\x1a\n"
    assert figure.png() == before


def test_figure_refuses_axes() -> None:
    with pytest.raises(LogError, match=r"give a matplotlib figure, such as axes\.figure"):
        Figure([1, 2])


# Histograms


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64, torch.int64])
def test_histogram_counts_as_numpy_does(dtype: torch.dtype) -> None:
    values = torch.arange(257, dtype=dtype)
    histogram = Histogram(values)
    counts, edges = np.histogram(values.double().numpy(), 64)
    assert histogram.counts == tuple(counts)
    assert histogram.edges == tuple(edges)


def test_histogram_leaves_out_what_is_not_finite() -> None:
    histogram = Histogram(torch.tensor([0.0, 1.0, torch.inf, -torch.inf, torch.nan]), bins=2)
    assert (histogram.counts, histogram.edges) == ((1.0, 1.0), (0.0, 0.5, 1.0))


def test_histogram_of_one_value_has_it_in_the_middle() -> None:
    histogram = Histogram(np.full(5, 3.0), bins=1)
    assert (histogram.counts, histogram.edges) == ((5.0,), (2.5, 3.5))


def test_histogram_of_nothing_is_empty() -> None:
    assert Histogram(torch.zeros(0), bins=2).counts == (0.0, 0.0)


def test_histogram_keeps_a_copy() -> None:
    values = torch.arange(4.0)
    histogram = Histogram(values, bins=2)
    values.zero_()
    assert histogram.counts == (2.0, 2.0)


def test_histogram_of_counts() -> None:
    histogram = Histogram.of_counts([1, 0, 2], [0, 1, 2, 4])
    assert (histogram.counts, histogram.edges) == ((1.0, 0.0, 2.0), (0.0, 1.0, 2.0, 4.0))


@pytest.mark.parametrize(
    ("counts", "edges", "fix"),
    [([1], [0], "one edge more"), ([-1], [0, 1], "not negative"), ([1, 1], [0, 2, 1], "do not rise"), ([], [1], "one")],
)
def test_histogram_of_counts_refuses(counts: list[float], edges: list[float], fix: str) -> None:
    with pytest.raises(LogError, match=fix):
        Histogram.of_counts(counts, edges)


@pytest.mark.parametrize(
    ("values", "bins", "fix"),
    [
        (torch.zeros(1, dtype=torch.complex64), 8, "abs"),
        ("text", 8, "no tensor"),
        (torch.zeros(1), 0, "counts from 1"),
        (torch.eye(2).to_sparse(), 8, r"no plain tensor with values: give such, as by \.to_dense\(\)"),
        (torch.zeros(2, device="meta"), 8, "no plain tensor with values"),
    ],
)
def test_histogram_refuses(values: object, bins: int, fix: str) -> None:
    with pytest.raises(LogError, match=fix):
        Histogram(values, bins)


# The others


def test_table_is_a_copy() -> None:
    rows = [[1, "a"], [None, 2.5]]
    table = Table(["x", "y"], rows)
    rows[0][0] = 5
    assert (table.columns, table.rows) == (("x", "y"), ((1, "a"), (None, 2.5)))


@pytest.mark.parametrize(
    ("columns", "rows", "fix"),
    [
        ("xy", [], "columns are str: give a list"),
        (None, [], "columns are NoneType: give a list"),
        ([1], [], "give a list of strings"),
        (["x"], None, "rows are NoneType: give a list"),
        (["x"], [5], r"a row is int: rows are lists of cells"),
        (["x"], ["a"], r"a row is str: rows are lists of cells"),
        (["x"], [[1, 2]], "row 0 has 2 cells, and there are 1 columns"),
        (["x"], [[1], [torch.zeros(2)]], r"row 1 has Tensor\[2\] float32 cpu under 'x': cells are"),
    ],
)
def test_table_refuses(columns: object, rows: object, fix: str) -> None:
    with pytest.raises(LogError, match=fix):
        Table(columns, rows)


def test_audio_wav_has_the_samples() -> None:
    samples = torch.tensor([[0.0, 1.0, -1.0], [0.5, -0.5, 0.0]])
    with wave.open(io.BytesIO(Audio(samples, 8000).wav())) as file:
        assert (file.getnchannels(), file.getframerate(), file.getsampwidth()) == (2, 8000, 2)
        frames = np.frombuffer(file.readframes(3), "<i2").reshape(3, 2)
    assert frames.tolist() == [[0, 16384], [32767, -16384], [-32767, 0]]


@pytest.mark.parametrize(
    ("samples", "rate", "fix"),
    [
        (torch.zeros(5, dtype=torch.int16), 8000, "give floats"),
        (torch.full((5,), 2.0), 8000, "reach 2: floats are in"),
        (torch.zeros(2, 2, 2), 8000, "shape"),
        (torch.zeros(5), 0.5, "a whole number of samples a second"),
    ],
)
def test_audio_refuses(samples: object, rate: object, fix: str) -> None:
    with pytest.raises(LogError, match=fix):
        Audio(samples, rate)


def test_file_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(LogError, match="is no file: write it before"):
        File(tmp_path / "none.txt")
    with pytest.raises(LogError, match="is no file"):
        File(tmp_path)
    with pytest.raises(LogError, match="path is NoneType: give a string or a Path"):
        File(None)  # type: ignore[arg-type]


def test_file_path_is_resolved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("a")
    monkeypatch.chdir(tmp_path)
    assert File("a.txt").path == tmp_path / "a.txt"


def test_hyperparameters_are_plain() -> None:
    given = {"lr": 0.1, "name": "sgd", "nesterov": True, "clip": None}
    assert Hyperparameters(given).values == given
    with pytest.raises(LogError, match=r"'sizes' is .*: values are None, booleans, numbers and strings"):
        Hyperparameters({"sizes": [1, 2]})
    with pytest.raises(LogError, match="the name 1 is no string"):
        Hyperparameters({1: 2})
    with pytest.raises(LogError, match="give a dict"):
        Hyperparameters([("lr", 0.1)])


def test_graph_lists_modules() -> None:
    rows = Graph(nn.Sequential(nn.Linear(3, 2), nn.ReLU())).modules()
    assert [(row["name"], row["type"]) for row in rows] == [("", "Sequential"), ("0", "Linear"), ("1", "ReLU")]
    assert rows[1]["parameters"] == {"weight": [2, 3], "bias": [2]}
    with pytest.raises(LogError, match=r"give an instance of torch\.nn\.Module"):
        Graph(nn.Linear)


def test_text_refuses_other_types() -> None:
    assert Text("a").text == "a"
    with pytest.raises(LogError, match="give a string"):
        Text(5)


# Histograms that are counted at once

CASES = {
    "random": torch.randn(1000, generator=torch.Generator().manual_seed(0)),
    "whole": torch.arange(100),
    "half": torch.randn(1000, generator=torch.Generator().manual_seed(1)).bfloat16(),
    "double": torch.randn(7, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(2)),
    "same": torch.full((5,), 3.0),
    "not finite": torch.tensor([float("inf"), 1.0, float("nan"), 2.0, 4.0, float("-inf")]),
    "none finite": torch.tensor([float("inf"), float("nan")]),
    "empty": torch.zeros(0),
    "scalar": torch.tensor(2.0),
    "bool": torch.tensor([True, False, True]),
}


@pytest.mark.parametrize("bins", [1, 8, 64])
@pytest.mark.parametrize("case", CASES)
def test_histogram_counted_at_once_is_that_of_values(case: str, bins: int) -> None:
    values = CASES[case]
    late, now = Histogram(values, bins), Histogram.counted(values, bins)
    assert now.edges == late.edges
    assert sum(now.counts) == sum(late.counts)
    moved = sum(abs(a - b) for a, b in zip(now.counts, late.counts, strict=True))
    assert moved <= 4  # those on an edge, by rounding


def test_histogram_counted_in_pieces_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Histogram.counted(CASES["random"]).counts
    monkeypatch.setattr(loopkit.logs.kinds, "PIECE", 64)
    assert Histogram.counted(CASES["random"]).counts == whole


def test_histogram_counted_at_once_keeps_no_copy() -> None:
    values = torch.arange(1000.0)
    found = Histogram.counted(values)
    values.zero_()
    assert found.values.numel() == 0
    assert found.edges[-1] == 999.0


def test_histogram_counted_at_once_refuses_complex() -> None:
    with pytest.raises(LogError, match="give real numbers"):
        Histogram.counted(torch.ones(2, dtype=torch.complex64))
