"""Logs on full disks, in places that cannot be written, and with two runs at once."""

from __future__ import annotations

import contextlib
import csv
import ctypes
import os
import resource
import signal
import socket
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from faults.forked import call_forked, forked
from helpers import batches, make_learner, on

from loopkit import every
from loopkit.errors import LogError
from loopkit.logs import Csv, JsonLines, read_log
from loopkit.logs.log_file import LogFile
from loopkit.plugins import Checkpoint, LogTo


def logging_learner(*logs: Any, every: int | None = None) -> Any:
    act = on("step_end", lambda learner, step, **given: learner.log("index", step.index))
    return make_learner(LogTo(*logs, every=every), act)


@contextmanager
def read_only(directory: Path) -> Iterator[None]:
    """The directory cannot be written; skips where the user may all the same."""
    directory.chmod(0o500)
    try:
        if os.access(directory, os.W_OK):
            pytest.skip("this user can write everywhere")
        yield
    finally:
        directory.chmod(0o700)


def test_read_only_directory_is_an_error_before_the_first_step(tmp_path: Path) -> None:
    learner = logging_learner(tmp_path / "log.jsonl")
    with read_only(tmp_path), pytest.raises(LogError, match="Permission denied; give this user the permission"):
        learner.fit(batches(1), epochs=1)
    assert learner.progress.steps == 0


@pytest.mark.parametrize("backend", [JsonLines, Csv])
def test_path_that_is_a_directory_or_below_a_file_is_an_error(tmp_path: Path, backend: Any) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "directory").mkdir()
    for path, fix in (
        (tmp_path / "directory", "name a file in it"),
        (tmp_path / "file" / "log", "choose another path"),
    ):
        learner = logging_learner(backend(path))
        with pytest.raises(LogError, match=rf"cannot be written: .*; .*{fix}"):
            learner.fit(batches(1), epochs=1)
        assert learner.progress.steps == 0


def test_missing_directories_are_made(tmp_path: Path) -> None:
    logging_learner(tmp_path / "a" / "b" / "log.jsonl", tmp_path / "c" / "log.csv").fit(batches(1), epochs=1)
    assert read_log(tmp_path / "a" / "b").values("index") == [0.0]
    assert (tmp_path / "c" / "log.csv").exists()


@pytest.mark.parametrize("ending", [".jsonl", ".csv"])
def test_two_runs_in_one_log_are_refused(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"log{ending}"
    first, second = logging_learner(path), logging_learner(path)
    with first.rounds(on_interrupt=None):
        first.run("train", batches(2))
        with pytest.raises(LogError, match="is being written by another run: stop that one, or give this one"):
            second.fit(batches(1), epochs=1)
    assert second.progress.steps == 0
    before = path.read_bytes()
    assert b"1.0" in before
    second.fit(batches(1), epochs=1)
    assert path.with_name(f"log-1{ending}").read_bytes() == before


def test_one_log_given_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LogError, match="is being written by another run"):
        logging_learner(tmp_path / "log.jsonl", tmp_path / "log.jsonl").fit(batches(1), epochs=1)


def cut_in_mid_line(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 5)


LOSSES = [
    (Path.unlink, "removed or renamed"),
    (lambda path: path.rename(path.with_name("moved")), "removed or renamed"),
    (lambda path: os.truncate(path, 0), "cut off at byte 0"),
    (cut_in_mid_line, "cut off at byte"),
]


@pytest.mark.parametrize("ending", [".jsonl", ".csv"])
@pytest.mark.parametrize(("lose", "what"), LOSSES, ids=["removed", "renamed", "emptied", "cut"])
def test_log_that_is_lost_under_the_run_begins_anew(tmp_path: Path, ending: str, lose: Any, what: str) -> None:
    path, set_aside = tmp_path / f"log{ending}", tmp_path / f"log-1{ending}"
    before = []

    def act(step: Any, **given: Any) -> None:
        if step.index == 6:
            before.append(path.read_bytes())
            lose(path)

    learner = logging_learner(path, every=1)
    learner.add(on("step_begin", act, "losing"))
    with pytest.warns(UserWarning, match=f"{what}.* while the run wrote it: another one begins") as said:
        learner.fit(batches(10), epochs=1)
    assert len(said) == 1
    if ending == ".jsonl":
        log = read_log(path)
        values = log.values("index")
        assert [(run["resumed"], run["step"]) for run in log.runs] == [(True, 7)]
        assert log.ends[0]["reason"] == "epochs"
    else:
        with open(path, newline="") as file:
            values = [float(row["index"]) for row in csv.DictReader(file)]
    assert values == [float(index) for index in range(int(values[0]), 10)]
    assert 5 <= values[0] <= 7  # what was written by then is in the old file alone
    assert set_aside.exists() == (lose is cut_in_mid_line)
    if lose is cut_in_mid_line:
        assert set_aside.read_bytes() == before[0][:-5]


