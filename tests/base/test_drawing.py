"""Charts for notebooks."""

import math
from xml.etree import ElementTree

import pytest

from loopkit.base.drawing import COLORS, charts, line_chart

SVG = "{http://www.w3.org/2000/svg}"


def lines(text):
    """The points of each curve."""
    found = ElementTree.fromstring(text).findall(f".//{SVG}polyline")
    return [[tuple(map(float, pair.split(","))) for pair in each.get("points").split()] for each in found]


def texts(text):
    return [each.text for each in ElementTree.fromstring(text).iter(f"{SVG}text")]


def test_each_curve_has_its_points_and_its_name():
    drawn = line_chart({"train": [(1, 4.0), (2, 2.0), (3, 1.0)], "val": [(1, 3.0), (3, 2.0)]}, "loss", "epoch")
    train, val = lines(drawn)
    assert [x for x, _ in train] == sorted(x for x, _ in train)
    assert [y for _, y in train] == sorted(y for _, y in train)  # downwards, y rises
    assert (train[0][0], train[-1][0]) == (val[0][0], val[-1][0])
    assert {"train", "val", "loss", "epoch"} <= set(texts(drawn))


def test_powers_of_ten_are_as_far_apart_as_each_other():
    (line,) = lines(line_chart({"loss": [(1e-4, 1.0), (1e-3, 2.0), (1e-2, 3.0), (0.0, 9.0)]}, log=True))
    assert len(line) == 3
    assert line[1][0] - line[0][0] == pytest.approx(line[2][0] - line[1][0], abs=0.11)  # places have one decimal
    assert {"0.0001", "0.001", "0.01"} <= set(texts(line_chart({"loss": [(1e-4, 1.0), (1e-2, 3.0)]}, log=True)))


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_points_that_are_no_numbers_are_left_out(odd):
    assert len(lines(line_chart({"loss": [(1, 1.0), (2, odd), (3, 2.0)]}))[0]) == 2


@pytest.mark.parametrize(
    "points", [[], [(1, 1.0)], [(1, 2.0), (2, 2.0)], [(1, 1e300), (2, -1e300)], [(1, 1e-300), (2, 0.0)]]
)
def test_few_points_and_equal_ones_are_drawn(points):
    drawn = line_chart({"a": points})
    assert all(math.isfinite(place) for line in lines(drawn) for point in line for place in point)


def test_names_are_data():
    drawn = line_chart({"<script>": [(1, 1.0)]}, "a & b", "<x>", marks={"<b>": 1.0})
    assert {"<script>", "a & b", "<x>", "<b>"} <= set(texts(drawn))


def test_more_curves_than_colors_are_drawn():
    assert len(lines(line_chart({str(number): [(0, number)] for number in range(len(COLORS) + 2)}))) == len(COLORS) + 2


def test_rows_of_a_history_have_a_chart_a_metric():
    rows = [
        {"phase": "train", "epoch": 1, "train/loss": 2.0},
        {"phase": "val", "epoch": 1, "val/loss": 1.5, "val/accuracy": 0.5},
        {"phase": "train", "epoch": 2, "train/loss": 1.0},
    ]
    drawn = charts(rows, "epoch")
    assert drawn.count("<svg") == 2
    assert [
        len(line) for each in ElementTree.fromstring(drawn) for line in lines(ElementTree.tostring(each, "unicode"))
    ] == [2, 1, 1]
