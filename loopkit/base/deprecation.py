"""Options with an old name, which is still taken."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from loopkit.base.notes import warn
from loopkit.base.words import takes
from loopkit.errors import PluginError

Init = TypeVar("Init", bound=Callable[..., None])
RENAMED = "loopkit_renamed"


def deprecated(option: str, *, since: str, use: str) -> Callable[[Init], Init]:
    """Decorate an ``__init__`` so that it also takes an option by its old name, with a warning.

    Signature, repr, ``options_of``, run files and logs show the new name alone.

    Args:
        option: The old name, given by keyword.
        since: The version that has the new name first.
        use: The new name.

    Example::

        class ClipByValue(Shown):
            @deprecated("value", since="0.2", use="max_value")
            def __init__(self, max_value=1.0):
                self.max_value = max_value
    """

    def decorate(init: Init) -> Init:
        make: Callable[..., None] = init if hasattr(init, "loopkit_takes") else takes()(init)

        @functools.wraps(make)
        def taking_both(self: Any, *arguments: Any, **options: Any) -> None:
            if option in options:
                _rename(type(self).__name__, options)
            make(self, *arguments, **options)

        setattr(taking_both, RENAMED, {**renamed_options(make), option: use})
        return taking_both  # type: ignore[return-value]

    def _rename(owner: str, options: dict[str, Any]) -> None:
        if use in options:
            raise PluginError(f"{owner}: {option} is the old name of {use}: give {use} only")
        options[use] = options.pop(option)
        warn(f"{owner}: {option} is {use} since version {since}: write {use}={options[use]!r:.60}", DeprecationWarning)

    return decorate


def renamed_options(made_by: Any) -> Mapping[str, str]:
    """The new names of deprecated options by the old ones; of a class or an ``__init__``.

    Example::

        >>> class Clip:
        ...     @deprecated("value", since="0.2", use="max_value")
        ...     def __init__(self, max_value=1.0): ...
        >>> renamed_options(Clip)
        {'value': 'max_value'}
    """
    init = getattr(made_by, "__init__") if isinstance(made_by, type) else made_by  # noqa: B009 - mypy takes it for unsound
    found: Mapping[str, str] = getattr(init, RENAMED, {})
    return found
