"""Make calls of a module go through its wrapper, so that ``learner.model`` stays the user's module."""

from __future__ import annotations

import copyreg
from collections.abc import Callable
from typing import Any

from torch import nn


class ForwardWrapper:
    """From now on ``module(...)`` runs ``wrapper(...)``; when the wrapper calls ``module`` it reaches it directly.

    Names, parameters and state of ``module`` stay as they are. Its class becomes a subclass of the same name;
    a copy of the module is not routed.

    Args:
        module: The module.
        wrapper: The object to run; the module itself without a wrapper.
        before: Called before each call, if given.
    """

    def __init__(self, module: nn.Module, wrapper: nn.Module, before: Callable[[], None] | None = None) -> None:
        self.wrapper = wrapper
        self._before = before
        cls = type(module)
        plain = getattr(cls, "routed_from", cls)  # of a module that is routed already
        route = self
        active = False

        silent = _has_own_init_subclass(cls)

        class Routed(nn.Module if silent else cls):  # type: ignore[misc]
            routed_from = plain

            def __call__(self, *args: Any, **kwargs: Any) -> Any:
                nonlocal active
                if self is not module or active:
                    return super().__call__(*args, **kwargs)
                active = True
                try:
                    if route._before is not None:
                        route._before()
                    if route.wrapper is module:
                        return super().__call__(*args, **kwargs)
                    return route.wrapper(*args, **kwargs)
                finally:
                    active = False

            def __reduce_ex__(self, protocol: Any) -> Any:
                reduced = super().__reduce_ex__(protocol)
                if not isinstance(reduced, tuple):
                    return reduced
                make, given, *state = reduced
                make = _new if make is copyreg.__newobj__ else make  # type: ignore[attr-defined]
                return (make, tuple(plain if each is Routed else each for each in given), *state)

        if silent:
            Routed.__bases__ = (cls,)
        Routed.__name__ = cls.__name__
        Routed.__qualname__ = cls.__qualname__
        Routed.__module__ = cls.__module__
        Routed.__doc__ = cls.__doc__
        self._module = module
        self._cls = cls
        self._routed: type[nn.Module] = Routed
        self._become(Routed)

    def undo(self) -> None:
        """Let calls of the module reach it directly again."""
        self.wrapper = self._module
        self._before = None
        if type(self._module) is self._routed:  # else it was routed once more since
            self._become(self._cls)

    def redo(self, before: Callable[[], None]) -> bool:
        """Take back `undo`, for what is to be called before each call; returns whether the module is as it was then.

        The class stays the same, so that what was compiled for it need not be compiled again.
        """
        self._before = before
        if type(self._module) is self._cls:
            self._become(self._routed)
        return type(self._module) is self._routed

    def _become(self, cls: type[nn.Module]) -> None:
        self._module.__class__ = cls


def _has_own_init_subclass(cls: type) -> bool:
    """Whether a class hears of its subclasses: it may register them, raise or ask for options."""
    return type(cls) is type and any("__init_subclass__" in vars(base) for base in cls.__mro__ if base is not object)


def _new(cls: type[nn.Module], *given: Any) -> nn.Module:
    return cls.__new__(cls, *given)
