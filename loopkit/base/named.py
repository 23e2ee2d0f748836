"""Named: a dictionary whose error for an unknown name offers the nearest one."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any, Generic, NoReturn, SupportsIndex, TypeVar

from loopkit.base.words import nearest, some
from loopkit.errors import UnknownNameError

V = TypeVar("V")


class Named(dict[str, V], Generic[V]):
    """Values by name.

    Args:
        kind: The word for a value, such as ``"model"``.
        values: A mapping, or pairs.

    >>> Named("model", {"generator": 1})["genrator"]
    Traceback (most recent call last):
    ...
    loopkit.errors.UnknownNameError: no model is called 'genrator' (did you mean 'generator'?); there are: generator
    """

    kind = "value"

    def __init__(self, kind: str, values: Mapping[str, V] | Iterable[tuple[str, V]] = ()) -> None:
        super().__init__(values)
        self.kind = kind

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        """Be stored as an ordered dictionary, which ``torch.load`` reads."""
        return OrderedDict, (), None, None, iter(self.items())

    def __missing__(self, name: Any) -> NoReturn:
        """Raise an error that lists the names."""
        hint = nearest(name, self) if isinstance(name, str) else ""
        there = f"there are: {some(list(self), 10)}" if self else "there is none yet"
        raise UnknownNameError(f"no {self.kind} is called {name!r}{hint}; {there}")
