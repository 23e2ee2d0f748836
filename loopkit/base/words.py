"""Words: the nearest spelling of a name, hints for unknown arguments, checks of counts and of half a state."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from difflib import get_close_matches
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from loopkit.errors import ArgumentError, CallError

P = ParamSpec("P")
R = TypeVar("R")
SHORTEST = 3
"""Letters from which the beginning of a name stands for it."""


def close_spellings(word: str, known: Iterable[str]) -> list[str]:
    """The word among ``known`` that is spelt nearly so, in a list, if there is one."""
    return get_close_matches(word, sorted(set(known)), n=1, cutoff=0.75)


def nearest(word: str, known: Iterable[str]) -> str:
    """`` (did you mean 'x'?)`` for a close spelling among ``known``, or the only one that it begins, else nothing."""
    known = sorted(set(known))
    close = close_spellings(word, known)
    if not close and len(word) >= SHORTEST:
        begun = [each for each in known if each.startswith(word)]
        close = begun if len(begun) == 1 else []
    return f" (did you mean {close[0]!r}?)" if close else ""


def some(items: Collection[str], most: int = 3) -> str:
    """The first of some words, and how many there are besides.

    >>> some(["a", "b", "c"], most=2)
    'a, b and 1 more'
    """
    shown = ", ".join(list(items)[:most])
    more = len(items) - most
    return f"{shown} and {more} more" if more > 0 else shown


def takes(**instead: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Let a function's error for arguments that do not fit give the right ones.

    Args:
        instead: Hints by arguments that people know from other libraries; for others the nearest name is given.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        shape = inspect.signature(function).parameters
        names = list(shape)
        flags = {name for name in names if shape[name].annotation in ("bool", bool)}

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            for name, value in (*zip(names, args, strict=False), *kwargs.items()) if flags else ():
                if isinstance(value, str) and name in flags:
                    raise _no_flag(function, args, name, value)
            try:
                return function(*args, **kwargs)
            except TypeError as error:
                check_call(error, function, args, kwargs, instead)
                raise

        call.loopkit_takes = instead  # type: ignore[attr-defined]
        return call

    return decorate


def _no_flag(function: Callable[..., Any], args: tuple[Any, ...], name: str, value: str) -> ArgumentError:
    """The error of a word in the place of True or False, which Python would take for true."""
    owner = type(args[0]).__name__ if args and function.__name__ == "__init__" else function.__qualname__
    return ArgumentError(f"{owner}: {name} is {value!r:.80}: it is True or False")


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
        call = _Call(function, args, given)
        message = call.unknown(instead) or call.too_many() or call.twice() or call.lacking()
        raise CallError(message) from None


class _Call:
    """A call whose arguments do not fit, and the messages about it."""

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], given: Mapping[str, Any]) -> None:
        shape = inspect.signature(function).parameters
        own = args[:1] if "self" in shape else ()
        self.owner = function.__qualname__
        if own and function.__name__ == "__init__":
            self.owner = type(own[0]).__name__
        self.parameters = [each for each in shape.values() if each.name != "self"]
        self.count = len(args) - len(own)
        self.given = given
        kinds = inspect.Parameter
        self.names = self._of_kinds(kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)
        self.places = self._of_kinds(kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)
        self.open_names = self._of_kinds(kinds.VAR_KEYWORD)
        self.open_places = self._of_kinds(kinds.VAR_POSITIONAL)

    def _of_kinds(self, *kinds: Any) -> list[str]:
        return [each.name for each in self.parameters if each.kind in kinds]

    def unknown(self, instead: Mapping[str, str]) -> str:
        """The message about the first unknown name, with the name to write."""
        if self.open_names:
            return ""
        unknown = [name for name in self.given if name not in self.names]
        if not unknown:
            return ""
        name = unknown[0]
        if name in instead:
            return f"{self.owner} has no argument {name!r}: {instead[name]}"
        hint = nearest(name, self.names) or f"; it takes {', '.join(self.names)}"
        return f"{self.owner} has no argument {name!r}{hint}"

    def too_many(self) -> str:
        """The message about too many arguments by position."""
        if self.open_places or self.count <= len(self.places):
            return ""
        by_name = ", ".join(name for name in self.names if name not in self.places)
        first = "takes no argument by position"
        if self.places:
            first = f"takes only {', '.join(self.places)} by position"
        rest = f": give the others by name ({by_name})" if by_name else ""
        return f"{self.owner} {first}, not {self.count}{rest}"

    def twice(self) -> str:
        """The message about an argument that comes by position and by name."""
        for name in self.places[: self.count]:
            if name in self.given:
                return f"{self.owner} gets {name!r} twice, by position and by name: leave one out"
        return ""

    def lacking(self) -> str:
        """The message about required arguments that are missing."""
        known = {*self.given, *self.places[: self.count]}
        names = []
        for each in self.parameters:
            is_required = each.name in self.names and each.default is each.empty
            if is_required and each.name not in known:
                names.append(each.name)
        line = ", ".join(f"{name}=..." for name in names)
        return f"{self.owner} lacks {' and '.join(map(repr, names))}: write {self.owner}({line})"


STATE = "state_dict", "load_state_dict"
"""The methods of an object with a state."""


def half_a_state(has: Collection[str]) -> str:
    """The message for an object that has one of `STATE` without the other; else an empty string."""
    if len(has) != 1:
        return ""
    (there,) = has
    (lacks,) = {*STATE} - {there}
    return f"has {there}, but no {lacks}: the saved state could not be loaded. Add {lacks}, or remove {there}"


def is_count(value: Any) -> bool:
    """Whether it is a whole number from 1."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
