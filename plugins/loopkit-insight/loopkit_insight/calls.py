"""Something around what other plugins' hooks are given and return, for plugins that watch their calls."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from loopkit.author import Target

__all__ = ["around", "with_default"]


def around(context: Any, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Any:
    """The context, with both functions wrapped by ``wrap``; any other value is returned as it is."""
    if not (hasattr(type(context), "__enter__") and hasattr(type(context), "__exit__")):
        return context  # None, or a mistake that the engine tells
    return _Around(wrap(context.__enter__), wrap(context.__exit__))


def with_default(
    target: Target, call: Callable[..., Any], wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Callable[..., Any]:
    """The call, in which ``wrap`` is around the ``default`` of ``optimizer_step``; as it is where none is taken."""
    if "default" not in target.arguments:
        return call
    at = target.arguments.index("default")
    return lambda *values: call(*values[:at], wrap(values[at]), *values[at + 1 :])


class _Around:
    __slots__ = ("_enter", "_exit")

    def __init__(self, enter: Callable[..., Any], leave: Callable[..., Any]) -> None:
        self._enter, self._exit = enter, leave

    def __enter__(self) -> None:
        self._enter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Any:
        return self._exit(kind, error, trace)
