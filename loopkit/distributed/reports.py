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
    bounded size that the others read: ``4 W`` requests a second for ``W`` processes. A summary that stays the same
    says that rank 0 is silent.

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
        self._laid = False
        """Whether each key is there."""

    def exchange(self, store: Store, own: Report) -> None:
        """Tell of this process, and read what there is of the others.

        Raises:
            dist.DistError: The store does not answer.
        """
        store.set(self._keys[self.rank], json.dumps(asdict(own)))
        dead = self._vanished()  # asked first: who is dead says no more, so that what is read then is the last word
        if self.rank == REPORTER:
            self._gather(store, dead)
            store.set(self._summary, self._told(own))
        elif self._read or store.check([self._summary]):
            self._receive(store, dead)

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
        """Seconds until the next exchange: fewer where one is likely to have failed, most of all in the reporter."""
        late, haste = (self._late, 4) if self.rank == REPORTER else (2 * self._late, 2)
        return self._interval / (1 if self.certain(late) is None else haste)

    def _vanished(self) -> set[int]:
        """The ranks of this machine whose processes are no more; rank 0 looks for all, others for late ones."""
        late = time.monotonic() - (0.0 if self.rank == REPORTER else self._late)
        return {
            rank
            for rank, heard in self.heard.items()
            if heard.at < late and heard.report.process.get("machine") == self._machine and not heard.report.alive()
        }

    def _gather(self, store: Store, dead: set[int]) -> None:
        """Read each process's own report."""
        if not self._laid:  # to read a key that is not there would mean to wait for it
            for key in self._keys:
                store.compare_set(key, "", "{}")
            self._laid = True
        texts, now = store.multi_get(self._keys), time.monotonic()
        heard, self.unheard = {}, []
        for rank, text in enumerate(texts):
            if rank == self.rank:
                continue
            if len(text) == 2:
                self.unheard.append(rank)
                continue
            report, before = Report(**json.loads(text)), self.heard.get(rank)
            at = now if before is None or before.report.count != report.count else before.at
            heard[rank] = Heard(report, at, now - at, rank in dead)
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
            return (1, -silent, rank) if dead or silent > self._late else (4, places[report.place], rank)

        told = {rank: self.heard[rank] for rank in sorted(self.heard, key=matters)[: TOLD - 1]}
        told[self.rank] = Heard(own, 0.0, 0.0)
        packed = {rank: (asdict(report), round(silent, 3), dead) for rank, (report, _, silent, dead) in told.items()}
        return json.dumps({"told": packed, "unheard": self.unheard[:TOLD]})

    def _receive(self, store: Store, dead: set[int]) -> None:
        """Read the summary."""
        text, now = store.get(self._summary).decode(), time.monotonic()
        if text != self._read:
            self._read, self._changed = text, now
        summary = json.loads(text)
        self.unheard = summary["unheard"]
        last = Report(**summary["told"][str(REPORTER)][0]).state != "running"
        heard = {}
        for key, (told, silent, vanished) in summary["told"].items():
            rank, report, at = int(key), Report(**told), self._changed - silent
            if last or rank in dead:  # it may have said more since the summary was made
                report = Report(**json.loads(store.get(self._keys[rank])))
            if rank == REPORTER:
                silent = now - at
            if rank != self.rank:
                heard[rank] = Heard(report, at, silent, vanished or rank in dead)
        self.heard = heard
