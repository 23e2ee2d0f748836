"""Watch: each process reports its place, so that the others can name the one that failed, and none waits for ever."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from loopkit.checkpoint.processes import identity
from loopkit.distributed.places import last_place
from loopkit.distributed.recorder import recorded
from loopkit.distributed.reports import GONE, INTERVAL, REPORTER, Heard, Report, Reports
from loopkit.errors import PeerError
from loopkit.hooks import hooks

if TYPE_CHECKING:
    from types import FrameType

    from loopkit.base.world import World

SILENCE = GONE * INTERVAL
"""Seconds without a report after which a process is taken for gone, once a collective failed."""
PATIENCE = 3.0
"""Seconds that are spent on finding out who failed."""
GRACE = 5.0
"""Seconds that a process may still hang after another one failed."""
BUSY = 0.1
"""The part of its time that a thread computes, above which it is not taken for one that waits."""
LONGEST = 2000
"""Characters of an error that are sent to the others."""

SIGNS = (
    "gloo/transport",
    "gloo/rendezvous",
    "Connection closed by peer",
    "Application timeout caused pair closure",
    "Connection reset by peer",
    "NCCL communicator",
    "NCCL operations have failed",
    "failed to pass monitoredBarrier",
)
"""Parts of the messages of RuntimeErrors from collectives."""


class Watch:
    """A thread that reports this process's place to the others, and checks whether they still make progress.

    It has no cost in the loop. If another process failed and this one hangs in one and the same place, the thread
    prints so on stderr and ends the process, with status 1: after five seconds without moving or computing, or after
    the world's timeout.

    Args:
        world: The processes.
        where: Returns the place of the calling thread of `start`, in words. Called in another thread.
        interval: Seconds between two reports.
        steps: Returns the epoch that runs or ended last, its steps so far, and whether its data ended. Called as
            `where`.
    """

    def __init__(
        self,
        world: World,
        where: Callable[[], str],
        interval: float = INTERVAL,
        steps: Callable[[], tuple[str, int, bool]] = lambda: ("", 0, False),
    ) -> None:
        self.world = world
        self._where = where
        self._steps = steps
        self._interval = interval
        self._changed = threading.Condition()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._own = self._told = Report()
        self.reports: Reports
        """The reports of the others, from `start` on."""
        self._read_at = self._since = time.monotonic()
        """When the store answered last, and since when this process has not moved."""
        self._lost = False
        """Whether the store is gone."""
        self._idle = self._since
        """Since when its loop has not computed either."""
        self._blaming = False
        self._place: Any = None
        self._computed = 0.0
        self._alarm: float | None = None
        """Since when another process is known to have failed."""

    # What the loop calls

    def start(self) -> None:
        """Begin to watch; all processes must do so the same number of times."""
        if self.world.size == 1 or self._thread is not None:
            return
        self._main = threading.get_ident()
        world = self.world
        own = identity()
        self.reports = Reports(world.rank, world.size, f"watch-{world.next_watch()}", own.machine, self._interval)
        self._own = self._told = Report(process=asdict(own))
        self._read_at = self._since = self._idle = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="loopkit-watch", daemon=True)
        self._thread.start()
        _running.add(self)
        atexit.unregister(leave)
        atexit.register(leave)

    def stop(self) -> None:
        """Stop watching; reports to the others that this process ended, unless it failed."""
        if self._thread is None:
            return
        if self._own.state == "running":
            self._tell(replace(self._own, state="ended", where=self._here()))
        thread = self._thread
        self._thread = None
        self._wake.set()
        thread.join(PATIENCE)
        _running.discard(self)

    def fail(self, error: BaseException) -> None:
        """Report to the others that this process fails; returns when they can read it."""
        if self._thread is None or self._own.state != "running":
            return
        notes = [note for note in getattr(error, "__notes__", ()) if isinstance(note, str)]
        located = [note.removeprefix("loopkit: ") for note in notes if note.startswith("loopkit: ")]
        where = located[0] if located else self._here()
        text = f"{type(error).__name__}: {_text(error)}"[:LONGEST]
        self._tell(replace(self._own, state="failed", where=where, error=text, peer=isinstance(error, PeerError)))

    def blame(self, error: BaseException) -> PeerError | None:
        """Who is the cause of a collective's failure here; None if the error does not come from a collective.

        Do not send afterwards: it sets ``world.broken``. It takes three seconds at most.
        """
        if self.world.size == 1 or not is_collective_error(error):
            return None
        self.world.broken = True
        deadline = time.monotonic() + PATIENCE
        with self._changed:
            self._blaming = True  # where it was when the collective failed counts, not where it is now
            self._wake.set()
            while (cause := self._certain(SILENCE)) is None and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(min(left, self._interval))
            likely = "" if cause else self._likely(error)
        return PeerError(f"rank {self.world.rank}: {cause or likely + recorded(self.world.rank)}")

    def _tell(self, report: Report) -> None:
        global _last_words
        with self._changed:
            self._own = report
            self._wake.set()
            self._changed.wait_for(lambda: self._told.state == report.state or self._lost, PATIENCE)
        if self.world.rank == 0:
            _last_words = time.monotonic()

    def _here(self) -> str:
        try:
            return self._where()
        except Exception:  # it looks at what another thread is changing
            return self._own.where

    # Who is the cause

    def _certain(self, silence: float) -> str | None:
        """Describe the failure of another process: its own report of it, or no report for so many seconds."""
        if (found := self.reports.certain(silence)) is None:
            return None
        rank, heard = found
        if heard.report.state == "failed":
            return _failed(rank, heard.report)
        return self._gone(rank, heard)

    def _gave_up(self) -> str | None:
        """Who failed because of yet another process."""
        return next((_failed(rank, report) for rank, report in self.reports.in_state("failed")), None)

    def _likely(self, error: BaseException) -> str:
        """Describe what probably happened, where no failure is certain."""
        own = self._own
        rank = self.world.rank
        if cause := self._gave_up():
            return cause
        if self._lost or time.monotonic() - self._read_at > SILENCE:
            return self._storeless()
        for other, report in self.reports.in_state("ended"):
            return (
                f"rank {other} came to its end before this one ({report.where}; this one: {self._here()}). "
                f"Give all processes the same number of steps"
            )
        for other in self.reports.unheard:
            return f"no report from rank {other}: it is gone, or has not come as far. Look at its output"
        places = {other: heard.report for other, heard in self.reports.heard.items()} | {rank: own}
        if early := _early(places):
            return early
        each = "; ".join(f"rank {other}: {places[other].where}, {places[other].line}" for other in sorted(places))
        if more := self.world.size - len(places):
            each += f"; and {more} more"
        if apart := [other for other in sorted(places) if places[other].place != own.place]:
            other = max(apart, key=lambda each: places[each].stays)
            return (
                f"rank {other} does not take part in the call that the others wait for: for "
                f"{places[other].stays:.1f} s it has been elsewhere ({each}). "
                f"It hangs, or takes other steps than the rest"
            )
        return (
            f"the processes could not exchange data, though all live and are at the same place ({each}): {_text(error)}"
        )

    def _storeless(self) -> str:
        if _kept():
            return "the launcher, which kept the store, is gone or does not answer. Look at its output"
        if self.world.rank == REPORTER:
            return "the store does not answer. Look at the output of the other processes"
        heard = self.reports.heard.get(REPORTER, Heard(Report(), self._read_at, 0.0))
        return self._gone(REPORTER, heard, ", which kept the store,")

    def _gone(self, rank: int, heard: Heard, what: str = "") -> str:
        told = heard.report.where
        last = last_place(self.world, rank)
        here = self._here()
        where = told if told.endswith(last) else last  # it told less often than it made steps
        at = f" ({where})" if where else ""
        at += "" if here in ("", where) else f", and this one is {here}"
        return (
            f"rank {rank}{what} is gone; it was last heard of {time.monotonic() - heard.at:.1f} s ago{at}. Look at "
            f"the end of its output, and whether its machine ran out of memory"
        )

    # What the thread does

    def _run(self) -> None:
        store: Any = None
        bell = threading.Thread(target=self._listen, name="loopkit-bell", daemon=True)
        if self.reports.many:
            bell.start()
        while True:
            ends = self._thread is None
            self._look()
            try:
                if not self._lost:
                    store = store or self._connect()
                    told = self._own
                    self.reports.exchange(store, told, look=self._blaming)
                    self._told, self._read_at = told, time.monotonic()
                    if ends and self.reports.bell:
                        self.reports.ring(store, self.world.rank)
            except dist.DistError:  # its host is gone
                self._lost = True
            with self._changed:
                self._changed.notify_all()
            if ends:
                if bell.ident:
                    bell.join(PATIENCE)
                return
            self._end_if_hung()
            self._wake.wait(min(self.reports.pause(), self._interval / (2 if self._blaming else 0.5)))
            self._wake.clear()

    def _listen(self) -> None:
        """Wake the other thread when the bell rings, and when that cannot be heard any more."""
        shared: Any = self.world.store
        with contextlib.suppress(RuntimeError):  # the store is gone, or of a kind that cannot do this
            store = shared.clone()
            kept = isinstance(store._underlying_non_prefix_store, dist.TCPStore)  # type: ignore[attr-defined]
            self.reports.bell = kept  # stores of other kinds would poll
            while self.reports.bell and self._thread is not None:
                self.reports.listen(store)
                self._wake.set()
        self.reports.bell = False
        self._wake.set()

    def _connect(self) -> Any:
        """A connection to the store for this thread: one that is shared would wait for what the loop asks."""
        shared: Any = self.world.store
        try:
            return shared.clone()
        except dist.DistError:
            raise
        except RuntimeError:  # a kind of store that cannot do this
            return shared

    def _look(self) -> None:
        """Where this process is now."""
        now = time.monotonic()
        where = self._here()
        computed = _computed(self._main)
        try:
            epoch, steps, over = self._steps()
        except Exception:  # it looks at what another thread is changing
            epoch = self._own.epoch
            steps = self._own.steps
            over = self._own.over
        point, line = _innermost(self._main)
        with self._changed:
            moved = (where, point) != self._place
            if moved or computed - self._computed > BUSY * max(self._interval, self.reports.pause()):
                self._idle = now
            if moved:
                self._place = (where, point)
                self._since = now
            self._computed = computed
            if self._own.state == "running" and not self._blaming:
                self._own = replace(self._own, where=where, line=line, stays=now - self._since)
                self._own = replace(self._own, epoch=epoch, steps=steps, over=over)
            self._own = replace(self._own, count=self._own.count + 1)

    def _end_if_hung(self) -> None:
        """End the process if another one failed, and this one has not moved since."""
        now = time.monotonic()
        timeout = self.world.timeout
        with self._changed:
            cause = self._certain(timeout) or self._gave_up()
            if cause is None and self._lost and now - self._read_at > timeout:
                cause = self._storeless()
            if cause is None or self._own.state != "running":
                self._alarm = None
                return
            self._alarm = self._alarm or now
            idle = now - max(self._alarm, self._idle)
            stuck = now - max(self._alarm, self._since)
            if idle < min(GRACE, timeout) and stuck < timeout:
                return
            stays = now - self._since
            where = self._own.where
        text = f"loopkit: rank {self.world.rank} has hung for {stays:.1f} s ({where}) and ends now, because {cause}"
        says = threading.Thread(target=lambda: os.write(2, f"{recorded(self.world.rank)}\n".encode()), daemon=True)
        try:
            os.write(2, text.encode())
            says.start()
            says.join(PATIENCE)  # it writes a file, for which a disk that is gone never ends
        finally:
            os._exit(1)


_running: set[Watch] = set()
_last_words = 0.0
"""When this process reported its end, if it is rank 0."""


def leave() -> None:
    """End all watches, before the interpreter ends; rank 0 stays until the others can have read its last words."""
    for watch in list(_running):
        watch.stop()
    if _last_words and not _kept():
        time.sleep(max(0.0, _last_words + 2.5 * INTERVAL - time.monotonic()))


def hook_of(thread: int, plugins: Mapping[str, Any]) -> str:
    """The innermost loopkit hook that a thread is in, as "in step_end of plugin 'x'"; "" if there is none.

    Args:
        thread: Its ``threading.get_ident()``.
        plugins: The plugins by name.
    """
    known = hooks()
    names = {id(plugin): name for name, plugin in plugins.items()}
    frame: FrameType | None = sys._current_frames().get(thread)
    while frame is not None:
        code = frame.f_code
        if code.co_name in known and code.co_argcount:
            owner = frame.f_locals.get(code.co_varnames[0])
            if owner is not None and id(owner) in names:
                return f"in {code.co_name} of plugin {names[id(owner)]!r}"
        frame = frame.f_back
    return ""


def is_collective_error(error: BaseException) -> bool:
    """Whether an error is one of a collective, or of the store: another process may be its cause."""
    if dist.is_available() and isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(sign in _text(error) for sign in SIGNS)


def _kept() -> bool:
    """Whether the launcher keeps the store, instead of rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _failed(rank: int, report: Report) -> str:
    where = f" ({report.where})" if report.where else ""
    return f"rank {rank} failed{where}: {report.error}"


def _early(reports: Mapping[int, Report]) -> str:
    """Name the process whose data ended before another one's; an empty string if all agree."""
    for rank, report in sorted(reports.items()):
        for other, on in sorted(reports.items()):
            if report.over and report.epoch and on.epoch == report.epoch and on.steps > report.steps:
                return (
                    f"the data of rank {rank} ended early, after {report.steps} steps of {report.epoch}, and rank "
                    f"{other} is at step {on.steps - 1} of it. Give all processes the same number of steps"
                )
    return ""


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return "(its message cannot be read)"


def _innermost(thread: int) -> tuple[tuple[int, int], str]:
    """The point at which a thread is, to be compared, and in words."""
    if (frame := sys._current_frames().get(thread)) is None:
        return (0, 0), "nowhere"
    code = frame.f_code
    return (id(frame), frame.f_lasti), f"line {frame.f_lineno} of {os.path.basename(code.co_filename)}, {code.co_name}"


def _computed(thread: int) -> float:
    """The seconds that a thread has computed; 0 where that is not known."""
    try:
        return time.clock_gettime(time.pthread_getcpuclockid(thread))
    except (AttributeError, OSError):
        return 0.0
