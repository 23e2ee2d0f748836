"""The helper of these tests: what it must notice itself."""

from __future__ import annotations

import gc
import os
import signal
import sys
import time

import pytest
import torch
import torch.distributed as dist

from distributed.processes import run
from loopkit.distributed import join


def test_run_gives_the_results_by_rank():
    def summed(rank, factor):
        world = join("gloo", timeout=60)
        value = torch.tensor([float(rank + 1)]) * factor
        dist.all_reduce(value)
        return rank, world.rank, world.size, value, torch.get_num_threads()

    results = run(summed, 2, 10.0)
    assert [result[:3] for result in results] == [(0, 0, 2), (1, 1, 2)]
    assert all(result[3].item() == 30.0 and result[4] == 1 for result in results)
    assert not dist.is_initialized()
    assert "RANK" not in os.environ


def test_run_fails_with_what_a_child_raised():
    def raising(rank):
        if rank == 1:
            raise ValueError("the cause")
        time.sleep(3000)

    with pytest.raises(AssertionError, match="the cause") as caught:
        run(raising, 2, timeout=3000)  # it does not wait that long for the others
    assert str(caught.value).startswith("rank 1 ended with 1")
    assert "rank 0 was still running" in str(caught.value)


def test_run_without_check_tells_how_each_ended():
    def ending(rank):
        print(f"rank {rank} prints")
        if rank == 0:
            return "value"
        if rank == 1:
            raise ValueError("the cause")
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        sys.stderr.write("waits\n")
        time.sleep(60)
        return None

    returned, raised, killed, hung = run(ending, 4, check=False, timeout=10)
    assert (returned.code, returned.value, returned.output) == (0, "value", "rank 0 prints\n")
    assert raised.code == 1
    assert raised.error.endswith("ValueError: the cause\n")
    assert (killed.code, killed.value, killed.error) == (-signal.SIGKILL, None, "")
    assert hung.code is None
    assert hung.output == "rank 3 prints\nwaits\n"
    assert hung.seconds >= 10


def test_run_leaves_no_process():
    def forking(rank):
        child = os.fork()
        if child == 0:
            time.sleep(60)
        return child

    [child] = run(forking, 1)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            os.kill(child, 0)
        except ProcessLookupError:
            return
        with open(f"/proc/{child}/stat") as file:  # killed, and not yet collected
            if file.read().rpartition(")")[2].split()[0] == "Z":
                return
        time.sleep(0.05)
    raise AssertionError(f"{child} still runs")


class Inherited:
    """Garbage whose end, in another process than its own, takes for ever."""

    def __init__(self):
        self.itself, self.pid = self, os.getpid()

    def __del__(self):
        if os.getpid() != self.pid:
            time.sleep(60)


def test_run_keeps_children_from_collecting_garbage_of_this_process():
    enabled = gc.isenabled()
    gc.disable()
    try:
        Inherited()
        frozen = gc.get_freeze_count()
        assert run(lambda rank: gc.collect() >= 0, 2) == [True, True]
        assert gc.get_freeze_count() == frozen
    finally:
        if enabled:
            gc.enable()
