from __future__ import annotations

import math
import sys
import timeit
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import lr_scheduler

from loopkit.schedules import (
    OfLength,
    ScheduleFn,
    clip,
    constant,
    cosine,
    cosine_restarts,
    cosine_warmup,
    cyclic,
    exponential,
    interpolate,
    inverse,
    inverse_sqrt,
    join,
    linear,
    loop,
    multi_step,
    one_cycle,
    one_cycle_momentum,
    piecewise,
    plot,
    polynomial,
    resolve,
    scale,
    shift,
    sine,
    step,
    warmup,
    warmup_stable_decay,
)

EPS = sys.float_info.epsilon
PI = math.pi


def values(schedule: ScheduleFn, n: int) -> list[float]:
    return [schedule(k) for k in range(n)]


# Each schedule against its closed form


def restarts(k: int, period: int, t_mult: int, decay: float, start: float, end: float) -> float:
    length, cycle = period, 0
    while k >= length:
        k, length, cycle = k - length, length * t_mult, cycle + 1
    return end + (start - end) * decay**cycle / 2 * (1 + math.cos(PI * k / length))


def one_cycle_by_hand(k: int, total: int, pct: float, levels: list[float], linearly: bool) -> float:
    peaks = [pct * total - 1, 2 * pct * total - 2] if len(levels) == 4 else [pct * total - 1]
    ends, k, begin = [*peaks, total - 1], min(k, total - 1), 0.0
    for end, a, b in zip(ends, levels, levels[1:], strict=False):
        if k <= end:
            part = (k - begin) / (end - begin)
            return (b - a) * part + a if linearly else b + (a - b) / 2 * (math.cos(PI * part) + 1)
        begin = end
    raise AssertionError(k)


def triangle(k: int, up: int, down: int) -> float:
    done = k % (up + down)
    return done / up if done < up else (up + down - done) / down


def stable_decay(
    k: int, total: int, rise: int, fall: int, peak: float, end: float, f: Callable[[float], float]
) -> float:
    if k < rise:
        return peak * ((k + 1) / rise)
    if k >= total:
        return end
    return peak if k <= total - fall else end + (peak - end) * f((k - (total - fall)) / fall)


def between(k: int, points: dict[int, float]) -> float:
    for a, b in zip(points, list(points)[1:], strict=False):
        if a <= k < b:
            return points[a] + (points[b] - points[a]) * (k - a) / (b - a)
    return points[min(points)] if k < min(points) else points[max(points)]


HI, LO, MIN = 0.5, 0.5 / 10, 0.5 / 10 / 100
POINTS = {3: 0.1, 10: 0.7, 200: -0.3}

