from __future__ import annotations

import json
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loopkit.errors import PluginError
from loopkit_local import Cadence, Controller, EverySteps, Free
from loopkit_local.cadence import divide


def test_cadence_starts_with_equal_counts():
    assert Controller(Cadence(anchor=7), 3).counts == [7, 7, 7]


@pytest.mark.parametrize(
    ("wall_ms", "counts", "expected"),
    [
        ([100.0, 300.0], [10, 10], [30, 10]),
        ([300.0, 100.0], [10, 10], [10, 30]),
        ([100.0, 100.0], [10, 10], [10, 10]),
        ([100.0, 105.0], [10, 10], [10, 10]),
        ([10.0, 300.0], [1, 10], [30, 10]),  # speeds are those of the steps that were made
        ([0.0, 300.0], [0, 10], [10, 10]),  # nothing is known of a rank without steps
        ([100.0, 200.0, 400.0], [10, 10, 10], [40, 20, 10]),
    ],
)
def test_cadence_first_report_sets_counts_in_proportion_to_speed(wall_ms, counts, expected):
    assert Controller(Cadence(anchor=10), len(counts)).report(wall_ms, counts, 0.0) == expected


@pytest.mark.parametrize(
    ("new", "expected"),
    [
        (10.5, 10.05),  # an error of 5 %: the least weight, 0.1
        (15.0, 12.5),  # 50 %: weight 0.5
        (100.0, 82.0),  # 900 %: the greatest, 0.8
        (5.0, 7.5),
    ],
)
def test_cadence_weighs_a_measurement_by_its_difference(new, expected):
    controller = Controller(Cadence(), 1)
    controller.report([100.0], [10], 0.0)
    controller.report([10 * new], [10], 0.0)
    assert controller.ms[0] == pytest.approx(expected, rel=1e-12)  # rounding of the decimal fractions


def test_cadence_leaves_counts_alone_in_the_dead_zone():
    controller = Controller(Cadence(), 2)
    controller.report([100.0, 300.0], [10, 10], 0.0)
    assert controller.report([30 * 11.0, 300.0], [30, 10], 0.0) == [30, 10]
    assert controller.report([30 * 20.0, 300.0], [30, 10], 0.0) != [30, 10]


def test_cadence_keeps_its_last_measurement_of_a_rank_without_steps():
    controller = Controller(Cadence(), 2)
    controller.report([100.0, 300.0], [10, 10], 0.0)
    assert controller.report([0.0, 300.0], [0, 10], 0.0) == [30, 10]


@pytest.mark.parametrize(
    ("sync_ms", "anchor"),
    [
        (0.0, 10),  # not measured
        (10.0, 10),  # the target
        (12.0, 12),
        (12.1, 13),
        (90.0, 20),  # twofold at most
    ],
)
def test_cadence_anchor_grows_to_where_the_overhead_is_the_target(sync_ms, anchor):
    controller = Controller(Cadence(anchor=10, overhead_target=0.1), 1)
    controller.report([100.0], [10], sync_ms)
    assert controller.anchor == anchor


def test_cadence_anchor_shrinks_by_one_and_not_below_the_first():
    controller = Controller(Cadence(anchor=10), 1)
    controller.report([100.0], [10], 13.0)
    anchors = []
    for _ in range(6):
        controller.report([10.0 * controller.anchor], [controller.anchor], 1.0)
        anchors.append(controller.anchor)
    assert anchors == [12, 11, 10, 10, 10, 10]


def test_cadence_anchor_stays_between_half_the_target_and_the_target():
    controller = Controller(Cadence(anchor=10), 1)
    controller.report([100.0], [10], 15.0)
    for sync_ms in (8.0, 9.0, 14.0):
        controller.report([150.0], [15], sync_ms)
    assert controller.anchor == 15


def test_cadence_anchor_ends_at_max_anchor():
    controller = Controller(Cadence(anchor=10, max_anchor=35), 1)
    for _ in range(5):
        controller.report([100.0], [10], 1000.0)
    assert controller.anchor == 35


@pytest.mark.parametrize(("diff", "expected"), [(None, [30, 10]), (5, [15, 10]), (0, [10, 10]), (50, [30, 10])])
def test_cadence_max_batch_diff_bounds_how_far_ranks_are_apart(diff, expected):
    assert Controller(Cadence(max_batch_diff=diff), 2).report([100.0, 300.0], [10, 10], 0.0) == expected


def diverge(controller, *divergences):
    for each in divergences:
        controller.report([100.0], [10], 0.0, each)
    return controller


