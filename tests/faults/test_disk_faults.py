"""Runs on disks that are full or broken: the error is said, training's bits and older checkpoints stay, all goes on."""

from __future__ import annotations

import contextlib
import copy
import errno
import io
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
from pathlib import Path

import pytest
import torch
from helpers import differences, halved, on
from torch import nn

from faults.forked import call_forked
from faults.shims import Shim, failing
from loopkit import Learner, every
from loopkit.checkpoint import disk, storage
from loopkit.data import TensorLoader
from loopkit.errors import CheckpointError, PluginError
from loopkit.plugins import History, SaveOptions, WeightAverage
from loopkit.plugins.checkpoint import Checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:.*is passed over:UserWarning")  # a manifest that could not be read
EPOCHS = 2
STEPS = 12
CHANGING = ("open", "write", "fsync", "truncate", "mkdir", "rename", "unlink", "rmdir")
NUMBERS = (errno.EIO, errno.EROFS, errno.ENOSPC)


def make(*plugins):
    """A learner, and its data: 6 steps an epoch."""
    torch.manual_seed(1)
    generator = torch.Generator().manual_seed(2)
    inputs, targets = torch.randn(24, 4, generator=generator), torch.randint(3, (24,), generator=generator)
    learner = Learner(
        nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.2), nn.Linear(5, 3)),
        nn.CrossEntropyLoss(),
        lambda params: torch.optim.Adam(params, lr=0.01),
        plugins=[WeightAverage(0.9), History(steps=True), *plugins],
        standard=False,
        seed=5,
    )
    return learner, TensorLoader(inputs, targets, batch_size=4, shuffle=True, seed=3)


def weights(learner):
    return {name: tensor.detach().clone() for name, tensor in learner.model.state_dict().items()}


@pytest.fixture(scope="module")
def reference():
    """The weights after each step of a run without checkpoints, and its state at the end."""
    after = {}
    log = on("step_end", lambda learner, **given: after.update({learner.progress.steps: weights(learner)}), "log")
    learner, data = make(log)
    after[0] = weights(learner)
    learner.fit(data, epochs=EPOCHS)
    return after, copy.deepcopy(learner.state_dict())


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """The directory of a run that ended after its first epoch."""
    directory = tmp_path_factory.mktemp("disk") / "run"
    learner, data = make(Checkpoint(directory, save=every(updates=4)))
    learner.fit(data, epochs=1)
    assert sorted(os.listdir(directory)) == ["000001-step-4", "000002-step-6"]
    return directory


def train(directory, *plugins, **options):
    """Run in this process: the error, the steps, whether threads are left, and the learner."""
    learner, data = make(Checkpoint(directory, save=every(updates=2), resume="auto", **options), *plugins)
    try:
        learner.fit(data, epochs=EPOCHS)
        error = None
    except CheckpointError as caught:
        error = caught
    return error, learner


def left(directory):
    """Hidden files: a lock, or what was being written or removed."""
    return [name for name in os.listdir(directory) if name.startswith(".")]


def check_training(reference, learner):
    assert not list(differences(reference[0][learner.progress.steps], weights(learner)))


def check_stands(directory):
    """What is listed is whole, and there is something."""
    found = storage.listing(directory)
    assert found.problems == {}
    assert found
    for manifest in found:
        storage.verify(manifest.path)


def check_goes_on(reference, directory):
    """A healthy disk: the run ends as if nothing had been, and nothing is left behind."""

    def child():
        error, learner = train(directory)
        assert error is None
        assert left(directory) == []
        return list(differences(reference[1], learner.state_dict()))

    assert call_forked(child) == []


def count_calls(directory, **options):
    """The names of the calls that the second epoch makes; those of files that it writes have "to write" behind them."""

    def child():
        made, written = [], set()

        def act(n, name, arguments, proceed):
            answer = proceed()
            if name == "open":
                change = written.add if arguments[1] & (os.O_WRONLY | os.O_RDWR) else written.discard
                change(answer)
            file = answer if name == "open" else arguments[0]
            made.append(f"{name} to write" if name in ("open", "close") and file in written else name)
            return answer

        disk.system = Shim(act)
        error, _ = train(directory, **options)
        assert error is None
        return made

    return call_forked(child)


