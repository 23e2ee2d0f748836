"""Reports of many processes: requests are linear in their number, and the summary tells of whoever matters."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import asdict, replace

import pytest
import torch.distributed as dist

from loopkit.checkpoint.processes import Process, identity
from loopkit.distributed.reports import SELDOM, TOLD, Report, Reports

INTERVAL = 0.02
WAITING = Report(where="step 3", line="line 1 of wait.py, wait")


class Counted:
    """A store in memory, which counts its requests."""

    def __init__(self):
        self.requests, self.uncounted = 0, dist.HashStore()

    def __getattr__(self, name):
        self.requests += 1
        return getattr(self.uncounted, name)


class Played:
    """All ranks, which exchange their reports in turn; each hears its bell when it comes to its turn."""

    def __init__(self, size, machine="here"):
        self.store = Counted()
        self.ranks = [Reports(rank, size, "watch", machine, INTERVAL) for rank in range(size)]
        self.own = [WAITING] * size
        for reports in self.ranks:
            reports.bell = reports.many
        self.ended = set()
        self.rings = 0
        self.count = 0

    def rounds(self, count=1, pause=0.0, look=False):
        for _ in range(count):
            self.count += 1
            for rank, reports in enumerate(self.ranks):
                if rank not in self.ended:
                    if self.store.uncounted.check([f"watch/{rank}/bell"]):
                        reports.listen(self.store)
                        self.rings += 1
                    reports.exchange(self.store, replace(self.own[rank], count=self.count), look)
            time.sleep(pause)

    def certain(self, silence=1.0):
        """Whom the others name; None if they do not agree."""
        found = {
            None if (each := self.ranks[rank].certain(silence)) is None else each[0]
            for rank in range(len(self.ranks))
            if rank not in self.ended
        }
        return found.pop() if len(found) == 1 else found


def requests(size):
    played = Played(size)
    played.rounds(SELDOM)
    before = played.store.requests
    played.rounds(SELDOM)
    return played.store.requests - before


def test_requests_are_linear_in_the_number_of_processes():
    assert requests(8) == SELDOM * (2 * 8 + 1)
    few = SELDOM * (64 + 2 + 4) + 59  # four read each summary, and 59 do it once
    assert requests(64) == few
    assert requests(128) == few + SELDOM * 64 + 64


def test_a_failure_is_rung_for_in_a_number_of_requests_that_is_linear():
    def requests(size):
        played = Played(size)
        played.rounds(SELDOM)
        played.own[size // 2] = replace(WAITING, state="failed", error="ValueError: the data is bad")
        played.rounds()
        before = played.store.requests
        played.rounds()
        assert played.rings == size  # by rank 0 for all others, and by the one that failed for rank 0
        return played.store.requests - before

    each = 3 + 2  # its bell: waited for, read and taken down; its report, and the summary
    assert requests(128) - requests(64) == 64 * each


def test_without_a_bell_each_summary_is_read():
    played = Played(64)
    played.rounds(SELDOM)
    for reports in played.ranks:
        reports.bell = False
    assert {reports.pause() for reports in played.ranks[1:]} == {INTERVAL}
    before = played.store.requests
    played.rounds()
    assert played.store.requests - before == 2 * 64 + 1


def test_a_failed_process_of_64_is_named_by_all_in_the_next_round():
    played = Played(64)
    played.rounds()
    played.own[40] = replace(WAITING, state="failed", error="ValueError: the data is bad")
    played.own[3] = replace(WAITING, state="failed", error="PeerError: rank 40 failed", peer=True)
    for rank in range(10, 30):
        played.own[rank] = replace(WAITING, state="ended")
    played.rounds()
    played.ended |= {3, 40, *range(10, 30)}
    played.rounds()
    assert played.certain() == 40
    assert [rank for rank, _ in played.ranks[1].in_state("failed")] == [3, 40]


def test_a_silent_process_of_64_is_named_by_all():
    played = Played(64)
    played.rounds()
    played.ended.add(40)
    played.rounds(2, 0.06)
    played.rounds(2)
    assert played.certain(0.1) == 40
    assert played.rings == 62  # of all that live but rank 0, once


@pytest.mark.parametrize("size", [16, 64])
def test_a_silent_reporter_is_named_by_all(size):
    played = Played(size)
    played.rounds(SELDOM)
    played.ended.add(0)
    played.rounds()
    time.sleep(0.12)
    played.rounds(2)
    assert played.certain(0.1) == 0
    assert played.rings == (size - 2 if size == 64 else 0)  # by one of four


def test_one_that_fails_while_rank_zero_rings_is_heard():
    played = Played(64)
    played.rounds()
    played.own[40] = replace(WAITING, state="failed", error="ValueError: the data is bad")
    rings = played.ranks[0].ring

    def ring(store, *ranks):
        played.own[41] = replace(WAITING, state="failed", error="ValueError: too")
        rings(store, *ranks)

    played.ranks[0].ring = ring
    played.rounds(2)
    played.ended |= {40, 41}
    played.rounds()
    assert [rank for rank, _ in played.ranks[1].in_state("failed")] == [40, 41]


def test_a_ring_while_the_bell_is_taken_down_is_not_lost():
    played = Played(64)
    played.rounds()
    reports, store = played.ranks[40], played.store
    told = replace(WAITING, state="failed", error="ValueError: the data is bad")
    taken = store.uncounted.delete_key

    class Between:
        """The store, in which rank 50 fails and rank 0 rings again when rank 40 has read its bell."""

        def __getattr__(self, name):
            return getattr(store, name)

        def delete_key(self, key):
            played.ranks[50].exchange(store, replace(told, count=2))
            played.ranks[0].exchange(store, replace(WAITING, count=2))
            return taken(key)

    played.ranks[0].ring(store, 40)
    reports.listen(Between())
    reports.exchange(store, replace(WAITING, count=SELDOM - 39 % SELDOM))  # it reads for the bell alone
    assert reports.certain(60.0)[0] == 50


def test_a_process_that_was_rung_for_is_not_taken_for_one_that_never_came():
    played = Played(64)
    played.rounds()
    played.ended |= {40, 50}
    played.rounds(1)
    played.own[30] = replace(WAITING, state="failed", error="ValueError: the data is bad")
    played.rounds(3)
    assert played.ranks[0].unheard == []
    assert 40 in played.ranks[0].heard


def test_a_process_that_ended_is_not_silent():
    played = Played(4)
    played.own[0] = played.own[2] = replace(WAITING, state="ended")
    played.rounds(2)
    played.ended |= {0, 2}
    played.rounds(2, 0.1)
    assert played.certain(0.05) is None


def test_a_dead_process_of_this_machine_is_named_before_it_is_silent():
    child = subprocess.Popen([sys.executable, "-S", "-c", ""])
    child.wait()
    here = identity()
    played = Played(4, here.machine)
    played.own = [replace(WAITING, process=asdict(here))] * 4
    played.own[2] = replace(WAITING, process=asdict(Process(here.host, here.machine, child.pid, 1)))
    played.rounds(2)
    played.ended.add(2)
    played.rounds(3, 2 * INTERVAL)
    assert played.certain(60.0) == 2


def test_last_words_that_no_summary_tells_are_read_of_a_dead_process():
    here = identity()
    gone = replace(WAITING, process=asdict(replace(here, pid=2**22 + 1)))
    played = Played(3, here.machine)
    played.own = [replace(WAITING, process=asdict(here))] * 3
    played.own[2] = gone
    played.rounds(2)
    played.ended |= {0, 2}
    said = Reports(2, 3, "watch", "here", INTERVAL)
    said.exchange(played.store, replace(gone, state="failed", error="ValueError: the data is bad"))
    time.sleep(2 * INTERVAL)
    played.rounds()
    rank, heard = played.ranks[1].certain(60.0)
    assert (rank, heard.report.error) == (2, "ValueError: the data is bad")


def test_who_was_never_heard_of_is_told():
    played = Played(64)
    played.ended |= {9, 50}
    played.rounds(2, look=True)
    assert {tuple(reports.unheard) for reports in played.ranks if reports.rank not in (9, 50)} == {(9, 50)}
    early = Reports(1, 2, "other", "here")
    early.exchange(played.store, WAITING)
    assert early.unheard == [0]


def test_who_is_elsewhere_is_told_among_64():
    played = Played(64)
    played.own[50] = replace(WAITING, line="line 7 of load.py, load", stays=4.0)
    played.rounds(2, look=True)
    for reports in played.ranks[1:50]:
        assert reports.heard[50].report.line == "line 7 of load.py, load"
        assert 0 in reports.heard
        assert len(reports.heard) <= TOLD


def test_a_process_that_fails_after_rank_zero_has_ended_is_named():
    played = Played(3)
    played.rounds()
    played.own[0] = replace(WAITING, state="ended")
    played.rounds()
    played.ended.add(0)
    played.own[1] = replace(WAITING, state="failed", error="ValueError: bad")
    played.rounds(2)
    assert played.ranks[2].certain(1.0)[0] == 1
