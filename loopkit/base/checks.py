"""Checks of options, as plugins, metrics and loaders make them; every message has one form.

>>> positive("ClipGradNorm", max_norm=0)
Traceback (most recent call last):
...
loopkit.errors.PluginError: ClipGradNorm: max_norm is 0: it is a number above 0
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real
from typing import Any, NoReturn

from loopkit.base.words import nearest
from loopkit.errors import PluginError


def whole(
    owner: str, least: int = 1, /, *, also: str = "", error: type[Exception] = PluginError, **options: Any
) -> None:
    """Check that options are whole numbers.

    Args:
        owner: The class or function that has the options, for the message.
        least: The smallest number allowed.
        also: Another value that is allowed, and was looked for already, such as ``"'auto'"``.
        error: The class of the error.
        options: Their values, by name.

    Raises:
        PluginError: One is not; or ``error``.

    Example::

        checks.whole("Accumulate", steps=steps)
    """
    for name, value in options.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            _wrong(owner, name, value, f"a whole number, from {least}{also and f', or {also}'}", error)


def positive(owner: str, unit: str = "", /, *, infinite: bool = False, **options: Any) -> None:
    """Check that options are numbers above 0.

    Args:
        owner: The class or function that has the options, for the message.
        unit: The unit, such as ``"seconds"``.
        infinite: Infinity is allowed, too.
        options: Their values, by name.

    Raises:
        PluginError: One is not.

    Example::

        checks.positive("Deadline", "minutes", minutes=minutes)
    """
    for name, value in options.items():
        if not (_is_number(value, infinite) and value > 0):
            _wrong(owner, name, value, f"a number{_of(unit)} above 0", PluginError)


def not_negative(owner: str, unit: str = "", /, *, infinite: bool = False, **options: Any) -> None:
    """Check that options are numbers from 0.

    Args:
        owner: The class or function that has the options, for the message.
        unit: The unit, such as ``"seconds"``.
        infinite: Infinity is allowed, too.
        options: Their values, by name.

    Raises:
        PluginError: One is not.

    Example::

        checks.not_negative("Upload", "seconds", wait=wait)
    """
    for name, value in options.items():
        if not (_is_number(value, infinite) and value >= 0):
            _wrong(owner, name, value, f"a number{_of(unit)}, from 0", PluginError)


def one_of(
    owner: str, choices: Sequence[str | bool | None], /, *, error: type[Exception] = PluginError, **options: Any
) -> None:
    """Check that options have one of several values; the message names the nearest word.

    Args:
        owner: The class or function that has the options, for the message.
        choices: Words, True, False or None.
        error: The class of the error.
        options: Their values, by name.

    Raises:
        PluginError: One has not; or ``error``.

    Example::

        checks.one_of("Schedule", ("update", "epoch"), every=every)
    """
    *others, last = map(repr, choices)
    listed = f"{', '.join(others)} or {last}" if others else last
    words = [choice for choice in choices if isinstance(choice, str)]
    for name, value in options.items():
        hint = ""
        if isinstance(value, str):
            if value in words:
                continue
            hint = nearest(value, words)
        elif any(value is choice for choice in choices):
            continue
        _wrong(owner, name, value, f"{listed}{hint}", error)


def metric_name(owner: str, /, **options: Any) -> None:
    """Check that options are names of metrics, with their phases.

    Args:
        owner: The class or function that has the options, for the message.
        options: Their values, by name.

    Raises:
        PluginError: One is not.

    Example::

        checks.metric_name("EarlyStopping", monitor=monitor)
    """
    for name, value in options.items():
        phase, _, metric = value.partition("/") if isinstance(value, str) else ("", "", "")
        if not (phase and metric) or "*" in phase:
            _wrong(owner, name, value, "'<phase>/<metric>', such as 'val/loss'", PluginError)


def _is_number(value: Any, infinite: bool) -> bool:
    if isinstance(value, bool) or not isinstance(value, Real):  # numbers of NumPy, too, as searches give them
        return False
    return infinite or math.isfinite(value)


def _of(unit: str) -> str:
    return f" of {unit}" if unit else ""


def _wrong(owner: str, name: str, value: Any, right: str, error: type[Exception]) -> NoReturn:
    raise error(f"{owner}: {name} is {value!r:.80}: it is {right}")
