"""The smoothed curve is that of all points, whatever part of it is shown."""

import json
import random
from functools import cache

import numpy as np
import pytest
from support import Writer

from loopkit_monitor import views
from loopkit_monitor.series import Series
from loopkit_monitor.smoothing import Mean
from loopkit_monitor.store import Store

WEIGHTS = (0.5, 0.9, 0.99, 0.999)


def direct(values, weight):
    """The debiased exponential mean, one value after the other."""
    means, sum, count = [], 0.0, 0
    for value in values:
        if np.isfinite(value):
            sum, count = sum * weight + (1 - weight) * value, count + 1
            means.append(sum / (1 - weight**count))
        else:
            means.append(value)
    return np.array(means)


def noise(count, seed=0):
    order = np.random.default_rng(seed)
    return np.where(order.random(count) < 0.01, 5.0, 0.3 + 0.01 * order.standard_normal(count))


@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("count", [1, 2, 100, 16_384, 50_000])
def test_mean_is_the_direct_one(count, weight):
    values = noise(count)
    assert np.abs(Mean(weight).of(values) - direct(values, weight)).max() < 1e-9


def test_mean_of_a_million_values_is_the_direct_one():
    values = noise(1_000_000)
    assert np.abs(Mean(0.99).of(values) - direct(values.tolist(), 0.99)).max() < 1e-6


@pytest.mark.parametrize("cuts", [(1,), (100, 101), (5000, 20_000)])
def test_mean_in_parts_is_that_of_the_whole(cuts):
    values, mean = noise(30_000), Mean(0.99)
    parts = [mean.of(part) for part in np.split(values, cuts)]
    assert np.allclose(np.concatenate(parts), Mean(0.99).of(values), rtol=1e-12, atol=0)


@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf])
def test_value_that_is_no_number_stays_and_does_not_count(odd):
    values = noise(300)
    values[[0, 50, 299]] = odd
    assert np.allclose(Mean(0.9).of(values), direct(values, 0.9), rtol=1e-12, equal_nan=True)


@pytest.mark.parametrize("weight", [-0.1, 1.0, np.nan])
def test_weight_out_of_range_raises(weight):
    with pytest.raises(ValueError, match="from 0 to below 1"):
        Mean(weight)


def write(root, name, values):
    writer = Writer(root / name / "log.jsonl")
    lines = [
        {"phase": "train", "epoch": 0, "step": step, "update": step, "time": 1.0 * step, "values": {"loss": value}}
        for step, value in enumerate(values, 1)
    ]
    writer.raw("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize("count", [100, 5000, 100_000])
def test_smoothed_curve_of_a_run_is_the_same_at_every_zoom(tmp_path, count):
    values = noise(count)
    write(tmp_path, "a", values.tolist())
    store = Store(tmp_path, most_points=10_000)
    store.poll()
    expected = direct(values, 0.99)
    for low, high in ((None, None), (count // 3, count // 2), (count - 50, None)):
        shown = views.series(store, "a", ["loss"], 200, low, high, smooth=0.99)["series"]["loss"]["smooth"]
        assert len(shown["step"]) > 10
        assert np.abs(expected[np.array(shown["step"]) - 1] - np.array(shown["value"])).max() < 1e-6


@pytest.fixture(scope="module")
def long_log(tmp_path_factory):
    """Logs of 60,000 values, three of them odd."""

    @cache
    def make(odd):
        root, values = tmp_path_factory.mktemp("long"), noise(60_000)
        if odd is not None:
            values[[3, 20_000, 40_001]] = odd
        write(root, "a", [str(value) if not np.isfinite(value) else value for value in values.tolist()])
        return root, values

    return make


@pytest.mark.parametrize("weight", [0.6, 0.99, 0.9999])
@pytest.mark.parametrize("odd", [None, np.nan, np.inf])
def test_zoom_begins_at_the_sums_before_it_and_reads_little(long_log, weight, odd, monkeypatch):
    root, values = long_log(odd)
    store = Store(root, most_points=5000)
    store.poll()
    expected = direct(values, weight)
    views.series(store, "a", ["loss"], 200, smooth=weight)
    seen = []
    blocks = Series.blocks
    monkeypatch.setattr(Series, "blocks", lambda *given: (seen.append(each) or each for each in blocks(*given)))
    shown = views.series(store, "a", ["loss"], 200, 50_000, 52_000, smooth=weight)["series"]["loss"]["smooth"]
    assert np.allclose(
        expected[np.array(shown["step"]) - 1], np.array(shown["value"], float), rtol=1e-9, equal_nan=True
    )
    assert sum(map(len, seen)) < 30_000


@pytest.mark.parametrize("count", [300, 16_384, 20_000])
def test_mean_of_each_point_is_made_once(tmp_path, count, monkeypatch):
    write(tmp_path, "a", noise(count).tolist())
    store = Store(tmp_path)
    store.poll()
    made = []
    of = Mean.of
    monkeypatch.setattr(Mean, "of", lambda mean, values: made.append(len(values)) or of(mean, values))
    sum, number = views.series(store, "a", ["loss"], 200, smooth=0.9)["series"]["loss"]["mean"]
    assert (sum, number) == (pytest.approx(direct(noise(count), 0.9)[-1]), count)
    assert np.sum(made) == count


def test_smoothed_curves_of_two_runs_keep_their_rank(tmp_path):
    order = random.Random(0)
    for name, level, spikes in (("a", 0.5, 0.0), ("b", 0.3, 0.01)):
        write(tmp_path, name, [5.0 if order.random() < spikes else order.gauss(level, 0.01) for _ in range(20_000)])
    store = Store(tmp_path)
    store.poll()
    means = {id: views.series(store, id, ["loss"], smooth=0.99)["series"]["loss"] for id in "ab"}
    a, b = (np.mean(each["smooth"]["value"]) for each in means.values())
    assert abs(a - 0.5) < 0.01
    assert b < 0.6
    assert means["b"]["smooth"]["value"][-1] < means["a"]["smooth"]["value"][-1]


def test_smoothed_curve_grows_with_its_log(tmp_path):
    values = noise(3000).tolist()
    write(tmp_path, "a", values[:2000])
    store = Store(tmp_path)
    store.poll()
    views.series(store, "a", ["loss"], smooth=0.9)
    writer = Writer(tmp_path / "a" / "log.jsonl")
    for step, value in enumerate(values[2000:], 2001):
        writer.step = step
        writer.together({"loss": value})
    store.poll()
    said = views.series(store, "a", ["loss"], 5000, smooth=0.9)["series"]["loss"]
    assert np.allclose(said["smooth"]["value"], direct(values, 0.9), rtol=1e-12)
    sum, count = said["mean"]
    assert (sum / (1 - 0.9**count), count) == (pytest.approx(said["smooth"]["value"][-1]), 3000)
