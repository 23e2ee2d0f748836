from __future__ import annotations

import math

import numpy as np
import pytest
from helpers import batches, make_learner
from hypothesis import given
from hypothesis import strategies as st

from loopkit.criteria import all_of, any_of, converged, improving, series, slope, stalled
from loopkit.plugins import History, Metrics

FALLING = [9.0, 3.0, 2.0, 1.0]
ROWS = [
    {"phase": phase, "epoch": epoch, f"{phase}/loss": loss, f"{phase}/accuracy": accuracy}
    for epoch, (loss, accuracy) in enumerate([(3.0, 0.5), (2.0, 0.5), (1.0, 0.5)], 1)
    for phase in ("train", "val")
]


@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=20), st.integers(2, 20))
def test_slope_is_that_of_a_fitted_line(values, window):
    found = slope(values, window)
    if len(values) < window:
        assert found is None
    else:
        expected = np.polyfit(np.arange(window), values[-window:], 1)[0]
        assert found == pytest.approx(expected, rel=1e-6, abs=1e-6)  # polyfit solves the system numerically


@pytest.mark.parametrize(
    ("values", "window", "expected"),
    [(FALLING, 3, -1.0), (FALLING, 2, -1.0), ([1.0, 5.0, 1.0], 3, 0.0), (FALLING, 5, None)],
)
def test_slope_of_the_last_values(values, window, expected):
    assert slope(values, window) == expected


@pytest.mark.parametrize("values", [[], [1.0], [1.0, 0.5, 0.25]])
def test_predicate_without_a_full_window_is_none(values):
    assert improving(values, 4) is None
    assert stalled(values, 4, tolerance=1.0) is None
    assert converged(values, 4, tolerance=1.0) is None


@pytest.mark.parametrize(
    ("mode", "tolerance", "expected"),
    [("min", 0.0, True), ("min", 0.5, True), ("min", 1.0, False), ("max", 0.0, False)],
)
def test_improving_is_a_slope_better_than_the_tolerance(mode, tolerance, expected):
    assert improving(FALLING, 3, mode=mode, tolerance=tolerance) is expected


def test_improving_with_mode_max_wants_rising_values():
    assert improving([1.0, 2.0, 3.0], 3, mode="max") is True
    assert improving([1.0, 1.0, 1.0], 3, mode="max") is False


@pytest.mark.parametrize(
    ("values", "tolerance", "expected"),
    [(FALLING, 0.5, False), (FALLING, 1.0, True), ([1.0, 2.0, 3.0], 0.5, False), ([1.0, 5.0, 1.0], 0.0, True)],
)
def test_stalled_is_a_slope_within_the_tolerance(values, tolerance, expected):
    assert stalled(values, 3, tolerance=tolerance) is expected


@given(st.lists(st.integers(-8, 8).map(float), min_size=4, max_size=4), st.sampled_from([0.0, 0.5, 2.0]))
def test_window_improves_or_stalls_or_gets_worse(values, tolerance):
    better = improving(values, 4, tolerance=tolerance)
    worse = improving(values, 4, tolerance=tolerance, mode="max")
    assert [better, stalled(values, 4, tolerance=tolerance), worse].count(True) == 1


@pytest.mark.parametrize(
    ("values", "tolerance", "expected"),
    [([9.0, 1.0, 3.0], 1.0, True), ([9.0, 1.0, 3.0], 0.9, False), ([9.0, 0.0, 0.0], 0.0, True)],
)
def test_converged_is_a_standard_deviation_within_the_tolerance(values, tolerance, expected):
    assert converged(values, 2, tolerance=tolerance) is expected


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_window_with_a_value_that_is_not_finite_is_none_of_all(bad):
    values = [3.0, bad, 1.0]
    assert math.isnan(slope(values, 3))
    answers = improving(values, 3), stalled(values, 3, tolerance=1.0), converged(values, 3, tolerance=1.0)
    assert answers == (False, False, False)


