"""Trends, the way a metric goes: its slope over a window, and whether it improves, stalls or has converged.

All take a series of numbers, or the rows of a `History` (``FitResult.history``) and the name of a metric::

    >>> slope([0.9, 0.5, 0.4, 0.3], window=3)
    -0.1
    >>> improving(result.history, 5, name="val/loss")                  # doctest: +SKIP
    >>> all_of(stalled, result.history, ["val/*"], 5, tolerance=1e-3)  # doctest: +SKIP

As long as the window is not full, every answer is None. A window that holds nan or infinity has a slope of nan, and
neither improves nor stalls nor has converged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from loopkit.base import checks
from loopkit.base.words import nearest
from loopkit.criteria.directions import Mode
from loopkit.errors import ArgumentError

__all__ = ["all_of", "any_of", "converged", "improving", "series", "slope", "stalled"]
__dir__ = __all__.copy

Values = Iterable[float] | Iterable[Mapping[str, Any]]


def series(rows: Iterable[Mapping[str, Any]], name: str) -> list[float]:
    """All values of one metric in the rows of a history, in their order.

    Args:
        rows: As in ``FitResult.history``.
        name: Such as ``"val/loss"``.

    Raises:
        ArgumentError: Epochs of that phase were made, none of them with this metric.

    >>> series([{"phase": "train", "train/loss": 1.0}, {"phase": "val", "val/loss": 0.5}], "val/loss")
    [0.5]
    """
    rows = list(rows)
    values = [row[name] for row in rows if name in row]
    phases = {row.get("phase") for row in rows}
    if not values and rows and ("/" not in name or name.partition("/")[0] in phases):
        raise _unknown(rows, name)
    return values


def slope(values: Values, window: int, *, name: str | None = None) -> float | None:
    """The slope of the least-squares line through the last values, per value.

    Args:
        values: Numbers in the order in which they were made, or rows of a history.
        window: How many of the last values count, from 2.
        name: The metric, if ``values`` are rows.

    Returns:
        ``sum((x - mean(x)) (y - mean(y))) / sum((x - mean(x)) ** 2)`` for ``x = 0, 1, ...``; None if there are fewer
        values than ``window``.

    Raises:
        ArgumentError: The window is too short, or no metric has this name.
    """
    last = _last(values, window, name)
    if last is None:
        return None
    middle = (window - 1) / 2
    mean = math.fsum(last) / window if all(map(math.isfinite, last)) else math.nan
    above = math.fsum((x - middle) * (y - mean) for x, y in enumerate(last))
    return above / math.fsum((x - middle) ** 2 for x in range(window))


def improving(
    values: Values, window: int, *, mode: Mode = "min", tolerance: float = 0.0, name: str | None = None
) -> bool | None:
    """Whether the slope is better than ``tolerance``: below ``-tolerance``, or above it with ``mode="max"``.

    Args:
        values, window, name: As in `slope`.
        mode: ``"min"`` if lower values are better, ``"max"`` if higher ones are.
        tolerance: Per value, at least 0.

    >>> improving([3.0, 2.0, 1.0], 3), improving([3.0, 2.0, 1.0], 3, mode="max"), improving([3.0, 2.0], 3)
    (True, False, None)
    """
    checks.one_of("improving", ("min", "max"), error=ArgumentError, mode=mode)
    _check(tolerance)
    found = slope(values, window, name=name)
    if found is None:
        return None
    return found < -tolerance if mode == "min" else found > tolerance


def stalled(values: Values, window: int, *, tolerance: float, name: str | None = None) -> bool | None:
    """Whether the slope is at most ``tolerance`` either way. A stalled series is not `improving` by that tolerance.

    Args:
        values, window, name: As in `slope`.
        tolerance: Per value, at least 0.

    >>> stalled([1.0, 1.1, 1.0], 3, tolerance=0.01), stalled([1.0], 3, tolerance=0.01)
    (True, None)
    """
    _check(tolerance)
    found = slope(values, window, name=name)
    return None if found is None else abs(found) <= tolerance


def converged(values: Values, window: int, *, tolerance: float, name: str | None = None) -> bool | None:
    """Whether the last values are all near each other: their standard deviation is at most ``tolerance``.

    The standard deviation is of these values as a population, ``sqrt(mean((y - mean(y)) ** 2))``, in the metric's
    own unit. A metric that swings around a level has stalled, but not converged.

    Args:
        values, window, name: As in `slope`.
        tolerance: At least 0.

    >>> converged([5.0, 1.0, 1.0], 2, tolerance=0.0), converged([1.0, 3.0], 2, tolerance=0.9)
    (True, False)
    """
    _check(tolerance)
    last = _last(values, window, name)
    if last is None:
        return None
    if not all(map(math.isfinite, last)):
        return False
    mean = math.fsum(last) / window
    return math.sqrt(math.fsum((y - mean) ** 2 for y in last) / window) <= tolerance


def any_of(
    predicate: Callable[..., bool | None],
    rows: Iterable[Mapping[str, Any]],
    names: Iterable[str],
    window: int,
    **options: Any,
) -> bool | None:
    """Whether a predicate holds for at least one metric of a group.

    Args:
        predicate: `improving`, `stalled` or `converged`.
        rows: As in ``FitResult.history``.
        names: Metrics; ``"val/*"`` is every one that the rows hold.
        window, options: For the predicate.

    Returns:
        None if that depends on a metric whose window is not full.
    """
    answers = _answers(predicate, rows, names, window, options)
    if True in answers:
        return True
    return None if None in answers or not answers else False


def all_of(
    predicate: Callable[..., bool | None],
    rows: Iterable[Mapping[str, Any]],
    names: Iterable[str],
    window: int,
    **options: Any,
) -> bool | None:
    """Whether a predicate holds for every metric of a group; otherwise as `any_of`."""
    answers = _answers(predicate, rows, names, window, options)
    if False in answers:
        return False
    return None if None in answers or not answers else True


def _answers(
    predicate: Callable[..., bool | None],
    rows: Iterable[Mapping[str, Any]],
    names: Iterable[str],
    window: int,
    options: Mapping[str, Any],
) -> list[bool | None]:
    if isinstance(names, str):
        raise ArgumentError(f"names is the string {names!r}: give a list, [{names!r}]")
    rows = list(rows)
    made = _names(rows)
    found: dict[str, None] = {}
    for name in names:
        if "*" not in name:
            found[name] = None
        elif matching := [other for other in made if fnmatchcase(other, name)]:
            found.update(dict.fromkeys(matching))
        elif rows and name.partition("/")[0] in {"*", *(row.get("phase") for row in rows)}:
            raise _unknown(rows, name)
        else:
            return [None]
    if not found:
        raise ArgumentError("names is empty: give at least one metric, such as 'val/loss'")
    return [predicate(rows, window, name=name, **options) for name in found]


def _names(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row if "/" in name))


def _unknown(rows: list[Mapping[str, Any]], name: str) -> ArgumentError:
    names = _names(rows)
    return ArgumentError(f"no metric is called {name!r}{nearest(name, names)}; there are: {', '.join(names) or 'none'}")


def _last(values: Values, window: int, name: str | None) -> list[float] | None:
    checks.whole("slope", 2, error=ArgumentError, window=window)
    numbers: list[Any] = list(values)
    if name is not None:
        numbers = series(numbers, name)
    elif numbers and isinstance(numbers[0], Mapping):
        raise ArgumentError("the values are rows of a history: name the metric with name=...")
    return [float(number) for number in numbers[-window:]] if len(numbers) >= window else None


def _check(tolerance: float) -> None:
    if not (tolerance >= 0 and math.isfinite(tolerance)):
        raise ArgumentError(f"tolerance is {tolerance}: it is a finite number, at least 0")
