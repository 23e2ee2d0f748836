"""What the watch over many processes costs, and how soon it names one that fails; on one machine.

    python benchmarks/watch.py [--sizes 8 64 512] [--seconds 5] [--json FILE]

Four connections play all ranks by `loopkit.distributed.reports`, each rank twice a second; one more connection plays
rank 0, which makes the summary. The store is torch's, in this process. A request is one call of the store; bytes are
those of keys and values in both directions. Delays are from the failure to the last of the other ranks that names it.
Of a rank that becomes silent, and of a silent rank 0, the 2.5 seconds of silence that are waited for are left out.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from loopkit.checkpoint.processes import Process, identity, status
from loopkit.distributed.reports import INTERVAL, REPORTER, Report, Reports
from loopkit.distributed.watch import SILENCE

CONNECTIONS = 4
PHASES = 20
"""Ranks begin at as many times within an interval."""
ELSEWHERE = "00000000"
"""A machine whose processes cannot be looked at from here."""


class Counted:
    """A connection to the store, and what went over it."""

    def __init__(self, port: int) -> None:
        self._store: Any = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        self.requests = self.bytes = 0

    def _count(self, *parts: Any) -> None:
        self.requests += 1
        self.bytes += sum(map(len, parts))

    def set(self, key: str, value: str) -> None:
        self._count(key, value)
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        value: bytes = self._store.get(key)
        self._count(key, value)
        return value

    def multi_get(self, keys: list[str]) -> list[bytes]:
        values: list[bytes] = self._store.multi_get(keys)
        self._count(*keys, *values)
        return values

    def check(self, keys: list[str]) -> bool:
        self._count(*keys)
        found: bool = self._store.check(keys)
        return found

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        self._count(key, expected, desired)
        value: bytes = self._store.compare_set(key, expected, desired)
        return value


class Rank:
    """One of the ranks that are played."""

    def __init__(self, rank: int, size: int, name: str, process: Process) -> None:
        self.reports = Reports(rank, size, name, process.machine)
        self.own = Report(where=f"phase 'train', epoch 0, step {rank % 3}", line="line 1 of a.py, f")
        self.own = replace(self.own, process=asdict(process))
        self.due = time.monotonic() + INTERVAL * (rank % PHASES) / PHASES
        self.silent = False
        self.named = 0.0
        """When it named a rank that failed."""

    def exchange(self, store: Any) -> None:
        """As the thread of a watch does."""
        self.due += self.reports.pause()
        if not self.silent:
            self.own = replace(self.own, count=self.own.count + 1)
            self.reports.exchange(store, self.own)
            if not self.named and self.reports.certain(SILENCE) is not None:
                self.named = time.monotonic()


class Played:
    """All ranks of a run, and the connections that play them."""

    def __init__(self, size: int, name: str, victim: Process | None = None) -> None:
        here = identity()
        self.size = size
        self.ranks = [Rank(rank, size, name, here) for rank in range(size)]
        if victim is not None:
            self.ranks[size // 2] = Rank(size // 2, size, name, victim)
        hosts: Any = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.hosts = hosts
        self.stores = [Counted(hosts.port) for _ in range(CONNECTIONS + 1)]
        self.over = False
        groups = [self.ranks[:1], *(self.ranks[1 + index :: CONNECTIONS] for index in range(CONNECTIONS))]
        self.threads = [
            threading.Thread(target=self._play, args=each) for each in zip(groups, self.stores, strict=True)
        ]
        for thread in self.threads:
            thread.start()

    def _play(self, ranks: list[Rank], store: Counted) -> None:
        while not self.over and ranks:
            rank = min(ranks, key=lambda each: each.due)
            time.sleep(max(0.0, rank.due - time.monotonic()))
            rank.exchange(store)

    def sent(self) -> tuple[int, int]:
        """Requests and bytes so far."""
        return sum(each.requests for each in self.stores), sum(each.bytes for each in self.stores)

    def close(self) -> None:
        self.over = True
        for thread in self.threads:
            thread.join()


def rates(size: int, seconds: float) -> dict[str, float]:
    """Requests and bytes a second of ranks that all go on."""
    played = Played(size, "watch-1")
    time.sleep(2.0)
    before, began, used = played.sent(), time.monotonic(), time.process_time()
    time.sleep(seconds)
    after, took, used = played.sent(), time.monotonic() - began, time.process_time() - used
    played.close()
    requests, sent = ((late - early) / took for early, late in zip(before, after, strict=True))
    return {"requests": requests, "bytes": sent, "processor": used / took}


def delay(size: int, fail: Callable[[Played, Rank], None], *, victim: int, process: Process | None = None) -> float:
    """Seconds until the last of the other ranks names the one that failed."""
    played = Played(size, "watch-1", process)
    time.sleep(2.0)
    failing = played.ranks[victim]
    failed = time.monotonic()
    fail(played, failing)
    others = [each for each in played.ranks if each is not failing]
    while not all(each.named for each in others) and time.monotonic() < failed + 30:
        time.sleep(0.01)
    played.close()
    return max(each.named or float("inf") for each in others) - failed


def raises(played: Played, rank: Rank) -> None:
    rank.own = replace(rank.own, state="failed", error="ValueError: the data is bad")
    rank.exchange(played.stores[0])
    rank.silent = True


def falls_silent(played: Played, rank: Rank) -> None:
    rank.silent = True


def delays(size: int) -> dict[str, float]:
    """Of each kind of failure."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    here = identity()
    living = replace(here, pid=child.pid, started=status(child.pid)[1])

    def killed(played: Played, rank: Rank) -> None:
        rank.silent = True
        child.kill()
        child.wait()

    away = replace(here, machine=ELSEWHERE)
    return {
        "raises": delay(size, raises, victim=size // 2),
        "killed": delay(size, killed, victim=size // 2, process=living),
        "silent": delay(size, falls_silent, victim=size // 2, process=away) - SILENCE,
        "rank 0 silent": delay(size, falls_silent, victim=REPORTER) - SILENCE,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[8, 64, 512])
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    sys.setswitchinterval(1e-4)
    rows = []
    print("   W  requests/s    kB/s  processor  raises  killed  silent  rank 0 silent")
    for size in options.sizes:
        row = {"size": size, **rates(size, options.seconds), **delays(size)}
        rows.append(row)
        each = "  ".join(f"{row[kind]:{len(kind)}.2f}" for kind in ("raises", "killed", "silent", "rank 0 silent"))
        print(
            f"{size:4}  {row['requests']:10,.0f}  {row['bytes'] / 1e3:6,.0f}  {row['processor']:9.2f}  {each}",
            flush=True,
        )
    if options.json:
        machine = {"python": platform.python_version(), "torch": torch.__version__, "cores": os.cpu_count()}
        options.json.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")
    return 0 if all(row[kind] < 1.0 for row in rows for kind in ("silent", "rank 0 silent")) else 1


if __name__ == "__main__":
    sys.exit(main())