def refuse_call(reference, directory, n, number, **options):
    """The n-th call is refused; returns the error or what was said, or nothing if the run could do without."""

    def child():
        disk.system = failing(n, number)
        lines = io.StringIO()
        with warnings.catch_warnings(record=True) as warned, contextlib.redirect_stderr(lines):
            warnings.simplefilter("always")
            error, learner = train(directory, **options)
        disk.system = disk.System()
        said = [str(each.message) for each in warned] if error is None else [str(error)]
        said += [line for line in lines.getvalue().splitlines() if line.startswith("loopkit: cannot ")]
        if error is None:
            assert learner.progress.steps == STEPS
        else:
            assert error.__cause__.errno == number
        if learner.progress.steps:  # else it was not loaded yet
            check_training(reference, learner)
        assert threading.active_count() == 1
        return "; ".join(said), left(directory)

    message, leftover = call_forked(child)
    check_stands(directory)
    if message:
        assert errno.errorcode[number] in message
        assert str(directory) in message
    if leftover:  # removing was what failed
        assert "cannot remove" in message or leftover == [".lock"], (message, leftover)
    check_goes_on(reference, directory)
    return message


@pytest.fixture(scope="module")
def calls(stopped, tmp_path_factory):
    """The calls of the second epoch, written by the loop or in the background."""
    found = {}
    for background in (False, True):
        directory = tmp_path_factory.mktemp("count") / "run"
        shutil.copytree(stopped, directory)
        found[background] = count_calls(directory, options=SaveOptions(background=background))
    return found


@pytest.mark.parametrize(("background", "part"), halved([False, True], range(2)))
def test_call_that_is_refused_is_said_and_the_run_goes_on(stopped, reference, calls, tmp_path, background, part):
    total = len(calls[background])
    failed = []
    for i in range(part, 10, 2):
        n = i * total // 10 + i % 7
        directory = tmp_path / str(n)
        shutil.copytree(stopped, directory)
        failed.append(refuse_call(reference, directory, n, NUMBERS[i % 3], options=SaveOptions(background=background)))
    assert any(failed)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("background", [False, True], ids=["sync", "background"])
@pytest.mark.parametrize("number", NUMBERS, ids=errno.errorcode.get)
def test_every_call_that_is_refused_is_said_and_the_run_goes_on(
    stopped, reference, calls, tmp_path, background, number
):
    unsaid = []
    for n, name in enumerate(calls[background]):
        directory = tmp_path / str(n)
        shutil.copytree(stopped, directory)
        if not refuse_call(reference, directory, n, number, options=SaveOptions(background=background)):
            unsaid.append(name)
        shutil.rmtree(directory)
    looking = {"lstat", "listdir", "stat", "open", "read", "close"}  # at older ones, which are kept if that fails
    assert set(unsaid) <= {"flush_soon", "unlink", "rmdir", *looking}, unsaid


@pytest.mark.parametrize(("background", "number"), halved([False, True], NUMBERS))
def test_disk_that_breaks_for_good_ends_the_run_with_its_cause(stopped, reference, tmp_path, number, background):
    directory = shutil.copytree(stopped, tmp_path / "run")

    def child():
        broken = []

        def act(n, name, arguments, proceed):
            if broken and name in CHANGING:
                raise OSError(number, os.strerror(number))
            return proceed()

        def break_it(learner, **given):
            if learner.progress.steps == 7:
                broken.append(True)

        disk.system = Shim(act)
        warnings.filterwarnings("ignore", "a save failed and is tried again")
        error, learner = train(
            directory, on("step_begin", break_it, "breaking"), options=SaveOptions(background=background, retries=1)
        )
        assert errno.errorcode[number] in str(error)
        assert str(directory) in str(error)
        assert error.__cause__.errno == number
        assert learner.result.reason == "error" or background  # else in fit_end
        assert learner.progress.steps < STEPS or background
        check_training(reference, learner)
        assert threading.active_count() == 1

    call_forked(child)
    check_stands(directory)
    check_goes_on(reference, directory)


def test_error_in_the_background_is_raised_at_the_next_edge(stopped, reference, tmp_path):
    directory = shutil.copytree(stopped, tmp_path / "run")

    def child():
        def act(n, name, arguments, proceed):
            if threading.current_thread().name == "loopkit-checkpoint" and name == "write":
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return proceed()

        def settle(**given):
            for thread in threading.enumerate():
                if thread.name == "loopkit-checkpoint":
                    thread.join()

        disk.system = Shim(act)
        saves = SaveOptions(background=True, on_error=False, at_end=False)
        error, learner = train(directory, on("step_begin", settle, "settling"), options=saves)
        assert "ENOSPC" in str(error)
        assert "Free some space" in str(error)
        assert learner.progress.steps == 9  # saved after 8
        check_training(reference, learner)
        assert left(directory) == []
        assert threading.active_count() == 1

    call_forked(child)
    check_stands(directory)
    check_goes_on(reference, directory)


