"""Logbook: sends logged values to the plugins that listen, with their place in the run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from threading import get_ident
from typing import Any, Protocol

from loopkit.base.notes import locate
from loopkit.errors import Cancel, strongest
from loopkit.logs.record import Packed, Place, unpacked
from loopkit.progress import Progress

LOG_VALUE = "log_value"
"""The hook of the plugins that listen."""


class CurrentStep(Protocol):
    """The last step that an epoch has begun."""

    ended: bool


class CurrentEpoch(Protocol):
    """The epoch that is running, or whose ``phase_end`` is."""

    name: str
    trains: bool
    around: int
    turns: dict[str, int]

    @property
    def number(self) -> int:
        """Which training epoch it is, or comes after."""

    @property
    def current(self) -> CurrentStep | None:
        """The last step that was begun."""


class Logbook:
    """Where in the run things are logged, and who listens."""

    loggable: Callable[[str, Any], Any]
    """Checks a value that is logged, and makes of it what is kept; there from the first listener on."""
    all_loggable: Callable[[Mapping[str, Any]], dict[str, Any]]
    """The same for several."""

    def __init__(self, progress: Progress) -> None:
        self.packed: list[Packed] | Listeners | None = None
        """The listeners of plugins to logged values; None without any."""
        self.place: Place | None = None
        """Where what is logged now is, if that was looked up since it has changed last."""
        self._progress = progress
        self.epoch: CurrentEpoch | None = None
        """The epoch that is running, or whose ``phase_end`` is."""
        self._thread = 0
        """The one that runs the epochs, and changes that."""

    def move_to(self, epoch: CurrentEpoch | None) -> None:
        """From here on things are logged in this epoch."""
        self.epoch, self._thread, self.place = epoch, get_ident(), None

    def listen(self, packed: list[Packed] | Listeners | None) -> None:
        """Give what is logged to these."""
        if packed is not None and self.packed is None:
            from loopkit.logs.kinds import all_loggable, loggable  # not before somebody listens

            self.loggable = loggable
            self.all_loggable = all_loggable
        self.packed = packed

    def look(self) -> Place:
        """Where what is logged now is."""
        here = self.epoch
        progress = self._progress
        name = ""
        epochs = progress.epochs
        steps = progress.steps
        if here is not None:
            name = here.name
            epochs = here.number
            steps += here.around
            if here.trains and (step := here.current) is not None and not step.ended:
                steps += 1
        made = name, epochs, steps, progress.updates
        if get_ident() == self._thread:  # in another one, it may have changed by now
            self.place = made
        return made


class Listeners:
    """Gives logged values to several plugins: as they are to plugins that keep them, as records to the others.

    Args:
        packs: The lists of the keeping plugins.
        calls: Of the others, with their names.
    """

    def __init__(self, packs: Sequence[list[Packed]], calls: Sequence[tuple[Callable[..., Any], str]]) -> None:
        self._packs = packs
        self._calls = calls

    def append(self, packed: Packed) -> None:
        """Give them what one call has logged."""
        for pack in self._packs:
            pack.append(packed)
        cancels: list[Cancel] = []
        for record in unpacked(packed):
            for call, plugin in self._calls:
                try:
                    call(record)
                except Cancel as cancel:  # the remaining plugins are called all the same
                    cancel.by = cancel.by or plugin
                    cancels.append(cancel)
                except BaseException as error:
                    locate(error, f"in {LOG_VALUE} of plugin {plugin!r}, of {record.name!r:.100}")
                    raise
        if cancels:
            try:
                raise strongest(cancels)
            finally:
                del cancels  # else a cycle with the traceback
