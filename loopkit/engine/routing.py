"""Make calls of a module go through its wrapper, so that ``learner.model`` stays the user's module."""

from __future__ import annotations

import copyreg
from typing import Any

from torch import nn


class Route:
    """From now on ``module(...)`` runs ``wrapper(...)``; when the wrapper calls ``module`` it reaches it directly.

    Names, parameters and state of ``module`` stay as they are. Its class becomes a subclass of the same name;
    a copy of the module is not routed.
    """

    def __init__(self, module: nn.Module, wrapper: nn.Module) -> None:
        self.wrapper = wrapper
        cls = type(module)
        route, active = self, False

        class Routed(cls):  # type: ignore[misc, valid-type]
            def __call__(self, *args: Any, **kwargs: Any) -> Any:
                nonlocal active
                if self is not module or active:
                    return super().__call__(*args, **kwargs)
                active = True
                try:
                    return route.wrapper(*args, **kwargs)
                finally:
                    active = False

            def __reduce_ex__(self, protocol: Any) -> Any:
                reduced = super().__reduce_ex__(protocol)
                if not isinstance(reduced, tuple):
                    return reduced
                make, given, *state = reduced
                make = _new if make is copyreg.__newobj__ else make  # type: ignore[attr-defined]
                return (make, tuple(cls if each is Routed else each for each in given), *state)

        Routed.__name__, Routed.__qualname__, Routed.__module__ = cls.__name__, cls.__qualname__, cls.__module__
        Routed.__doc__ = cls.__doc__
        module.__class__ = Routed
        self._module, self._cls = module, cls

    def undo(self) -> None:
        """Let calls of the module reach it directly again."""
        self._module.__class__ = self._cls


def _new(cls: type[nn.Module], *given: Any) -> nn.Module:
    return cls.__new__(cls, *given)
