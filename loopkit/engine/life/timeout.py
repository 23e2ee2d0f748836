"""Workers of a ``DataLoader`` that hang or die: an epoch over them ends, with an error that gives the reason."""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.data import DataLoader


@contextmanager
def bounded_wait(data: Any, seconds: float | None, batch: Callable[[], int] | None = None) -> Iterator[None]:
    """Let an epoch over a ``DataLoader`` whose workers hang end with an error; put this around all of it.

    It sets the loader's ``timeout`` where it is 0 and there are workers, and puts it back. torch's error when
    workers time out or die gets a note with the loader, the batch, and how a killed worker ended.

    In other threads than the main one torch notices a dead worker by looking every five seconds, which a timeout
    would delay: there no timeout is set.

    Args:
        data: The data of ``iter()``; anything but a ``DataLoader`` with workers stays as it is.
        seconds: How long a batch may take; None for no limit.
        batch: Returns the index of the awaited batch.
    """
    if not isinstance(data, DataLoader) or not data.num_workers:
        yield
        return
    before = data.timeout
    if seconds and not before and threading.current_thread() is threading.main_thread():
        data.timeout = seconds
    limit = data.timeout
    try:
        yield
    except (RuntimeError, OSError, EOFError) as error:
        try:
            why = _why_no_batch(error, limit)
        except RuntimeError as late:  # a signal tells torch of the dead worker now, and it raises wherever we are
            why = _told(late)
        at = f"{type(data).__name__} with {data.num_workers} workers"
        if batch is not None:
            at += f", batch {batch()}"
        if why:
            error.add_note(f"loopkit: {at}: {why}")
        raise
    finally:
        data.timeout = before


def _why_no_batch(error: Exception, limit: float) -> str:
    """Describe why the workers gave no batch; an empty string if that is not known."""
    if isinstance(error, RuntimeError) and "DataLoader timed out after" in str(error):
        return (
            f"no batch came within {limit:g} s; a worker hangs, or the dataset is slower than that: give "
            f"fit(..., loader_timeout=...) or DataLoader(..., timeout=...) more seconds"
        )
    if isinstance(error, RuntimeError) and "DataLoader worker" not in str(error):
        return ""
    if told := _told(error):
        return told
    for worker in _workers(error):  # a pipe broke before torch noticed why
        worker.join(0.5)
        if worker.exitcode:
            code = worker.exitcode
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
            return _of_worker(worker.pid, how)
    return ""


def _told(error: BaseException) -> str:
    """How a worker ended, by torch's message."""
    chain: BaseException | None = error
    while chain is not None:
        text = str(chain)
        if found := re.search(r"\(pid (\d+)\) is killed by signal: (.*?)\.", text):
            names = [each.name for each in signal.Signals if signal.strsignal(each) == found[2]]
            return _of_worker(found[1], f"was killed by {names[0] if names else found[2]}")
        if found := re.search(r"\(pid (\d+)\) exited unexpectedly with exit code (\d+)", text):
            return _of_worker(found[1], f"exited with code {found[2]}")
        chain = chain.__cause__
    return ""


def _of_worker(pid: Any, how: str) -> str:
    memory = "; when memory runs out, the kernel kills the largest process: fewer workers take less"
    return f"worker {pid} {how}" + (memory if how.endswith("SIGKILL") else "")


def _workers(error: BaseException) -> list[Any]:
    """The worker processes of the loader's iterator that raised."""
    trace = error.__traceback__
    while trace is not None:
        if workers := getattr(trace.tb_frame.f_locals.get("self"), "_workers", None):
            return list(workers)
        trace = trace.tb_next
    return []
