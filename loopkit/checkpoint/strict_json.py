"""JSON read with suspicion: input that no writer of ours makes raises, in time linear in its size."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np

LONGEST_NUMBER = 25
"""Digits in a row; 64-bit integers have at most 20, floats by ``repr`` at most 21."""
STRETCH = 1 << 16
"""Characters whose brackets are counted at a time."""

STRING = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)
STEPS = np.zeros(256, np.int8)
"""The change in depth by each byte."""
STEPS[list(b"[{")] = 1
STEPS[list(b"]}")] = -1
ZEROS = bytes.maketrans(b"123456789", b"000000000")


def render(value: Any, *, sort: bool = False) -> bytes:
    """The one way we write JSON: ASCII, no spaces, floats by ``repr``, keys in the order they have, or sorted.

    Raises:
        ValueError: ``value`` holds infinity or NaN, or a type that JSON lacks.
    """
    try:
        return json.dumps(value, sort_keys=sort, separators=(",", ":"), allow_nan=False).encode("ascii")
    except (TypeError, RecursionError) as error:
        raise ValueError(str(error)) from error


def parse(text: str, depth: int) -> Any:
    """The value of a JSON text nested at most ``depth`` deep, in which no key is given twice.

    Raises:
        ValueError: It is malformed, too deep, or holds a duplicate key, NaN, an infinity or an absurdly long number.
    """
    without_strings(text, depth)
    return json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)


def without_strings(text: str, depth: int) -> str:
    """A JSON text without its strings, for a parser to be warned: nesting exhausts its stack, long numbers its time.

    Raises:
        ValueError: It is nested more than ``depth`` deep, or holds an absurdly long number.
    """
    bare = STRING.sub("", text)
    characters = bare.encode()
    level = 0
    for start in range(0, len(characters), STRETCH):  # a bomb is found in the first
        stretch = np.frombuffer(characters[start : start + STRETCH], np.uint8)
        levels = level + np.cumsum(STEPS[stretch], dtype=np.int64)
        if (deepest := levels.max()) > depth:
            raise ValueError(f"nested {deepest} deep or deeper, at most {depth} is allowed")
        level = levels[-1]
    if b"0" * (LONGEST_NUMBER + 1) in characters.translate(ZEROS):
        raise ValueError(f"a number of more than {LONGEST_NUMBER} digits")
    return bare


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"key {twice[:80]!r} is given twice")
    return result


def _no_constant(token: str) -> Any:
    raise ValueError(f"the token {token} is no JSON")
