"""The writes of a run's checkpoints: at once or in the background, made again when they fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from loopkit.base.notes import warn
from loopkit.checkpoint.background import Snapshot, Writer
from loopkit.checkpoint.failures import Failures, JointError

if TYPE_CHECKING:
    from loopkit.checkpoint.bundle import Contents


class Writing:
    """Makes one write at a time.

    Args:
        background: Write in a thread, from a copy of the state in main memory.
        retries: How many writes in a row may fail.
    """

    def __init__(self, background: bool, retries: int) -> None:
        self._snapshot = Snapshot() if background else None
        self._writer = Writer()
        self._failures = Failures(retries)
        self._together = False
        """Whether other processes write parts of the same checkpoint."""

    @property
    def memory(self) -> int:
        """Bytes of main memory that the copy takes."""
        return 0 if self._snapshot is None else self._snapshot.nbytes

    @property
    def busy(self) -> bool:
        """Whether a write is under way."""
        return self._writer.busy

    def check(self) -> None:
        """Look at the result of a write in the background."""
        error = self._writer.forgive()
        if error is not None:
            self._bear(error)

    def join(self) -> None:
        """Wait for the write that is under way."""
        self._writer.join()

    def wait(self) -> None:
        """Wait for the write that is under way; raise its error."""
        self._writer.wait()

    def clear(self) -> None:
        """Free the memory."""
        if self._snapshot is not None:
            self._snapshot.clear()

    def write(self, contents: Contents, act: Callable[[], None], now: bool) -> None:
        """Write; with ``now`` the write is over when this returns, and one that fails is made again at once."""
        self._together = contents.together
        if self._snapshot is not None and not now:
            self._snapshot.take(contents)
            self._writer.start(lambda: self._write_copy(act))
            return
        self._write_here(act, again=now)
        earlier = self._writer.forgive()
        if earlier is not None:
            warn(f"an earlier write failed, and this one did not: {earlier}")

    def forget(self) -> None:
        """Count failures anew: a checkpoint was written."""
        self._failures.forget()

    def warn_of_pace(self, what: str) -> None:
        """Warn once that saves are due more often than a write takes."""
        self._writer.warn_of_pace(what)

    def _write_copy(self, act: Callable[[], None]) -> None:
        assert self._snapshot is not None
        self._snapshot.wait()
        act()

    def _write_here(self, act: Callable[[], None], again: bool) -> None:
        while True:
            try:
                return act()
            except Exception as error:
                self._bear(error)
                if not again:
                    return None

    def _bear(self, error: BaseException) -> None:
        """Warn of a write that has failed, or raise its error."""
        if self._together and not isinstance(error, JointError):  # the other processes do not know of it
            raise error
        self._failures.bear(error)
