"""Launch: start the processes of one machine from Python, and get what they return."""

from __future__ import annotations

import functools
import json
import logging
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist

from loopkit.base import devices
from loopkit.base.notes import shown
from loopkit.errors import PeerError, WorldError

T = TypeVar("T")
STARTS = ("spawn", "forkserver")
SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT") if hasattr(signal, name))
HANDLED = "TORCHELASTIC_SIGNALS_TO_HANDLE"


def launch(
    fn: Callable[..., T],
    *args: Any,
    processes: int | Literal["auto"] = "auto",
    timeout: float = 300.0,
    restarts: int = 0,
    start: Literal["spawn", "forkserver"] = "spawn",
) -> list[T]:
    """Call ``fn(*args)`` in several processes of this machine, which can train together; returns their results, by
    rank.

    They are started by torch's elastic launcher, the one of ``torchrun``: if one fails, all are ended. For several
    machines use ``torchrun`` itself. With one process, ``fn`` is called in this one.

    Args:
        fn: A function of a module, or of a script that calls `launch` under ``if __name__ == "__main__":``.
        args: Its arguments, in each process: pickled, as are the results.
        processes: How many; "auto" is one for each CUDA device, without any one for every second core of the CPU.
        timeout: Seconds that the processes may take to start.
        restarts: How often all of them are started again after a failure.
        start: How: "forkserver" is the faster one from the second call on, where
            ``multiprocessing.set_forkserver_preload(["loopkit"])`` was called before the first. A plain fork is not
            offered: torch's launcher has threads, whose locks would stay locked in some of the processes.

    Raises:
        WorldError: A process failed: the message has its rank and error. Or it was called within a launched process, or
            with an argument that cannot be sent to another process.

    Example::

        def train(epochs):
            learner = Learner(make_model(), loss_fn, torch.optim.AdamW, plugins=[DDP()])
            return learner.fit(make_data(), epochs=epochs).metrics

        if __name__ == "__main__":
            first, *others = loopkit.launch(train, 3, processes=2)
    """
    count = _count(processes)
    _check(fn, args, count, timeout, restarts, start)
    if count == 1:
        return [fn(*args)]
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    with tempfile.TemporaryDirectory(prefix=f"loopkit-launch-{os.getpid()}-") as directory:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=count,
            logs_specs=DefaultLogsSpecs(log_dir=directory),
            run_id=uuid.uuid4().hex,
            role="loopkit",
            rdzv_endpoint="127.0.0.1:0",
            rdzv_backend="c10d",
            rdzv_configs={"timeout": max(1, round(timeout))},
            max_restarts=restarts,
            start_method=start,
            local_addr="127.0.0.1",
        )
        caught = None
        try:
            with _restored(quiet=not restarts):
                returned = elastic_launch(config, _call)(fn, args, directory)
        except ChildFailedError as error:
            raise _failure(error, Path(directory)) from error
        except SignalException as error:
            caught = error.sigval
    if caught is not None:
        signal.raise_signal(caught)
        raise WorldError(f"launch was ended by {signal.Signals(caught).name}, and with it its {count} processes")
    return [None if returned[rank] is None else pickle.loads(returned[rank]) for rank in range(count)]  # type: ignore[misc]


