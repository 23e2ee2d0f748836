"""The watch: who failed is named on every rank, and no process hangs for ever."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from distributed.processes import free_port, run
from loopkit import hookimpl
from loopkit.distributed import World, join, reports, watch
from loopkit.distributed.watch import Watch, hook_of, is_collective_error
from loopkit.errors import PeerError

pytestmark = pytest.mark.clock


def trained(rank, happens, steps=4, timeout=300.0):
    """A loop with a collective in each step; ``happens(rank, step)`` comes before it. Returns what is blamed."""
    joined = join("gloo", timeout=timeout)
    at = ["before step 0"]
    watching = Watch(joined, lambda: at[0])
    watching.start()
    blamed = None
    try:
        for step in range(steps):
            at[0] = f"step {step}"
            stops = happens(rank, step)
            if stops:
                break
            dist.all_reduce(torch.ones(1))
    except Exception as error:
        blamed = watching.blame(error)
        watching.fail(blamed or error)
        if blamed is None:
            raise
        assert isinstance(blamed, PeerError)
        assert joined.broken
        return str(blamed)
    finally:
        watching.stop()
        watch.leave()
    return None


def killed(rank, step):
    if rank == 1 and step == 2:
        time.sleep(2)  # the others are told of the step
        os.kill(os.getpid(), signal.SIGKILL)


def raising(rank, step):
    if rank == 1 and step == 2:
        raise ValueError("the data is bad")


def sleeping(rank, step):
    if rank == 1 and step == 2:
        time.sleep(60)


def ending(rank, step):
    return rank == 1 and step == 2


def nothing(rank, step):
    return False


def test_no_failure_is_no_error():
    assert run(trained, 2, nothing) == [None, None]


def test_a_killed_process_is_named():
    survivor, dead = run(trained, 2, killed, check=False)
    assert dead.code == -signal.SIGKILL
    assert re.match(r"rank 0: rank 1 is gone; it was last heard of \d+\.\d s ago \(step 2\)", survivor.value)


def killed_zero(rank, step):
    if rank == 0 and step == 2:
        time.sleep(2)
        os.kill(os.getpid(), signal.SIGKILL)


def killed_later(rank, step):
    if rank == 1 and step == 7:
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_process_that_could_not_tell_its_step_is_named_with_that_of_the_others():
    survivor, _ = run(trained, 2, killed_later, 9, check=False)
    assert re.search(r"rank 1 is gone; .* ago \((before )?step \d\), and this one is step 7\. ", survivor.value)


def test_a_killed_rank_zero_is_named():
    dead, survivor = run(trained, 2, killed_zero, check=False)
    assert dead.code == -signal.SIGKILL
    assert re.match(
        r"rank 1: rank 0(, which kept the store,)? is gone; it was last heard of .* \(step 2\)", survivor.value
    )


def test_a_killed_rank_zero_is_named_where_the_launcher_keeps_the_store():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    kept = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_PORT": str(store.port)}
    dead, *survivors = run(trained, 3, killed_zero, env=kept, check=False)
    assert dead.code == -signal.SIGKILL
    for rank, survivor in enumerate(survivors, 1):
        assert re.match(rf"rank {rank}: rank 0 is gone; it was last heard of [01]\.\d s ago \(step 2\)", survivor.value)


def test_what_a_process_raised_is_told_to_the_others():
    survivor, failed = run(trained, 2, raising, check=False)
    assert failed.code == 1
    assert failed.error.endswith("ValueError: the data is bad\n")
    assert survivor.value == "rank 0: rank 1 failed (step 2): ValueError: the data is bad"


def test_what_rank_zero_raised_is_told_to_the_others():
    def other(rank, step):
        raising(1 - rank, step)

    failed, survivor = run(trained, 2, other, check=False)
    assert failed.error.endswith("ValueError: the data is bad\n")
    assert survivor.value == "rank 1: rank 0 failed (step 2): ValueError: the data is bad"


def test_a_hanging_process_is_named_within_the_timeout(tmp_path):
    waiting, _ = run(trained, 2, sleeping, 4, 5.0, env={"TORCH_FR_DUMP_TEMP_FILE": f"{tmp_path}/rank_"}, check=False)
    text = waiting.value
    assert text.startswith("rank 0: rank 1 does not take part in the call that the others wait for: for ")
    assert re.search(r"rank 0: step 2, line \d+ of distributed_c10d.py, all_reduce; rank 1: step 2, line", text)
    assert re.search(r"of test_watch.py, sleeping\)", text)
    assert text.endswith(f". The last exchanges of rank 0 are in {tmp_path}/rank_0.json")
    last = json.loads((tmp_path / "rank_0.json").read_text())["entries"][-1]
    assert (last["profiling_name"], last["input_sizes"]) == ("gloo:all_reduce", [[1]])


def test_a_process_that_ends_early_is_named():
    waiting, ended = run(trained, 2, ending, check=False)
    assert ended.code == 0
    assert waiting.value.startswith("rank 0: rank 1 came to its end before this one (step 2; this one: step 2)")


def test_the_first_cause_is_named_by_all_of_four():
    def killed_third(rank, step):
        if step == 1:
            time.sleep(1)
            killed(1 if rank == 2 else 0, 2)

    outcomes = run(trained, 4, killed_third, check=False)
    for rank in (0, 1, 3):
        assert "rank 2 is gone" in outcomes[rank].value, outcomes[rank]


def heard(watching, joined):
    """Wait until each process has heard of the others."""
    while len(watching.reports.heard) < joined.size - 1:
        time.sleep(0.01)
    joined.gather(0)


def hung(rank, failing):
    """Rank 1 fails and lives as long as rank 0, which waits for something that never comes."""
    joined = join("gloo", timeout=300)
    watching = Watch(joined, lambda: "in the loop")
    watching.start()
    heard(watching, joined)
    if rank == 0:
        threading.Event().wait()
    failing(watching)
    with contextlib.suppress(dist.DistError):
        while True:
            joined.store.check(["never"])  # rank 0 keeps the store
            time.sleep(0.05)


def test_a_process_that_hangs_ends_when_another_one_failed():
    def failing(watching):
        watching.fail(ValueError("the data is bad"))

    waiting, _ = run(hung, 2, failing, check=False)
    assert waiting.code == 1
    assert re.search(
        r"loopkit: rank 0 has hung for \d+\.\d s \(in the loop\) and ends now, because rank 1 failed \(in the loop\): "
        r"ValueError: the data is bad\. The last exchanges of rank 0 are in .*rank_0\.json\n",
        waiting.output,
    )


def test_a_process_that_hangs_ends_when_another_one_was_killed():
    def failing(watching):
        os.kill(os.getpid(), signal.SIGKILL)

    waiting, _ = run(hung, 2, failing, check=False)
    assert waiting.code == 1
    assert "ends now, because rank 1 is gone; it was last heard of" in waiting.output


def test_a_process_that_goes_on_is_left_alone():
    def busy(rank):
        joined = join("gloo", timeout=60)
        at = [""]
        watching = Watch(joined, lambda: at[0])
        watching.start()
        joined.gather(0)
        if rank == 1:
            watching.fail(ValueError("the data is bad"))
        watch.GRACE = 2.0
        for step in range(40):
            at[0] = f"step {step}"
            time.sleep(0.1)
        watching.stop()
        return "went on"

    assert run(busy, 2) == ["went on", "went on"]


def test_a_process_that_computes_is_left_alone():
    def computing(rank):
        joined = join("gloo", timeout=60)
        watching = Watch(joined, lambda: "in the loop")
        watching.start()
        joined.gather(0)
        if rank == 1:
            watching.fail(ValueError("the data is bad"))
            time.sleep(4.5)
        else:
            watch.GRACE = 2.0
            until = time.monotonic() + 4.5
            matrix = torch.ones(300, 300)
            while time.monotonic() < until:
                matrix.mm(matrix)
        watching.stop()
        return "went on"

    assert run(computing, 2) == ["went on", "went on"]


def test_two_watches_one_after_the_other_do_not_mix():
    def two(rank):
        assert trained(rank, nothing) is None
        joined = join()
        second = Watch(joined, lambda: "second")
        second.start()
        heard(second, joined)
        states = {other: heard.report.state for other, heard in second.reports.heard.items()}
        joined.gather(0)
        second.stop()
        return states

    assert run(two, 2) == [{1: "running"}, {0: "running"}]


def ringing(interval=20.0):
    """A watch that reports seldom, once it waits for its bell."""
    reports.FEW = 1
    joined = join("gloo", timeout=60)
    watching = Watch(joined, lambda: "in the loop", interval=interval)
    watching.start()
    while not watching.reports.bell:
        time.sleep(0.01)
    joined.gather(0)
    return joined, watching


def threads():
    """The names of the threads of watches."""
    return sorted(each.name for each in threading.enumerate() if each.name.startswith("loopkit-"))


def test_an_error_is_named_when_the_bell_rings_and_no_bell_is_left():
    def rung(rank):
        seconds = []
        for _ in range(2):
            joined, watching = ringing()
            assert threads() == ["loopkit-bell", "loopkit-watch"]
            began = time.monotonic()
            if rank == 2:
                watching.fail(ValueError("the data is bad"))
            while rank != 2 and watching.reports.certain(60.0) is None:
                time.sleep(0.01)
            seconds.append(time.monotonic() - began)
            if rank != 2:
                assert watching.reports.certain(60.0)[1].report.error == "ValueError: the data is bad"
            joined.gather(0)
            watching.stop()
            assert threads() == []
        return max(seconds)

    assert max(run(rung, 5)) < 5.0  # rank 0 would look after 10 seconds, ranks 1, 3 and 4 after 20


def test_a_bell_ends_with_the_store():
    def left(rank):
        _, watching = ringing(interval=0.5)
        if rank == 0:
            os._exit(0)
        while "loopkit-bell" in threads():
            time.sleep(0.01)
        told = watching.blame(dist.DistNetworkError("the store is gone"))
        watching.stop()
        return str(told), threads()

    _, (told, threads_left) = (outcome.value for outcome in run(left, 2, check=False))
    assert "rank 0, which kept the store, is gone" in told
    assert threads_left == []


SCRIPT = """
import time
from loopkit.distributed import join, reports
from loopkit.distributed.watch import Watch
reports.FEW = 1
joined = join("gloo", timeout=60)
watching = Watch(joined, lambda: "in the loop", interval=20.0)
watching.start()
while not watching.reports.bell:
    time.sleep(0.01)
