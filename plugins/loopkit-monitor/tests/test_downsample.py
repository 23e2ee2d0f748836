import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loopkit_monitor.downsample import extremes


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
