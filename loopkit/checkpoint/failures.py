"""Saves that fail: which are tried again at the next one, and when a run ends by them."""

from __future__ import annotations

import errno

from loopkit.base.notes import warn
from loopkit.errors import CheckpointError, CorruptCheckpointError

LASTING = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM}
"""Errors of the operating system that do not go away by themselves: no space, read-only, no rights."""


class JointError(CheckpointError):
    """A save that several processes make together has failed in one of them; it is raised in all of them."""


class Failures:
    """The saves that have failed in a row.

    Args:
        retries: How many of them are only warned of.
    """

    def __init__(self, retries: int) -> None:
        self._retries = retries
        self._count = 0

    def bear(self, error: BaseException) -> None:
        """Warn of a save that has failed and that is tried again; else raise its error."""
        if not is_passing(error) or self._count >= self._retries:
            raise error
        self._count += 1
        warn(f"a save failed and is tried again ({self._count} of {self._retries} times): {error}")

    def forget(self) -> None:
        """A save has succeeded."""
        self._count = 0


def is_passing(error: BaseException) -> bool:
    """Whether a save that failed so may succeed if it is made again."""
    if not isinstance(error, CheckpointError) or isinstance(error, CorruptCheckpointError):
        return False
    return error.errno is not None and error.errno not in LASTING