def _count(processes: int | Literal["auto"]) -> int:
    if processes == "auto":
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return devices.count() or max(1, cores // 2)
    if not isinstance(processes, int) or isinstance(processes, bool) or processes < 1:
        raise WorldError(f"launch(processes={processes!r}): it is 'auto', or a number of at least 1")
    return processes


def _check(fn: Any, args: tuple[Any, ...], count: int, timeout: float, restarts: int, start: str) -> None:
    """Check the arguments before anything is started."""
    if start not in STARTS:
        raise WorldError(f"launch(start={start!r}): it is one of {', '.join(map(repr, STARTS))}")
    if not timeout > 0:
        raise WorldError(f"launch(timeout={timeout!r}): it counts seconds, above 0")
    if not isinstance(restarts, int) or restarts < 0:
        raise WorldError(f"launch(restarts={restarts!r}): it is a number of at least 0")
    if not callable(fn):
        raise WorldError(f"launch({fn!r}): the first argument is the function to call, without its arguments")
    if "RANK" in os.environ or (dist.is_available() and dist.is_initialized()):
        raise WorldError(
            f"launch was called in a process that is launched already (rank {os.environ.get('RANK', 'unknown')}): "
            f"start the script with python instead of torchrun, or call {_name(fn)} itself"
        )
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise WorldError(
            'launch was called while a started process imports the script: call it under if __name__ == "__main__":'
        )
    if count > 1 and not dist.is_available():
        raise WorldError("this build of torch has no torch.distributed: install one that has it, or use processes=1")
    if count > 1:
        _check_sendable(fn, args, start)


def _check_sendable(fn: Any, args: tuple[Any, ...], start: str) -> None:
    """Check that a new process can find and get it."""
    name = getattr(fn, "__qualname__", "")
    code = "<locals>"
    why = ""
    if "<lambda>" in name:
        why = "it is a lambda"
    elif code in name:
        why = "it is defined inside another function"
    elif getattr(fn, "__module__", "") == "__main__":
        main = sys.modules["__main__"]
        file = getattr(main, "__file__", None)
        if getattr(main, "__spec__", None) is None and (file is None or not os.path.exists(file)):
            why = "it was typed into a session or a notebook"
    if why:
        raise WorldError(
            f"launch cannot start {_name(fn)} by start={start!r}: {why}, and the new processes import it by its name; "
            f"put it into a module"
        )
    from multiprocessing.reduction import ForkingPickler

    for what, value in (("the function", fn), *((f"argument {index}", arg) for index, arg in enumerate(args))):
        try:
            ForkingPickler.dumps(value)
        except Exception as error:
            raise WorldError(
                f"launch cannot send {what}, {_short(value)}, to another process ({_short(error)}): make it inside "
                f"{_name(fn)}"
            ) from error


@contextmanager
def _restored(quiet: bool) -> Iterator[None]:
    """Put back what torch's launcher changes in this process: the handlers of signals, and a variable.

    Args:
        quiet: Keep it from logging the traceback that `launch` raises with its error.
    """
    logger = logging.getLogger("torch.distributed.elastic.multiprocessing.api")
    level = logger.level
    if quiet:
        logger.setLevel(logging.CRITICAL)
    variable = os.environ.get(HANDLED)
    main = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        yield
    finally:
        logger.setLevel(level)
        os.environ.pop(HANDLED, None)
        os.environ.update({} if variable is None else {HANDLED: variable})
        for number, handler in handlers.items():
            if main and handler is not None:
                signal.signal(number, handler)


def _call(fn: Callable[..., Any], args: tuple[Any, ...], directory: str) -> bytes:
    """In a started process: call the function; its result, or a file with its error."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ["LOCAL_WORLD_SIZE"])))
    try:
        value = fn(*args)
        try:
            return pickle.dumps(value)
        except Exception as error:
            raise WorldError(
                f"what {_name(fn)} returned, {_short(value)}, cannot be sent to the process that launched it "
                f"({_short(error)}): return numbers, text, tensors, or lists and dicts of them"
            ) from error
    except Exception as error:
        said = {
            "at": time.time(),
            "text": f"{type(error).__name__}: {error}",
            "trace": "".join(traceback.format_exception(error)),
            "peer": isinstance(error, PeerError),
        }
        restart = os.environ["TORCHELASTIC_RESTART_COUNT"]
        rank = os.environ["RANK"]
        Path(directory, f"failed-{restart}-{rank}.json").write_text(json.dumps(said))
        raise


def _failure(error: Any, directory: Path) -> WorldError:
    """The error of the process that failed first, by itself."""
    said: list[tuple[int, bool, float, int, dict[str, Any]]] = []
    for path in directory.glob("failed-*.json"):
        restart, rank = map(int, path.stem.split("-")[1:])
        try:
            told = json.loads(path.read_text())
        except ValueError:  # it was ended while it wrote
            continue
        said.append((-restart, told["peer"], told["at"], rank, told))
    latest = [each for each in said if each[0] == min(said)[0]] if said else []
    first, failure = error.get_first_failure()
    died = failure.exitcode < 0 or not any(rank == first for *_, rank, _ in latest)
    if latest and not (died and min(latest)[1]):
        *_, rank, told = min(latest, key=lambda each: each[:4])
        raised = WorldError(f"rank {rank} failed: {told['text']}")
        raised.add_note(f"loopkit: in rank {rank}:\n{told['trace']}")
        return raised
    if failure.exitcode < 0:
        how = f"was killed by {signal.Signals(-failure.exitcode).name}"
        memory = "; when memory runs out, the kernel kills the largest process" if failure.exitcode == -9 else ""
    else:
        how = f"ended with status {failure.exitcode}"
        memory = ", without an error in Python"
    raised = WorldError(f"rank {first} {how}{memory}")
    for *_, rank, told in sorted(latest, key=lambda each: each[:4]):
        raised.add_note(f"loopkit: rank {rank} raised: {told['text']}")
    return raised


def _name(fn: Any) -> str:
    if isinstance(fn, functools.partial):
        return _name(fn.func)
    return f"{getattr(fn, '__qualname__', type(fn).__name__)}()"


def _short(value: Any) -> str:
    text = shown(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
