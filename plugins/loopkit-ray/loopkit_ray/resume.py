"""The way back from Ray's checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import ray.train

__all__ = ["in_worker", "resume_from"]


def in_worker() -> bool:
    """Whether this process runs a training function for Ray Train."""
    try:
        ray.train.get_context()
    except RuntimeError:
        return False
    return True


@contextmanager
def resume_from() -> Iterator[Path | None]:
    """The checkpoint from which Ray wants this run to resume, for ``Checkpoint(..., resume=...)``.

    It is there when Ray has restarted the workers, and when a run of the same name is started again. Call it once, at
    the beginning of the training function, and fit inside the block: files fetched from another machine are
    removed at its end.

    Yields:
        Its directory on this machine, to be read only; None if there is none, or outside Ray Train: the run begins.

    Example::

        with resume_from() as latest, tempfile.TemporaryDirectory() as directory:
            run = Checkpoint(directory, resume=latest)
    """
    checkpoint = ray.train.get_checkpoint() if in_worker() else None
    if checkpoint is None:
        yield None
        return
    with checkpoint.as_directory() as directory:
        yield Path(directory)
