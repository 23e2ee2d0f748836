"""Criteria: when to end a training, judged by the values of one metric.

A criterion takes the values one by one, as they are measured, and returns the reason to stop, or an empty string.
Criteria are put together with ``|`` (one of them is enough) and ``&`` (all at the same value)::

    EarlyStopping("val/loss", criterion=warmup(Patience(3), 10) | TimeLimit(3600))

or used in your own loop::

    >>> criterion = Patience(2) | Threshold(0.1)
    >>> for loss in (0.5, 0.4, 0.45, 0.6, 0.3):
    ...     if reason := criterion.update(loss):
    ...         print(reason)
    ...         break
    rose 2 times in a row, last from 0.45 to 0.6

With ``mode="min"`` lower values are better, with ``"max"`` higher ones. A value that is nan is worse than any number.

Source: Prechelt, "Early Stopping - But When?" (1998), section 2, for `Patience`; his errors become any metric here. His
other criteria are in the distribution loopkit-control. `slope`, `improving`, `stalled` and `converged` are about the
trend of a series that was measured.
"""

from __future__ import annotations

import math
import time
from typing import Any, ClassVar

from loopkit.base import checks
from loopkit.base.options import Shown
from loopkit.criteria.directions import Mode, is_better
from loopkit.criteria.trends import all_of, any_of, converged, improving, series, slope, stalled
from loopkit.errors import PluginError

__all__ = [
    "Criterion",
    "Divergence",
    "InvalidValue",
    "Mode",
    "NumberLimit",
    "NumberSinceBest",
    "Patience",
    "Threshold",
    "TimeLimit",
    "all_of",
    "any_of",
    "converged",
    "improving",
    "series",
    "slope",
    "stalled",
    "warmup",
]
__dir__ = __all__.copy