def test_value_that_is_not_finite_before_the_window_does_not_count():
    assert slope([math.nan, 2.0, 1.0], 2) == -1.0


# Rows of a history


def test_series_is_what_the_rows_hold_in_order():
    assert series(ROWS, "val/loss") == [3.0, 2.0, 1.0]


def test_series_of_a_phase_that_has_not_run_is_empty():
    assert series(ROWS[:1], "val/loss") == []


def test_series_of_an_unknown_metric_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"called 'val/los' \(did you mean 'val/loss'\?\); there are: train/loss, "):
        series(ROWS, "val/los")


def test_predicates_take_rows_and_a_name():
    assert slope(ROWS, 3, name="val/loss") == -1.0
    assert improving(ROWS, 3, name="val/loss") is True
    assert stalled(ROWS, 3, name="val/accuracy", tolerance=0.0) is True
    assert converged(ROWS, 3, name="val/accuracy", tolerance=0.0) is True


def test_rows_of_a_fit_are_taken_as_they_are():
    result = make_learner(Metrics(), History()).fit(batches(3), batches(2), epochs=3)
    losses = [row["val/loss"] for row in result.history if "val/loss" in row]
    assert slope(result.history, 3, name="val/loss") == slope(losses, 3)
    assert slope(result.history, 4, name="val/loss") is None


# Groups


@pytest.mark.parametrize(
    ("names", "any_expected", "all_expected"),
    [
        (["val/loss", "train/loss"], True, True),
        (["val/loss", "val/accuracy"], True, False),
        (["*/accuracy"], False, False),
        (["val/*"], True, False),
    ],
)
def test_groups_join_the_answers(names, any_expected, all_expected):
    assert any_of(improving, ROWS, names, 3) is any_expected
    assert all_of(improving, ROWS, names, 3) is all_expected


def test_groups_are_none_where_a_full_window_could_change_the_answer():
    rows = [*ROWS, {"phase": "late", "late/loss": 1.0}]
    assert any_of(improving, rows, ["late/loss", "val/loss"], 3) is True
    assert any_of(improving, rows, ["late/loss", "val/accuracy"], 3) is None
    assert all_of(improving, rows, ["late/loss", "val/loss"], 3) is None
    assert all_of(improving, rows, ["late/loss", "val/accuracy"], 3) is False


def test_groups_are_none_without_rows():
    assert any_of(improving, [], ["val/*"], 3) is None
    assert all_of(improving, [], ["val/loss"], 3) is None


def test_groups_pass_options_on():
    assert all_of(stalled, ROWS, ["val/loss"], 3, tolerance=1.0) is True
    assert all_of(improving, ROWS, ["val/loss"], 3, mode="max") is False


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("val/loss", r"names is the string 'val/loss': give a list"),
        ([], r"names is empty"),
        (["val/x*"], r"no metric is called 'val/x\*'; there are: train/loss"),
        (["val/los"], r"no metric is called 'val/los' \(did you mean"),
    ],
)
def test_groups_refuse_bad_names(names, message):
    with pytest.raises(ValueError, match=message):
        any_of(improving, ROWS, names, 3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: slope([1.0], 1), r"slope: window is 1: it is a whole number, from 2"),
        (lambda: slope([1.0], 2.0), r"slope: window is 2\.0: it is a whole number"),
        (lambda: improving([1.0], 2, mode="low"), r"mode is 'low': it is 'min' or 'max'"),
        (lambda: improving([1.0], 2, tolerance=-1.0), r"tolerance is -1\.0: it is a finite number, at least 0"),
        (lambda: stalled([1.0], 2, tolerance=math.nan), r"tolerance is nan"),
        (lambda: converged([1.0], 2, tolerance=math.inf), r"tolerance is inf"),
        (lambda: slope(ROWS, 2), r"the values are rows of a history: name the metric with name="),
    ],
)
def test_bad_options_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
