"""Reports: what each process tells of itself, and the summary of all of them that every process reads."""

from __future__ import annotations

import json
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from loopkit.checkpoint.processes import Process

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

INTERVAL = 0.5
"""Seconds between two reports of a process."""
LATE = 1.5
"""Intervals without a report after which a process may have failed."""
TOLD = 16
"""How many processes a summary tells of."""
REPORTER = 0
"""Who makes the summary."""
FEW = 16
"""Up to so many processes, each reads every summary."""
SELDOM = 8
"""Of more, most read one after so many reports, and, when they are called, each for twice as long."""
UNHEARD = b"{}"
"""In the place of a report until there is one."""
RUNNING = b'{"state": "running"'
"""Begins a report of a process that goes on."""
CALL = "!"
"""Begins what is put in the place of a report, to call its process to the summary; then the age of that in seconds."""


@dataclass(frozen=True)
class Report:
    """What a process tells of itself."""

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
    """Of that epoch, begun so far."""
    over: bool = False
    """Whether the data of that epoch ended."""
    error: str = ""
    """What it failed with."""
    peer: bool = False
    """Whether it failed because of another process."""
    count: int = 0
    """Of its reports."""
    process: dict[str, Any] = field(default_factory=dict)
    """What its machine calls it."""

    @property
    def place(self) -> tuple[str, str]:
        """Where it is, to be compared."""
        return self.where, self.line

    def alive(self) -> bool:
        """Whether its process lives; asked on its machine."""
        return Process(**self.process).alive()


class Heard(NamedTuple):
    """What is known of another process."""

    report: Report
    at: float
    """When its last report came."""
    silent: float
    """Seconds without one, when it was looked for last."""
    dead: bool = False
    """Whether its process ended without a word."""


