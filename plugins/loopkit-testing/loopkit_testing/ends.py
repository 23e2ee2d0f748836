"""The two ends of a plugin's context, watched apart from its inside."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any


@contextmanager
def watched_ends(context: Any, watch: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """A plugin's context that is entered and left inside ``watch()``; its body is outside."""
    with watch():
        context.__enter__()
    try:
        yield
    except BaseException as error:
        with watch():
            context.__exit__(type(error), error, error.__traceback__)
        raise
    with watch():
        context.__exit__(None, None, None)