CLOSED_FORMS: list[tuple[ScheduleFn, Callable[[int], float]]] = [
    (constant(), lambda k: 1.0),
    (constant(0.3), lambda k: 0.3),
    (step(7), lambda k: 0.1 ** (k // 7)),
    (step(7, 0.3, start=0.7), lambda k: 0.7 * 0.3 ** (k // 7)),
    (multi_step([1, 50, 51]), lambda k: 0.1 ** sum(mark <= k for mark in (1, 50, 51))),
    (multi_step([]), lambda k: 1.0),
    (multi_step([3, 9], 0.3, start=0.7), lambda k: 0.7 * 0.3 ** ((k >= 3) + (k >= 9))),
    (exponential(0.97), lambda k: 0.97**k),
    (exponential(1.03, start=0.7), lambda k: 0.7 * 1.03**k),
    (exponential(0.3, every=70, start=0.7), lambda k: 0.7 * 0.3 ** (k / 70)),
    (polynomial(100), lambda k: 1 - min(k, 100) / 100),
    (polynomial(100, 0.9, start=0.7, end=0.2), lambda k: 0.2 + (0.7 - 0.2) * (1 - k / 100) ** 0.9 if k < 100 else 0.2),
    (inverse(0.01), lambda k: 1 / (1 + 0.01 * k)),
    (inverse(0.01, 0.75, start=0.7), lambda k: 0.7 / (1 + 0.01 * k) ** 0.75),
    (linear(100), lambda k: 1 - min(k, 100) / 100),
    (linear(100, start=0.1, end=0.7), lambda k: 0.1 + (0.7 - 0.1) * k / 100 if k < 100 else 0.7),
    (cosine(100), lambda k: 0.5 * (1 + math.cos(PI * min(k, 100) / 100))),
    (cosine(100, start=0.7, end=0.2), lambda k: 0.2 + 0.5 * (0.7 - 0.2) * (1 + math.cos(PI * min(k, 100) / 100))),
    (cosine_warmup(100), lambda k: 0.5 * (1 - math.cos(PI * min(k, 100) / 100))),
    (
        cosine_warmup(100, start=0.1, end=0.7),
        lambda k: 0.1 + 0.5 * (0.7 - 0.1) * (1 - math.cos(PI * k / 100)) if k < 100 else 0.7,
    ),
    (cosine_restarts(30), lambda k: restarts(k, 30, 1, 1.0, 1.0, 0.0)),
    (
        cosine_restarts(30, decay=0.7, start=0.7, end=0.2),
        lambda k: restarts(k, 30, 1, 0.7, 0.7, 0.2),
    ),
    (
        cosine_restarts(3, t_mult=2, decay=0.7, start=0.7, end=0.2),
        lambda k: restarts(k, 3, 2, 0.7, 0.7, 0.2),
    ),
    (cosine_restarts(5, t_mult=3), lambda k: restarts(k, 5, 3, 1.0, 1.0, 0.0)),
    (one_cycle(100), lambda k: one_cycle_by_hand(k, 100, 0.3, [1 / 25, 1.0, 1 / 25 / 1e4], False)),
    (
        one_cycle(97, max_lr=HI, pct_start=0.4, anneal="linear", div_factor=10, final_div_factor=100),
        lambda k: one_cycle_by_hand(k, 97, 0.4, [LO, HI, MIN], True),
    ),
    (
        one_cycle(97, max_lr=HI, pct_start=0.4, div_factor=10, final_div_factor=100, three_phase=True),
        lambda k: one_cycle_by_hand(k, 97, 0.4, [LO, HI, LO, MIN], False),
    ),
    (one_cycle(100, pct_start=1.0), lambda k: one_cycle_by_hand(k, 100, 1.0, [1 / 25, 1.0, 0.0], False)),
    (one_cycle_momentum(100), lambda k: one_cycle_by_hand(k, 100, 0.3, [0.95, 0.85, 0.95], False)),
    (
        one_cycle_momentum(100, base_momentum=0.7, max_momentum=0.8, pct_start=0.4, anneal="linear", three_phase=True),
        lambda k: one_cycle_by_hand(k, 100, 0.4, [0.8, 0.7, 0.8, 0.8], True),
    ),
    (sine(20), lambda k: math.sin(PI * (k % 20) / 20)),
    (
        sine(20, low=0.2, high=0.7, halve=True),
        lambda k: 0.2 + (0.7 - 0.2) * math.sin(PI * (k % 20) / 20) * 0.5 ** (k // 20),
    ),
    (
        sine(7, low=0.2, high=0.7, gamma=0.99),
        lambda k: 0.2 + (0.7 - 0.2) * math.sin(PI * (k % 7) / 7) * 0.99**k,
    ),
    (cyclic(20), lambda k: triangle(k, 20, 20)),
    (cyclic(20, 33, low=0.2, high=0.7), lambda k: 0.2 + (0.7 - 0.2) * triangle(k, 20, 33)),
    (
        cyclic(7, 3, low=0.2, high=0.7, mode="triangular2"),
        lambda k: 0.2 + (0.7 - 0.2) * triangle(k, 7, 3) / 2 ** (k // 10),
    ),
    (
        cyclic(7, 3, low=0.2, high=0.7, mode="exp_range", gamma=0.99),
        lambda k: 0.2 + (0.7 - 0.2) * triangle(k, 7, 3) * 0.99**k,
    ),
    (
        warmup_stable_decay(100, warmup=10, decay=20),
        lambda k: stable_decay(k, 100, 10, 20, 1.0, 0.0, lambda x: 1 - x),
    ),
    (
        warmup_stable_decay(100, warmup=0, decay=30, peak=0.7, end=0.2, shape="cosine"),
        lambda k: stable_decay(k, 100, 0, 30, 0.7, 0.2, lambda x: 0.5 * (1 + math.cos(PI * x))),
    ),
    (
        warmup_stable_decay(100, warmup=70, decay=30, peak=0.7, end=0.2, shape="sqrt"),
        lambda k: stable_decay(k, 100, 70, 30, 0.7, 0.2, lambda x: 1 - math.sqrt(x)),
    ),
    (inverse_sqrt(30), lambda k: min((k + 1) / 30, math.sqrt(30 / (k + 1)))),
    (inverse_sqrt(30, peak=0.7), lambda k: 0.7 * min((k + 1) / 30, math.sqrt(30 / (k + 1)))),
    (interpolate(POINTS), lambda k: between(k, POINTS)),
    (interpolate({5: 0.3}), lambda k: 0.3),
    (piecewise({0: 0.1, 10: 0.7, 200: -0.3}), lambda k: 0.1 if k < 10 else 0.7 if k < 200 else -0.3),
    (piecewise({0: 0.3}), lambda k: 0.3),
    (warmup(10), lambda k: min((k + 1) / 10, 1.0)),
    (warmup(10, from_zero=True), lambda k: min(k / 10, 1.0)),
    (warmup(0, then=linear(100)), lambda k: 1 - min(k, 100) / 100),
    (
        warmup(10, then=cosine(90, start=0.7)),
        lambda k: 0.7 * ((k + 1) / 10) if k < 10 else 0.35 * (1 + math.cos(PI * min(k - 10, 90) / 90)),
    ),
    (shift(exponential(0.97), 5), lambda k: 0.97 ** (k + 5)),
    (shift(exponential(0.97), -5), lambda k: 0.97 ** max(0, k - 5)),
    (scale(exponential(0.97), 0.3), lambda k: 0.97**k * 0.3),
    (clip(exponential(0.97), 0.2, 0.8), lambda k: min(max(0.97**k, 0.2), 0.8)),
    (loop(exponential(0.97), 7), lambda k: 0.97 ** (k % 7)),
    (
        join([(exponential(0.97), 10), (constant(0.3), 1), (step(7), 50)]),
        lambda k: 0.97**k if k < 10 else 0.3 if k < 11 else 0.1 ** ((k - 11) // 7),
    ),
]


def text(value: object) -> str:
    return getattr(value, "__name__", "")


@pytest.mark.parametrize(("schedule", "closed_form"), CLOSED_FORMS, ids=text)
def test_schedule_equals_its_closed_form_bitwise(schedule: ScheduleFn, closed_form: Callable[[int], float]) -> None:
    assert values(schedule, 1000) == values(closed_form, 1000)


@pytest.mark.parametrize(("schedule", "closed_form"), CLOSED_FORMS, ids=text)
def test_schedule_gives_a_float(schedule: ScheduleFn, closed_form: Callable[[int], float]) -> None:
    assert {type(value) for value in values(schedule, 300)} == {float}


@pytest.mark.parametrize(("schedule", "closed_form"), CLOSED_FORMS, ids=text)
def test_schedule_is_pure(schedule: ScheduleFn, closed_form: Callable[[int], float]) -> None:
    assert [schedule(k) for k in reversed(range(300))] == values(schedule, 300)[::-1]


# The ends, where a formula's rounding would show


@pytest.mark.parametrize("shape", [linear, cosine, cosine_warmup, polynomial])
@pytest.mark.parametrize(("start", "end"), [(1.0, 0.0), (0.1, 0.3), (0.7, 1e-3), (1e-3, 0.1), (0.3, 0.3)])
@pytest.mark.parametrize("updates", [1, 3, 7, 49, 1000])
def test_schedule_begins_and_ends_exactly(shape: Any, start: float, end: float, updates: int) -> None:
    schedule = shape(updates, start=start, end=end)
    assert schedule(0) == start
    assert schedule(updates) == end


@pytest.mark.parametrize("shape", [linear, cosine, cosine_warmup, polynomial])
@pytest.mark.parametrize("after", [0, 1, 50, 100, 10**12])
def test_schedule_stays_after_its_end(shape: Any, after: int) -> None:
    assert shape(100, start=0.7, end=0.2)(100 + after) == 0.2


@pytest.mark.parametrize("anneal", ["cos", "linear"])
@pytest.mark.parametrize("three_phase", [False, True])
def test_one_cycle_stays_after_its_end(anneal: Any, three_phase: bool) -> None:
    schedule = one_cycle(100, anneal=anneal, three_phase=three_phase)
    assert values(lambda k: schedule(99 + k), 200) == [schedule(99)] * 200


def test_one_cycle_peaks_at_its_maximum() -> None:
    assert max(values(one_cycle(100, max_lr=0.5), 100)) == one_cycle(100, max_lr=0.5)(29) == 0.5


def test_one_cycle_momentum_is_lowest_where_the_learning_rate_is_highest() -> None:
    lrs, momenta = values(one_cycle(100), 100), values(one_cycle_momentum(100), 100)
    assert momenta.index(min(momenta)) == lrs.index(max(lrs))


@pytest.mark.parametrize("three_phase", [False, True])
@pytest.mark.parametrize(("updates", "pct_start"), [(10, 0.1), (4, 0.25), (2, 0.5)])
def test_one_cycle_begins_at_the_peak_if_the_rise_has_one_update(
    updates: int, pct_start: float, three_phase: bool
) -> None:
    assert one_cycle(updates, pct_start=pct_start, three_phase=three_phase)(0) == 1.0


@pytest.mark.parametrize("t_mult", [2, 3, 10])
@pytest.mark.parametrize("cycle", [0, 1, 2, 5, 10, 15])
def test_cosine_restarts_begins_each_cycle_at_its_very_update(t_mult: int, cycle: int) -> None:
    begin = sum(7 * t_mult**i for i in range(cycle))
    schedule = cosine_restarts(7, t_mult=t_mult, decay=0.5)
    assert schedule(begin) == 0.5**cycle
    if begin:
        assert schedule(begin - 1) < 0.5**cycle


@pytest.mark.parametrize("schedule", [warmup(10), inverse_sqrt(10), warmup_stable_decay(99, warmup=10, decay=9)])
def test_warmup_is_never_zero_and_ends_at_the_peak(schedule: ScheduleFn) -> None:
    assert values(schedule, 10) == [k / 10 for k in range(1, 11)]


def test_cyclic_triangular2_vanishes_after_very_many_cycles() -> None:
    assert cyclic(1, mode="triangular2")(10**9 + 1) == 0.0


# Each schedule against torch's, run on an optimizer


def torch_lrs(make: Callable[[torch.optim.Optimizer], Any], n: int, key: str = "lr", lr: float = 0.7) -> list[float]:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=lr, momentum=0.5)
    scheduler = make(optimizer)
    lrs = []
    for k in range(n):
        if k:
            optimizer.step()
            scheduler.step()
        lrs.append(optimizer.param_groups[0][key])
    return lrs


# Updates, our schedule, torch's, and the bound on the difference relative to the largest value. Where torch multiplies
# the last learning rate by a factor at each update, the factors are each within a few roundings, which add up: 4 per
# update. Where torch has a closed form the bound is a few roundings in all.
RECURSIVE = 4 * EPS
TORCH: dict[str, tuple[int, ScheduleFn, Callable[[torch.optim.Optimizer], Any], float]] = {
    "constant": (50, constant(0.7), lambda o: lr_scheduler.LambdaLR(o, lambda k: 1.0), 0.0),
    "step": (50, step(7, 0.3, start=0.7), lambda o: lr_scheduler.StepLR(o, 7, 0.3), 7 * RECURSIVE),
    "multi_step": (
        50,
        multi_step([3, 9, 40], 0.3, start=0.7),
        lambda o: lr_scheduler.MultiStepLR(o, [3, 9, 40], 0.3),
        3 * RECURSIVE,
    ),
    "exponential": (300, exponential(0.97, start=0.7), lambda o: lr_scheduler.ExponentialLR(o, 0.97), 300 * RECURSIVE),
    "polynomial": (
        300,
        polynomial(200, 2.0, start=0.7),
        lambda o: lr_scheduler.PolynomialLR(o, 200, 2.0),
        300 * RECURSIVE,
    ),
    "linear_up": (
        300,
        linear(200, start=0.7 * 0.1, end=0.7),
        lambda o: lr_scheduler.LinearLR(o, 0.1, 1.0, 200),
        300 * RECURSIVE,
    ),
    "linear_down": (
        300,
        linear(200, start=0.7, end=0.7 * 0.1),
        lambda o: lr_scheduler.LinearLR(o, 1.0, 0.1, 200),
        300 * RECURSIVE,
    ),
    # up to its end: after it torch's rises again
    "cosine": (
        201,
        cosine(200, start=0.7, end=0.2),
        lambda o: lr_scheduler.CosineAnnealingLR(o, 200, 0.2),
        201 * RECURSIVE,
    ),
    "cosine_restarts": (
        300,
        cosine_restarts(30, start=0.7, end=0.2),
        lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 30, 1, 0.2),
        4 * EPS,
    ),
    "cosine_restarts_longer": (
        300,
        cosine_restarts(5, t_mult=3, start=0.7, end=0.2),
        lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 5, 3, 0.2),
        4 * EPS,
    ),
    "one_cycle": (
        100,
        one_cycle(100, max_lr=0.7),
        lambda o: lr_scheduler.OneCycleLR(o, 0.7, 100),
        0.0,
    ),
    "one_cycle_linear": (
        97,
        one_cycle(97, max_lr=0.7, pct_start=0.4, anneal="linear", div_factor=10, final_div_factor=100),
        lambda o: lr_scheduler.OneCycleLR(
            o, 0.7, 97, pct_start=0.4, anneal_strategy="linear", div_factor=10, final_div_factor=100
        ),
        0.0,
    ),
    "one_cycle_three_phase": (
        97,
        one_cycle(97, max_lr=0.7, pct_start=0.4, three_phase=True),
        lambda o: lr_scheduler.OneCycleLR(o, 0.7, 97, pct_start=0.4, three_phase=True),
        0.0,
    ),
    "one_cycle_all_rise": (
        50,
        one_cycle(50, pct_start=1.0),
        lambda o: lr_scheduler.OneCycleLR(o, 1.0, 50, pct_start=1.0),
        0.0,
    ),
    "one_cycle_no_rise": (
        50,
        one_cycle(50, pct_start=0.0),
        lambda o: lr_scheduler.OneCycleLR(o, 1.0, 50, pct_start=0.0),
        0.0,
    ),
    "one_cycle_single": (1, one_cycle(1), lambda o: lr_scheduler.OneCycleLR(o, 1.0, 1), 0.0),
    # torch's position in the cycle is a rounded fraction of the number of cycles so far (up to 30), and the division
    # by the part that is left enlarges that by up to 3
    "cyclic": (
        300,
        cyclic(20, 33, low=0.2, high=0.7),
        lambda o: lr_scheduler.CyclicLR(o, 0.2, 0.7, 20, 33),
        100 * EPS,
    ),
    "cyclic_triangular2": (
        300,
        cyclic(7, 3, low=0.2, high=0.7, mode="triangular2"),
        lambda o: lr_scheduler.CyclicLR(o, 0.2, 0.7, 7, 3, mode="triangular2"),
        100 * EPS,
    ),
    "cyclic_exp_range": (
        300,
        cyclic(7, 3, low=0.2, high=0.7, mode="exp_range", gamma=0.99),
        lambda o: lr_scheduler.CyclicLR(o, 0.2, 0.7, 7, 3, mode="exp_range", gamma=0.99),
        100 * EPS,
    ),
}


@pytest.mark.parametrize("case", TORCH)
def test_schedule_equals_torch(case: str) -> None:
    n, schedule, make, bound = TORCH[case]
    ours, torchs = values(schedule, n), torch_lrs(make, n)
    assert max(abs(a - b) for a, b in zip(ours, torchs, strict=True)) <= bound * max(ours)


@pytest.mark.parametrize("anneal", ["cos", "linear"])
@pytest.mark.parametrize("three_phase", [False, True])
def test_one_cycle_momentum_equals_torch(anneal: Any, three_phase: bool) -> None:
    ours = one_cycle_momentum(100, pct_start=0.4, anneal=anneal, three_phase=three_phase)
    torchs = torch_lrs(
        lambda o: lr_scheduler.OneCycleLR(o, 0.7, 100, pct_start=0.4, anneal_strategy=anneal, three_phase=three_phase),
        100,
        "momentum",
    )
    assert values(ours, 100) == torchs


def test_join_equals_torch_sequential() -> None:
    ours = join([(linear(10, start=0.7 * 0.1, end=0.7), 10), (exponential(0.9, start=0.7), None)])
    torchs = torch_lrs(
        lambda o: lr_scheduler.SequentialLR(
            o, [lr_scheduler.LinearLR(o, 0.1, 1.0, 10), lr_scheduler.ExponentialLR(o, 0.9)], [10]
        ),
        50,
    )
    # torch multiplies at each update: 4 roundings for each of 50
    assert max(abs(a - b) for a, b in zip(values(ours, 50), torchs, strict=True)) <= 50 * RECURSIVE


# Laws of composition

schedules = st.one_of(
    st.builds(exponential, st.floats(0.5, 1.01), start=st.floats(-2, 2)),
    st.builds(cosine, st.integers(1, 60), start=st.floats(-2, 2), end=st.floats(-2, 2)),
    st.builds(linear, st.integers(1, 60), start=st.floats(-2, 2), end=st.floats(-2, 2)),
    st.builds(cyclic, st.integers(1, 9), st.integers(1, 9)),
    st.builds(sine, st.integers(1, 9)),
    st.builds(interpolate, st.dictionaries(st.integers(0, 60), st.floats(-2, 2), min_size=1)),
)
N = 80
lengths = st.integers(1, 40)


@given(schedules, lengths, lengths)
def test_shift_adds_up(s: ScheduleFn, a: int, b: int) -> None:
    assert values(shift(shift(s, a), b), N) == values(shift(s, a + b), N)


@given(schedules, lengths)
def test_shift_there_and_back_is_nothing(s: ScheduleFn, a: int) -> None:
    assert values(shift(shift(s, -a), a), N) == values(s, N)


@given(schedules)
def test_shift_by_nothing_is_nothing(s: ScheduleFn) -> None:
    assert values(shift(s, 0), N) == values(s, N)


@given(schedules, st.integers(-3, 3), st.integers(-3, 3))
def test_scale_multiplies(s: ScheduleFn, a: int, b: int) -> None:
    # powers of two, which round nothing unless a value is subnormal
    flat = clip(s, 1e-9, 2.0)
    assert values(scale(scale(flat, 2.0**a), 2.0**b), N) == values(scale(flat, 2.0 ** (a + b)), N)


@given(schedules, st.floats(-1, 1), st.floats(0, 1))
def test_clip_stays_within_its_bounds(s: ScheduleFn, low: float, width: float) -> None:
    assert all(low <= value <= low + width for value in values(clip(s, low, low + width), N))


@given(schedules, st.floats(-1, 1), st.floats(0, 1))
def test_clip_changes_only_what_is_outside(s: ScheduleFn, low: float, width: float) -> None:
    pairs = zip(values(clip(s, low, low + width), N), values(s, N), strict=True)
    assert all(clipped == value for clipped, value in pairs if low <= value <= low + width)


@given(schedules, lengths)
def test_loop_repeats_the_beginning(s: ScheduleFn, n: int) -> None:
    once = values(s, n)
    assert values(loop(s, n), 3 * n) == once * 3


@given(schedules, lengths)
def test_join_of_a_schedule_and_its_rest_is_the_schedule(s: ScheduleFn, n: int) -> None:
    assert values(join([(s, n), (shift(s, n), None)]), N) == values(s, N)


@given(schedules, schedules, schedules, lengths, lengths)
def test_join_is_associative(a: ScheduleFn, b: ScheduleFn, c: ScheduleFn, n: int, m: int) -> None:
    flat = values(join([(a, n), (b, m), (c, None)]), N)
    assert values(join([(join([(a, n), (b, m)]), n + m), (c, None)]), N) == flat
    assert values(join([(a, n), (join([(b, m), (c, None)]), None)]), N) == flat


@given(schedules, schedules, lengths, st.floats(-2, 2))
def test_scale_distributes_over_join(a: ScheduleFn, b: ScheduleFn, n: int, factor: float) -> None:
    inside = join([(scale(a, factor), n), (scale(b, factor), None)])
    assert values(scale(join([(a, n), (b, None)]), factor), N) == values(inside, N)


@given(schedules, lengths)
def test_warmup_then_runs_the_schedule_from_its_beginning(s: ScheduleFn, n: int) -> None:
    assert values(shift(warmup(n, then=s), n), N) == values(s, N)


@given(schedules, lengths)
def test_warmup_ends_at_the_first_value(s: ScheduleFn, n: int) -> None:
    assert warmup(n, then=s)(n - 1) == s(0)


@given(st.dictionaries(st.integers(0, 60), st.floats(-2, 2), min_size=1))
def test_interpolate_goes_through_its_points(points: dict[int, float]) -> None:
    schedule = interpolate(points)
    assert {k: schedule(k) for k in points} == points


@given(st.dictionaries(st.integers(1, 60), st.floats(-2, 2)), st.floats(-2, 2))
def test_piecewise_is_a_join_of_constants(points: dict[int, float], first: float) -> None:
    marks = [0, *sorted(points)]
    held = {0: first, **points}
    ends: list[int | None] = [*marks[1:], None]
    parts = [(constant(held[a]), None if b is None else b - a) for a, b in zip(marks, ends, strict=True)]
    assert values(piecewise(held), N) == values(join(parts), N)


# Schedules whose length is not known yet

UNKNOWN: dict[str, tuple[ScheduleFn, Callable[[int], ScheduleFn]]] = {
    "linear": (linear(start=0.7, end=0.2), lambda n: linear(n, start=0.7, end=0.2)),
    "cosine": (cosine(start=0.7, end=0.2), lambda n: cosine(n, start=0.7, end=0.2)),
    "polynomial": (polynomial(power=2.0), lambda n: polynomial(n, 2.0)),
    "one_cycle": (one_cycle(max_lr=0.7), lambda n: one_cycle(n, max_lr=0.7)),
    "one_cycle_momentum": (one_cycle_momentum(anneal="linear"), lambda n: one_cycle_momentum(n, anneal="linear")),
    "warmup_stable_decay": (
        warmup_stable_decay(warmup=5, decay=10),
        lambda n: warmup_stable_decay(n, warmup=5, decay=10),
    ),
    "warmup": (warmup(20, then=cosine()), lambda n: warmup(20, then=cosine(n - 20))),
    "shift": (shift(cosine(), 20), lambda n: shift(cosine(n + 20), 20)),
    "shift_back": (shift(cosine(), -20), lambda n: shift(cosine(n - 20), -20)),
    "scale": (scale(cosine(), 0.3), lambda n: scale(cosine(n), 0.3)),
    "clip": (clip(cosine(), 0.2, 0.8), lambda n: clip(cosine(n), 0.2, 0.8)),
    "join": (
        join([(linear(), 10), (constant(), 7), (cosine(), None)]),
        lambda n: join([(linear(10), 10), (constant(), 7), (cosine(n - 17), None)]),
    ),
    "nested": (
        clip(scale(warmup(20, then=join([(constant(), 10), (cosine(), None)])), 0.3), 0.01, 0.29),
        lambda n: clip(scale(warmup(20, then=join([(constant(), 10), (cosine(n - 30), None)])), 0.3), 0.01, 0.29),
    ),
}


@pytest.mark.parametrize("case", UNKNOWN)
@pytest.mark.parametrize("total", [31, 100])
def test_resolve_gives_a_schedule_its_length(case: str, total: int) -> None:
    unknown, known = UNKNOWN[case]
    assert isinstance(unknown, OfLength)
    assert values(resolve(unknown, total), 200) == values(known(total), 200)


@pytest.mark.parametrize("case", UNKNOWN)
def test_resolve_names_the_schedule_as_if_its_length_had_been_known(case: str) -> None:
    unknown, known = UNKNOWN[case]
    assert text(resolve(unknown, 100)) == text(known(100))


@pytest.mark.parametrize("case", UNKNOWN)
def test_resolve_can_be_done_again_with_another_length(case: str) -> None:
    unknown, known = UNKNOWN[case]
    resolve(unknown, 50)
    assert values(resolve(unknown, 100), 200) == values(known(100), 200)


def test_resolve_returns_a_schedule_of_known_length_as_it_is() -> None:
    schedule = cosine(5)
    assert resolve(schedule, 100) is schedule
    assert resolve(schedule, None) is schedule


@pytest.mark.parametrize("schedule", [loop(cosine(), 9), join([(linear(), 4), (cosine(), 9)])])
def test_composition_that_knows_the_length_gives_it(schedule: ScheduleFn) -> None:
    assert not isinstance(schedule, OfLength)


def test_loop_gives_its_length_to_the_schedule() -> None:
    assert values(loop(cosine(), 9), 30) == values(loop(cosine(9), 9), 30)


def test_join_gives_its_lengths_to_the_schedules() -> None:
    ours = join([(linear(), 4), (cosine(), 9)])
    assert values(ours, 30) == values(join([(linear(4), 4), (cosine(9), 9)]), 30)


def test_of_length_says_that_it_cannot_be_called_yet() -> None:
    with pytest.raises(TypeError, match=r"^linear\(updates=None, start=1\.0, end=0\.0\) was called with update 3, but"):
        linear()(3)


def test_resolve_without_a_total_names_the_schedule() -> None:
    with pytest.raises(ValueError, match=r"^warmup\(3, then=linear\(.*\)\) spans the whole fit, but the number"):
        resolve(warmup(3, then=linear()), None)


@pytest.mark.parametrize("total", [1, 19, 20])
@pytest.mark.parametrize(
    "schedule",
    [warmup(20, then=cosine()), shift(cosine(), -20), join([(constant(), 9), (linear(), 11), (cosine(), None)])],
)
def test_resolve_refuses_a_fit_that_is_over_before_the_last_part(schedule: ScheduleFn, total: int) -> None:
    with pytest.raises(ValueError, match=rf"^total is {total}, but .* has 20 updates before its last part"):
        resolve(schedule, total)


def test_resolve_refuses_a_fit_shorter_than_warmup_and_decay() -> None:
    with pytest.raises(ValueError, match=r"^updates is 14: it must be at least warmup \+ decay, 5 \+ 10"):
        resolve(warmup_stable_decay(warmup=5, decay=10), 14)


# What it says of itself


def test_repr_says_what_the_schedule_is() -> None:
    schedule = scale(warmup(3, then=cosine(9)), 0.5)
    assert repr(schedule).startswith(
        "<function scale(warmup(3, then=cosine(updates=9, start=1.0, end=0.0)), 0.5) at 0x"
    )


def test_repr_of_an_unknown_length_says_what_the_schedule_is() -> None:
    assert repr(clip(linear(), 0, 1)) == "clip(linear(updates=None, start=1.0, end=0.0), 0.0, 1.0)"


def test_repr_names_a_function_of_the_user() -> None:
    def ramp(update: int) -> float:
        return float(update)

    assert text(scale(ramp, 2)) == "scale(ramp, 2.0)"
    assert text(ramp) == "ramp"


# What it refuses

WHOLE = "it must be a whole number"
FINITE = "it must be a finite number"
wrong_whole: list[tuple[Callable[[Any], object], str, int | None]] = [
    (lambda v: step(v), "every", 1),
    (lambda v: multi_step([v]), "milestones[0]", 1),
    (lambda v: multi_step([4, v]), "milestones[1]", 1),
    (lambda v: exponential(0.9, every=v), "every", 1),
    (lambda v: polynomial(v), "updates", 1),
    (lambda v: linear(v), "updates", 1),
    (lambda v: cosine(v), "updates", 1),
    (lambda v: cosine_warmup(v), "updates", 1),
    (lambda v: cosine_restarts(v), "period", 1),
    (lambda v: cosine_restarts(3, t_mult=v), "t_mult", 1),
    (lambda v: one_cycle(v), "updates", 1),
    (lambda v: one_cycle_momentum(v), "updates", 1),
    (lambda v: cyclic(v), "up", 1),
    (lambda v: sine(v), "period", 1),
    (lambda v: cyclic(3, v), "down", 1),
    (lambda v: warmup_stable_decay(v, warmup=1, decay=1), "updates", 1),
    (lambda v: warmup_stable_decay(warmup=v, decay=1), "warmup", 0),
    (lambda v: warmup_stable_decay(warmup=1, decay=v), "decay", 1),
    (lambda v: inverse_sqrt(v), "warmup", 1),
    (lambda v: interpolate({v: 1.0}), "update", 0),
    (lambda v: piecewise({0: 1.0, v: 1.0}), "update", 0),
    (lambda v: join([(linear(), v), (cosine(), 2)]), "updates of parts[0]", 1),
    (lambda v: join([(linear(), 1), (cosine(3), v)]), "updates of parts[1]", 1),
    (lambda v: warmup(v), "n", 0),
    (lambda v: shift(constant(), v), "k", None),
    (lambda v: loop(constant(), v), "n", 1),
    (lambda v: resolve(cosine(), v), "total", 1),
    (lambda v: plot(constant(), v), "updates", 1),
]


def wrong_wholes() -> Iterator[tuple[Callable[[Any], object], str, object]]:
    for make, argument, low in wrong_whole:
        span = "" if low is None else f", from {low}"
        for value in [1.5, 1e4, "3", True, *([] if low is None else [low - 1, -7])]:
            yield make, f"{argument} is {value!r}: {WHOLE}{span}", value


@pytest.mark.parametrize(("make", "message", "value"), list(wrong_wholes()))
def test_schedule_refuses_a_wrong_count(make: Callable[[Any], object], message: str, value: object) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the whole message is compared
        make(value)
    assert str(caught.value) == message


ANY: list[float] = []
POSITIVE = [0.0, -0.1]
wrong_number: list[tuple[Callable[[Any], object], str, str, list[float]]] = [
    (lambda v: constant(v), "value", "", ANY),
    (lambda v: step(3, v), "gamma", " above 0", POSITIVE),
    (lambda v: step(3, start=v), "start", "", ANY),
    (lambda v: multi_step([3], v), "gamma", " above 0", POSITIVE),
    (lambda v: multi_step([3], start=v), "start", "", ANY),
    (lambda v: exponential(v), "gamma", " above 0", POSITIVE),
    (lambda v: exponential(0.9, start=v), "start", "", ANY),
    (lambda v: polynomial(power=v), "power", " above 0", POSITIVE),
    (lambda v: polynomial(start=v), "start", "", ANY),
    (lambda v: polynomial(end=v), "end", "", ANY),
    (lambda v: inverse(v), "gamma", " from 0.0", [-0.1]),
    (lambda v: inverse(0.1, v), "power", " above 0", POSITIVE),
    (lambda v: inverse(0.1, start=v), "start", "", ANY),
    (lambda v: linear(start=v), "start", "", ANY),
    (lambda v: linear(end=v), "end", "", ANY),
    (lambda v: cosine(start=v), "start", "", ANY),
    (lambda v: cosine(end=v), "end", "", ANY),
    (lambda v: cosine_warmup(3, start=v), "start", "", ANY),
    (lambda v: cosine_warmup(3, end=v), "end", "", ANY),
    (lambda v: cosine_restarts(3, decay=v), "decay", " above 0, up to 1.0", [*POSITIVE, 1.1]),
    (lambda v: cosine_restarts(3, start=v), "start", "", ANY),
    (lambda v: cosine_restarts(3, end=v), "end", "", ANY),
    (lambda v: one_cycle(max_lr=v), "max_lr", " above 0", POSITIVE),
    (lambda v: one_cycle(pct_start=v), "pct_start", " from 0.0 to 1.0", [-0.1, 1.1]),
    (lambda v: one_cycle(pct_start=v, three_phase=True), "pct_start", " from 0.0 to 0.5", [-0.1, 0.6]),
    (lambda v: one_cycle(div_factor=v), "div_factor", " above 0", POSITIVE),
    (lambda v: one_cycle(final_div_factor=v), "final_div_factor", " above 0", POSITIVE),
    (lambda v: one_cycle_momentum(base_momentum=v), "base_momentum", "", ANY),
    (lambda v: one_cycle_momentum(max_momentum=v), "max_momentum", "", ANY),
    (lambda v: one_cycle_momentum(pct_start=v), "pct_start", " from 0.0 to 1.0", [-0.1, 1.1]),
    (lambda v: cyclic(3, low=v), "low", "", ANY),
    (lambda v: sine(3, low=v), "low", "", ANY),
    (lambda v: sine(3, high=v), "high", "", ANY),
    (lambda v: sine(3, gamma=v), "gamma", " above 0, up to 1.0", [*POSITIVE, 1.1]),
    (lambda v: cyclic(3, high=v), "high", "", ANY),
    (lambda v: cyclic(3, mode="exp_range", gamma=v), "gamma", " above 0, up to 1.0", [*POSITIVE, 1.1]),
    (lambda v: warmup_stable_decay(warmup=1, decay=1, peak=v), "peak", "", ANY),
    (lambda v: warmup_stable_decay(warmup=1, decay=1, end=v), "end", "", ANY),
    (lambda v: inverse_sqrt(3, peak=v), "peak", "", ANY),
    (lambda v: interpolate({3: v}), "points[3]", "", ANY),
    (lambda v: piecewise({0: v}), "points[0]", "", ANY),
    (lambda v: scale(constant(), v), "factor", "", ANY),
    (lambda v: clip(constant(), v, 1.0), "low", "", ANY),
    (lambda v: clip(constant(), 0.0, v), "high", "", ANY),
]


def wrong_numbers() -> Iterator[tuple[Callable[[Any], object], str, object]]:
    for make, argument, span, more in wrong_number:
        for value in [math.nan, math.inf, -math.inf, "0.1", None, True, *more]:
            yield make, f"{argument} is {value!r}: {FINITE}{span}", value


@pytest.mark.parametrize(("make", "message", "value"), list(wrong_numbers()))
def test_schedule_refuses_a_wrong_number(make: Callable[[Any], object], message: str, value: object) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the whole message is compared
        make(value)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: multi_step([3, 3]), r"milestones is \[3, 3\]: each must be larger than the one before"),
        (lambda: multi_step([4, 3]), r"milestones is \[4, 3\]: each must be larger"),
        (lambda: one_cycle(anneal="cosine"), "one_cycle: anneal is 'cosine': it is 'cos' or 'linear'"),
        (lambda: one_cycle_momentum(anneal="sin"), "one_cycle_momentum: anneal is 'sin': it is 'cos' or 'linear'"),
        (
            lambda: cyclic(3, mode="tri"),
            "cyclic: mode is 'tri': it is 'triangular', 'triangular2' or 'exp_range'",
        ),
        (lambda: cyclic(3, low=0.7, high=0.2), r"low is 0\.7 and high is 0\.2: low must be at most high"),
        (lambda: cyclic(3, gamma=0.9), r"gamma is 0\.9 with mode 'triangular': only mode 'exp_range' uses it"),
        (
            lambda: warmup_stable_decay(warmup=1, decay=1, shape="exp"),
            "warmup_stable_decay: shape is 'exp': it is 'linear', 'cosine' or 'sqrt'",
        ),
        (
            lambda: warmup_stable_decay(14, warmup=5, decay=10),
            r"updates is 14: it must be at least warmup \+ decay, 5 \+ 10; shorten one of them",
        ),
        (lambda: interpolate({}), r"points is \{\}: give a mapping of updates to values, at least one"),
        (lambda: interpolate([(0, 1.0)]), r"points is \[\(0, 1\.0\)\]: give a mapping"),
        (lambda: piecewise({}), r"points is \{\}: give a mapping"),
        (lambda: piecewise({2: 1.0}), "points begin at update 2: give a value for update 0"),
        (lambda: join([]), r"parts is \[\]: give at least one pair \(schedule, updates\)"),
        (
            lambda: join([(linear(), None), (cosine(), 3)]),
            r"updates of parts\[0\] is None: only the last part may go without a number",
        ),
        (lambda: join([(0.1, 3)]), r"parts\[0\] is 0\.1: a schedule is a function of the update"),
        (lambda: warmup(3, then=0.1), r"then is 0\.1: a schedule is a function"),
        (lambda: shift(0.1, 3), r"schedule is 0\.1: a schedule is a function"),
        (lambda: scale(0.1, 3), r"schedule is 0\.1: a schedule is a function"),
        (lambda: clip(0.1, 0, 1), r"schedule is 0\.1: a schedule is a function"),
        (lambda: loop(0.1, 3), r"schedule is 0\.1: a schedule is a function"),
        (lambda: resolve(0.1, 3), r"schedule is 0\.1: a schedule is a function"),
        (lambda: clip(constant(), 0.7, 0.2), r"low is 0\.7 and high is 0\.2: low must be at most high"),
    ],
)
def test_schedule_refuses(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        make()


def test_schedule_takes_numbers_of_other_types() -> None:
    schedule = linear(torch.tensor(4), start=torch.tensor(0.5), end=Fraction(1, 4))  # type: ignore[arg-type]
    assert text(schedule) == "linear(updates=4, start=0.5, end=0.25)"


# plot


@pytest.fixture
def pyplot() -> Iterator[Any]:
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    yield plt
    plt.close("all")


def test_plot_draws_the_values(pyplot: Any) -> None:
    schedule = scale(linear(), 0.5)
    ax = plot(schedule, 4)
    (line,) = ax.get_lines()
    assert list(line.get_xdata()) == [0, 1, 2, 3]
    assert list(line.get_ydata()) == [0.5, 0.375, 0.25, 0.125]
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("update", "value")
    assert line.get_label() == "scale(linear(updates=4, start=1.0, end=0.0), 0.5)"


def test_plot_draws_into_given_axes(pyplot: Any) -> None:
    _, axes = pyplot.subplots()
    assert plot(linear(), 4, ax=axes) is axes
    assert plot(cosine(), 4, ax=axes) is axes
    assert len(axes.get_lines()) == 2
    assert len(pyplot.get_fignums()) == 1


def test_plot_without_matplotlib_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(ImportError, match=r"^plot needs matplotlib: pip install matplotlib$"):
        plot(linear(), 4)


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "closed_form"), CLOSED_FORMS, ids=text)
def test_schedule_costs_less_than_a_microsecond(schedule: ScheduleFn, closed_form: Callable[[int], float]) -> None:
    # the best of many short runs, so that other load on the machine does not count
    best = min(timeit.repeat(lambda: schedule(50), number=1000, repeat=50)) / 1000
    assert best < 1e-6