@pytest.mark.parametrize(
    ("divergences", "lowered"),
    [
        ((0.06, 0.07, 0.08), 1),
        ((0.01, 0.03, 0.06), 1),
        ((0.01, 0.02, 0.03), 0),  # rises, below the threshold
        ((0.08, 0.07, 0.09), 0),  # above, does not rise
        ((0.06, 0.07), 0),
        ((0.06, 0.07, 0.08, 0.09, 0.10), 1),  # three more are needed
        ((0.06, 0.07, 0.08, 0.09, 0.10, 0.11), 2),
        ((math.inf,), 1),
        ((math.nan,), 1),
    ],
)
def test_guard_lowers_the_anchor_when_divergence_rises_above_its_threshold(divergences, lowered):
    controller = diverge(Controller(Cadence(anchor=16), 1), *divergences)
    assert (controller.lowered, controller.anchor) == (lowered, 16 >> lowered)
    assert controller.counts == [16 >> lowered]


def test_guard_off_lowers_nothing():
    assert diverge(Controller(Cadence(guard=None), 1), 1.0, 2.0, 3.0, math.inf).anchor == 10


def test_guard_beats_a_slow_collective():
    controller = Controller(Cadence(anchor=16), 1)
    for each in (0.1, 0.2, 0.3):
        controller.report([100.0], [16], 1000.0, each)
    lowered = controller.anchor
    controller.report([100.0], [16], 1000.0, 0.1)
    assert lowered == 32  # 64 after two reports, halved
    assert controller.anchor == 32


def test_guard_lets_the_anchor_grow_back_while_nothing_diverges():
    controller = diverge(Controller(Cadence(anchor=16), 1), 0.1, 0.2, 0.3)
    assert controller.anchor == 8
    assert [diverge(controller, 0.01).anchor for _ in range(10)] == [9, 10, 11, 12, 13, 14, 15, 16, 16, 16]


def test_guard_lowers_to_one_at_least():
    controller = Controller(Cadence(anchor=2), 1)
    for i in range(30):
        diverge(controller, 1.0 + i)
    assert controller.anchor == 1


@pytest.mark.parametrize(
    ("left", "expected"),
    [
        (100, [30, 10]),
        (81, [30, 10]),
        (80, [30, 10]),
        (60, [23, 7]),  # half of what is left, and half again
        (41, [16, 5]),
        (40, [30, 10]),
        (7, [5, 2]),
        (2, [1, 1]),
        (1, [1, 0]),
        (0, [0, 0]),
    ],
)
def test_cadence_plan_lets_all_ranks_end_the_pass_together(left, expected):
    controller = Controller(Cadence(), 2)
    controller.report([100.0, 300.0], [10, 10], 0.0)
    assert controller.plan(left) == expected


@given(st.integers(0, 10_000), st.lists(st.integers(1, 500), min_size=1, max_size=8))
def test_divide_is_exact_and_fair(total, weights):
    parts = divide(total, weights)
    assert sum(parts) == total
    assert min(parts) >= (total >= len(weights))
    quotas = [total * weight / sum(weights) for weight in weights]
    if all(quota >= 1 for quota in quotas):
        assert all(abs(part - quota) < 1 for part, quota in zip(parts, quotas, strict=True))


times = st.floats(0, 1e5, allow_nan=False)
reports = st.lists(
    st.tuples(
        st.lists(times, min_size=3, max_size=3),
        st.lists(st.integers(0, 300), min_size=3, max_size=3),
        times,
        st.one_of(st.none(), st.floats(0, 1)),
    ),
    max_size=12,
)
cadences = st.builds(
    lambda anchor, more, diff, guard: Cadence(anchor, 0.1, anchor + more, diff, guard),
    st.integers(1, 50),
    st.integers(0, 100),
    st.one_of(st.none(), st.integers(0, 20)),
    st.one_of(st.none(), st.floats(0.01, 0.5)),
)


@settings(deadline=None, max_examples=60)
@given(cadences, reports)
def test_cadence_keeps_its_bounds_whatever_is_reported(cadence, reports):
    controller, other = Controller(cadence, 3), Controller(cadence, 3)
    for wall_ms, counts, sync_ms, divergence in reports:
        now = controller.report(wall_ms, counts, sync_ms, divergence)
        assert now == other.report(wall_ms, counts, sync_ms, divergence)
        assert min(now) >= 1
        assert 1 <= controller.anchor <= cadence.max_anchor
        assert cadence.guard is not None or controller.anchor >= cadence.anchor
        if cadence.max_batch_diff is not None:
            assert max(now) - min(now) <= cadence.max_batch_diff
        saved = json.loads(json.dumps(controller.state_dict()))
        other = Controller(cadence, 3)
        other.load_state_dict(saved)
        assert other.state_dict() == controller.state_dict()