joined.gather(0)
if joined.rank == 2:
    watching.fail(ValueError("the data is bad"))
    raise SystemExit(3)
while (found := watching.reports.certain(60.0)) is None:
    time.sleep(0.01)
print(found[0], found[1].report.error, flush=True)
"""


@pytest.mark.slow
def test_interpreters_that_end_while_they_wait_for_their_bells_end_as_they_should():
    port, ends = str(free_port()), []
    started = [  # not forked: it is the end of the interpreter that matters, which costs three imports of torch
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"RANK": str(rank), "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port},
        )
        for rank in range(3)
    ]
    try:
        ends = [(each.communicate(timeout=90)[0], each.returncode) for each in started]
    finally:
        for each in started:
            each.kill()
            each.wait()
    assert ends == [("2 ValueError: the data is bad\n", 0)] * 2 + [("", 3)]


def test_a_process_alone_watches_nothing():
    alone = Watch(World(), lambda: "")
    before = threading.active_count()
    alone.start()
    assert threading.active_count() == before
    assert alone.blame(RuntimeError("gloo/transport: Connection closed by peer")) is None
    alone.fail(ValueError())
    alone.stop()


def test_errors_of_the_user_are_not_blamed_on_others():
    for error in (RuntimeError("CUDA error: out of memory"), ValueError("x"), KeyError("gloo/transport"), OSError()):
        assert not is_collective_error(error)
    with pytest.raises(RuntimeError) as caught:
        torch.ones(2) @ torch.ones(3)
    assert not is_collective_error(caught.value)


def test_errors_of_collectives_are_recognised():
    def closed(rank):
        joined = join("gloo", timeout=60)
        joined.store.set_timeout(timedelta(seconds=1))
        if rank == 1:
            os._exit(0)
        errors = []
        tensor = torch.ones(1)
        for call in (
            lambda: dist.all_reduce(tensor),
            lambda: dist.broadcast(tensor, 1),
            lambda: dist.barrier(),
            lambda: joined.gather(1),
            lambda: joined.highest(1.0),
            lambda: joined.store.get("never"),
        ):
            try:
                call()
            except Exception as error:
                errors.append((is_collective_error(error), str(error)))
        return errors

    def late(rank):
        join("gloo", timeout=3)
        if rank == 1:
            time.sleep(6)
            return []
        with pytest.raises(RuntimeError) as caught:
            dist.all_reduce(torch.ones(1))
        return [(is_collective_error(caught.value), str(caught.value))]

    errors = run(closed, 2, check=False)[0].value
    assert len(errors) == 6
    assert all(found for found, _ in errors), errors
    assert run(late, 2)[0][0][0]


class Sleeper:
    @hookimpl
    def step_end(self):
        self.inside.set()
        self.release.wait(60)

    def __init__(self):
        self.inside, self.release = threading.Event(), threading.Event()


class Caller:
    def __init__(self, inner):
        self.inner = inner

    @hookimpl
    def epoch_end(self):
        self.inner.step_end()


def test_hook_of_names_the_innermost_hook():
    inner = Sleeper()
    outer = Caller(inner)
    thread = threading.Thread(target=outer.epoch_end)
    thread.start()
    try:
        assert inner.inside.wait(60)
        assert hook_of(thread.ident, {"sleeper": inner, "caller": outer}) == "in step_end of plugin 'sleeper'"
        assert hook_of(thread.ident, {"caller": outer}) == "in epoch_end of plugin 'caller'"
        assert hook_of(thread.ident, {"caller": Caller(inner)}) == ""
    finally:
        inner.release.set()
        thread.join(60)
    assert hook_of(thread.ident, {"sleeper": inner}) == ""
    assert "step_end" not in sys._current_frames()
