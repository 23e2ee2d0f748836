"""Words: the nearest spelling of a name, hints for unknown arguments, checks of counts and of half a state."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from difflib import get_close_matches
from functools import wraps
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def nearest(word: str, known: Iterable[str]) -> str:
    """`` (did you mean 'x'?)`` for a close spelling among ``known``, else an empty string."""
    close = get_close_matches(word, sorted(set(known)), n=1, cutoff=0.75)
    return f" (did you mean {close[0]!r}?)" if close else ""


def some(items: Collection[str], most: int = 3) -> str:
    """The first of some words, and how many there are besides.

    >>> some(["a", "b", "c"], most=2)
    'a, b and 1 more'
    """
    rest = f" and {len(items) - most} more" if len(items) > most else ""
    return ", ".join(list(items)[:most]) + rest


def takes(**instead: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Let a function's error for an unknown argument give the right one.

    Args:
        instead: Hints by arguments that people know from other libraries; for others the nearest name is given.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        code = function.__code__
        known = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            for name in kwargs:
                if name not in known:
                    hint = f": {instead[name]}" if name in instead else nearest(name, known)
                    own = function.__name__ == "__init__" and args
                    owner = type(args[0]).__name__ if own else function.__qualname__
                    raise TypeError(f"{owner} has no argument {name!r}{hint}")
            return function(*args, **kwargs)

        return call

    return decorate


STATE = "state_dict", "load_state_dict"
"""The methods of an object with a state."""


def half_a_state(has: Collection[str]) -> str:
    """The message for an object that has one of `STATE` without the other; else an empty string."""
    if len(has) != 1:
        return ""
    (there,), (lacks,) = has, {*STATE} - {*has}
    return f"has {there}, but no {lacks}: the saved state could not be loaded. Add {lacks}, or remove {there}"


def is_count(value: Any) -> bool:
    """Whether it is a whole number from 1."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
