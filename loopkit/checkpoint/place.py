"""The directory of a run's checkpoints: its lock, and which checkpoints in it are the run's own."""

from __future__ import annotations

from pathlib import Path

from loopkit.base.notes import say, warn
from loopkit.checkpoint import disk, storage
from loopkit.checkpoint.lock import Lock
from loopkit.checkpoint.manifest import Listing, Manifest
from loopkit.errors import CheckpointError


class Place:
    """A directory that one run saves in, from `take` to `release`.

    Args:
        directory: Links and a relative path are resolved now.
        after: As for `Lock`.

    Example::

        place = Place("runs/digits", after=120)
        place.take()
        place.release()
    """

    def __init__(self, directory: Path | str, after: float) -> None:
        self._after = after
        self.directory = disk.resolved(directory)
        self._lock: Lock | None = None
        self._own: set[int] = set()
        """Checkpoints that this run has written, or found when it was resumed, by `_identity`."""

    def take(self) -> None:
        """Lock the directory, which is made if missing, and remove what dead processes left there.

        Raises:
            CheckpointError: Another run has it, or it cannot be written.
        """
        storage.probe(self.directory)
        self._lock = Lock(self.directory, self._after)
        self._lock.acquire()
        if self._lock.took_over:
            say(self._lock.took_over)
        disk.clean(self.directory, everything=True)

    def keep(self) -> None:
        """Take the directory anew if it, or the lock in it, was removed, moved or replaced under the run."""
        was = self.directory
        lock = self._lock
        self.directory = disk.resolved(was)  # a link may have been left in its place
        if lock is None or (self.directory == was and lock.in_place):
            return
        if self.directory == was and (by := lock.taken_by):
            raise CheckpointError(
                f"{was} was taken over by {by}: this run stops, so that only one run writes there. It was silent for "
                f"longer than that run's SaveOptions(lock_after=), such as while its machine slept"
            )
        self.release()
        try:
            self.take()
            self.refuse_taken()
        except BaseException:
            self.release()
            self._lock = lock
            raise
        where = "" if self.directory == was else f" to {self.directory}"
        warn(
            f"{was}, or the lock in it, was removed or moved{where} while the run saved there: it is locked again, and "
            f"checkpoints continue in {self.directory}"
        )

    def release(self) -> None:
        """Let the directory go; a lock that cannot be removed is no reason for a run to fail, or to hide why it did."""
        if self._lock is not None:
            try:
                self._lock.release()
            except CheckpointError as error:
                say(f"{error}. The next run takes the lock over")

    def note(self, written: Manifest) -> None:
        """A checkpoint of this run has been written: it is not another run's."""
        self._own.add(_identity(written))

    def claim(self) -> None:
        """All checkpoints that are there are this run's: it resumes from them."""
        self._own.update(map(_identity, storage.listing(self.directory)))

    def refuse_taken(self) -> None:
        """Raise for checkpoints of a run that has begun in the directory since this one last saved there."""
        found = storage.listing(self.directory)
        if not self._own.issuperset(map(_identity, found)):
            self.refuse_others(found)

    def refuse_others(self, found: Listing) -> None:
        """Raise for these checkpoints, of another run.

        Raises:
            CheckpointError: There are any.
        """
        paths = [*(manifest.path for manifest in found), *found.problems]
        if paths:
            raise CheckpointError(
                f"{self.directory} holds checkpoints of another run, the newest {paths[0].name}: give resume='auto' to "
                f"resume that run, overwrite=True to remove them, or another directory"
            )


def _identity(manifest: Manifest) -> int:
    """The identity of a checkpoint: a hash of its name and its files' digests."""
    return hash((manifest.path.name, frozenset(manifest.files.items())))
