"""worker_end: workers of a loader end at once when a learner that held the loader is collected."""

from __future__ import annotations

import weakref
from contextlib import suppress
from typing import Any


def end_with(batches: Any) -> None:
    """Let the workers of an iterator of a ``DataLoader`` end with it, also where it is part of a reference cycle.

    There the garbage collector ends the threads of the workers' queues before torch tells the workers to end, which
    then takes five seconds for each. A finalizer runs before that.
    """
    done, queues = (getattr(batches, name, None) for name in ("_workers_done_event", "_index_queues"))
    if done is not None and queues:
        weakref.finalize(batches, _tell, done, queues).atexit = False


def _tell(done: Any, queues: list[Any]) -> None:
    """Tell workers to end, as torch does."""
    if done.is_set():
        return
    done.set()
    for queue in queues:
        with suppress(ValueError, OSError):  # it is closed already
            queue.put(None)