class Criterion(Shown):
    """Base of every criterion.

    Your own has an `update`; its state is in the attributes that `fields` names and `update` replaces, which
    hold None, numbers, strings or lists of them.
    """

    fields: ClassVar[tuple[str, ...]] = ()
    needs_training = False
    """Whether it wants the training's values too, by `observe_training`."""
    needs_mode = True
    """Whether it goes by which values are better."""

    def update(self, value: float, mode: Mode = "min") -> str:
        """Take in the next value; return why it is time to stop, or an empty string."""
        raise NotImplementedError(f"{type(self).__name__} has no update(self, value, mode)")

    def observe_training(self, value: float) -> None:
        """Take in the next value of the training series, before the `update` of the same epoch."""

    def start(self) -> None:
        """A fit begins: clocks go."""

    def pause(self) -> None:
        """A fit ends: clocks stand still."""

    def state_dict(self) -> dict[str, Any]:
        """The values that it keeps."""
        return {name: _copy(getattr(self, name)) for name in self.fields}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the return value of `state_dict`.

        Raises:
            PluginError: Another kind of criterion made the state.
        """
        own = self.state_dict().keys()
        if state.keys() != own:
            raise PluginError(
                f"{type(self).__name__}: the saved state holds {', '.join(state) or 'nothing'}, not "
                f"{', '.join(own) or 'nothing'}: it was saved by another criterion; give the same one again"
            )
        self._load(state)

    def _load(self, state: dict[str, Any]) -> None:
        for name in self.fields:
            setattr(self, name, _copy(state[name]))

    def __or__(self, other: Criterion) -> Criterion:
        """Either of them."""
        return _Either(self, other) if isinstance(other, Criterion) else NotImplemented

    def __and__(self, other: Criterion) -> Criterion:
        """Both at the same value."""
        return _Both(self, other) if isinstance(other, Criterion) else NotImplemented


class Patience(Criterion):
    """Stop after ``n`` values in a row, each worse than the one before it.

    Args:
        n: From 1.

    Source: Prechelt's ``UP_s`` with ``s = n`` and strips of one epoch: ``UP_s`` stops after epoch ``t`` if
    ``UP_{s-1}`` stops after epoch ``t - 1`` and ``E_va(t) > E_va(t - 1)``.
    """

    fields = ("last", "count")

    def __init__(self, n: int) -> None:
        checks.whole("Patience", n=n)
        self.n = n
        self.last: float | None = None
        self.count = 0

    def update(self, value: float, mode: Mode = "min") -> str:  # noqa: D102
        last = self.last
        self.last = value
        self.count = self.count + 1 if last is not None and _is_worse(value, last, mode) else 0
        if self.count < self.n:
            return ""
        times = "once" if self.count == 1 else f"{self.count} times in a row"
        return f"{'rose' if mode == 'min' else 'fell'} {times}, last from {last:.6g} to {value:.6g}"


class NumberSinceBest(Criterion):
    """Stop when ``n`` values have passed since the best one.

    Args:
        n: From 1.
        min_delta: Only a value that is better by more than this is a new best one; from 0.
        relative: ``min_delta`` is a share of the best value's size: 0.01 is 1 %.
    """

    fields = ("best", "count")

    def __init__(self, n: int, min_delta: float = 0.0, relative: bool = False) -> None:
        checks.whole("NumberSinceBest", n=n)
        self.n = n
        self.relative = relative
        self.min_delta = _number("NumberSinceBest", "min_delta", min_delta)
        if self.min_delta < 0:
            raise PluginError(f"NumberSinceBest: min_delta is {min_delta}: it is at least 0, whatever the mode")
        self.best: float | None = None
        self.count = 0

    def update(self, value: float, mode: Mode = "min") -> str:  # noqa: D102
        size = abs(self.best) if self.relative and self.best is not None else 1.0
        if is_better(value, self.best, mode, self.min_delta * size):
            self.best = value
            self.count = 0
            return ""
        self.count += 1
        if self.count < self.n:
            return ""
        values = "1 value" if self.count == 1 else f"{self.count} values"
        if self.best is None:
            return f"there was no finite one among {values}, the last is {value:.6g}"
        amount = f"{100 * self.min_delta:.6g} %" if self.relative else f"{self.min_delta:.6g}"
        by = f" by more than {amount}" if self.min_delta else ""
        return f'{self.best:.6g} was not improved{by} in {values} (mode "{mode}"), the last is {value:.6g}'


class NumberLimit(Criterion):
    """Stop after ``n`` values.

    Args:
        n: From 1.
    """

    fields = ("count",)
    needs_mode = False

    def __init__(self, n: int) -> None:
        checks.whole("NumberLimit", n=n)
        self.n = n
        self.count = 0

    def update(self, value: float, mode: Mode = "min") -> str:  # noqa: D102
        self.count += 1
        return f"measured {self.count} times, the limit is {self.n}" if self.count >= self.n else ""


class TimeLimit(Criterion):
    """Stop after this time in fits, by a monotonic clock; checked at each value.

    A loaded state resumes from the time that was used before. Without `start`, the clock runs from the first value on.

    Args:
        seconds: Above 0.
    """

    fields = ("seconds",)
    needs_mode = False

    def __init__(self, seconds: float) -> None:
        checks.positive("TimeLimit", "seconds", seconds=seconds)
        self.limit = float(seconds)
        self._before = 0.0
        self._started: float | None = None

    def options(self) -> dict[str, Any]:
        """The options it was made with. Its attribute ``seconds`` is the time that has passed."""
        return {"seconds": self.limit}

    @property
    def seconds(self) -> float:
        """The time that was used."""
        return self._before + (0.0 if self._started is None else time.monotonic() - self._started)

    def start(self) -> None:  # noqa: D102
        if self._started is None:
            self._started = time.monotonic()

    def pause(self) -> None:  # noqa: D102
        self._before = self.seconds
        self._started = None

    def update(self, value: float, mode: Mode = "min") -> str:  # noqa: D102
        self.start()
        used = self.seconds
        return f"took {used:.1f} s, the limit is {self.limit:g} s" if used >= self.limit else ""

    def _load(self, state: dict[str, Any]) -> None:
        self._before = float(state["seconds"])
        if self._started is not None:
            self._started = time.monotonic()


class Threshold(Criterion):
    """Stop when the value reaches this one, or is better.

    Args:
        value: A number.
    """

    def __init__(self, value: float) -> None:
        self.value = _number("Threshold", "value", value)

    def update(self, value: float, mode: Mode = "min") -> str:  # noqa: D102
        reached = value <= self.value if mode == "min" else value >= self.value
        return f"reached {value:.6g}, the threshold is {self.value:g}" if reached else ""


class Divergence(Criterion):
    """Stop when the value is worse than this one, or nan.

    Args:
        value: A number. With ``relative``, how much worse than the best value so far, as a share of its size: 0.5 is
            50 %.
        relative: See there.
    """

    fields = ("best",)

    def __init__(self, value: float, relative: bool = False) -> None:
        self.value = _number("Divergence", "value", value)
        self.relative = relative
        self.best: float | None = None

    def update(self, value: float, mode: Mode = "min") -> str:  # noqa: D102
        if is_better(value, self.best, mode):
            self.best = value
        if not self.relative:
            return f"is {value:.6g}, worse than {self.value:g}" if _is_worse(value, self.value, mode) else ""
        if self.best is None:
            return "" if math.isfinite(value) else f"is {value}"
        gap = self.value * abs(self.best)
        if not _is_worse(value, self.best + gap if mode == "min" else self.best - gap, mode):
            return ""
        return f"{value:.6g} is more than {100 * self.value:g} % worse than the best, {self.best:.6g}"


class InvalidValue(Criterion):
    """A value that is nan or infinite."""

    needs_mode = False

    def update(self, value: float, mode: Mode = "min") -> str:  # noqa: D102
        return "" if math.isfinite(value) else f"is {value}"


def warmup(criterion: Criterion, n: int) -> Criterion:
    """The criterion, which does not see the first ``n`` values (training values and time it does).

    Args:
        criterion: Any.
        n: From 1.

    >>> criterion = warmup(Threshold(0.5), 2)
    >>> [criterion.update(value) != "" for value in (0.1, 0.1, 0.1)]
    [False, False, True]
    """
    checks.whole("warmup", n=n)
    return _Warmup(_criterion("warmup", criterion), n)


class _Warmup(Criterion):
    def __init__(self, criterion: Criterion, n: int) -> None:
        self.criterion = criterion
        self.n = n
        self.count = 0
        self.needs_training = criterion.needs_training
        self.needs_mode = criterion.needs_mode

    def __repr__(self) -> str:
        return f"warmup({self.criterion!r}, {self.n})"

    def update(self, value: float, mode: Mode = "min") -> str:
        if self.count < self.n:
            self.count += 1
            return ""
        return self.criterion.update(value, mode)

    def observe_training(self, value: float) -> None:
        self.criterion.observe_training(value)

    def start(self) -> None:
        self.criterion.start()

    def pause(self) -> None:
        self.criterion.pause()

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "criterion": self.criterion.state_dict()}

    def _load(self, state: dict[str, Any]) -> None:
        self.criterion.load_state_dict(state["criterion"])
        self.count = state["count"]


class _Pair(Criterion):
    """Two criteria that see the same values, whatever the other one returns."""

    def __init__(self, first: Criterion, second: Criterion) -> None:
        if first is second:
            raise PluginError(f"{type(first).__name__} is combined with itself: make a second one")
        self.first = first
        self.second = second
        self.needs_training = first.needs_training or second.needs_training
        self.needs_mode = first.needs_mode or second.needs_mode

    def reasons(self, value: float, mode: Mode) -> list[str]:
        reasons = [self.first.update(value, mode), self.second.update(value, mode)]
        return [reason for reason in reasons if reason]

    def observe_training(self, value: float) -> None:
        self.first.observe_training(value)
        self.second.observe_training(value)

    def start(self) -> None:
        self.first.start()
        self.second.start()

    def pause(self) -> None:
        self.first.pause()
        self.second.pause()

    def state_dict(self) -> dict[str, Any]:
        return {"first": self.first.state_dict(), "second": self.second.state_dict()}

    def _load(self, state: dict[str, Any]) -> None:
        self.first.load_state_dict(state["first"])
        self.second.load_state_dict(state["second"])


class _Either(_Pair):
    def __repr__(self) -> str:
        return f"({self.first!r} | {self.second!r})"

    def update(self, value: float, mode: Mode = "min") -> str:
        return "; ".join(self.reasons(value, mode))


class _Both(_Pair):
    def __repr__(self) -> str:
        return f"({self.first!r} & {self.second!r})"

    def update(self, value: float, mode: Mode = "min") -> str:
        reasons = self.reasons(value, mode)
        return " and ".join(reasons) if len(reasons) == 2 else ""


def _is_worse(value: float, than: float, mode: Mode) -> bool:
    return math.isnan(value) or (value > than if mode == "min" else value < than)


def _copy(value: Any) -> Any:
    return list(value) if isinstance(value, list) else value


def _number(owner: str, argument: str, value: Any) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
        raise PluginError(f"{owner}: {argument} is {value!r}: it is a finite number")
    return float(value)


def _criterion(owner: str, value: Any) -> Criterion:
    if isinstance(value, Criterion):
        return value
    if isinstance(value, type) and issubclass(value, Criterion):
        raise PluginError(f"{owner}: {value.__name__} is a class; give an instance, such as Patience(3)")
    raise PluginError(f"{owner}: {value!r} is no criterion; give one of loopkit.criteria, such as Patience(3)")
