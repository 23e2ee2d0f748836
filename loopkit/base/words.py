"""Words: the nearest spelling of a name, hints for unknown arguments, checks of counts and of half a state."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from difflib import get_close_matches
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from loopkit.errors import CallError

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
    """Let a function's error for arguments that do not fit give the right ones.

    Args:
        instead: Hints by arguments that people know from other libraries; for others the nearest name is given.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return function(*args, **kwargs)
            except TypeError as error:
                check_call(error, function, args, kwargs, instead)
                raise

        call.loopkit_takes = instead  # type: ignore[attr-defined]
        return call

    return decorate


def check_call(
    error: TypeError,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    given: Mapping[str, Any],
    instead: Mapping[str, str],
) -> None:
    """Raise for arguments that a function cannot be called with, if that was the error; called where it was caught.

    Raises:
        CallError: Names the argument, and what to write.
    """
    trace = error.__traceback__
    if trace is None or trace.tb_next is None:  # the function itself did not begin
        raise CallError(_misfit(function, args, given, instead)) from None


def _misfit(
    function: Callable[..., Any], args: tuple[Any, ...], given: Mapping[str, Any], instead: Mapping[str, str]
) -> str:
    """The message about the arguments of a call that do not fit."""
    shape = inspect.signature(function).parameters
    own = args[:1] if "self" in shape else ()
    owner = type(own[0]).__name__ if own and function.__name__ == "__init__" else function.__qualname__
    parameters = [each for each in shape.values() if each.name != "self"]
    kinds = {each.kind for each in parameters}
    names = [each.name for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
    places = [each.name for each in parameters if each.kind <= each.POSITIONAL_OR_KEYWORD]
    unknown = [name for name in given if name not in names and inspect.Parameter.VAR_KEYWORD not in kinds]
    if unknown:
        name = unknown[0]
        hint = f": {instead[name]}" if name in instead else nearest(name, names) or f"; it takes {', '.join(names)}"
        return f"{owner} has no argument {name!r}{hint}"
    taken = places[: len(args) - len(own)]
    if len(args) - len(own) > len(places) and inspect.Parameter.VAR_POSITIONAL not in kinds:
        return _too_many(owner, places, names, len(args) - len(own))
    if twice := [name for name in taken if name in given]:
        return f"{owner} gets {twice[0]!r} twice, by position and by name: leave one out"
    required = [each.name for each in parameters if each.name in names and each.default is each.empty]
    lacking = [name for name in required if name not in given and name not in taken]
    return f"{owner} lacks {' and '.join(map(repr, lacking))}: write {owner}({', '.join(f'{n}=...' for n in lacking)})"


def _too_many(owner: str, places: list[str], names: list[str], count: int) -> str:
    """The message about a call with too many arguments by position."""
    by_name = [name for name in names if name not in places]
    first = f"takes only {', '.join(places)} by position" if places else "takes no argument by position"
    rest = f": give the others by name ({', '.join(by_name)})" if by_name else ""
    return f"{owner} {first}, not {count}{rest}"


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
