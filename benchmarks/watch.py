"""What the watch over many processes costs, and how soon it names one that fails; on one machine.

    python benchmarks/watch.py [--sizes 8 64 512] [--seconds 5] [--json FILE]

Four connections play all ranks by `loopkit.distributed.reports`, each rank at its own pace; one more connection plays
rank 0, which makes the summary. Of more than 16 ranks, each has one more connection and a thread, which wait for its
bell. The store is torch's, in a process of its own. A request is one call of the store, and each wait is one; bytes are
those of keys and values in both directions. torch looks up names for each connection: with a slow name server, 512 of
them take long. Delays are from the failure to the last of the other ranks that names it.
Of a rank that becomes silent, and of a silent rank 0, the 2.5 seconds of silence that are waited for are left out.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from loopkit.checkpoint.processes import Process, identity, status
from loopkit.distributed.reports import INTERVAL, REPORTER, SELDOM, Report, Reports
from loopkit.distributed.watch import SILENCE

CONNECTIONS = 4
PHASES = 20
"""Ranks begin at as many times within an interval."""
HOST = """
import sys
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""
"""Keeps the store until its input ends."""
ELSEWHERE = "00000000"
"""A machine whose processes cannot be looked at from here."""


class Counted:
    """A connection to the store, and what went over it."""

    def __init__(self, port: int) -> None:
        c10d: Any = dist
        self._store = c10d.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
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

    def multi_set(self, keys: list[str], values: list[str]) -> None:
        self._count(*keys, *values)
        self._store.multi_set(keys, values)

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        self._count(*keys)
        self._store.wait(keys, timeout)

    def add(self, key: str, amount: int) -> int:
        self._count(key, "12345678")
        value: int = self._store.add(key, amount)
        return value

    def delete_key(self, key: str) -> bool:
        self._count(key)
        found: bool = self._store.delete_key(key)
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
        self.due = 0.0
        """When it reports next."""
        self.silent = False
        self.named = 0.0
        """When it named a rank that failed."""

    def exchange(self, store: Any) -> None:
        """As the thread of a watch does."""
        self.due = max(self.due, time.monotonic() - INTERVAL) + self.reports.pause()
        if not self.silent:
            self.own = replace(self.own, count=self.own.count + 1)
            self.reports.exchange(store, self.own)
            if not self.named and self.reports.certain(SILENCE) is not None:
                self.named = time.monotonic()


class Player(threading.Thread):
    """Plays some ranks, by one connection."""

    def __init__(self, ranks: list[Rank], port: int) -> None:
        super().__init__()
        self.ranks, self.store = ranks, Counted(port)
        self.rung, self.over = threading.Event(), False

    def run(self) -> None:
        while not self.over and self.ranks:
            rank = min(self.ranks, key=lambda each: each.due)
            self.rung.wait(max(0.0, rank.due - time.monotonic()))
            self.rung.clear()
            if rank.due <= time.monotonic():
                rank.exchange(self.store)


class Bell(threading.Thread):
    """Waits for the bell of a rank, as the second thread of a watch does."""

    def __init__(self, rank: Rank, player: Player, port: int) -> None:
        super().__init__()
        self.rank, self.player, self.port = rank, player, port
        self.store: Counted | None = None
        self.start()

    def run(self) -> None:
        self.store = Counted(self.port)
        self.rank.reports.bell = True
        while not self.player.over:
            self.rank.reports.listen(self.store)  # type: ignore[arg-type]
            self.rank.due = 0.0
            self.player.rung.set()


class Played:
    """All ranks of a run, and the connections that play them."""

    def __init__(self, size: int, name: str, victim: Process | None = None) -> None:
        here = identity()
        self.size = size
        self.ranks = [Rank(rank, size, name, here) for rank in range(size)]
        if victim is not None:
            self.ranks[size // 2] = Rank(size // 2, size, name, victim)
        self.host = subprocess.Popen([sys.executable, "-c", HOST], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.host.stdout is not None
        port = int(self.host.stdout.readline())
        groups = [self.ranks[:1], *(self.ranks[1 + index :: CONNECTIONS] for index in range(CONNECTIONS))]
        self.players = [Player(ranks, port) for ranks in groups]
        many = [(rank, player) for player in self.players for rank in player.ranks if rank.reports.many]
        self.bells = [Bell(rank, player, port) for rank, player in many]
        while not all(rank.reports.bell for rank, _ in many):
            time.sleep(0.01)
        now = time.monotonic()
        for each in self.ranks:
            each.due = now + each.reports.pause() * (each.reports.rank % PHASES) / PHASES
        for player in self.players:
            player.start()

    def sent(self) -> tuple[int, int]:
        """Requests and bytes so far."""
        stores = [player.store for player in self.players] + [bell.store for bell in self.bells if bell.store]
        return sum(each.requests for each in stores), sum(each.bytes for each in stores)

    def close(self) -> None:
        for player in self.players:
            player.over = True
        for player in self.players:
            player.join()
        for bell in self.bells:
            self.ranks[0].reports.ring(self.players[0].store, bell.rank.reports.rank)
        for bell in self.bells:
            bell.join()
        self.host.communicate()


def rates(size: int, seconds: float) -> dict[str, float]:
    """Requests and bytes a second of ranks that all go on."""
    played = Played(size, "watch-1")
    time.sleep(2.0 * SELDOM * INTERVAL)  # until each has read a summary
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
    rank.exchange(played.players[0].store)
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
    with contextlib.suppress(ValueError):  # a socket for each rank that has a bell
        resource.setrlimit(resource.RLIMIT_NOFILE, (8192, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
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
