"""Schedules: pure functions from the number of the update, from 0, to a value.

A schedule is any ``Callable[[int], float]``. Those made here start at 1.0 by default, so that they can
multiply the learning rate that each parameter group was given; with ``start=``, ``end=`` or ``peak=`` they give the
value itself. ``schedule(k)`` is the value in force during update k, so ``schedule(0)`` belongs to the first update.
They keep no state: any update can be asked for, in any order.

>>> schedule = warmup(10, then=cosine(90))
>>> schedule(0), schedule(9), schedule(55), schedule(100)
(0.1, 1.0, 0.5, 0.0)

A schedule over the whole of a fit need not know its length yet: without ``updates`` it is an ``OfLength``, which
composes like any other and becomes a schedule by ``resolve(schedule, total)``.

>>> schedule = scale(warmup(10, then=cosine()), 0.5)
>>> schedule
scale(warmup(10, then=cosine(updates=None, start=1.0, end=0.0)), 0.5)
>>> resolve(schedule, 100)(55)
0.25

Every function raises ``ValueError``, when the schedule is made, for an argument outside its range.
"""

from __future__ import annotations

import math
import operator
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, NoReturn, SupportsIndex

from loopkit.base import checks
from loopkit.base.words import takes
from loopkit.errors import ArgumentError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = [
    "ScheduleFn",
    "clip",
    "constant",
    "cosine",
    "cosine_restarts",
    "cosine_warmup",
    "cyclic",
    "exponential",
    "interpolate",
    "inverse",
    "inverse_sqrt",
    "join",
    "linear",
    "loop",
    "multi_step",
    "one_cycle",
    "one_cycle_momentum",
    "piecewise",
    "plot",
    "polynomial",
    "scale",
    "shift",
    "sine",
    "step",
    "warmup",
    "warmup_stable_decay",
]
__dir__ = __all__.copy

ScheduleFn = Callable[[int], float]
"""A function from the number of the update, from 0, to a value."""


ELSEWHERE = {
    "T_max": "give updates=...",
    "total_steps": "give updates=...",
    "num_training_steps": "give updates=...",
    "max_steps": "give updates=...",
    "steps": "give the number of updates",
    "epochs": "give the number of updates, or Schedule(..., every='epoch')",
    "step_size": "give every=...",
    "T_0": "give updates=...",
    "eta_min": "give end=..., a factor of the optimizer's rate",
    "end_factor": "give end=...",
    "start_factor": "give start=...",
    "max_lr": "give it to the optimizer as lr",
    "base_lr": "give it to the optimizer as lr",
    "lr": "give it to the optimizer: a schedule multiplies its rate",
    "warmup_steps": "give the number of updates first",
    "num_warmup_steps": "give the number of updates first",
}
"""Arguments that people bring from schedulers of torch and others, and what to write."""

HINTS = {
    "updates": ". A schedule multiplies the optimizer's rate: give a rate to the optimizer, and a factor by its name",
    "n": ". For a part of the fit, multiply it by the number of updates",
}
"""Hints for a fraction in the place of a number of updates."""


@dataclass(frozen=True, repr=False)
class OfLength:
    """A schedule whose length in updates is not known yet; ``resolve`` makes it one that can be called.

    Args:
        name: Its name, for ``repr`` and errors.
        make: The function ``total -> ScheduleFn``.
    """

    name: str
    make: Callable[[int], ScheduleFn]

    def __call__(self, update: int) -> NoReturn:
        """Raise: there is no value before the length is known."""
        raise TypeError(
            f"{self.name} was called with update {update}, but its length is not known yet: "
            "give it updates=, or resolve(schedule, total)"
        )

    def __repr__(self) -> str:
        return self.name


def resolve(schedule: ScheduleFn, total: int | None) -> ScheduleFn:
    """Give an ``OfLength`` the fit's length in updates; any other schedule is returned as it is.

    Args:
        schedule: Any schedule.
        total: The number of updates, from 1; None when it cannot be known.

    Raises:
        ValueError: The schedule needs the length and there is none, or it is too short for the schedule's parts.

    >>> resolve(linear(), 4)(1)
    0.75
    """
    if not isinstance(schedule, OfLength):
        return _schedule("schedule", schedule)
    if total is None:
        raise ArgumentError(
            f"{schedule.name} spans the whole fit, but the number of updates is not known before it: "
            "give the schedule updates="
        )
    return schedule.make(_whole("total", total, 1))


# Decays and other single shapes


@takes(**ELSEWHERE)
def constant(value: float = 1.0) -> ScheduleFn:
    """Give the same value at every update.

    >>> constant(0.1)(7)
    0.1
    """
    value = _number("value", value)
    return _named(lambda update: value, f"constant({value})")


