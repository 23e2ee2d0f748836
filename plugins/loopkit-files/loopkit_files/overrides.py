"""Values given on the command line: ``--set plugins.clip_grad_norm.max_norm=0.5``."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from typing import Any

from loopkit_files.lines import Place

__all__ = ["Override", "OverrideError", "apply", "parse"]

Override = tuple[Place, Any]
PYTHON = {"True": "true", "False": "false"}
NULL = ("None", "null", "nil")


class OverrideError(Exception):
    """A value on the command line is wrong."""


def parse(text: str) -> tuple[tuple[str, ...], Any]:
    """The keys, and the value: of TOML if it is that, else the text itself.

    Raises:
        OverrideError: It is neither.

    >>> parse("fit.epochs=3"), parse("plugins.checkpoint.directory=runs/b")
    ((('fit', 'epochs'), 3), (('plugins', 'checkpoint', 'directory'), 'runs/b'))
    """
    for at in _equals(text):
        keys = _keys(text[:at])
        if keys:
            return keys, _value(text[at + 1 :].strip())
    if "=" not in text:
        raise OverrideError("there is no '=' in it: write --set table.key=value")
    raise OverrideError(f"{text.partition('=')[0]!r} is no key: write --set table.key=value")


def apply(values: dict[str, Any], keys: tuple[str, ...], value: Any) -> Place:
    """Put a value in its place, and make the tables on the way; returns the place.

    Raises:
        OverrideError: A value on the way is no table.
    """
    place: Place = ()
    inside: Any = values
    for i, key in enumerate(keys):
        last = i == len(keys) - 1
        if isinstance(inside, list):
            index = int(key) if key.isdecimal() and len(key) < 10 else len(inside)
            if index >= len(inside):
                raise OverrideError(f"{'.'.join(keys[:i])} is an array of {len(inside)}, which has no item {key!r}")
            place = (*place, index)
            if last:
                inside[index] = value
            inside = inside[index]
        elif isinstance(inside, dict):
            place = (*place, key)
            if last:
                inside[key] = value
            inside = inside.setdefault(key, {})
        else:
            raise OverrideError(f"{'.'.join(keys[:i])} is {inside!r}, not a table")
    return place


def _equals(text: str) -> Iterator[int]:
    return (match.start() for match in re.finditer("=", text))


def _keys(text: str) -> tuple[str, ...]:
    """The parts of a dotted key; none if it is malformed."""
    try:
        inside = tomllib.loads(f"{text} = 0") if "\n" not in text else {}
    except tomllib.TOMLDecodeError:
        return ()
    keys: list[str] = []
    while isinstance(inside, dict):
        if len(inside) != 1:
            return ()
        ((key, inside),) = inside.items()
        keys.append(key)
    return tuple(keys)


def _value(text: str) -> Any:
    try:
        parsed = tomllib.loads(f"table = {{value = {text}}}")
    except (ValueError, RecursionError) as error:  # TOMLDecodeError, or a number of thousands of digits
        return _bare(text, error)
    if parsed.keys() != {"table"} or parsed["table"].keys() != {"value"}:
        return _bare(text, None)
    return parsed["table"]["value"]


def _bare(text: str, error: Exception | None) -> str:
    """A text that is no TOML, unless it seems to be meant as some."""
    if not text:
        raise OverrideError('there is no value: write "" for an empty text')
    if text in PYTHON:
        raise OverrideError(f"{text!r} is no TOML: write {PYTHON[text]}, or '\"{text}\"' for the text")
    if text in NULL:
        raise OverrideError(f"TOML has no {text!r}: leave the key out to have the default")
    if text[0] in "\"'[{":
        raise OverrideError(f"the value is no TOML: {re.sub(r' *[(]at .*', '', str(error or 'more than one value'))}")
    try:
        float(text)
    except ValueError:
        return text
    raise OverrideError(
        f"{text[:40]!r} is no number of TOML, which has a digit on both sides of the point, no zero before others, and "
        f"integers of 64 bits"
    )
