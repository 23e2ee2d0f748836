"""Schedules of `loopkit.schedules` as the lines of a plain function."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from loopkit import schedules
from loopkit_files.plain.code import NoWrittenForm, name_of, number

__all__ = ["Formula", "formula"]

Wrap = Callable[[str], str]
"""A function that wraps the expression of a schedule's value."""


@dataclass(frozen=True)
class Formula:
    """A schedule as code: the lines of a function of ``update`` (and ``total``), or an expression that makes one."""

    lines: tuple[str, ...] = ()
    """The body of the function; empty if there is an expression instead."""
    expression: str = ""
    total: bool = False
    """Whether it needs the number of updates of the whole fit."""


def formula(schedule: schedules.ScheduleFn, imports: set[str]) -> Formula:
    """Write a schedule out.

    Those without a plain form come as an expression over `loopkit.schedules`, or over the module that has the function.

    Args:
        schedule: The schedule.
        imports: Gets what the code imports.

    Raises:
        NoWrittenForm: It is a function that no script can import.

    >>> print(*formula(schedules.warmup(3, then=schedules.cosine(9)), set()).lines, sep="\\n")
    if update < 3:
        return (update + 1) / 3
    update -= 3
    if update < 9:
        return 0.5 * (1.0 + math.cos(math.pi * update / 9))
    return 0.0
    """
    whole_fit = isinstance(schedule, schedules.OfLength)
    if not whole_fit and getattr(schedule, "__module__", "") != schedules.__name__:
        return Formula((), name_of(schedule, imports))
    text = schedule.name if isinstance(schedule, schedules.OfLength) else str(getattr(schedule, "__name__", schedule))
    call = _parsed(text)
    writer = _Writer()
    try:
        lines = writer.write(call, None, lambda value: value)
    except _NotPlain:
        used = {
            node.func.id for node in ast.walk(call) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        }
        names = used | {"resolve"} if whole_fit else used
        text = text.replace("'", '"')
        expression = f"resolve({text}, total_updates)" if whole_fit else text
        imports |= {f"from loopkit.schedules import {name}" for name in names}
        return Formula((), expression, whole_fit)
    if any("math." in line for line in lines):
        imports.add("import math")
    return Formula(tuple(lines), "", whole_fit)


def _parsed(text: str) -> ast.Call:
    """The call that a schedule of `loopkit.schedules` has as its name."""
    try:
        call = ast.parse(text, mode="eval").body
        _made(call)
    except (SyntaxError, ValueError, TypeError, AttributeError):
        raise NoWrittenForm(f"{text} holds a function that is not of loopkit.schedules") from None
    assert isinstance(call, ast.Call)
    return call


def _made(node: ast.expr) -> Any:
    """Evaluate an expression of schedules, lists, tuples and numbers."""
    if isinstance(node, ast.Call):
        if not isinstance(node.func, ast.Name) or node.func.id not in schedules.__all__:
            raise ValueError(ast.unparse(node))
        arguments = {key.arg: _made(key.value) for key in node.keywords if key.arg}
        return getattr(schedules, node.func.id)(*map(_made, node.args), **arguments)
    if isinstance(node, (ast.List, ast.Tuple)):
        return [_made(each) for each in node.elts]
    return ast.literal_eval(node)


def _at_zero(call: ast.expr) -> float:
    """A schedule's first value, which must not depend on its length."""
    made = _made(call)
    values = {schedules.resolve(made, total)(0) for total in (2**20, 2**20 + 7, 999_983)}
    if len(values) != 1:
        raise _NotPlain
    return values.pop()


class _NotPlain(Exception):
    """A schedule that is shorter as a call than as a formula."""