@settings(deadline=None, max_examples=60)
@given(cadences, reports, st.integers(0, 3000))
def test_cadence_plans_use_up_a_pass_exactly(cadence, reports, left):
    controller = Controller(cadence, 3)
    for report in reports:
        controller.report(*report)
    rounds = 0
    while left:
        plan = controller.plan(left)
        assert 0 < sum(plan) <= left
        assert all(planned <= count for planned, count in zip(plan, controller.counts, strict=True))
        left -= sum(plan)
        rounds += 1
    assert controller.plan(0) == [0, 0, 0]


def simulate(controller, ms, rounds, sync_ms=1.0, jitter=0.0, seed=0):
    """Rounds of ranks with these milliseconds per step; the steps of each in the last ten rounds, and the waiting."""
    draw = random.Random(seed)
    made, waited = [0] * len(ms), 0.0
    for number in range(rounds):
        counts = controller.plan(10**9)
        wall = [n * each * (1 + jitter * draw.uniform(-1, 1)) for n, each in zip(counts, ms, strict=True)]
        if number >= rounds - 10:
            made = [a + b for a, b in zip(made, counts, strict=True)]
            waited += 1 - sum(wall) / len(wall) / max(wall)
        controller.report(wall, counts, sync_ms)
    return made, waited / 10


@pytest.mark.parametrize("jitter", [0.0, 0.2])
@pytest.mark.parametrize("ms", [[10.0, 30.0], [30.0, 10.0], [10.0, 30.0, 30.0, 10.0], [5.0, 8.0, 13.0, 21.0]])
def test_simulated_shares_follow_the_speeds(ms, jitter):
    made, waited = simulate(Controller(Cadence(anchor=10), len(ms)), ms, 30, jitter=jitter)
    speeds = [1 / each for each in ms]
    for steps, speed in zip(made, speeds, strict=True):
        assert steps / sum(made) == pytest.approx(speed / sum(speeds), rel=0.1)  # what is promised
    assert waited < 0.05 + jitter  # what the ranks wait for each other, of all their time


def test_simulated_throttle_is_followed_within_three_reports():
    controller = Controller(Cadence(), 2)
    simulate(controller, [10.0, 10.0], 5)
    simulate(controller, [10.0, 30.0], 3)
    assert controller.counts[0] / sum(controller.counts) == pytest.approx(0.75, rel=0.1)  # what is promised


def test_simulated_slow_collective_costs_the_target_once_the_anchor_has_grown():
    controller = Controller(Cadence(anchor=10), 2)
    simulate(controller, [10.0, 30.0], 20, sync_ms=150.0)  # 50 % of the first round
    assert 50 <= controller.anchor <= 56
    assert controller.overhead <= 0.1 * 1.1  # within the dead zone of the counts
    simulate(controller, [10.0, 30.0], 100, sync_ms=1.0)
    assert controller.anchor == 10


def test_controller_of_another_number_of_processes_takes_over_the_anchor():
    controller = Controller(Cadence(), 2)
    controller.report([100.0, 300.0], [10, 10], 45.0)
    other = Controller(Cadence(), 3)
    other.load_state_dict(controller.state_dict())
    assert (other.anchor, other.counts, other.ms) == (15, [15, 15, 15], [None, None, None])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: EverySteps(0), "steps is 0"),
        (lambda: EverySteps(True), "steps is True"),
        (lambda: Cadence(anchor=0), "anchor is 0"),
        (lambda: Free(max_anchor=5), "Free: max_anchor is 5: it is a whole number, from 10"),
        (lambda: Cadence(max_batch_diff=-1), "max_batch_diff is -1"),
        (lambda: Cadence(overhead_target=0.6), "overhead_target is 0.6"),
        (lambda: Cadence(overhead_target=math.nan), "overhead_target is nan"),
        (lambda: Cadence(guard=0), "guard is 0"),
    ],
)
def test_options_out_of_range_are_refused(make, words):
    with pytest.raises(PluginError, match=words):
        make()


@pytest.mark.parametrize(
    ("wall_ms", "counts", "sync_ms"),
    [([1.0], [1, 1], 0.0), ([1.0, -1.0], [1, 1], 0.0), ([1.0, 1.0], [1, -1], 0.0), ([1.0, 1.0], [1, 1], math.nan)],
)
def test_report_refuses_what_cannot_be_measured(wall_ms, counts, sync_ms):
    controller = Controller(Cadence(), 2)
    before = controller.state_dict()
    with pytest.raises(PluginError, match="report"):
        controller.report(wall_ms, counts, sync_ms)
    assert controller.state_dict() == before
