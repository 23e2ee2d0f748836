"""The world: who the processes are, how they meet, and what is said when they cannot."""

from __future__ import annotations

import os
import re
import socket
import time

import pytest
import torch
import torch.distributed as dist

from distributed.processes import free_port, run
from loopkit import LoopkitError
from loopkit.base import world
from loopkit.distributed import join
from loopkit.errors import WorldError

LAUNCHER = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch):
    for name in LAUNCHER:
        monkeypatch.delenv(name, raising=False)
    yield
    assert world._current is None
    assert not dist.is_initialized()


def launched(monkeypatch, **changes):
    """Set what a launcher sets."""
    values = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), **changes}
    for name, value in values.items():
        monkeypatch.setenv(name, value)


def tried(rank, backend="gloo", timeout=2.0):
    """What joining says: the error's class, text and cause."""
    try:
        return join(backend, timeout=timeout).size
    except LoopkitError as error:
        return type(error).__name__, str(error), type(error.__cause__).__name__


def test_join_without_a_launcher_is_alone():
    alone = join()
    assert (alone.rank, alone.size, alone.store, alone.broken) == (0, 1, None, False)
    assert alone.gather({"a": 1}) == [{"a": 1}]
    assert alone.share("x") == "x"
    assert alone.highest(1.0, 2) == [1.0, 2]
    assert alone.total(1.5) == [1.5]


def test_join_with_one_process_is_alone(monkeypatch):
    launched(monkeypatch, WORLD_SIZE="1")
    assert join().size == 1


def test_join_alone_first_can_join_others_later():
    def later(rank):
        os.environ.pop("RANK" if rank else "MASTER_PORT")
        given = {name: os.environ.pop(name) for name in LAUNCHER if name in os.environ}
        alone = join().size
        os.environ.update(given, RANK=str(rank), MASTER_PORT=os.environ["PORT"])
        return alone, join("gloo", timeout=60).size

    assert run(later, 2, env={"PORT": str(free_port())}) == [(1, 2), (1, 2)]


def test_all_say_the_same_of_each_other():
    def told(rank):
        joined = join("gloo", timeout=60)
        highest = joined.highest(rank, -rank)
        total = joined.total(rank, 2.0**60 * rank)
        return joined.gather({"rank": rank}), joined.share(["from", rank]), highest, total

    first, second = run(told, 2)
    assert first == second
    assert first == ([{"rank": 0}, {"rank": 1}], ["from", 0], [1.0, 0.0], [1.0, 2.0**60])


def test_join_twice_gives_the_same_world():
    def twice(rank):
        return join("gloo", timeout=60) is join("gloo", timeout=1)

    assert run(twice, 2) == [True, True]


def test_join_uses_a_process_group_that_is_there():
    def own(rank):
        dist.init_process_group("gloo")
        joined = join("gloo", timeout=60)
        joined.store.set(f"said-{rank}", "hello")
        return joined.rank, joined.size, joined.gather(rank), dist.get_world_size()

    assert run(own, 2) == [(0, 2, [0, 1], 2), (1, 2, [0, 1], 2)]


def test_join_follows_a_process_group_made_after_it():
    def again(rank):
        joined = join("gloo", timeout=60)
        dist.destroy_process_group()
        os.environ["MASTER_PORT"] = os.environ["SECOND_PORT"]
        dist.init_process_group("gloo")
        return join("gloo", timeout=60) is joined, join("gloo").gather(rank), joined.open

    assert run(again, 2, env={"SECOND_PORT": str(free_port())}) == [(False, [0, 1], False)] * 2


def test_a_destroyed_process_group_is_an_error_instead_of_silence():
    def destroyed(rank):
        joined = join("gloo", timeout=60)
        dist.destroy_process_group()
        said = []
        for call in (lambda: joined.highest(1.0), lambda: joined.gather(1), lambda: joined.share(1), join):
            with pytest.raises(WorldError, match=f"rank {rank}: the process group was destroyed") as caught:
                call()
            said.append(str(caught.value))
        return len(said)

    assert run(destroyed, 2) == [4, 4]


def test_a_broken_world_sends_nothing():
    def broken(rank):
        joined = join("gloo", timeout=60)
        joined.broken = True
        with pytest.raises(WorldError, match="is gone, so they can no longer be reached"):
            joined.highest(1.0)

    run(broken, 2)


