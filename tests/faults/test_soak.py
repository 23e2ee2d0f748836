"""A long run grows in nothing: the soak program in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from faults import soak

SOAK = Path(__file__).with_name("soak.py")


def soaked(steps):
    """What a soak of so many steps reports."""
    arguments = [sys.executable, str(SOAK), "--json", "--steps", str(steps)]
    done = subprocess.run(arguments, cwd=SOAK.parents[2], capture_output=True, text=True, timeout=3600, check=False)
    assert done.stderr == ""
    report = json.loads(done.stdout)
    assert (done.returncode == 0) == (report["problems"] == [])
    assert report["figures"][-1]["steps"] >= steps
    return report


@pytest.mark.slow
def test_soak_of_5_000_steps_is_flat():
    assert soaked(5_000)["problems"] == []


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_soak_of_1_000_000_steps_is_flat():
    assert soaked(1_000_000)["problems"] == []


@pytest.mark.parametrize("figure", ["rss", "files", "threads", "objects"])
def test_soak_notices_what_grows_after_the_first_tenth(figure):
    step = {"rss": soak.MIB}.get(figure, 1)
    flat = [soak.Figures(n, 100 * soak.MIB, 7, 1, 1000) for n in range(0, 101, 10)]
    assert soak.problems(soak.growth(flat)) == []
    grown = [*flat[:-1], replace(flat[-1], **{figure: getattr(flat[-1], figure) + step + 1})]
    assert [problem.split()[0] for problem in soak.problems(soak.growth(grown))] == [figure]
