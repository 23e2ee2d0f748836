from __future__ import annotations

import math
import time

import pytest
from helpers import Gap
from hypothesis import given
from hypothesis import strategies as st

from loopkit.criteria import (
    Criterion,
    Divergence,
    InvalidValue,
    NumberLimit,
    NumberSinceBest,
    Patience,
    Threshold,
    TimeLimit,
    warmup,
)
from loopkit.criteria.directions import is_better
from loopkit.errors import PluginError

NAN, INF = math.nan, math.inf
errors = st.lists(st.integers(1, 20).map(lambda n: n / 4), min_size=1, max_size=30)


def fired(criterion: Criterion, values, mode="min", training=None) -> list[int]:
    """The positions at which it fires."""
    found = []
    for position, value in enumerate(values):
        if training is not None:
            criterion.observe_training(training[position])
        if criterion.update(value, mode):
            found.append(position)
    return found


# What is better


@pytest.mark.parametrize(
    ("value", "than", "mode", "by", "expected"),
    [
        (0.0, 0.5, "min", 0.0, True),
        (0.0, None, "min", 0.0, True),
        (0.5, 0.0, "max", 0.0, True),
        (0.5, 0.5, "min", 0.0, False),
        (0.5, 0.5, "max", 0.0, False),
        (0.5, 0.75, "min", 0.25, False),
        (0.5, 0.875, "min", 0.25, True),
        (NAN, None, "min", 0.0, False),
        (NAN, 1.0, "max", 0.0, False),
        (-INF, 1.0, "min", 0.0, False),
        (INF, None, "max", 0.0, False),
    ],
)
def test_is_better_takes_finite_values_that_are_better_by_more_than_the_margin(value, than, mode, by, expected):
    assert is_better(value, than, mode, by) is expected


# Each criterion in literal scenarios


@pytest.mark.parametrize(
    ("criterion", "values", "mode", "expected"),
    [
        (Patience(2), [5, 4, 5, 4, 5, 6, 7, 1], "min", [5, 6]),
        (Patience(2), [5, 6, 5, 6, 5, 4, 3, 9], "max", [5, 6]),
        (Patience(2), [1, 2, 2, 3], "min", []),  # an equal value interrupts the row
        (Patience(1), [1, 2], "min", [1]),
        (Patience(2), [1, NAN, NAN, 5, 6], "min", [2]),
        (Patience(1), [NAN, 5], "min", []),
        (NumberSinceBest(2), [5, 4, 5, 4, 3, 4, 3, 2], "min", [3, 6]),
        (NumberSinceBest(2), [1, 2, 1, 1, 3, 1], "max", [3]),
        (NumberSinceBest(2, 0.5), [4, 3.75, 3.5, 3.25], "min", [2]),
        (NumberSinceBest(2, 0.5), [4, 3.75, 3.25, 3.0], "min", []),
        (NumberSinceBest(2), [NAN, NAN, 1, NAN, 2], "min", [1, 4]),
        (NumberSinceBest(2), [1, 0.0, 0.0, 1], "min", [3]),
        (NumberLimit(2), [3, 2, 1], "min", [1, 2]),
        (Threshold(0.5), [0.6, 0.5, 0.7, 0.4, NAN], "min", [1, 3]),
        (Threshold(0.5), [0.4, 0.5, 0.3, 0.6, NAN], "max", [1, 3]),
        (Threshold(0), [0.1, 0.0], "min", [1]),
        (NumberSinceBest(2, 0.5, relative=True), [8, 5, 4, 3, 2, 1], "min", [2]),
        (NumberSinceBest(1, 0.5, relative=True), [-2, -2.5, -3.5], "min", [1]),
        (NumberSinceBest(1, 0.5, relative=True), [2, 3, 4, 5], "max", [1, 3]),
        (Divergence(3), [2, 3, 3.5, NAN, INF, 1], "min", [2, 3, 4]),
        (Divergence(3), [4, 3, 2, NAN], "max", [2, 3]),
        (Divergence(0.5, relative=True), [NAN, 2, 3, 1, 1.5, 1.75, INF], "min", [0, 5, 6]),
        (Divergence(0.5, relative=True), [4, 2, 1.5, NAN], "max", [2, 3]),
        (InvalidValue(), [0.0, NAN, INF, -INF, 1e300], "min", [1, 2, 3]),
    ],
)
def test_criterion_fires_at_these_values(criterion, values, mode, expected):
    assert fired(criterion, values, mode) == expected