@takes(**ELSEWHERE)
def step(every: int, gamma: float = 0.1, *, start: float = 1.0) -> ScheduleFn:
    """Multiply by ``gamma`` every so many updates: ``start * gamma ** (update // every)``.

    Args:
        every: Updates between drops, from 1.
        gamma: Factor of each drop, above 0.
        start: The first value.

    Source: ``torch.optim.lr_scheduler.StepLR``.

    >>> [step(2, 0.5)(k) for k in range(5)]
    [1.0, 1.0, 0.5, 0.5, 0.25]
    """
    every = _whole("every", every, 1)
    gamma = _positive("gamma", gamma)
    start = _number("start", start)
    name = f"step({every}, {gamma}, start={start})"
    return _named(lambda update: start * gamma ** (update // every), name)


@takes(**ELSEWHERE)
def multi_step(milestones: Sequence[int], gamma: float = 0.1, *, start: float = 1.0) -> ScheduleFn:
    """Multiply by ``gamma`` at each milestone: ``start * gamma ** (how many milestones are <= update)``.

    Args:
        milestones: Updates, from 1, each larger than the one before.
        gamma: Factor of each drop, above 0.
        start: The first value.

    Source: ``torch.optim.lr_scheduler.MultiStepLR``.

    >>> [multi_step([1, 3], 0.5)(k) for k in range(4)]
    [1.0, 0.5, 0.5, 0.25]
    """
    if not isinstance(milestones, Iterable):
        raise ArgumentError(f"milestones is {milestones!r}: give a list, multi_step([30])")
    marks = [_whole(f"milestones[{i}]", mark, 1) for i, mark in enumerate(milestones)]
    if any(after <= before for before, after in pairwise(marks)):
        raise ArgumentError(f"milestones is {marks}: each must be larger than the one before")
    gamma = _positive("gamma", gamma)
    start = _number("start", start)
    values = [start * gamma**drops for drops in range(len(marks) + 1)]
    name = f"multi_step({marks}, {gamma}, start={start})"
    return _named(lambda update: values[bisect_right(marks, update)], name)


@takes(**ELSEWHERE)
def exponential(gamma: float, *, every: int = 1, start: float = 1.0) -> ScheduleFn:
    """Multiply by ``gamma`` over every so many updates, smoothly: ``start * gamma ** (update / every)``.

    Args:
        gamma: Factor per ``every`` updates, above 0; above 1 it grows, and Python raises ``OverflowError`` at the
            update where the value has no float.
        every: Updates, from 1.
        start: The first value.

    Source: ``torch.optim.lr_scheduler.ExponentialLR`` (``every=1``).

    >>> exponential(0.25, every=2)(1)
    0.5
    """
    gamma = _positive("gamma", gamma)
    every = _whole("every", every, 1)
    start = _number("start", start)
    name = f"exponential({gamma}, every={every}, start={start})"
    return _named(lambda update: start * gamma ** (update / every), name)


@takes(**ELSEWHERE)
def polynomial(updates: int | None = None, power: float = 1.0, *, start: float = 1.0, end: float = 0.0) -> ScheduleFn:
    """Go from ``start`` to ``end`` by ``end + (start - end) * (1 - update / updates) ** power``, then stay.

    Args:
        updates: Length, from 1; None for the whole fit.
        power: Exponent, above 0.
        start: The first value.
        end: The value from update ``updates`` on.

    Source: ``torch.optim.lr_scheduler.PolynomialLR``.

    >>> polynomial(4, 2.0)(2)
    0.25
    """
    power = _positive("power", power)
    start = _number("start", start)
    end = _number("end", end)
    delta = start - end

    def make(updates: int) -> ScheduleFn:
        def schedule(update: int) -> float:
            if 0 < update < updates:
                value: float = end + delta * (1.0 - update / updates) ** power
                return value
            return end if update > 0 else start

        return _named(schedule, name(updates))

    def name(updates: int | None) -> str:
        return f"polynomial(updates={updates}, power={power}, start={start}, end={end})"

    return _of_length(updates, make, name(None))


@takes(**ELSEWHERE)
def inverse(gamma: float, power: float = 1.0, *, start: float = 1.0) -> ScheduleFn:
    """Decay by ``start / (1 + gamma * update) ** power``.

    Args:
        gamma: Rate per update, from 0.
        power: Exponent, above 0.
        start: The first value.

    >>> inverse(0.5)(2)
    0.5
    """
    gamma = _number("gamma", gamma, low=0.0)
    power = _positive("power", power)
    start = _number("start", start)
    name = f"inverse({gamma}, {power}, start={start})"
    return _named(lambda update: start / (1.0 + gamma * update) ** power, name)


@takes(**ELSEWHERE)
def linear(updates: int | None = None, *, start: float = 1.0, end: float = 0.0) -> ScheduleFn:
    """Go from ``start`` to ``end`` in a straight line, then stay: ``start + (end - start) * update / updates``.

    Args:
        updates: Length, from 1; None for the whole fit.
        start: The first value.
        end: The value from update ``updates`` on.

    Source: ``torch.optim.lr_scheduler.LinearLR``.

    >>> linear(4)(1)
    0.75
    """
    start = _number("start", start)
    end = _number("end", end)
    delta = end - start

    def make(updates: int) -> ScheduleFn:
        def schedule(update: int) -> float:
            if 0 < update < updates:
                return start + delta * update / updates
            return end if update > 0 else start

        return _named(schedule, name(updates))

    def name(updates: int | None) -> str:
        return f"linear(updates={updates}, start={start}, end={end})"

    return _of_length(updates, make, name(None))


@takes(**ELSEWHERE)
def cosine(updates: int | None = None, *, start: float = 1.0, end: float = 0.0) -> ScheduleFn:
    """Go from ``start`` to ``end`` along half a cosine, then stay.

    ``end + (start - end) / 2 * (1 + cos(pi * update / updates))``.

    Args:
        updates: Length, from 1; None for the whole fit.
        start: The first value.
        end: The value from update ``updates`` on: an absolute value, no fraction of ``start``.

    Source: Loshchilov and Hutter 2017 (SGDR), eq. 5; ``torch.optim.lr_scheduler.CosineAnnealingLR`` up to
    ``updates``, after which torch's rises again and this one does not.

    >>> cosine(4)(2), cosine(4)(4), cosine(4)(7)
    (0.5, 0.0, 0.0)
    """
    start = _number("start", start)
    end = _number("end", end)
    half = (start - end) / 2.0
    cos = math.cos
    pi = math.pi

    def make(updates: int) -> ScheduleFn:
        def schedule(update: int) -> float:
            if 0 < update < updates:
                return end + half * (1.0 + cos(pi * update / updates))
            return end if update > 0 else start

        return _named(schedule, name(updates))

    def name(updates: int | None) -> str:
        return f"cosine(updates={updates}, start={start}, end={end})"

    return _of_length(updates, make, name(None))


@takes(**ELSEWHERE)
def cosine_warmup(updates: int, *, start: float = 0.0, end: float = 1.0) -> ScheduleFn:
    """Rise from ``start`` to ``end`` along half a cosine, then stay.

    ``start + (end - start) / 2 * (1 - cos(pi * update / updates))``. With ``start=0.0`` the first update has no
    effect; ``shift(cosine_warmup(n + 1), 1)`` is n updates of rise without that.

    Args:
        updates: Length, from 1.
        start: The first value.
        end: The value from update ``updates`` on.

    >>> [round(cosine_warmup(4)(k), 3) for k in range(5)]
    [0.0, 0.146, 0.5, 0.854, 1.0]
    """
    updates = _whole("updates", updates, 1)
    start = _number("start", start)
    end = _number("end", end)
    half = (end - start) / 2.0
    cos = math.cos
    pi = math.pi

    def schedule(update: int) -> float:
        if 0 < update < updates:
            return start + half * (1.0 - cos(pi * update / updates))
        return end if update > 0 else start

    return _named(schedule, f"cosine_warmup(updates={updates}, start={start}, end={end})")


@takes(**ELSEWHERE)
def cosine_restarts(
    period: int, *, t_mult: int = 1, decay: float = 1.0, start: float = 1.0, end: float = 0.0
) -> ScheduleFn:
    """Go down half a cosine again and again, each time from a new start.

    In cycle i (from 0), which has ``period * t_mult ** i`` updates, of which k are over:
    ``end + (start - end) * decay ** i / 2 * (1 + cos(pi * k / (period * t_mult ** i)))``.

    Args:
        period: Length of the first cycle in updates, from 1.
        t_mult: Each cycle is so many times as long as the one before, a whole number from 1.
        decay: Each cycle's height above ``end`` is so many times the last one's, above 0, up to 1.
        start: The first value.
        end: The value that each cycle approaches.

    Source: Loshchilov and Hutter 2017 (SGDR), eq. 5; ``torch.optim.lr_scheduler.CosineAnnealingWarmRestarts``
    (``decay=1``).

    >>> schedule = cosine_restarts(4, t_mult=2, decay=0.5)
    >>> schedule(0), schedule(4), schedule(12)
    (1.0, 0.5, 0.25)
    """
    period = _whole("period", period, 1)
    t_mult = _whole("t_mult", t_mult, 1)
    decay = _positive("decay", decay, 1.0)
    start = _number("start", start)
    end = _number("end", end)
    name = f"cosine_restarts({period}, t_mult={t_mult}, decay={decay}, start={start}, end={end})"
    delta = start - end
    cos = math.cos
    pi = math.pi

    if t_mult == 1:

        def equal(update: int) -> float:
            cycle, done = divmod(update, period)
            return end + delta * decay**cycle / 2.0 * (1.0 + cos(pi * done / period))

        return _named(equal, name)

    # The cycles are looked up, not computed with a logarithm: its rounding is wrong by one cycle at some restarts.
    begins = [0]
    lengths = [period]
    while begins[-1] < 2**63:
        begins.append(begins[-1] + lengths[-1])
        lengths.append(lengths[-1] * t_mult)

    def growing(update: int) -> float:
        cycle = bisect_right(begins, update) - 1
        return end + delta * decay**cycle / 2.0 * (1.0 + cos(pi * (update - begins[cycle]) / lengths[cycle]))

    return _named(growing, name)


@takes(**ELSEWHERE)
def one_cycle(
    updates: int | None = None,
    *,
    max_lr: float = 1.0,
    pct_start: float = 0.3,
    anneal: Literal["cos", "linear"] = "cos",
    div_factor: float = 25.0,
    final_div_factor: float = 1e4,
    three_phase: bool = False,
) -> ScheduleFn:
    """Rise from ``max_lr / div_factor`` to ``max_lr``, then fall to ``max_lr / div_factor / final_div_factor``.

    The peak is at update ``pct_start * updates - 1``, the last value at update ``updates - 1`` and after it.

    In `Schedule`, the optimizer's ``lr`` is the peak: leave ``max_lr`` out. With ``max_lr=0.1`` the peak is a tenth.

    Args:
        updates: Length, from 1; None for the whole fit.
        max_lr: The peak, above 0.
        pct_start: Part of the updates in which it rises, from 0 to 1.
        anneal: Along half a cosine or in a straight line.
        div_factor: The peak divided by the first value, above 0.
        final_div_factor: The first value divided by the last one, above 0.
        three_phase: Fall back to the first value as slowly as it rose, and only then to the last one; ``pct_start``
            is then at most 0.5.

    Source: Smith and Topin 2018; ``torch.optim.lr_scheduler.OneCycleLR`` (``total_steps`` is ``updates``). Where
    torch divides by zero, with ``pct_start * updates`` exactly 1, this one begins at the peak.

    >>> schedule = one_cycle(100, max_lr=0.5)
    >>> round(schedule(0), 9), schedule(29), round(schedule(99), 9)
    (0.02, 0.5, 2e-06)
    """
    max_lr = _positive("max_lr", max_lr)
    first = max_lr / _positive("div_factor", div_factor)
    last = first / _positive("final_div_factor", final_div_factor)
    levels = [first, max_lr, first, last] if three_phase else [first, max_lr, last]
    text = (
        f"max_lr={max_lr}, pct_start={pct_start}, anneal={anneal!r}, div_factor={div_factor}, "
        f"final_div_factor={final_div_factor}, three_phase={three_phase}"
    )
    return _cycle("one_cycle", updates, levels, pct_start, anneal, text)


@takes(**ELSEWHERE)
def one_cycle_momentum(
    updates: int | None = None,
    *,
    base_momentum: float = 0.85,
    max_momentum: float = 0.95,
    pct_start: float = 0.3,
    anneal: Literal["cos", "linear"] = "cos",
    three_phase: bool = False,
) -> ScheduleFn:
    """The momentum (or Adam's beta1) that goes with ``one_cycle``: lowest where the learning rate is highest.

    Args:
        updates: Length, from 1; None for the whole fit.
        base_momentum: The value at the learning rate's peak.
        max_momentum: The first and the last value.
        pct_start: As in ``one_cycle``.
        anneal: As in ``one_cycle``.
        three_phase: As in ``one_cycle``.

    Source: ``torch.optim.lr_scheduler.OneCycleLR`` (``cycle_momentum=True``).

    >>> schedule = one_cycle_momentum(100)
    >>> schedule(0), schedule(29), schedule(99)
    (0.95, 0.85, 0.95)
    """
    base = _number("base_momentum", base_momentum)
    most = _number("max_momentum", max_momentum)
    levels = [most, base, most, most] if three_phase else [most, base, most]
    text = (
        f"base_momentum={base}, max_momentum={most}, pct_start={pct_start}, anneal={anneal!r}, "
        f"three_phase={three_phase}"
    )
    return _cycle("one_cycle_momentum", updates, levels, pct_start, anneal, text)


def _cycle(
    kind: str, updates: int | None, levels: Sequence[float], pct_start: float, anneal: str, text: str
) -> ScheduleFn:
    """The legs between three or four levels, placed as ``torch.optim.lr_scheduler.OneCycleLR`` places them."""
    three_phase = len(levels) == 4
    pct_start = _number("pct_start", pct_start, low=0.0, high=0.5 if three_phase else 1.0)
    checks.one_of(kind, ("cos", "linear"), error=ArgumentError, anneal=anneal)
    between = _along_cosine if anneal == "cos" else _along_line
    first = levels[0]
    peak = levels[1]
    back = levels[-2]
    last = levels[-1]

    def make(updates: int) -> ScheduleFn:
        final = updates - 1
        rise = pct_start * updates - 1
        fall = 2 * pct_start * updates - 2 if three_phase else rise

        def schedule(update: int) -> float:
            if update > final:
                update = final
            if update <= rise:
                return between(first, peak, update / rise) if rise else peak
            if update <= fall:
                return between(peak, back, (update - rise) / (fall - rise))
            return between(back, last, (update - fall) / (final - fall))

        return _named(schedule, f"{kind}(updates={updates}, {text})")

    return _of_length(updates, make, f"{kind}(updates=None, {text})")


def _along_cosine(start: float, end: float, part: float) -> float:
    return end + (start - end) / 2.0 * (math.cos(math.pi * part) + 1.0)


def _along_line(start: float, end: float, part: float) -> float:
    return (end - start) * part + start


@takes(**ELSEWHERE)
def cyclic(
    up: int,
    down: int | None = None,
    *,
    low: float = 0.0,
    high: float = 1.0,
    mode: Literal["triangular", "triangular2", "exp_range"] = "triangular",
    gamma: float = 1.0,
) -> ScheduleFn:
    """Go up and down between ``low`` and ``high`` in straight lines, again and again.

    Args:
        up: Updates from ``low`` to ``high``, from 1.
        down: Updates back, from 1; None for as many as ``up``.
        low: The first value.
        high: The value at update ``up``.
        mode: ``"triangular"``: each cycle alike. ``"triangular2"``: each half as high as the one before.
            ``"exp_range"``: the height at each update is multiplied by ``gamma ** update``.
        gamma: For ``"exp_range"`` only: above 0, up to 1.

    Source: Smith 2017; ``torch.optim.lr_scheduler.CyclicLR``.

    >>> [cyclic(2, mode="triangular2")(k) for k in range(8)]
    [0.0, 0.5, 1.0, 0.5, 0.0, 0.25, 0.5, 0.25]
    """
    up = _whole("up", up, 1)
    down = up if down is None else _whole("down", down, 1)
    low = _number("low", low)
    high = _number("high", high)
    gamma = _positive("gamma", gamma, 1.0)
    checks.one_of("cyclic", ("triangular", "triangular2", "exp_range"), error=ArgumentError, mode=mode)
    if low > high:
        raise ArgumentError(f"low is {low} and high is {high}: low must be at most high")
    if gamma != 1.0 and mode != "exp_range":
        raise ArgumentError(f"gamma is {gamma} with mode {mode!r}: only mode 'exp_range' uses it")
    size = up + down
    height = high - low
    name = f"cyclic({up}, {down}, low={low}, high={high}, mode={mode!r}, gamma={gamma})"

    def triangular(update: int) -> float:
        done = update % size
        return low + height * (done / up if done <= up else (size - done) / down)

    def triangular2(update: int) -> float:
        cycle, done = divmod(update, size)
        return low + height * (done / up if done <= up else (size - done) / down) * 0.5**cycle

    def exp_range(update: int) -> float:
        done = update % size
        return low + height * (done / up if done <= up else (size - done) / down) * gamma**update

    return _named({"triangular": triangular, "triangular2": triangular2, "exp_range": exp_range}[mode], name)


@takes(**ELSEWHERE)
def sine(period: int, *, low: float = 0.0, high: float = 1.0, halve: bool = False, gamma: float = 1.0) -> ScheduleFn:
    """Go from ``low`` to ``high`` and back along half a sine, again and again.

    ``low + (high - low) * sin(pi * k / period)``, k updates into a cycle.

    Args:
        period: Length of a cycle in updates, from 1.
        low: The first value.
        high: The value in the middle of the first cycle.
        halve: Each cycle is half as high as the one before.
        gamma: The height at each update is multiplied by ``gamma ** update``: above 0, up to 1.

    Source: ``Sin``, ``SinDecay2`` (``halve=True``) and ``SinExp`` (``gamma``) of ParameterSchedulers.jl.

    >>> [round(sine(4, halve=True)(k), 3) for k in range(8)]
    [0.0, 0.707, 1.0, 0.707, 0.0, 0.354, 0.5, 0.354]
    """
    period = _whole("period", period, 1)
    low = _number("low", low)
    high = _number("high", high)
    gamma = _positive("gamma", gamma, 1.0)
    if low > high:
        raise ArgumentError(f"low is {low} and high is {high}: low must be at most high")
    height = high - low
    base = 0.5 if halve else 1.0

    def schedule(update: int) -> float:
        cycle, done = divmod(update, period)
        return low + height * math.sin(math.pi * done / period) * base**cycle * gamma**update

    return _named(schedule, f"sine({period}, low={low}, high={high}, halve={halve}, gamma={gamma})")


@takes(**ELSEWHERE)
def warmup_stable_decay(
    updates: int | None = None,
    *,
    warmup: int,
    decay: int,
    peak: float = 1.0,
    end: float = 0.0,
    shape: Literal["linear", "cosine", "sqrt"] = "linear",
) -> ScheduleFn:
    """Rise to ``peak``, stay there, and fall to ``end`` over the last ``decay`` updates.

    Rise: ``peak * (update + 1) / warmup``, so the first value is not 0. Fall, with x the part of it that is over:
    ``end + (peak - end) * f(x)``, where f(x) is ``1 - x``, ``(1 + cos(pi * x)) / 2`` or ``1 - sqrt(x)``.

    Args:
        updates: Length, from ``warmup + decay``; None for the whole fit.
        warmup: Updates of the rise, from 0.
        decay: Updates of the fall, from 1.
        peak: The value in between.
        end: The value from update ``updates`` on.
        shape: Which f.

    Source: Hu et al. 2024 (MiniCPM), section 4; ``"sqrt"``: Haegele et al. 2024.

    >>> schedule = warmup_stable_decay(100, warmup=10, decay=20)
    >>> schedule(0), schedule(50), schedule(90), schedule(100)
    (0.1, 1.0, 0.5, 0.0)
    """
    warmup = _whole("warmup", warmup, 0)
    decay = _whole("decay", decay, 1)
    peak = _number("peak", peak)
    end = _number("end", end)
    checks.one_of("warmup_stable_decay", ("linear", "cosine", "sqrt"), error=ArgumentError, shape=shape)
    delta = peak - end
    remaining: dict[str, Callable[[float], float]] = {
        "linear": lambda x: 1.0 - x,
        "cosine": lambda x: (1.0 + math.cos(math.pi * x)) / 2.0,
        "sqrt": lambda x: 1.0 - math.sqrt(x),
    }
    left = remaining[shape]

    def make(updates: int) -> ScheduleFn:
        if updates < warmup + decay:
            raise ArgumentError(
                f"updates is {updates}: it must be at least warmup + decay, {warmup} + {decay}; shorten one of them"
            )
        stable = updates - decay

        def schedule(update: int) -> float:
            if update < warmup:
                return peak * ((update + 1) / warmup)
            if update <= stable:
                return peak
            return end + delta * left((update - stable) / decay) if update < updates else end

        return _named(schedule, name(updates))

    def name(updates: int | None) -> str:
        return (
            f"warmup_stable_decay(updates={updates}, warmup={warmup}, decay={decay}, peak={peak}, end={end}, "
            f"shape={shape!r})"
        )

    return _of_length(updates, make, name(None))


@takes(**ELSEWHERE)
def inverse_sqrt(warmup: int, *, peak: float = 1.0) -> ScheduleFn:
    """Rise in a straight line over ``warmup`` updates, then decay with the square root of the update.

    With k = update + 1: ``peak * k / warmup`` up to k = ``warmup``, then ``peak * sqrt(warmup / k)``.

    Args:
        warmup: Updates of the rise, from 1.
        peak: The value at its end.

    Source: Vaswani et al. 2017, eq. 3.

    >>> inverse_sqrt(4)(0), inverse_sqrt(4)(3), inverse_sqrt(4)(15)
    (0.25, 1.0, 0.5)
    """
    warmup = _whole("warmup", warmup, 1)
    peak = _number("peak", peak)
    sqrt = math.sqrt

    def schedule(update: int) -> float:
        if update < warmup:
            return peak * ((update + 1) / warmup)
        return peak * sqrt(warmup / (update + 1))

    return _named(schedule, f"inverse_sqrt({warmup}, peak={peak})")


# Given by points


@takes(**ELSEWHERE)
def interpolate(points: Mapping[int, float]) -> ScheduleFn:
    """Go through the given points in straight lines; before the first and after the last the value stays.

    Args:
        points: Values by update, from 0, at least one.

    >>> [interpolate({0: 0.0, 2: 1.0, 6: 0.0})(k) for k in (1, 2, 3, 9)]
    [0.5, 1.0, 0.75, 0.0]
    """
    at, values = _points(points)
    last = len(at)

    def schedule(update: int) -> float:
        after = bisect_right(at, update)
        if after == 0:
            return values[0]
        if after == last:
            return values[-1]
        begin = at[after - 1]
        value = values[after - 1]
        return value + (values[after] - value) * (update - begin) / (at[after] - begin)

    return _named(schedule, f"interpolate({dict(zip(at, values, strict=True))})")


@takes(**ELSEWHERE)
def piecewise(points: Mapping[int, float]) -> ScheduleFn:
    """Hold each value from its update on until the next one's.

    Args:
        points: Values by update; update 0 must be among them.

    >>> [piecewise({0: 1.0, 2: 0.1})(k) for k in range(4)]
    [1.0, 1.0, 0.1, 0.1]
    """
    at, values = _points(points)
    if at[0] != 0:
        raise ArgumentError(f"points begin at update {at[0]}: give a value for update 0")
    begins = at[1:]
    name = f"piecewise({dict(zip(at, values, strict=True))})"
    return _named(lambda update: values[bisect_right(begins, update)], name)


# Composition. Where a part is an OfLength, so is the whole, unless the part's length follows from the arguments.


@takes(**ELSEWHERE)
def join(parts: Sequence[tuple[ScheduleFn, int | None]]) -> ScheduleFn:
    """Run schedules one after the other, each counting from its own 0; the last one never ends.

    Args:
        parts: Pairs of a schedule and its number of updates, from 1. Only the last number may be None: the rest
            of the fit. A part made without ``updates`` gets its number as its length.

    >>> schedule = join([(linear(start=0.0, end=1.0), 4), (constant(1.0), 2), (cosine(4), None)])
    >>> schedule(1), schedule(5), schedule(8), schedule(99)
    (0.25, 1.0, 0.5, 0.0)
    """
    if not parts:
        raise ArgumentError(f"parts is {parts!r}: give at least one pair (schedule, updates)")
    schedules: list[ScheduleFn] = []
    begins = [0]
    for i, (schedule, updates) in enumerate(parts):
        schedule = _schedule(f"parts[{i}]", schedule)
        if updates is not None:
            updates = _whole(f"updates of parts[{i}]", updates, 1)
            schedule = resolve(schedule, updates)
            begins.append(begins[-1] + updates)
        elif i < len(parts) - 1:
            raise ArgumentError(f"updates of parts[{i}] is None: only the last part may go without a number")
        schedules.append(schedule)
    begins = begins[: len(schedules)]
    ends = begins[1:]
    last_begin = begins[-1]

    def build(last: ScheduleFn) -> ScheduleFn:
        runs = [*schedules[:-1], last]

        def joined(update: int) -> float:
            i = bisect_right(ends, update)
            return runs[i](update - begins[i])

        return joined

    def name(last: ScheduleFn) -> str:
        runs = [*schedules[:-1], last]
        words = [f"({_name(run)}, {updates})" for run, (_, updates) in zip(runs, parts, strict=True)]
        return f"join([{', '.join(words)}])"

    return _compose(schedules[-1], build, name, last_begin)


@takes(**ELSEWHERE)
def warmup(n: int, then: ScheduleFn | None = None, *, from_zero: bool = False) -> ScheduleFn:
    """Rise in a straight line to the first value of ``then`` in n updates, then run it from its own 0.

    ``then(0) * (update + 1) / n``: the first value is not 0, and the n-th is already ``then(0)``.

    Args:
        n: Updates, from 0.
        then: The schedule that follows; None for ``constant(1.0)``. Made without ``updates``, it gets the rest.
        from_zero: ``then(0) * update / n`` instead: the first update has no effect, as in the schedules of
            transformers (``get_linear_schedule_with_warmup``).

    >>> [warmup(2, then=linear(4))(k) for k in range(5)]
    [0.5, 1.0, 1.0, 0.75, 0.5]
    >>> [warmup(2, then=linear(4), from_zero=True)(k) for k in range(5)]
    [0.0, 0.5, 1.0, 0.75, 0.5]
    """
    n = _whole("n", n, 0)
    ahead = 0 if from_zero else 1
    then = constant() if then is None else _schedule("then", then)

    def build(then: ScheduleFn) -> ScheduleFn:
        first = then(0)

        def warmed(update: int) -> float:
            return first * ((update + ahead) / n) if update < n else then(update - n)

        return warmed

    zero = ", from_zero=True" if from_zero else ""
    return _compose(then, build, lambda then: f"warmup({n}, then={_name(then)}{zero})", n)


@takes(**ELSEWHERE)
def shift(schedule: ScheduleFn, k: int) -> ScheduleFn:
    """Begin k updates into the schedule; a negative k holds its first value for so many updates longer.

    ``schedule(max(0, update + k))``. Made without ``updates``, the schedule ends with the fit all the same.

    >>> shift(linear(4), 1)(0), shift(linear(4), -1)(2)
    (0.75, 0.75)
    """
    schedule = _schedule("schedule", schedule)
    k = _whole("k", k)

    def build(schedule: ScheduleFn) -> ScheduleFn:
        if k >= 0:
            return lambda update: schedule(update + k)
        return lambda update: schedule(update + k if update + k > 0 else 0)

    return _compose(schedule, build, lambda schedule: f"shift({_name(schedule)}, {k})", -k)


@takes(**ELSEWHERE)
def scale(schedule: ScheduleFn, factor: float) -> ScheduleFn:
    """Multiply every value by a factor.

    >>> scale(linear(4), 0.5)(2)
    0.25
    """
    schedule = _schedule("schedule", schedule)
    factor = _number("factor", factor)

    def build(schedule: ScheduleFn) -> ScheduleFn:
        return lambda update: schedule(update) * factor

    return _compose(schedule, build, lambda schedule: f"scale({_name(schedule)}, {factor})")


@takes(**ELSEWHERE)
def clip(schedule: ScheduleFn, low: float, high: float) -> ScheduleFn:
    """Keep every value between ``low`` and ``high``.

    >>> [clip(linear(4), 0.25, 0.75)(k) for k in range(5)]
    [0.75, 0.75, 0.5, 0.25, 0.25]
    """
    schedule = _schedule("schedule", schedule)
    low = _number("low", low)
    high = _number("high", high)
    if low > high:
        raise ArgumentError(f"low is {low} and high is {high}: low must be at most high")

    def build(schedule: ScheduleFn) -> ScheduleFn:
        def clipped(update: int) -> float:
            value = schedule(update)
            if value < low:
                return low
            return high if value > high else value

        return clipped

    return _compose(schedule, build, lambda schedule: f"clip({_name(schedule)}, {low}, {high})")


@takes(**ELSEWHERE)
def loop(schedule: ScheduleFn, n: int) -> ScheduleFn:
    """Repeat the schedule's first n updates for ever: ``schedule(update % n)``.

    A schedule made without ``updates`` gets n as its length.

    >>> [loop(linear(), 2)(k) for k in range(4)]
    [1.0, 0.5, 1.0, 0.5]
    """
    n = _whole("n", n, 1)
    schedule = resolve(schedule, n)
    return _named(lambda update: schedule(update % n), f"loop({_name(schedule)}, {n})")


@takes(**ELSEWHERE)
def plot(schedule: ScheduleFn, updates: int, ax: Axes | None = None) -> Axes:
    """Draw a schedule's values over its first updates and return the axes. Needs matplotlib.

    Args:
        schedule: Any schedule; one made without ``updates`` gets this length.
        updates: How many, from 1.
        ax: Axes to draw in; None for a new figure.

    Raises:
        ImportError: matplotlib is not installed.

    Example::

        plot(warmup(100, then=cosine()), 1000).figure.savefig("lr.png")
    """
    updates = _whole("updates", updates, 1)
    schedule = resolve(schedule, updates)
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError("plot needs matplotlib: pip install matplotlib") from error
    if ax is None:
        _, ax = plt.subplots()
    ax.plot(range(updates), [schedule(update) for update in range(updates)], label=_name(schedule))
    ax.set_xlabel("update")
    ax.set_ylabel("value")
    return ax


def _named(schedule: ScheduleFn, name: str) -> ScheduleFn:
    # A closure is called faster than an object with __call__; its name is what repr shows.
    schedule.__name__ = schedule.__qualname__ = name
    return schedule


def _name(schedule: ScheduleFn) -> str:
    return str(getattr(schedule, "__name__", None) or repr(schedule))


def _of_length(updates: int | None, make: Callable[[int], ScheduleFn], name: str) -> ScheduleFn:
    if updates is None:
        return OfLength(name, make)
    return make(_whole("updates", updates, 1))


def _compose(
    part: ScheduleFn, build: Callable[[ScheduleFn], ScheduleFn], name: Callable[[ScheduleFn], str], before: int = 0
) -> ScheduleFn:
    """Build on a part now or, if its length is not known, when it is: the whole's less the updates before the part."""
    if not isinstance(part, OfLength):
        return _named(build(part), name(part))
    unresolved = part

    def make(total: int) -> ScheduleFn:
        if total <= before:
            raise ArgumentError(
                f"total is {total}, but {name(unresolved)} has {before} updates before its last part: shorten them"
            )
        part = unresolved.make(total - before)
        return _named(build(part), name(part))

    return OfLength(name(unresolved), make)


def _schedule(argument: str, value: ScheduleFn) -> ScheduleFn:
    if not callable(value):
        raise ArgumentError(
            f"{argument} is {value!r}: a schedule is a function of the update; for a number, constant()"
        )
    word = getattr(value, "__name__", "")
    if word in __all__ and globals()[word] is value:
        raise ArgumentError(f"{argument} is the function that makes a schedule: call it, {word}(...)")
    return value


def _whole(argument: str, value: SupportsIndex, low: int | None = None) -> int:
    try:
        found = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        found = None
    if found is None or (low is not None and found < low):
        span = "" if low is None else f", from {low}"
        is_share = isinstance(value, float) and 0.0 < value < 1.0
        hint = HINTS.get(argument, "") if is_share else ""
        raise ArgumentError(f"{argument} is {value!r}: it must be a whole number{span}{hint}")
    return found


def _number(argument: str, value: Any, low: float = -math.inf, high: float = math.inf) -> float:
    try:
        found = math.nan if isinstance(value, (bool, str)) else float(value)
    except (TypeError, ValueError):
        found = math.nan
    if not (math.isfinite(found) and low <= found <= high):
        span = ""
        if low != -math.inf:
            span = f" from {low}"
            if high != math.inf:
                span += f" to {high}"
        raise ArgumentError(f"{argument} is {value!r}: it must be a finite number{span}")
    return found


def _positive(argument: str, value: Any, high: float = math.inf) -> float:
    try:
        found = _number(argument, value, 0.0, high)
    except ValueError:
        found = 0.0
    if found == 0.0:
        span = "" if high == math.inf else f", up to {high}"
        raise ArgumentError(f"{argument} is {value!r}: it must be a finite number above 0{span}")
    return found


def _points(points: Mapping[int, float]) -> tuple[list[int], list[float]]:
    if not isinstance(points, Mapping) or not points:
        raise ArgumentError(f"points is {points!r}: give a mapping of updates to values, at least one")
    pairs = []
    for given, value in points.items():
        update = _whole("update", given, 0)
        pairs.append((update, _number(f"points[{given!r}]", value)))
    pairs.sort()
    return [update for update, _ in pairs], [value for _, value in pairs]
