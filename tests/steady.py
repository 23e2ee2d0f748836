"""What keeps tests from going by how busy the machine is, and what makes all of them faster."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
"""Before torch is imported: the threads of OpenMP do not come along into a fork, which would wait for them."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give tests that go by the real clock a second try."""
    for item in items:
        if item.get_closest_marker("clock"):
            item.add_marker(pytest.mark.flaky(reruns=2, reruns_delay=5))


overlooked: list[object] = []


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Let the garbage collector overlook torch and all tests: a full collection of them takes half a second.

    Once for each file of tests, and after large imports.
    """
    now: list[object] = [item.path, len(sys.modules) // 100]
    if now != overlooked:
        overlooked[:] = now
        gc.collect()
        gc.freeze()
        use_huge_pages()


HUGE, COLLAPSE = 1 << 21, 25


def use_huge_pages() -> None:
    """Put the memory into pages of 2 MiB where Linux can: a fork takes a third of the time."""
    if not sys.platform.startswith("linux"):
        return
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, rights, _, _, file, *name = line.split()
        first, end = (int(each, 16) for each in place.split("-"))
        if rights.startswith("rw") and file == "0" and name in ([], ["[heap]"]):
            for start in range(-(-first // HUGE) * HUGE, end - HUGE + 1, HUGE):
                advise(start, HUGE, COLLAPSE)  # what cannot be is left as it is