@pytest.mark.parametrize(
    ("criterion", "values", "mode", "expected"),
    [
        (Patience(2), [1, 2, 3.5], "min", "rose 2 times in a row, last from 2 to 3.5"),
        (Patience(1), [2, 1], "max", "fell once, last from 2 to 1"),
        (
            NumberSinceBest(2),
            [0.25, 0.5, 0.75],
            "min",
            '0.25 was not improved in 2 values (mode "min"), the last is 0.75',
        ),
        (
            NumberSinceBest(1, 0.5),
            [1, 1],
            "min",
            '1 was not improved by more than 0.5 in 1 value (mode "min"), the last is 1',
        ),
        (
            NumberSinceBest(1, 0.5, relative=True),
            [2, 1],
            "min",
            '2 was not improved by more than 50 % in 1 value (mode "min"), the last is 1',
        ),
        (Divergence(3), [4], "min", "is 4, worse than 3"),
        (Divergence(0.5, relative=True), [2, 4], "min", "4 is more than 50 % worse than the best, 2"),
        (NumberSinceBest(2), [NAN, NAN], "min", "there was no finite one among 2 values, the last is nan"),
        (NumberLimit(2), [1, 1], "min", "measured 2 times, the limit is 2"),
        (Threshold(0.5), [0.25], "min", "reached 0.25, the threshold is 0.5"),
        (InvalidValue(), [INF], "min", "is inf"),
    ],
)
def test_criterion_says_why_it_fired(criterion, values, mode, expected):
    *before, last = values
    for value in before:
        criterion.update(value, mode)
    assert criterion.update(last, mode) == expected


# Formulas against definitions in exact arithmetic


@given(errors, st.integers(1, 4))
def test_patience_is_the_recursive_definition_of_prechelt(values, n):
    def stops(s: int, t: int) -> bool:
        """UP_s at epoch t: UP_{s-1} at t - 1, and an increase; UP_0 always."""
        return s == 0 or (t > 0 and values[t] > values[t - 1] and stops(s - 1, t - 1))

    assert fired(Patience(n), values) == [t for t in range(len(values)) if stops(n, t)]


@given(errors, st.integers(1, 4))
def test_number_since_best_counts_from_the_first_of_the_lowest_values(values, n):
    def since(t: int) -> int:
        seen = values[: t + 1]
        return t - seen.index(min(seen))

    assert fired(NumberSinceBest(n), values) == [t for t in range(len(values)) if since(t) >= n]


# Time


