"""The lock of a directory of checkpoints."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import threading
import time

import pytest
from faults.forked import call_forked, dead_pid, forked, other
from faults.shims import Shim

from loopkit.checkpoint import disk
from loopkit.checkpoint.lock import Lock
from loopkit.checkpoint.processes import identity, status
from loopkit.errors import CheckpointError


@pytest.fixture
def shim(monkeypatch):
    """Puts a shim in place of the operating system."""
    return lambda system: monkeypatch.setattr(disk, "system", system)


def names(directory):
    return sorted(os.listdir(directory))


def test_lock_is_held_until_released(tmp_path):
    with Lock(tmp_path):
        said = json.loads((tmp_path / ".lock").read_bytes())
        assert said["pid"] == os.getpid()
        assert said["started"] == status(os.getpid())[1]
        with pytest.raises(CheckpointError, match="locked by this process"):
            Lock(tmp_path).acquire()
    assert names(tmp_path) == []
    with Lock(tmp_path):
        pass


def test_lock_refuses_another_process_and_says_who_holds_it(tmp_path):
    with Lock(tmp_path):
        outcome = forked(Lock(tmp_path).acquire)
    assert "CheckpointError" in outcome.error
    assert f"locked by process {os.getpid()} on {identity().host}" in outcome.error


def test_lock_is_neither_held_nor_released_by_a_forked_child(tmp_path):
    with Lock(tmp_path) as lock:
        assert call_forked(lock.release) is None
        assert names(tmp_path) == [".lock"]
        assert "locked by process" in forked(Lock(tmp_path).acquire).error


def test_lock_of_a_killed_process_is_taken_over_though_its_child_lives(tmp_path):
    reader, writer = os.pipe()

    def hold_and_tell():
        Lock(tmp_path).acquire()
        worker = os.fork()
        if worker == 0:
            signal.alarm(20)
            os.write(writer, str(os.getpid()).encode())
            signal.pause()
        os.setpgid(worker, worker)  # its parent's end is not its own
        os.kill(os.getpid(), signal.SIGKILL)

    outcome = forked(hold_and_tell)
    worker = int(os.read(reader, 100))
    os.close(reader), os.close(writer)
    try:
        assert outcome.code == -signal.SIGKILL
        lock = Lock(tmp_path)
        lock.acquire()
        assert "which is gone" in lock.took_over
        lock.release()
    finally:
        os.kill(worker, signal.SIGKILL)


def write_lock(directory, owner, flock=True):
    said = {**vars(owner), "flock": flock, "time": "2026-01-01 00:00:00 +0000"}
    (directory / ".lock").write_text(json.dumps(said))


@pytest.mark.parametrize("flock", [True, False])
def test_lock_of_a_dead_or_replaced_process_is_taken_over(tmp_path, flock):
    for owner in (other(pid=dead_pid()), other(started=1)):
        write_lock(tmp_path, owner, flock)
        lock = Lock(tmp_path)
        lock.acquire()
        assert re.search(rf"left by process {owner.pid} .*2026-01-01.* gone", lock.took_over)
        assert json.loads((tmp_path / ".lock").read_bytes())["pid"] == os.getpid()
        lock.release()


def test_lock_of_a_living_process_is_respected_even_without_the_kernels(tmp_path):
    write_lock(tmp_path, other(pid=os.getppid(), started=status(os.getppid())[1]))
    with pytest.raises(CheckpointError, match=f"locked by process {os.getppid()}"):
        Lock(tmp_path).acquire()


HOLDERS = {
    "another host name": {"host": "elsewhere"},
    "a container": {"host": "elsewhere", "machine": "00000000"},
    "before a restart": {"machine": "00000000"},
}


@pytest.fixture
def network(monkeypatch):
    """Every file system is one that other machines may use."""
    monkeypatch.setattr("loopkit.checkpoint.lock.is_local", lambda path: False)


@pytest.mark.parametrize("holder", HOLDERS.values(), ids=HOLDERS)
def test_lock_of_a_dead_process_is_taken_over_on_a_local_disk_whatever_its_host(tmp_path, holder):
    write_lock(tmp_path, other(pid=dead_pid(), **holder))
    with Lock(tmp_path) as lock:
        assert "which is gone" in lock.took_over


@pytest.mark.parametrize("flock", [True, False])
def test_lock_that_the_kernel_cannot_judge_is_taken_over_once_it_is_silent(tmp_path, network, flock, capsys):
    write_lock(tmp_path, other(host="elsewhere", machine="00000000"), flock)
    begun = time.monotonic()
    with Lock(tmp_path, after=1.0) as lock:
        assert time.monotonic() - begun >= 0.9
        assert "silent for too long" in lock.took_over
        assert json.loads((tmp_path / ".lock").read_bytes())["pid"] == os.getpid()
    assert names(tmp_path) == []
    assert capsys.readouterr().err.count("is taken over if it is silent") == 1


def test_lock_that_is_silent_for_long_already_is_taken_over_at_once(tmp_path, network):
    write_lock(tmp_path, other(host="elsewhere", machine="00000000"))
    os.utime(tmp_path / ".lock", (1, 1))
    with Lock(tmp_path) as lock:
        assert "silent for too long" in lock.took_over


def test_lock_that_is_touched_meanwhile_is_respected(tmp_path, network, monkeypatch):
    monkeypatch.setattr("loopkit.checkpoint.lock.POLL", 0.05)
    write_lock(tmp_path, other(host="elsewhere", machine="00000000"))
    touch = threading.Timer(0.2, lambda: os.utime(tmp_path / ".lock"))
    touch.start()
    with pytest.raises(CheckpointError, match="on elsewhere since 2026-01-01"):
        Lock(tmp_path, after=30).acquire()
    touch.join()
    assert names(tmp_path) == [".lock"]


def test_holder_touches_its_lock_until_the_release(tmp_path):
    lock = Lock(tmp_path, after=0.2)
    lock.acquire()
    os.utime(tmp_path / ".lock", (1, 1))
    time.sleep(0.3)
    assert os.stat(tmp_path / ".lock").st_mtime > 1
    lock.release()
    assert [each.name for each in threading.enumerate() if each.name == "loopkit-lock"] == []


def test_holder_that_lost_its_lock_knows_by_whom(tmp_path):
    lock = Lock(tmp_path)
    lock.acquire()
    assert (lock.in_place, lock.taken_by) == (True, "")
    write_lock(tmp_path, other(host="elsewhere", pid=7))
    os.rename(tmp_path / ".lock", tmp_path / "new")
    os.rename(tmp_path / "new", tmp_path / ".lock")
    assert lock.taken_by == "process 7 on elsewhere (since 2026-01-01 00:00:00 +0000)"
    lock.release()


def test_lock_without_content_is_taken_over_and_junk_is_respected(tmp_path):
    (tmp_path / ".lock").touch()
    with Lock(tmp_path):
        pass
    (tmp_path / ".lock").write_text("[" * 10_000)
    with pytest.raises(CheckpointError, match="does not name its owner"):
        Lock(tmp_path).acquire()


def test_lock_holds_where_the_file_system_cannot_lock(tmp_path, shim):
    def act(n, name, arguments, proceed):
        if name == "flock":
            raise OSError(errno.ENOLCK, "no")
        return proceed()

    shim(Shim(act))
    with Lock(tmp_path):
        with pytest.raises(CheckpointError, match="locked by this process"):
            Lock(tmp_path).acquire()
        assert "locked by process" in forked(Lock(tmp_path).acquire).error
    assert names(tmp_path) == []
    write_lock(tmp_path, other(pid=dead_pid()), flock=False)
    with Lock(tmp_path) as lock:
        assert "which is gone" in lock.took_over


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/etc/passwd", path)])
def test_lock_that_is_no_file_is_refused_without_waiting(tmp_path, make):
    make(tmp_path / ".lock")
    with pytest.raises(CheckpointError, match=r"\.lock"):
        Lock(tmp_path).acquire()


def test_lock_leaves_no_file_open_after_a_refusal(tmp_path):
    with Lock(tmp_path):
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            with pytest.raises(CheckpointError):
                Lock(tmp_path).acquire()
        assert len(os.listdir("/proc/self/fd")) == before


def test_lock_whose_file_the_holder_removes_meanwhile_is_tried_again(tmp_path, shim):
    removed = []

    def act(n, name, arguments, proceed):
        if name == "flock" and not removed:
            removed.append(n)
            (tmp_path / ".lock").unlink()
        return proceed()

    (tmp_path / ".lock").touch()
    shim(Shim(act))
    with Lock(tmp_path):
        assert names(tmp_path) == [".lock"]


@pytest.mark.parametrize("call", ["stat", "unlink", "close"])
def test_release_that_is_refused_is_said(tmp_path, shim, call):
    lock = Lock(tmp_path)
    lock.acquire()
    refused = []

    def act(n, name, arguments, proceed):
        if name == "close" or name != call:
            proceed()
        if name == call:
            refused.append(name)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return os.stat(tmp_path / ".lock") if name in ("stat", "lstat") else None

    shim(Shim(act))
    with pytest.raises(CheckpointError, match=r"cannot unlock .*\.lock: EIO"):
        lock.release()
    assert refused == [call]


def test_lock_is_won_by_one_of_many_that_find_it_stale(tmp_path):
    write_lock(tmp_path, other(pid=dead_pid()))
    read, write = os.pipe()

    def race():
        os.close(write)
        os.read(read, 1)  # until the pipe is closed
        try:
            Lock(tmp_path).acquire()
        except CheckpointError:
            os._exit(1)
        except BaseException:
            os._exit(2)
        os.write(won, b"x")
        signal.alarm(120)
        signal.pause()

    seen, won = os.pipe()
    children = []
    for _ in range(6):
        child = os.fork()
        if child == 0:
            import warnings

            warnings.simplefilter("ignore")
            race()
        children.append(child)
    os.close(read), os.close(write), os.close(won)
    winners = os.read(seen, 10)  # until one has won, or all have ended
    codes = sorted(os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(5))
    for child in children:
        try:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        except (ProcessLookupError, ChildProcessError):
            pass
    winners += os.read(seen, 10)
    os.close(seen)
    assert codes == [1] * 5
    assert winners == b"x"


def test_interrupt_while_the_lock_is_let_go_leaves_no_lock(tmp_path, monkeypatch):
    def interrupted(thread, timeout=None):
        raise KeyboardInterrupt

    lock = Lock(tmp_path)
    lock.acquire()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "join", interrupted)
        with pytest.raises(KeyboardInterrupt):
            lock.release()
    assert list(tmp_path.iterdir()) == []
    lock.acquire()
    lock.release()