@pytest.mark.parametrize("missing", LAUNCHER)
def test_an_incomplete_environment_is_refused(monkeypatch, missing):
    launched(monkeypatch)
    monkeypatch.delenv(missing)
    with pytest.raises(WorldError, match=rf"but not {missing}: start the script by torchrun"):
        join()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"RANK": "2"}, "RANK=2 and WORLD_SIZE=2: ranks are 0 to 1"),
        ({"RANK": "one"}, "RANK='one', which is no number of at least 0"),
        ({"WORLD_SIZE": "-1"}, "WORLD_SIZE='-1', which is no number of at least 1"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT='70000', which is no number from 1 to 65535"),
    ],
)
def test_a_wrong_environment_is_refused(monkeypatch, changes, message):
    launched(monkeypatch, **changes)
    with pytest.raises(WorldError, match=re.escape(message)):
        join()


def test_a_timeout_that_is_none_is_refused():
    with pytest.raises(WorldError, match=r"timeout=0\): it counts seconds"):
        join(timeout=0)


def test_a_backend_that_is_missing_is_refused(monkeypatch):
    launched(monkeypatch)
    with pytest.raises(WorldError, match="the backend 'mpi' is not in this build of torch"):
        join("mpi")


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is there")
@pytest.mark.skipif(not dist.is_nccl_available(), reason="this build of torch has no NCCL")
def test_nccl_without_cuda_is_refused(monkeypatch):
    launched(monkeypatch)
    with pytest.raises(WorldError, match="the backend 'nccl' needs CUDA, and there is none here"):
        join("cpu:gloo,cuda:nccl")


def test_a_taken_port_is_named():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen(1)
        port = str(other.getsockname()[1])
        [(kind, text, cause)] = run(tried, 1, env={"WORLD_SIZE": "2", "MASTER_PORT": port})
    assert (kind, cause) == ("WorldError", "DistNetworkError")
    assert text.startswith(f"rank 0 of 2, 127.0.0.1:{port}: the port is taken")


def test_peers_that_never_come_are_an_error_in_time():
    [(kind, text, cause)] = run(tried, 1, env={"WORLD_SIZE": "2"})
    assert (kind, cause) == ("WorldError", "DistStoreError")
    assert "rank 0 of 2, 127.0.0.1:" in text
    assert "the others did not come, or left again" in text


def test_a_rank_zero_that_never_comes_is_an_error_in_time():
    [(kind, text, cause)] = run(tried, 1, env={"WORLD_SIZE": "2", "RANK": "1"})
    assert (kind, cause) == ("WorldError", "DistNetworkError")
    assert "no answer from there" in text
    assert "Did rank 0 start" in text


def test_a_peer_that_leaves_while_they_meet_is_an_error_in_time():
    def leaving(rank):
        if rank == 1:
            dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), 2, False)
            os._exit(3)
        return tried(rank)

    met, left = run(leaving, 2, check=False)
    assert left.code == 3
    assert met.value[0] == "WorldError"
    assert "the others did not come, or left again" in met.value[1]


def test_two_runs_on_one_port_are_refused(tmp_path):
    def wait_for(*names):
        while not all((tmp_path / name).exists() for name in names):
            time.sleep(0.01)

    def second(rank):
        if rank == 2:
            wait_for("0", "1")
            os.environ["RANK"] = "1"
            said = tried(rank, timeout=60)
            (tmp_path / "refused").touch()
            return said
        joined = join("gloo", timeout=60)
        (tmp_path / str(rank)).touch()
        wait_for("refused")
        return joined.gather(rank)

    first, other, (kind, text, _) = run(second, 3, env={"WORLD_SIZE": "2"})
    assert first == other == [0, 1]
    assert kind == "WorldError"
    assert "another process with this rank is there already" in text


def test_each_restart_meets_under_a_name_of_its_own():
    def restarted(rank):
        store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), None, rank == 0)  # a launcher's own
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        seen = []
        for restart in range(2):
            os.environ["TORCHELASTIC_RESTART_COUNT"] = str(restart)
            joined = join("gloo", timeout=60)
            seen.append(joined.store.check(["mark"]))
            joined.gather(0)
            joined.store.set("mark", "old")
            joined.gather(0)
            dist.destroy_process_group()
            world._current = None
        keys = [store.check([f"run/restart-{restart}/default_pg/0//loopkit/mark"]) for restart in range(2)]
        store.add("left", 1)
        while rank == 0 and store.add("left", 0) < 2:
            time.sleep(0.05)
        return seen, keys

    assert all(seen == [False, False] for seen, _ in run(restarted, 2, env={"TORCHELASTIC_RUN_ID": "run"}))