@pytest.fixture
def clock(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_time_limit_fires_when_the_time_is_used(clock):
    criterion = TimeLimit(60)
    criterion.start()
    clock[0] += 59
    assert criterion.update(1.0) == ""
    clock[0] += 1
    assert criterion.update(1.0) == "took 60.0 s, the limit is 60 s"


def test_time_limit_does_not_count_the_time_between_fits(clock):
    criterion = TimeLimit(60)
    criterion.start()
    clock[0] += 50
    criterion.pause()
    clock[0] += 1000
    criterion.start()
    clock[0] += 9
    assert criterion.update(1.0) == ""
    assert criterion.seconds == 59


def test_time_limit_goes_on_from_saved_seconds(clock):
    saved = TimeLimit(60)
    saved.start()
    clock[0] += 50
    state = saved.state_dict()
    resumed = TimeLimit(60)
    resumed.start()
    clock[0] += 500  # loading takes its time
    resumed.load_state_dict(state)
    clock[0] += 10
    assert resumed.seconds == 60


def test_time_limit_without_start_counts_from_the_first_value(clock):
    criterion = TimeLimit(60)
    clock[0] += 100
    assert fired(criterion, [1.0]) == []
    assert criterion.seconds == 0


# Put together


def test_either_fires_with_the_reasons_of_those_that_fire():
    criterion = Threshold(0.5) | NumberLimit(2)
    assert criterion.update(0.75) == ""
    assert criterion.update(0.25) == "reached 0.25, the threshold is 0.5; measured 2 times, the limit is 2"


def test_both_fires_only_where_both_do():
    assert fired(Threshold(0.5) & NumberLimit(2), [0.25, 0.75, 0.25]) == [2]


def test_pair_shows_each_value_to_both_members():
    assert fired(Threshold(5) | NumberSinceBest(2), [5, 6, 7, 1], "min") == [0, 2, 3]
    assert fired(NumberLimit(3) & Patience(2), [3, 4, 5, 6], "min") == [2, 3]


def test_warmup_hides_the_first_values():
    assert fired(warmup(NumberSinceBest(2), 2), [0, 0, 5, 4, 5, 6]) == [5]
    assert fired(NumberSinceBest(2), [0, 0, 5, 4, 5, 6]) == [2, 3, 4, 5]


def test_warmup_does_not_hide_training_values():
    assert fired(warmup(Gap(0.5), 2), [9, 9, 1, 9], training=[3, 2, 2, 1]) == [3]


@pytest.mark.parametrize(
    "criterion",
    [Threshold(1) | Gap(1), Gap(1) & Threshold(1), warmup(Gap(1), 1)],
)
def test_combination_needs_training_if_a_member_does(criterion):
    assert criterion.needs_training
    assert not (warmup(Threshold(1), 1) | Patience(1)).needs_training


# State

MAKERS = {
    "patience": lambda: Patience(2),
    "number_since_best": lambda: NumberSinceBest(3, 0.25),
    "divergence": lambda: Divergence(0.6, relative=True),
    "number_limit": lambda: NumberLimit(7),
    "threshold": lambda: Threshold(1.5),
    "invalid": InvalidValue,
    "gap": lambda: Gap(0.25),
    "either": lambda: Patience(2) | Divergence(0.9, relative=True),
    "both": lambda: NumberSinceBest(2) & NumberLimit(5),
    "warmup": lambda: warmup(Patience(1), 4) | warmup(Gap(0.5), 3),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("cut", range(9))
def test_criterion_resumed_anywhere_fires_as_an_uninterrupted_one(make, cut):
    values = [3, 2, 2.5, 3, 1, 1.5, 2, NAN, 4]
    training = [5, 4, 4.5, 3, 3, 3, 2, 2, 2]
    straight = fired(make(), values, training=training)
    first, second = make(), make()
    found = fired(first, values[:cut], training=training)
    second.load_state_dict(first.state_dict())
    found += [cut + t for t in fired(second, values[cut:], training=training[cut:])]
    assert found == straight


def test_state_of_another_criterion_is_refused():
    with pytest.raises(PluginError, match=r"Patience: the saved state holds best, count, not last, count: .* another"):
        Patience(2).load_state_dict(NumberSinceBest(2).state_dict())


# Refused


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Patience(0), r"Patience: n is 0: it is a whole number, from 1"),
        (lambda: Patience(True), r"Patience: n is True: it is a whole number"),
        (lambda: Patience(2.5), r"Patience: n is 2\.5: it is a whole number"),
        (lambda: NumberSinceBest(0), r"NumberSinceBest: n is 0"),
        (lambda: NumberSinceBest(2, -0.1), r"NumberSinceBest: min_delta is -0\.1: it is at least 0"),
        (lambda: NumberSinceBest(2, NAN), r"NumberSinceBest: min_delta is nan: it is a finite number"),
        (lambda: Divergence(NAN), r"Divergence: value is nan: it is a finite number"),
        (lambda: NumberLimit(-1), r"NumberLimit: n is -1"),
        (lambda: TimeLimit(0), r"TimeLimit: seconds is 0: it is a number of seconds above 0"),
        (lambda: TimeLimit("1h"), r"TimeLimit: seconds is '1h': it is a number of seconds above 0"),
        (lambda: Threshold(NAN), r"Threshold: value is nan: it is a finite number"),
        (lambda: warmup(Patience(1), 0), r"warmup: n is 0: it is a whole number, from 1"),
        (lambda: warmup(Patience, 1), r"warmup: Patience is a class; give an instance"),
        (lambda: warmup(3, 1), r"warmup: 3 is no criterion; give one of loopkit\.criteria"),
    ],
)
def test_criterion_with_a_bad_option_is_refused(make, message):
    with pytest.raises(PluginError, match=message):
        make()


def test_criterion_combined_with_itself_is_refused():
    criterion = Patience(2)
    with pytest.raises(PluginError, match="Patience is combined with itself: make a second one"):
        criterion | criterion


def test_criterion_combined_with_something_else_is_refused():
    with pytest.raises(TypeError, match="unsupported operand"):
        Patience(2) | 3
