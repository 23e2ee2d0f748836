"""SaveOptions: rarely needed options of `Checkpoint`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from loopkit.base import checks
from loopkit.errors import PluginError


@dataclass(frozen=True, kw_only=True)
class SaveOptions:
    """The options of `Checkpoint` that are rarely needed.

    Args:
        on_error: Save when an error, such as one of the loader, comes between two steps or in a validation.
        at_end: Save at the end of the fit what was trained since the last save.
        background: Write in a thread: the loop waits only for a copy of the state in main memory (`Checkpoint.memory`).
            At most one write is under way; an error of one is raised at the end of the next step. A save that is due
            meanwhile waits for it; if the disk is slower than the interval, there is one warning.
        keep_best: How many of the best to keep; more than one needs ``best``.
        replay: Let data without a position be skipped up to where it was (`load_state_dict`).
        allow: Plugins that may be missing in the checkpoint or here.
        retries: How many saves in a row may fail, such as by one EIO of a file server: an interval's save is then
            tried again at the next, with a warning; the last one of a process at once. No space, a read-only file
            system and missing rights raise at the first.
        lock_after: Seconds after which the lock of a silent run is taken over, on file systems where this machine's
            kernel does not know whether that run lives (network, FUSE). Give the same to all runs of a directory.

    Raises:
        PluginError: ``retries`` is no count from 0, ``keep_best`` is no count from 1, or ``allow`` no list of names.

    Example::

        Checkpoint("runs/a", save=every(minutes=10), options=SaveOptions(background=True))
    """

    on_error: bool = True
    at_end: bool = True
    background: bool = False
    keep_best: int = 1
    replay: bool = True
    allow: Sequence[str] = ()
    retries: int = 2
    lock_after: float = 120.0

    def __post_init__(self) -> None:
        for option in ("on_error", "at_end", "background", "replay"):
            if not isinstance(value := getattr(self, option), bool):
                raise PluginError(f"SaveOptions: {option} is {value!r}: it is True or False")
        checks.whole("SaveOptions", keep_best=self.keep_best)
        checks.whole("SaveOptions", 0, retries=self.retries)
        checks.positive("SaveOptions", "seconds", lock_after=self.lock_after)
        if isinstance(self.allow, str) or not all(isinstance(name, str) for name in self.allow):
            raise PluginError(f"SaveOptions: allow is {self.allow!r}: it lists names of plugins, such as ('history',)")
