"""A run that is killed at any moment goes on exactly: every bit of its final state is that of a run nobody stopped.

The long forms: ``python tests/faults/campaign.py kills --trials 1000`` and ``calls``.
"""

from __future__ import annotations

import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from faults.campaign import RESUME, SMALL, calls, kills, lines
from faults.runs import RUNS, Run, difference, plain
from loopkit.checkpoint import storage
from loopkit.checkpoint.lock import Lock
from loopkit.errors import CheckpointError

QUICK = tuple(replace(run, epochs=2) for run in RUNS if run.data != "loader2")[2::4]


def test_plain_values_tell_types_strides_and_bits_apart():
    values = [1, 1.0, True, "1", [1], (1,), 0.0, -0.0, {"a": 1}, {"b": 1}, {"a": 1, "b": 2}, {"b": 2, "a": 1}]
    values += [torch.ones(2, 2), torch.ones(2, 2).t(), torch.ones(2, 2).double(), torch.zeros(2, 2), -torch.zeros(2, 2)]
    for i, one in enumerate(values):
        for j, other in enumerate(values):
            assert (difference(plain(one), plain(other)) == "") == (i == j)
    assert difference(plain({"x": {"seconds": 1.0, "y": 1}}), plain({"x": {"seconds": 2.0, "y": 2}})).startswith(".x.y")


def sleep(begun):
    Path(begun).touch()
    time.sleep(60)


def test_fork_server_tells_how_a_child_ended(trials, tmp_path):
    assert trials.server.call("os:getpid") > 1
    assert trials.server.run("sys:exit", 143).code == 143
    assert trials.server.run("time:sleep", 60, signals=((0.01, signal.SIGTERM),)).code == -signal.SIGTERM
    failed = trials.server.run("math:sqrt", -1)
    assert failed.code == 1
    assert "ValueError: math domain error" in failed.said
    begun = str(tmp_path / "begun")
    interrupted = trials.server.run("faults.test_kills:sleep", begun, signals=((0.0, signal.SIGINT),), after=begun)
    assert interrupted.code == -signal.SIGINT
    assert "KeyboardInterrupt" in interrupted.said


def test_fork_server_kills_a_child_that_does_not_end(trials):
    with pytest.raises(AssertionError, match=r"did not end within 0\.1 s"):
        trials.server.run("time:sleep", 60, limit=0.1)
    assert trials.server.call("os:getpid") > 1


def test_fork_server_leaves_no_process_behind(trials):
    assert trials.server.run("subprocess:Popen", ["sleep", "60"]).code == 1  # it cannot be sent back
    trials.server.sweep()
    assert trials.server.call("faults.runs:children", trials.server.call("os:getppid")) == []


def test_run_goes_on_exactly_whenever_it_is_killed(trials):
    kills(trials, len(QUICK), seed=0, runs=QUICK, most=2)
    assert trials.counts["trials"] == len(QUICK)
    assert trials.counts["kills"] > 2  # how many depends on how fast the machine is


def test_run_with_workers_goes_on_exactly_whenever_it_is_killed(trials):
    kills(
        trials, 3, seed=1, runs=[replace(Run("loader2"), epochs=2), replace(Run("loader2", True, 3), epochs=2)], most=2
    )
    assert trials.counts["trials"] == 3


def test_run_goes_on_exactly_if_killed_in_any_call_of_a_save(trials):
    calls(trials)
    for name in ("mkdir", "create", "write", "rename", "unlink", "rmdir"):
        assert trials.counts[f"kills after {name}"] > 0, name
    assert trials.counts["kills during write"] == trials.counts["kills after write"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("background", [False, True])
def test_run_goes_on_exactly_if_killed_in_any_call_of_its_fit(trials, background):
    calls(trials, replace(SMALL, background=background), 0, 1 << 60, every=True)
    assert trials.counts["kills"] > 500


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_thousand_runs_go_on_exactly_whenever_they_are_killed(trials):
    kills(trials, 1000, seed=2)
    assert trials.counts["trials"] == 1000


@pytest.mark.parametrize("extra", ["average", "plateau"])
def test_run_that_had_ended_ends_again_with_the_same_state(trials, extra):
    run = replace(SMALL, extra=extra)
    at = trials.begin()
    first = trials.server.call(RESUME, run, str(at))
    again = trials.server.call(RESUME, run, str(at))
    assert difference(first, again) == ""
    assert [line.split()[0] for line in lines(at)[-2:]] == ["fit_begin", "fit_end"]


@pytest.mark.parametrize("said", ["", "{", '{"host": "a", "pid'])
def test_lock_of_a_run_that_was_killed_while_it_took_it_is_taken_over(tmp_path, said):
    (tmp_path / ".lock").write_text(said)
    with Lock(tmp_path):
        assert (tmp_path / ".lock").read_text().endswith("}")
    (tmp_path / ".lock").write_text("not by us")
    with pytest.raises(CheckpointError, match="does not name its owner"):
        Lock(tmp_path).acquire()


def test_damaged_checkpoint_fails_a_campaign(trials):
    at = trials.begin()
    trials.server.call(RESUME, SMALL, str(at))
    newest = storage.listing(at / "checkpoints")[0].path
    (newest / "state.json").unlink()
    with pytest.raises(AssertionError, match=r"state\.json is missing"):
        trials.check_found(SMALL, at, "damaged")