class Reports:
    """The reports of all processes, as one of them knows them.

    Each writes its own under a key of the store. Rank 0 reads all of them in one request, and writes a summary of
    bounded size. When that tells of a failure, rank 0 puts a call in the place of each report, which its process sees
    as it writes the next one, in the same request. Without a call, most processes read the summary seldom: a little
    more than ``2 W`` requests a second for ``W`` processes. A summary that stays the same says that rank 0 is silent.
    Four of the others read each summary, and then call in its place.

    Args:
        rank: Of this process.
        size: How many there are.
        name: The keys begin with it.
        machine: What this process calls its machine.
        interval: Seconds between two exchanges.
    """

    def __init__(self, rank: int, size: int, name: str, machine: str, interval: float = INTERVAL) -> None:
        self.rank, self.size = rank, size
        self.heard: dict[int, Heard] = {}
        """Of the others: all, in the reporter; elsewhere those that the summary tells of."""
        self.unheard: list[int] = [] if rank == REPORTER else [REPORTER]
        """Some that have said nothing so far."""
        self._machine = machine
        self._interval = interval
        self._late = LATE * interval
        self._keys = [f"{name}/{each}" for each in range(size)]
        self._summary = f"{name}/summary"
        self._read = ""
        """The summary that was read last."""
        self._changed = 0.0
        """When it came."""
        self._seen = 0.0
        """When it was read last."""
        self._written = ""
        """The own report that was written last."""
        self._until = 0
        """Up to which report it reads each summary."""
        self._called: set[tuple[int, str]] = set()
        """Of what the others were called to read."""
        self._reads_all = size <= FEW or rank in (REPORTER, 1, size // 3, 2 * size // 3, size - 1)
        self._laid = False
        """Whether each key is there."""

    def exchange(self, store: Store, own: Report, look: bool = False) -> None:
        """Tell of this process, and read what there is of the others.

        Args:
            store: What all processes share.
            own: The report of this process.
            look: Read the summary, even if nobody calls.

        Raises:
            dist.DistError: The store does not answer.
        """
        text, key = json.dumps(asdict(own)), self._keys[self.rank]
        call = store.compare_set(key, self._written, text).decode()
        if call != text:
            store.set(key, text)
        if called := call.startswith(CALL):
            self._until = own.count + 2 * SELDOM
        self._written = text
        reads = look or self._reads_all or own.count <= self._until or (own.count + self.rank) % SELDOM == 0
        if self.rank != REPORTER and not (reads and (self._read or store.check([self._summary]))):
            return
        dead = self._vanished()  # asked first: who is dead says no more, so that what is read then is the last word
        if self.rank == REPORTER:
            texts = self._gather(store, dead)
            store.set(self._summary, self._told(own))
            self._call(store, own, texts)
        else:
            self._receive(store, dead, float(call[1:]) if called else 0.0)
            if self._reads_all:
                self._call(store, own)

    def certain(self, silence: float) -> tuple[int, Heard] | None:
        """The process that failed of itself, or is gone: dead, or without a report for so many seconds."""
        others = sorted(self.heard.items())
        for rank, heard in others:
            if heard.report.state == "failed" and not heard.report.peer:
                return rank, heard
        for rank, heard in others:
            if heard.report.state == "running" and (heard.dead or heard.silent > silence):
                return rank, heard
        return None

    def in_state(self, state: str) -> list[tuple[int, Report]]:
        """The processes in a state, the lowest rank first."""
        return [(rank, heard.report) for rank, heard in sorted(self.heard.items()) if heard.report.state == state]

    def pause(self) -> float:
        """Seconds until the next exchange: fewer in the reporter, most of all where one is likely to have failed."""
        haste = 1 if self.rank != REPORTER else 2 if self.certain(self._late) is None else 4
        return self._interval / haste

    def _failing(self) -> set[tuple[int, str]]:
        """The processes that failed, or are likely to, each with its state."""
        late = 2 * self._late
        return {
            (rank, report.state)
            for rank, (report, _, silent, dead) in self.heard.items()
            if report.state == "failed" or (report.state == "running" and (dead or silent > late))
        }

    def _call(self, store: Store, own: Report, texts: list[bytes] | None = None) -> None:
        """Call the others to the summary, once for each failure: rank 0 of any, another one of that of rank 0."""
        failing = {each for each in self._failing() if REPORTER in (self.rank, each[0])}
        if own.state == "failed" and self.rank == REPORTER:
            failing.add((self.rank, own.state))
        news, self._called = failing - self._called, failing
        if news and self.size > FEW:
            call = f"{CALL}{0.0 if self.rank == REPORTER else time.monotonic() - self._changed:.2f}"
            for rank, text in enumerate(store.multi_get(self._keys) if texts is None else texts):
                while rank != self.rank and text.startswith(RUNNING):  # last words stay
                    text = store.compare_set(self._keys[rank], text.decode(), call)

    def _vanished(self) -> set[int]:
        """The ranks of this machine whose processes are no more; rank 0 looks for all, others for late ones."""
        late = (time.monotonic() if self._reads_all else self._seen) - (0.0 if self.rank == REPORTER else self._late)
        return {
            rank
            for rank, heard in self.heard.items()
            if heard.at < late and heard.report.process.get("machine") == self._machine and not heard.report.alive()
        }

    def _gather(self, store: Store, dead: set[int]) -> list[bytes]:
        """Read each process's own report; returns them as they were."""
        if not self._laid:  # to read a key that is not there would mean to wait for it
            for key in self._keys:
                store.compare_set(key, "", UNHEARD.decode())
            self._laid = True
        texts, now = store.multi_get(self._keys), time.monotonic()
        heard, self.unheard = {}, []
        for rank, text in enumerate(texts):
            if rank == self.rank:
                continue
            before = self.heard.get(rank)
            called = text.startswith(CALL.encode())
            if text == UNHEARD or (called and before is None):
                self.unheard.append(rank)
                continue
            report = before.report if called and before else Report(**json.loads(text))
            at = now if before is None or before.report.count != report.count else before.at
            heard[rank] = Heard(report, at, now - at, rank in dead)
        self.heard = heard
        return texts

    def _told(self, own: Report) -> str:
        """The summary: the processes that matter most, and the reporter."""
        places = Counter(heard.report.place for heard in self.heard.values())

        def matters(rank: int) -> tuple[int, float, int]:
            report, _, silent, dead = self.heard[rank]
            if report.state == "failed":
                return 2 * report.peer, 0, rank
            if report.state == "ended":
                return 3, 0, rank
            return (1, -silent, rank) if dead or silent > self._late else (4, places[report.place], rank)

        told = {rank: self.heard[rank] for rank in sorted(self.heard, key=matters)[: TOLD - 1]}
        told[self.rank] = Heard(own, 0.0, 0.0)
        packed = {rank: (asdict(report), round(silent, 3), dead) for rank, (report, _, silent, dead) in told.items()}
        return json.dumps({"told": packed, "unheard": self.unheard[:TOLD]})

    def _receive(self, store: Store, dead: set[int], age: float) -> None:
        """Read the summary, which has been there for so many seconds."""
        text, now = store.get(self._summary).decode(), time.monotonic()
        if text != self._read:
            self._read, self._changed = text, now
        self._changed, self._seen = min(self._changed, now - age), now
        summary = json.loads(text)
        self.unheard = summary["unheard"]
        last = Report(**summary["told"][str(REPORTER)][0]).state != "running"
        heard = {}
        for key, (told, silent, vanished) in summary["told"].items():
            rank, report, at = int(key), Report(**told), self._changed - silent
            if last or rank in dead:  # it may have said more since the summary was made
                said = store.get(self._keys[rank])
                report = report if said.startswith(CALL.encode()) else Report(**json.loads(said))
            if rank == REPORTER:
                silent = now - at
            if rank != self.rank:
                heard[rank] = Heard(report, at, silent, vanished or rank in dead)
        self.heard = heard
