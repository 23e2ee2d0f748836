import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loopkit_monitor.downsample import extremes, extremes_of


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(), min_size=1, max_size=300), st.integers(5, 50))
def test_extremes_keep_the_ends_and_all_that_stands_out(values, points):
    values = np.array(values)
    kept = extremes(values, points)
    assert len(kept) <= max(points, 1)
    assert (np.diff(kept) > 0).all()
    assert (kept[0], kept[-1]) == (0, len(values) - 1)
    shown = values[kept]
    if not np.isnan(values).all():
        assert np.nanmin(shown) == np.nanmin(values)
        assert np.nanmax(shown) == np.nanmax(values)
    assert np.isnan(shown).any() == np.isnan(values).any()


def test_one_peak_in_a_million_shows():
    values = np.zeros(1_000_000)
    values[123_456], values[777_777] = 9.0, np.nan
    kept = extremes(values, 2000)
    assert 123_456 in kept
    assert 777_777 in kept


def test_too_few_points_are_refused():
    with pytest.raises(ValueError, match="points is 4"):
        extremes(np.zeros(9), 4)


@pytest.mark.parametrize("cuts", [(), (1,), (7, 900), (40_000, 40_001, 70_000)])
@pytest.mark.parametrize("undefined", [False, True])
@pytest.mark.parametrize("points", [5, 200, 1600])
def test_a_curve_in_blocks_has_the_points_of_the_whole(cuts, undefined, points):
    values = np.random.default_rng(0).standard_normal(100_003)
    if undefined:
        values[[0, 500, 40_000, 100_002]] = np.nan
    blocks = np.split(values, cuts)
    chosen, there = extremes_of(blocks, len(values), points, undefined=undefined)
    assert chosen.tolist() == extremes(values, points).tolist()
    assert np.array_equal(there, values[chosen], equal_nan=True)
    assert len(chosen) <= points