def test_log_that_another_run_took_meanwhile_is_left_to_it(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    theirs = LogFile(path)

    def act(step: Any, **given: Any) -> None:
        if step.index == 3:
            path.unlink()
            theirs.open()

    learner = logging_learner(path, every=1)
    learner.add(on("step_begin", act, "losing"))
    with pytest.warns(UserWarning, match="disabled for the rest of the fit: its write failed, LogError: .*another run"):
        assert learner.fit(batches(6), epochs=1).steps == 6
    assert path.read_bytes() == b""
    theirs.close()


def test_run_goes_on_with_the_log_that_began_under_it(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    options: dict[str, Any] = {"save": every(updates=2), "resume": "auto"}

    def act(learner: Any, step: Any, **given: Any) -> None:
        if step.index == 3:
            path.unlink()
        if step.index == 7:
            raise RuntimeError("killed")

    learner = logging_learner(path, every=1)
    learner.add(on("step_begin", act, "losing"), Checkpoint(tmp_path / "saved", **options))
    with pytest.warns(UserWarning, match="removed or renamed"), pytest.raises(RuntimeError):
        learner.fit(batches(10), epochs=1)
    again = logging_learner(path, every=1)
    again.add(Checkpoint(tmp_path / "saved", **options))
    again.fit(batches(10), epochs=1)
    values = read_log(path).values("index")
    assert values == [float(index) for index in range(int(values[0]), 10)]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_forked_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "log")
    log.open()
    (ready, says), (waits, ends) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:  # as a worker of a loader that outlives its parent
        os.close(ends)
        os.write(says, b"x")
        os.read(waits, 1)
        os._exit(0)
    try:
        os.read(ready, 1)
        log.close()
        again = LogFile(tmp_path / "log")
        again.open()
        again.close()
    finally:
        os.close(ends)
        os.waitpid(child, 0)
        for end in (ready, says, waits):
            os.close(end)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full on this system")
def test_full_device_disables_the_log(tmp_path: Path) -> None:
    learner = logging_learner(JsonLines("/dev/full"), tmp_path / "whole.jsonl")  # which renames nothing
    with pytest.warns(UserWarning, match=r"is disabled for the rest of the fit: .*No space left on device") as seen:
        result = learner.fit(batches(4), epochs=2)
    assert len(seen) == 1
    assert result.steps == 8
    assert read_log(tmp_path / "whole.jsonl").values("index") == [0.0, 1.0, 2.0, 3.0] * 2


@pytest.mark.parametrize("backend", [JsonLines, Csv])
def test_pipe_gets_the_log_as_it_is(tmp_path: Path, backend: Any) -> None:
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    try:
        logging_learner(backend(tmp_path / "pipe")).fit(batches(2), epochs=1)
        assert b"index" in os.read(reader, 100_000)
        assert (tmp_path / "pipe").is_fifo()
    finally:
        os.close(reader)


def test_link_to_a_csv_file_stays_one_when_columns_come(tmp_path: Path) -> None:
    (tmp_path / "log.csv").symlink_to(tmp_path / "real.csv")
    logging_learner(tmp_path / "log.csv").fit(batches(2), epochs=1)
    assert (tmp_path / "log.csv").is_symlink()
    assert b"train,1,2,2," in (tmp_path / "real.csv").read_bytes()


@pytest.mark.parametrize("ending", [".jsonl", ".csv"])
def test_disk_that_gets_full_leaves_whole_lines(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"log{ending}"
    size = 3000 if ending == ".jsonl" else 600

    def limited() -> tuple[int, list[str]]:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        learner = logging_learner(path, every=1)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            result = learner.fit(batches(50), epochs=1)
        return result.steps, [str(each.message) for each in seen]

    steps, (said,) = call_forked(limited)
    assert steps == 50
    assert said.startswith("log")
    assert "File too large" in said
    assert path.read_bytes().endswith(b"\n")
    if ending == ".jsonl":
        values = read_log(path).values("index")
        assert values == [float(i) for i in range(len(values))]
        assert 0 < len(values) < 50


def test_closed_output_does_not_touch_the_log(tmp_path: Path) -> None:
    def closed() -> None:
        sys.stdout = open(1, "w")  # noqa: SIM115 - not pytest's
        os.close(1)
        with contextlib.suppress(OSError):
            sys.stdout.close()
        act = on("step_end", lambda learner, step, **given: learner.log("index", step.index))
        make_learner(LogTo(tmp_path), act, standard=True).fit(batches(3), epochs=1)

    outcome = forked(closed)
    assert read_log(tmp_path).values("index") == [0.0, 1.0, 2.0], outcome.error


def test_link_in_the_place_of_a_log_is_followed(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").symlink_to(tmp_path / "real.jsonl")
    logging_learner(tmp_path / "log.jsonl").fit(batches(1), epochs=1)
    assert read_log(tmp_path / "real.jsonl").values("index") == [0.0]


NEW_HOST = 0x04000000
"""CLONE_NEWUTS: the process gets a host name of its own."""


def goes_by_another_name() -> bool:
    """Give this process another host name; returns whether it may."""
    if ctypes.CDLL(None, use_errno=True).unshare(NEW_HOST):
        return False
    socket.sethostname("another-host")
    return True


def test_log_of_a_killed_run_goes_on_under_another_host_name(tmp_path: Path) -> None:
    """As a new container on the same disk; the kernel has let the lock go."""
    path = tmp_path / "log.jsonl"

    def run(last: int, other: bool) -> bool:
        if other and not goes_by_another_name():
            return False
        learner = logging_learner(path, every=1)
        learner.add(Checkpoint(tmp_path / "saved", save=every(updates=1), resume="auto"))
        act = on(
            "step_begin", lambda step, **given: step.index == last and os.kill(os.getpid(), signal.SIGKILL), "kills"
        )
        learner.add(act)
        learner.fit(batches(10), epochs=1)
        return True

    assert forked(lambda: run(6, False)).code == -signal.SIGKILL
    ended = forked(lambda: run(-1, True))
    assert ended.code == 0, ended.error
    if not ended.value:
        pytest.skip("this user may not change the host name")
    assert read_log(path).values("index") == [float(index) for index in range(10)]
    assert [each.name for each in tmp_path.iterdir() if each.name.startswith("log")] == [path.name]
