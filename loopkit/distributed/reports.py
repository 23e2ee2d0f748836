"""Reports: each process's own, and the summary of all of them that every process reads."""

from __future__ import annotations

import json
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

from loopkit.checkpoint.processes import Process

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

INTERVAL = 0.5
"""Seconds between two reports of a process; of more than `FEW`, most take twice as long."""
LATE = 1.5
"""Reports that are missing after which a process may have failed."""
GONE = 5.0
"""Intervals without a report after which a process is taken for gone."""
TOLD = 16
"""How many processes a summary covers."""
REPORTER = 0
"""Who makes the summary."""
FEW = 16
"""Up to so many processes, each reads every summary."""
SELDOM = 8
"""With more processes, most read one after so many reports, and when their bells ring."""
UNHEARD = "{}"
"""In the place of a report until there is one."""
UNRUNG = timedelta(days=20)
"""How long a bell is waited for; torch counts it in milliseconds of 31 bits, and prints a warning when it is over."""


@dataclass(frozen=True)
class Report:
    """The report of a process on itself."""

    state: str = "running"
    """Or "failed", or "ended"."""
    where: str = ""
    line: str = ""
    """The innermost line of Python."""
    stays: float = 0.0
    """Seconds that it has been there."""
    epoch: str = ""
    """The epoch that runs, or that ended last."""
    steps: int = 0
    """The steps of the epoch so far."""
    over: bool = False
    """Whether the data of that epoch ended."""
    error: str = ""
    """The error of the process."""
    peer: bool = False
    """Whether it failed because of another process."""
    count: int = 0
    """How many reports it has sent."""
    process: dict[str, Any] = field(default_factory=dict)
    """The names of the process on its machine."""

    @property
    def place(self) -> tuple[str, str]:
        """Where it is, to be compared."""
        return self.where, self.line

    def alive(self) -> bool:
        """Whether its process lives; asked on its machine."""
        return Process(**self.process).alive()


class Heard(NamedTuple):
    """The last report of another process, and when it came."""

    report: Report
    at: float
    """When its last report came."""
    silent: float
    """Seconds without one, when it was looked for last."""
    dead: bool = False
    """Whether its process ended without a word."""

    def failing(self, silence: float) -> bool:
        """Whether it failed, or is gone: dead, or silent for more than so many seconds."""
        if self.report.state != "running":
            return self.report.state == "failed"
        return self.dead or self.silent > silence