@pytest.mark.parametrize("background", [False, True], ids=["sync", "background"])
def test_limit_on_the_size_of_files_ends_the_run_with_its_cause(stopped, reference, tmp_path, background):
    directory = shutil.copytree(stopped, tmp_path / "run")

    def child():
        def limit(learner, **given):
            if learner.progress.steps == 7:
                resource.setrlimit(resource.RLIMIT_FSIZE, (3_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))

        error, learner = train(
            directory, on("step_begin", limit, "limiting"), options=SaveOptions(background=background)
        )
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        assert "EFBIG" in str(error)
        assert "ulimit -f" in str(error)
        assert str(directory) in str(error)
        assert error.__cause__.errno == errno.EFBIG
        check_training(reference, learner)
        assert threading.active_count() == 1
        assert left(directory) == []

    call_forked(child)
    check_stands(directory)
    assert sorted(os.listdir(directory)) == ["000001-step-4", "000002-step-6"]
    check_goes_on(reference, directory)


def test_disk_that_is_full_from_the_start_is_said_before_the_first_step(tmp_path, reference):
    def child():
        resource.setrlimit(resource.RLIMIT_FSIZE, (3_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        error, learner = train(tmp_path / "run")
        assert "EFBIG" in str(error)
        assert learner.progress.steps == 0
        check_training(reference, learner)
        assert os.listdir(tmp_path / "run") == []

    call_forked(child)


def passing(number, call, times):
    """This call fails so many times, in a save, and the disk is well again."""
    failed = []

    def act(n, name, arguments, proceed):
        saving = any("storage.py" in frame.filename and frame.name == "drafted" for frame in traceback.extract_stack())
        if name == call and saving and len(failed) < times:
            failed.append(name)
            raise OSError(number, os.strerror(number))
        return proceed()

    return Shim(act), failed


def settle(**given):
    """Wait for what is written in the background, so that it is known which save fails."""
    for thread in threading.enumerate():
        if thread.name == "loopkit-checkpoint":
            thread.join()


def saved_steps(directory):
    return [manifest.about["progress"]["steps"] for manifest in storage.listing(directory)]


def train_with(system, directory, **options):
    """A run from its begin, of 12 steps; returns its error and what it warned of."""
    learner, data = make(
        Checkpoint(directory, save=every(updates=2), keep=9, options=SaveOptions(**options)),
        on("step_end", settle, "z"),
    )
    disk.system = system
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            learner.fit(data, epochs=EPOCHS)
        error = None
    except CheckpointError as caught:
        error = caught
    finally:
        disk.system = disk.System()
    return error, [str(each.message) for each in warned]


@pytest.mark.parametrize("background", [False, True], ids=["sync", "background"])
@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ETIMEDOUT], ids=errno.errorcode.get)
@pytest.mark.parametrize("call", ["open", "fsync", "rename", "write", "mkdir"])
def test_save_that_fails_once_is_warned_of_and_tried_again_at_the_next(tmp_path, call, number, background):
    system, failed = passing(number, call, 1)
    error, warned = train_with(system, tmp_path, background=background)
    assert failed == [call]
    assert error is None
    (text,) = warned
    assert re.match(rf"a save failed and is tried again \(1 of 2 times\): .*{errno.errorcode[number]}", text)
    assert saved_steps(tmp_path) == [12, 10, 8, 6, 4]
    check_stands(tmp_path)
    assert left(tmp_path) == []


@pytest.mark.parametrize("background", [False, True], ids=["sync", "background"])
@pytest.mark.parametrize(("retries", "times"), [(0, 1), (1, 2), (2, 3)])
def test_save_that_fails_too_often_in_a_row_raises(tmp_path, retries, times, background):
    system, failed = passing(errno.EIO, "fsync", 99)
    error, warned = train_with(system, tmp_path, background=background, retries=retries, at_end=False)
    assert "EIO" in str(error)
    assert (len(warned), len(failed)) == (retries, times)


def test_failures_that_are_not_in_a_row_do_not_end_a_run(tmp_path):
    count = []

    def act(n, name, arguments, proceed):
        if name == "rename" and "step" in arguments[1].name:
            count.append(n)
            if len(count) % 2:
                raise OSError(errno.EIO, "no")
        return proceed()

    error, warned = train_with(Shim(act), tmp_path, retries=1)
    assert error is None
    assert len(warned) == 4
    assert saved_steps(tmp_path) == [12, 8, 4]


@pytest.mark.parametrize("background", [False, True], ids=["sync", "background"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM])
def test_error_that_lasts_raises_at_the_first_save(tmp_path, number, background):
    system, failed = passing(number, "fsync", 1)
    error, warned = train_with(system, tmp_path, background=background)
    assert errno.errorcode[number] in str(error)
    assert (warned, failed) == ([], ["fsync"])