class _Writer:
    """Writes the lines for a schedule; each method is named after the function that it writes out."""

    def write(self, call: ast.expr, total: int | None, wrap: Wrap) -> list[str]:
        """The lines that return the schedule's value.

        Args:
            call: The schedule.
            total: The length of a schedule without one; None: the variable ``total``.
            wrap: How the value is used.
        """
        assert isinstance(call, ast.Call)
        assert isinstance(call.func, ast.Name)
        method = getattr(self, call.func.id, None)
        if method is None:
            raise _NotPlain
        signature = inspect.signature(getattr(schedules, call.func.id))
        bound = signature.bind(*call.args, **{key.arg: key.value for key in call.keywords if key.arg})
        bound.apply_defaults()
        values = {
            name: value if isinstance(value, ast.Call) else _made(value) if isinstance(value, ast.expr) else value
            for name, value in bound.arguments.items()
            if name != "parts"
        }
        if "parts" in bound.arguments:
            values["parts"] = bound.arguments["parts"]
        lines: list[str] = method(total=total, wrap=wrap, **values)
        return lines

    # Single shapes

    def constant(self, value: float, total: int | None, wrap: Wrap) -> list[str]:
        return [f"return {wrap(number(value))}"]

    def step(self, every: int, gamma: float, start: float, total: int | None, wrap: Wrap) -> list[str]:
        return [f"return {wrap(_times(start, f'{number(gamma)} ** (update // {every})'))}"]

    def exponential(self, gamma: float, every: int, start: float, total: int | None, wrap: Wrap) -> list[str]:
        power = f"{number(gamma)}**update" if every == 1 else f"{number(gamma)} ** (update / {every})"
        return [f"return {wrap(_times(start, power))}"]

    def multi_step(self, milestones: list[int], gamma: float, start: float, total: int | None, wrap: Wrap) -> list[str]:
        marks = ", ".join(map(str, milestones)) + ("," if len(milestones) == 1 else "")
        return [
            f"drops = sum(update >= milestone for milestone in ({marks}))",
            f"return {wrap(_times(start, f'{number(gamma)}**drops'))}",
        ]

    def inverse(self, gamma: float, power: float, start: float, total: int | None, wrap: Wrap) -> list[str]:
        below = f"(1.0 + {number(gamma)} * update)"
        return [f"return {wrap(f'{number(start)} / {below}' + ('' if power == 1 else f' ** {number(power)}'))}"]

    def inverse_sqrt(self, warmup: int, peak: float, total: int | None, wrap: Wrap) -> list[str]:
        return [
            f"if update < {warmup}:",
            f"    return {wrap(_times(peak, f'((update + 1) / {warmup})'))}",
            f"return {wrap(_times(peak, f'math.sqrt({warmup} / (update + 1))'))}",
        ]

    def linear(self, updates: int | None, start: float, end: float, total: int | None, wrap: Wrap) -> list[str]:
        length, delta = _length(updates, total), end - start
        part = f"update / {length}"
        value = f"{number(start)} - {part}" if delta == -1 else f"{number(start)} + {number(delta)} * {part}"
        return [f"if update < {length}:", f"    return {wrap(value)}", f"return {wrap(number(end))}"]

    def cosine(self, updates: int | None, start: float, end: float, total: int | None, wrap: Wrap) -> list[str]:
        length, half = _length(updates, total), (start - end) / 2.0
        wave = f"{number(half)} * (1.0 + math.cos(math.pi * update / {length}))"
        value = wave if end == 0 and half > 0 else f"{number(end)} + {wave}"
        return _between(length, value, start, end, end + half * 2.0 == start, wrap)

    def cosine_warmup(self, updates: int, start: float, end: float, total: int | None, wrap: Wrap) -> list[str]:
        half = (end - start) / 2.0
        wave = f"{number(half)} * (1.0 - math.cos(math.pi * update / {updates}))"
        value = wave if start == 0 and half > 0 else f"{number(start)} + {wave}"
        return _between(str(updates), value, start, end, start + half * 0.0 == start, wrap)

    def polynomial(
        self, updates: int | None, power: float, start: float, end: float, total: int | None, wrap: Wrap
    ) -> list[str]:
        length, delta = _length(updates, total), start - end
        value = _times(delta, f"(1.0 - update / {length}) ** {number(power)}")
        value = value if end == 0 and delta > 0 else f"{number(end)} + {value}"
        return _between(length, value, start, end, end + delta == start, wrap)

    # Composition

    def warmup(self, n: int, then: ast.Call | None, from_zero: bool, total: int | None, wrap: Wrap) -> list[str]:
        first = 1.0 if then is None else _at_zero(then)
        part = f"update / {n}" if from_zero else f"(update + 1) / {n}"
        rise = part if first == 1 else f"{number(first)} * ({part})"
        if then is None:
            after = self.constant(1.0, total, wrap)
        else:
            after = self._later(then, n, total, wrap)
        return [f"if update < {n}:", f"    return {wrap(rise)}", *after] if n else after

    def join(self, parts: ast.List, total: int | None, wrap: Wrap) -> list[str]:
        lines: list[str] = []
        for i, pair in enumerate(parts.elts):
            assert isinstance(pair, ast.Tuple)
            part, updates = pair.elts[0], ast.literal_eval(pair.elts[1])
            if i == len(parts.elts) - 1:
                own = updates if updates is not None else total
                return lines + self.write(part, own, wrap)
            inner = self.write(part, updates, wrap)
            lines += [f"if update < {updates}:", *(f"    {line}" for line in inner), f"update -= {updates}"]
            if total is not None:
                total -= updates
            elif isinstance(_made(parts.elts[-1].elts[0]), schedules.OfLength):  # type: ignore[attr-defined]
                lines += [f"total -= {updates}"]
        raise _NotPlain

    def shift(self, schedule: ast.Call, k: int, total: int | None, wrap: Wrap) -> list[str]:
        move = [f"update += {k}"] if k >= 0 else [f"update = max(update - {-k}, 0)"]
        if total is None and isinstance(_made(schedule), schedules.OfLength):
            move += [f"total += {k}" if k >= 0 else f"total -= {-k}"]
        return move + self.write(schedule, None if total is None else total + k, wrap)

    def scale(self, schedule: ast.Call, factor: float, total: int | None, wrap: Wrap) -> list[str]:
        return self.write(schedule, total, lambda value: wrap(f"{_grouped(value)} * {number(factor)}"))

    def clip(self, schedule: ast.Call, low: float, high: float, total: int | None, wrap: Wrap) -> list[str]:
        return self.write(schedule, total, lambda value: wrap(f"min(max({value}, {number(low)}), {number(high)})"))

    def loop(self, schedule: ast.Call, n: int, total: int | None, wrap: Wrap) -> list[str]:
        return [f"update %= {n}", *self.write(schedule, n, wrap)]

    def _later(self, then: ast.Call, n: int, total: int | None, wrap: Wrap) -> list[str]:
        """A schedule that begins after n updates."""
        move = [f"update -= {n}"] if n else []
        if n and total is None and isinstance(_made(then), schedules.OfLength):
            move += [f"total -= {n}"]
        return move + self.write(then, None if total is None else total - n, wrap)


def _length(updates: int | None, total: int | None) -> str:
    own = updates if updates is not None else total
    return "total" if own is None else str(own)


def _times(factor: float, value: str) -> str:
    return value if factor == 1 else f"{number(factor)} * {value}"


def _between(length: str, value: str, start: float, end: float, exact: bool, wrap: Wrap) -> list[str]:
    """A value below ``length`` and ``end`` from there on; at 0 it is ``start``, where the formula may be a bit off."""
    first = [] if exact else ["if update == 0:", f"    return {wrap(number(start))}"]
    return [*first, f"if update < {length}:", f"    return {wrap(value)}", f"return {wrap(number(end))}"]


def _grouped(value: str) -> str:
    return value if value.replace(".", "").isdigit() else f"({value})"