class Reports:
    """The reports of all processes, as one of them knows them.

    Each writes its own under a key of the store. Rank 0 reads all of them in one request, and writes a summary of
    bounded size. Up to 16 processes read each summary. Of more, four do; each other one has a bell, a key for which a
    second connection waits, and reads a summary when it rings. Rank 0 rings all bells in one request when a failure is
    news. A process that fails rings rank 0's. A summary that stays the same means that rank 0 is silent; then one
    of the four rings. So ``W`` processes make a little more than ``W`` requests a second.

    Args:
        rank: Of this process.
        size: How many there are.
        name: The keys begin with it.
        machine: This process's name for its machine.
        interval: Seconds between two exchanges.
    """

    def __init__(self, rank: int, size: int, name: str, machine: str, interval: float = INTERVAL) -> None:
        self.rank = rank
        self.size = size
        self.heard: dict[int, Heard] = {}
        """The reports of other processes: all in the reporter, elsewhere those in the summary."""
        self.unheard: list[int] = [] if rank == REPORTER else [REPORTER]
        """Some without a report so far."""
        self.bell = False
        """Whether `listen` waits for the own bell; until then, each summary is read."""
        self.many = size > FEW
        """Whether there are bells."""
        self._machine = machine
        self._interval = interval
        self._late = LATE * interval * (1 + self.many)
        self._keys = [f"{name}/{each}" for each in range(size)]
        self._bells = [f"{key}/bell" for key in self._keys]
        self._summary = f"{name}/summary"
        self._read = ""
        """The summary that was read last."""
        self._changed = 0.0
        """When it came, or was written."""
        self._rings: list[float] = []
        """The times of the bell since the last exchange."""
        self._rung: int | None = None
        """The process for whose failure this one rang last, as long as that comes first."""
        self._reads_all = not self.many or rank in (REPORTER, 1, size // 3, 2 * size // 3, size - 1)

    def exchange(self, store: Store, own: Report, look: bool = False) -> None:
        """Send this process's report, and read the others'.

        Args:
            store: The store that all processes share.
            own: The report of this process.
            look: Read the summary, even if no bell rings.

        Raises:
            dist.DistError: The store does not answer.
        """
        rings = [self._rings.pop() for _ in range(len(self._rings))]
        store.set(self._keys[self.rank], json.dumps(asdict(own)))
        is_due = (own.count + self.rank) % SELDOM == 0
        reads = look or self._reads_all or not self.bell or bool(rings) or is_due
        amiss = own.state != "running" or self.certain(self._late) is not None  # last words have come when it has read
        if self.rank == REPORTER:
            self._gather(store)
            store.set(self._summary, self._told(own))
            self._changed = time.monotonic()
        elif (reads or amiss) and (self._read or store.check([self._summary])):
            self._receive(store, max(rings, default=0.0))
        self._alert(store, own)

    def listen(self, store: Store) -> None:
        """Wait until the own bell rings; the next exchange reads the summary.

        Args:
            store: A connection only for this.

        Raises:
            dist.DistError: The store does not answer.
        """
        bell = self._bells[self.rank]
        store.wait([bell], UNRUNG)
        age = float(store.get(bell))
        store.delete_key(bell)
        self._rings.append(age)  # only now: what was rung for before the bell was taken down is read after this

    def ring(self, store: Any, *ranks: int) -> None:
        """Ring for processes, with the seconds that the summary has been unchanged."""
        bells = [self._bells[rank] for rank in ranks]
        unchanged = str(time.monotonic() - self._changed)
        store.multi_set(bells, [unchanged] * len(bells))

    def certain(self, silence: float) -> tuple[int, Heard] | None:
        """The process that failed of itself, or is gone: dead, or without a report for so many seconds."""
        failing = self._failing(silence)
        if not failing:
            return None
        rank, heard = failing[0]
        return None if heard.report.peer else (rank, heard)

    def in_state(self, state: str) -> list[tuple[int, Report]]:
        """The processes in a state, the lowest rank first."""
        return [(rank, heard.report) for rank, heard in sorted(self.heard.items()) if heard.report.state == state]

    def pause(self) -> float:
        """Seconds until the next exchange: fewer in the reporter, most of all where one is likely to have failed."""
        if self.rank == REPORTER:
            likely = self.certain(self._late) is not None
            return self._interval / (4 if likely else 2)
        if self.bell and not self._reads_all:
            return self._interval * 2
        return self._interval

    def _failing(self, silence: float) -> list[tuple[int, Heard]]:
        """Who failed of itself, then who is gone, then who failed because of another process."""
        failing = [each for each in sorted(self.heard.items()) if each[1].failing(silence)]
        return sorted(failing, key=lambda each: (each[1].report.peer, each[1].report.state))  # "failed", "running"

    def _alert(self, store: Store, own: Report) -> None:
        """Ring if a failure is news.

        A process that fails of itself rings for rank 0. Rank 0 rings for all when one fails. If rank 0 does, or is
        silent, one of the four that read each summary rings for all.
        """
        failing = self._failure_to_tell(own)
        is_news = failing is not None and failing != self._rung
        self._rung = failing
        if not self.many or not is_news:
            return
        if failing == self.rank != REPORTER:
            self.ring(store, REPORTER)
        elif self.rank == REPORTER or self._is_first(store):
            self.ring(store, *(rank for rank in range(self.size) if rank != self.rank))

    def _failure_to_tell(self, own: Report) -> int | None:
        """The failed process that this one rings for; None without one."""
        if own.state == "failed" and (self.rank == REPORTER or not own.peer):
            return self.rank
        failing = [rank for rank, _ in self._failing(GONE * self._interval)]
        if self.rank == REPORTER:
            return failing[0] if failing else None
        return REPORTER if self._reads_all and REPORTER in failing else None

    def _is_first(self, store: Store) -> bool:
        """Whether this process is the first that rings because of rank 0."""
        return store.add(f"{self._summary}/{self.heard[REPORTER].report.count}", 1) == 1

    def _vanished(self) -> set[int]:
        """The ranks of this machine whose processes are no more; rank 0 looks for all, others for late ones.

        It is asked before reports are read: a dead process sends no more, so that the report read then is its last.
        """
        late = time.monotonic()
        if self.rank != REPORTER:
            late -= self._late
        found = set()
        for rank, heard in self.heard.items():
            is_here = heard.report.process.get("machine") == self._machine
            if is_here and heard.at < late and not heard.report.alive():
                found.add(rank)
        return found

    def _gather(self, store: Store) -> None:
        """Read each process's own report."""
        dead = self._vanished()
        if not (self.heard or self.unheard):  # to read a key that is not there would mean to wait for it
            for key in self._keys:
                store.compare_set(key, "", UNHEARD)
        texts = store.multi_get(self._keys)
        now = time.monotonic()
        self.unheard = [rank for rank, text in enumerate(texts) if text == UNHEARD.encode()]
        heard = {}
        for rank in set(range(self.size)) - {self.rank, *self.unheard}:
            report = Report(**json.loads(texts[rank]))
            before = self.heard.get(rank)
            at = now
            if before is not None and before.report.count == report.count:  # nothing new
                at = before.at
            heard[rank] = Heard(report, at, round(now - at, 3), rank in dead)
        self.heard = heard

    def _told(self, own: Report) -> str:
        """The summary: the processes that matter most, and the reporter."""
        places = Counter(heard.report.place for heard in self.heard.values())

        def matters(rank: int) -> tuple[int, float, int]:
            report, _, silent, dead = self.heard[rank]
            if report.state == "failed":
                return 2 * report.peer, 0, rank
            if report.state == "ended":
                return 3, 0, rank
            if dead or silent > self._late:
                return 1, -silent, rank
            return 4, places[report.place], rank

        first = sorted(self.heard, key=matters)[: TOLD - 1]
        told = {rank: self.heard[rank] for rank in first}
        told[self.rank] = Heard(own, 0.0, 0.0)
        packed = {rank: (asdict(heard.report), heard.silent, heard.dead) for rank, heard in told.items()}
        return json.dumps({"told": packed, "unheard": self.unheard[:TOLD]})

    def _receive(self, store: Store, age: float) -> None:
        """Read the summary, which has been there for so many seconds."""
        dead = self._vanished()
        text = store.get(self._summary).decode()
        now = time.monotonic()
        if text != self._read:
            self._read = text
            self._changed = now
        self._changed = min(self._changed, now - age)
        summary = json.loads(text)
        self.unheard = summary["unheard"]
        told = summary["told"]
        reporter = Report(**told[str(REPORTER)][0])
        heard = {}
        for key, (facts, silent, vanished) in told.items():
            rank = int(key)
            at = self._changed - silent
            if reporter.state != "running" or rank in dead:  # it may have said more since the summary was made
                facts = json.loads(store.get(self._keys[rank]))
            if rank == REPORTER:
                silent = now - at
            if rank != self.rank:
                heard[rank] = Heard(Report(**facts), at, silent, vanished or rank in dead)
        self.heard = heard