@pytest.mark.parametrize("call", ["open", "fsync", "rename"])
def test_save_of_a_signal_that_fails_once_is_made_again_at_once(tmp_path, call):
    def send(learner, **given):
        if learner.progress.steps == 3:
            disk.system, _ = passing(errno.EIO, call, 1)
            os.kill(os.getpid(), signal.SIGTERM)

    learner, data = make(Checkpoint(tmp_path, save=every(updates=100)), on("step_begin", send, "sending"))
    try:
        with pytest.warns(UserWarning, match="tried again"), pytest.raises(SystemExit):
            learner.fit(data, epochs=EPOCHS)
    finally:
        disk.system = disk.System()
    assert saved_steps(tmp_path) == [4]


def test_old_checkpoint_stays_until_a_new_one_is_whole(tmp_path):
    seen = []

    def act(n, name, arguments, proceed):
        if name == "rename" and arguments[1].name.endswith("step-8"):
            seen.append(saved_steps(tmp_path))
            raise OSError(errno.EIO, "no")
        return proceed()

    learner, data = make(Checkpoint(tmp_path, save=every(updates=2), keep=2))
    disk.system = Shim(act)
    try:
        with pytest.warns(UserWarning, match="tried again"):
            learner.fit(data, epochs=EPOCHS)
    finally:
        disk.system = disk.System()
    assert seen == [[6, 4]]
    assert saved_steps(tmp_path) == [12, 10]


@pytest.mark.parametrize("given", [-1, True, 1.5, "2", None])
def test_retries_that_are_no_count_are_refused(given):
    with pytest.raises(PluginError, match="retries is"):
        SaveOptions(retries=given)


@pytest.mark.filterwarnings("error::UserWarning")
@pytest.mark.parametrize("save", [every(updates=1), every(updates=3), [every(updates=2), every(epochs=1)]], ids=repr)
def test_background_that_is_slower_than_the_interval_warns_once(tmp_path, save):
    def act(n, name, arguments, proceed):
        if name == "fsync" and threading.current_thread().name == "loopkit-checkpoint":
            time.sleep(0.1)
        return proceed()

    learner, data = make(
        Checkpoint(tmp_path, save=save, options=SaveOptions(background=True)),
        on("step_end", lambda **_: time.sleep(0.03), "slow_step"),
    )
    disk.system = Shim(act)
    try:
        with pytest.warns(UserWarning, match="checkpoints come less often than") as warned:
            learner.fit(data, epochs=EPOCHS)
    finally:
        disk.system = disk.System()
    assert len(warned) == 1


SCRIPT = """
import resource, sys
import torch
from torch import nn
from loopkit import Learner, every, hookimpl
from loopkit.plugins import Checkpoint, SaveOptions

class Limit:
    name = "limit"

    @hookimpl
    def step_end(self, learner):
        resource.setrlimit(resource.RLIMIT_FSIZE, (3_000, 3_000))

options = SaveOptions(background=sys.argv[2] == "background")
learner = Learner(
    nn.Linear(2, 1), nn.MSELoss(), lambda p: torch.optim.SGD(p, lr=0.1), standard=False,
    plugins=[Limit(), Checkpoint(sys.argv[1], save=every(updates=1_000), options=options)],
)
learner.fit([(torch.ones(4, 2), torch.ones(4, 1))] * 3, epochs=1)
print("went on")
"""


@pytest.mark.parametrize(
    "kind", ["sync", pytest.param("background", marks=pytest.mark.slow)]
)  # each imports torch anew
def test_program_whose_last_save_fails_does_not_exit_with_0(tmp_path, kind):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    root = str(Path(__file__).resolve().parents[2])
    ended = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "run"), kind],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": root},
    )
    assert ended.returncode == 1, ended.stderr
    assert "CheckpointError: cannot write" in ended.stderr
    assert "EFBIG" in ended.stderr
    assert str(tmp_path / "run") in ended.stderr
    assert "went on" not in ended.stdout
    assert os.listdir(tmp_path / "run") == []


def test_full_disk_ends_the_run_with_its_cause(stopped, reference, tmp_path):
    place = tmp_path / "small"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(place)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small file system is not permitted")
    try:
        directory = shutil.copytree(stopped, place / "run")

        def fill(learner, **given):
            if learner.progress.steps == 7:
                free = os.statvfs(place).f_bavail * 4096
                (place / "filler").write_bytes(bytes(free - 8192))

        def child():
            error, learner = train(directory, on("step_begin", fill, "filling"))
            assert "ENOSPC" in str(error)
            assert str(directory) in str(error)
            check_training(reference, learner)
            assert left(directory) == []

        call_forked(child)
        check_stands(directory)
        (place / "filler").unlink()
        check_goes_on(reference, directory)
    finally:
        subprocess.run(["umount", str(place)], check=True)
