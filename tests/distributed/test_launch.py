"""Launching the processes of one machine from Python: results, failures, and what is refused."""

from __future__ import annotations

import glob
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest
import torch

import loopkit
from distributed import launched
from loopkit.distributed.launch import _count, launch
from loopkit.errors import WorldError

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _nothing_is_left(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    variables = {name for name in os.environ if name.startswith("TORCHELASTIC")}
    yield
    assert {number: signal.getsignal(number) for number in handlers} == handlers
    assert {name for name in os.environ if name.startswith("TORCHELASTIC")} == variables
    assert not glob.glob(f"{tempfile.gettempdir()}/loopkit-launch-{os.getpid()}-*")


def test_launch_returns_the_results_by_rank():
    results = launch(launched.together, 10.0, processes=2, start="forkserver")
    assert [result["rank"] for result in results] == [0, 1]
    assert all(torch.equal(result["sum"], torch.tensor([30.0])) and result["size"] == 2 for result in results)
    assert len({os.getpid(), *(result["pid"] for result in results)}) == 3


def test_launch_works_from_a_script(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, loopkit\n"
        "def told(word):\n"
        "    return word, os.environ['RANK'], os.environ['WORLD_SIZE']\n"
        "if __name__ == '__main__':\n"
        "    assert 'torch.distributed.launcher' not in sys.modules\n"
        "    print(loopkit.launch(told, 'hello', processes=2))\n"
    )
    done = subprocess.run(
        [sys.executable, script],
        capture_output=True,
        text=True,
        timeout=110,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[('hello', '0', '2'), ('hello', '1', '2')]\n"


def test_one_process_is_this_one():
    assert launch(os.getpid, processes=1) == [os.getpid()]
    assert launch(lambda *args: args, 1, 2, processes=1) == [(1, 2)]


def test_what_a_process_raised_is_raised_here(caplog):
    with pytest.raises(WorldError) as caught:
        launch(launched.fails, "raise", processes=2, start="forkserver")
    assert str(caught.value) == "rank 1 failed: ValueError: the data is bad"
    assert type(caught.value.__cause__).__name__ == "ChildFailedError"
    [note] = caught.value.__notes__
    assert note.startswith("loopkit: in rank 1:\nTraceback")
    assert 'raise ValueError("the data is bad")' in note
    assert not [record for record in caplog.records if record.levelname == "ERROR"]  # it is said once


def test_what_a_process_raised_is_logged_if_all_are_started_again(caplog):
    launch(launched.after_restart, "", processes=2, restarts=1, start="forkserver")
    assert "ValueError: the first time" in caplog.text


def test_a_killed_process_is_named():
    with pytest.raises(WorldError, match=r"^rank 1 was killed by SIGKILL; when memory runs out, the kernel kills"):
        launch(launched.fails, "kill", processes=2, start="forkserver")


def test_a_process_that_exits_is_named():
    with pytest.raises(WorldError, match=r"^rank 1 ended with status 3, without an error"):
        launch(launched.fails, "exit", processes=2, start="forkserver")


def test_a_process_that_exits_quietly_returned_nothing():
    assert launch(launched.fails, "exit quietly", processes=2, start="forkserver") == [None, None]


def test_a_result_that_cannot_be_sent_is_named():
    with pytest.raises(
        WorldError, match=r"rank 1 failed: WorldError: what fails\(\) returned, <function .* cannot be sent"
    ):
        launch(launched.fails, "return", processes=2, start="forkserver")


def test_restarts_start_all_again(tmp_path):
    results = launch(launched.after_restart, str(tmp_path), processes=2, restarts=1, start="forkserver")
    assert results == [[(0, "1"), (1, "1")]] * 2


def test_launch_within_a_launched_process_is_refused(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    for processes in (1, 2):
        with pytest.raises(WorldError, match=r"launched already \(rank 1\): start the script with python instead"):
            launch(launched.together, 1.0, processes=processes)


def test_functions_that_no_other_process_can_import_are_refused():
    def inner():
        pass

    for fn, why in ((lambda: None, "it is a lambda"), (inner, "it is defined inside another function")):
        for start in ("spawn", "forkserver"):
            with pytest.raises(WorldError, match=rf"{re.escape(why)}, and the new processes import it by its name"):
                launch(fn, processes=2, start=start)


def test_a_function_of_a_session_is_refused():
    code = "import loopkit\ndef f(): pass\nloopkit.launch(f, processes=2)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, cwd=ROOT)
    assert "WorldError: launch cannot start f() by start='spawn': it was typed into a session" in done.stderr


def test_arguments_that_cannot_be_sent_are_refused():
    with pytest.raises(
        WorldError, match=r"launch cannot send argument 1, <unlocked _thread.lock .*, to another process"
    ):
        launch(launched.together, 1.0, threading.Lock(), processes=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"processes": 0}, "processes=0"),
        ({"processes": "two"}, "processes='two'"),
        ({"processes": True}, "processes=True"),
        ({"start": "fork"}, "start='fork'"),
        ({"timeout": 0}, "timeout=0"),
        ({"restarts": -1}, "restarts=-1"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(WorldError, match=message):
        launch(os.getpid, **options)


def test_a_call_in_place_of_a_function_is_refused():
    with pytest.raises(WorldError, match=r"launch\(3\): the first argument is the function to call"):
        launch(3)


def test_auto_is_one_process_per_device_or_half_the_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(9)), raising=False)
    monkeypatch.setattr("loopkit.base.devices.count", lambda: 0)
    assert _count("auto") == 4
    monkeypatch.setattr("loopkit.base.devices.count", lambda: 3)
    assert _count("auto") == 3


def test_launch_is_part_of_loopkit():
    assert loopkit.launch is launch
