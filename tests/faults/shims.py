"""A stand-in for the operating system below checkpoints, which watches, changes or refuses calls."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from loopkit.checkpoint import disk

CALLS = tuple(name for name in vars(disk.System) if not name.startswith("_"))


class Shim(disk.System):
    """Every call goes through ``act(n, name, arguments, proceed)``; n counts from 0, ``proceed()`` makes the call."""

    def __init__(self, act: Callable[..., Any]) -> None:
        self.act = act
        self.count = 0


def _forward(name: str) -> Callable[..., Any]:
    def call(self: Shim, *arguments: Any) -> Any:
        n, self.count = self.count, self.count + 1
        return self.act(n, name, arguments, lambda: getattr(disk.System, name)(self, *arguments))

    return call


for _name in CALLS:
    setattr(Shim, _name, _forward(_name))


def failing(at: int, number: int) -> Shim:
    """The call ``at`` is refused with this errno."""

    def act(n, name, arguments, proceed):
        if n == at:
            if name == "close":
                proceed()  # the kernel closes a file even when it reports an error
            raise OSError(number, os.strerror(number))
        return proceed()

    return Shim(act)
