"""ShardedCheckpoint: processes write their parts, and others go on with them."""

from __future__ import annotations

import errno
import functools
import os
import re
import shutil
import signal
import warnings
from contextlib import nullcontext

import pytest
import torch
from distributed.processes import run
from small import LIMIT, adam, differing, gathered, loader, make, net, whole
from torch import nn

from loopkit import Learner, ValidationPhase, checkpoint, every, hookimpl
from loopkit.checkpoint import disk
from loopkit.checkpoint.storage import listing, verify
from loopkit.errors import CheckpointError, CorruptCheckpointError, PluginError, StateError
from loopkit.plugins import DDP, Checkpoint, Freeze, SaveOptions, WeightAverage
from loopkit_sharded import FSDP, ShardedCheckpoint, load, save, writer

BACKGROUND = SaveOptions(background=True)


def sgd(params):
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def trains(rank, processes, directory, epochs, options):
    learner = make(directory=directory, resume="auto", keep=9, **options)
    learner.fit(loader(processes), epochs=epochs)
    return whole(learner)


@pytest.mark.parametrize("options", [{}, pytest.param({"options": BACKGROUND}, marks=pytest.mark.slow)])
def test_resumed_run_is_bitwise_the_one_that_was_not_interrupted(tmp_path, options):
    options = {"save": every(updates=3), **options}
    straight = run(trains, 2, 2, tmp_path, 3, options, timeout=LIMIT)[0]
    for each in listing(tmp_path):
        if each.about["progress"]["steps"] > 9:  # of 15; an epoch has 5
            shutil.rmtree(each.path)
    assert [name for name in sorted(verify(listing(tmp_path)[0].path).files) if name.startswith("part")] == [
        "part-0000-state.safetensors",
        "part-0000-weights.safetensors",
        "part-0001-state.safetensors",
        "part-0001-weights.safetensors",
        "parts.json",
    ]
    resumed = run(trains, 2, 2, tmp_path, 3, options, timeout=LIMIT)[0]
    assert differing(straight, resumed) == []
    assert listing(tmp_path)[0].about["progress"]["steps"] == 15


def saves_weights(rank, processes, directory, sync):
    average, saver = WeightAverage(0.5), Checkpoint(directory, weights_only=True)
    plugins = [FSDP(wrap=nn.Linear, timeout=LIMIT), average] if sync == "fsdp" else [DDP(timeout=LIMIT), average]
    learner = Learner(net(), nn.MSELoss(), adam, plugins=[*plugins, saver], standard=False)
    learner.fit(loader(processes), epochs=1)
    own, averaged = whole(learner), average.model_state(learner)
    return {name.removeprefix("model "): p for name, p in own.items() if name.startswith("model ")}, averaged


@pytest.mark.slow
@pytest.mark.parametrize("sync", ["ddp", "fsdp"])
def test_weights_alone_are_whole_in_files_of_rank_0(sync, tmp_path):
    for own, averaged in run(saves_weights, 2, 2, tmp_path, sync, timeout=LIMIT):
        (newest,) = listing(tmp_path)
        for file, expected in (("model.safetensors", own), ("model.weight_average.safetensors", averaged)):
            fresh = net(2)
            checkpoint.load_weights(fresh, newest.path / file)
            assert differing(dict(fresh.state_dict()), expected) == []
        assert differing(own, averaged)


def test_weights_alone_are_refused_where_each_process_writes_a_part(tmp_path):
    with pytest.raises(PluginError, match="ShardedCheckpoint cannot resume from weights_only=True"):
        ShardedCheckpoint(tmp_path, weights_only=True)


# Any number of processes


def goes_on(rank, processes, source, target, epochs, optimizer):
    learner = make(optimizer=optimizer)
    if source is not None:
        load(learner, source)
    if epochs:
        learner.fit(loader(processes), epochs=epochs)
    save(learner, target)
    return whole(learner)


def chain(directory, trained, optimizer):
    """What is held after each of 4, 2, 1 and 4 processes, each of which goes on from the one before."""
    held, source = [], None
    for index, (processes, epochs) in enumerate(zip((4, 2, 1, 4), trained, strict=True)):
        target = directory / str(index)
        args = processes, source, target, epochs, optimizer
        held.append(run(goes_on, processes, *args, timeout=LIMIT)[0] if processes > 1 else goes_on(0, *args))
        source = target
    return held


@pytest.mark.parametrize("optimizer", [adam, pytest.param(sgd, marks=pytest.mark.slow)])
def test_four_two_one_and_four_processes_hold_the_same_bits(tmp_path, optimizer):
    first, *others = chain(tmp_path, (1, 0, 0, 0), optimizer)
    assert [differing(first, other) for other in others] == [[], [], []]


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [adam, sgd])
def test_four_two_one_and_four_processes_train_as_one(tmp_path, optimizer):
    one = make(optimizer=optimizer)
    one.fit(loader(), epochs=4)
    for name, value in chain(tmp_path, (1, 1, 1, 1), optimizer)[-1].items():
        torch.testing.assert_close(value, whole(one)[name], rtol=0, atol=1e-6)  # sums in another order


# A save that does not come to its end


class Dies(disk.System):
    """The process is killed at one of the calls into the system, by its number or name, or the call fails."""

    def __init__(self, at, act):
        self.at, self.act, self.count = at, act, 0

    def before(self, name):
        self.count += 1
        if self.at in (name, self.count):
            self.act()

    def after(self, name):
        if self.at == f"after {name}":
            self.act()


def _counted(name):
    def call(self, *args):
        self.before(name)
        done = getattr(disk.System, name)(self, *args)
        self.after(name)
        return done

    return call


CALLS = ("open", "write", "fsync", "close", "listdir", "mkdir", "rename")
for each in CALLS:
    setattr(Dies, each, _counted(each))


def full():
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def killed():
    os.kill(os.getpid(), signal.SIGKILL)


def saves_twice(rank, directory, victim, at, act):
    learner = make()
    learner.fit(loader(2), epochs=1)
    save(learner, directory)
    learner.fit(loader(2), epochs=1)
    if rank == victim:
        disk.system = Dies(at, act)
    save(learner, directory)
    return disk.system.count if rank == victim else None


PLANS = [
    (writer._Planner, "set_up_planner"),
    (writer.PartsWriter, "prepare_local_plan"),
    (writer._Planner, "finish_plan"),
    (writer.PartsWriter, "write_data"),
]
"""What torch calls in each process in the course of a save."""


def saves_twice_in_a_plan(rank, directory, victim, at, act):
    """As `saves_twice`, with the death in one of torch's calls: before it, or when it is done."""
    (owner, name), early = at
    learner = make()
    learner.fit(loader(2), epochs=1)
    save(learner, directory)
    learner.fit(loader(2), epochs=1)
    call = getattr(owner, name)

    @functools.wraps(call)  # torch looks at the arguments
    def dies(*args, **kwargs):
        if early:
            act()
        call(*args, **kwargs)
        act()

    if rank == victim:
        setattr(owner, name, dies)
    save(learner, directory)


def saves_in_background(rank, directory, victim, at, act):
    learner = make(directory=directory, keep=9, options=BACKGROUND)

    class Arm:
        @hookimpl
        def epoch_begin(self):
            if rank == victim and learner.progress.epochs == 1:
                learner.plugins["checkpoint"]._writer.join()  # the first save has ended
                disk.system = Dies(at, act)

    learner.add(Arm())
    learner.fit(loader(2), epochs=2)
    return disk.system.count if rank == victim else None


def states(directory, saves=saves_twice):
    """What two saves hold that nothing has disturbed."""
    run(saves, 2, directory, 0, None, killed, timeout=LIMIT)
    return [held(each.path) for each in reversed(listing(directory))]


def held(path):
    learner = make()
    load(learner, path)
    return whole(learner)


def kill(directory, expected, victim, at, saves=saves_twice):
    """Kill a process in its second save: there is the first or the second, whole."""
    outcomes = run(saves, 2, directory, victim, at, killed, timeout=LIMIT, check=False)
    assert outcomes[victim].code == -signal.SIGKILL
    assert outcomes[1 - victim].code is not None  # it did not wait until it was killed, too
    found = listing(directory)
    assert not found.problems
    assert differing(held(verify(found[0].path).path), expected[found[0].number - 1]) == []
    return found[0].number


def test_kill_in_a_save_leaves_the_one_before_it(tmp_path):
    expected = states(tmp_path / "whole")
    for index, (victim, at, newest) in enumerate([(0, "after rename", 2), (1, 6, 1)]):
        assert kill(tmp_path / str(index), expected, victim, at) == newest


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("early", [pytest.param(True, marks=pytest.mark.slow), False], ids=["before", "after"])
def test_kill_in_a_plan_of_a_save_leaves_the_one_before_it(
    tmp_path, early, victim
):  # five starts, with torch's planner
    expected = states(tmp_path / "whole")
    for call in PLANS:
        newest = kill(tmp_path / call[1], expected, victim, (call, early), saves_twice_in_a_plan)
        assert newest == 1, call


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("saves", "step"), [(saves_twice, 1), (saves_in_background, 7)])
@pytest.mark.parametrize("victim", [0, 1])
def test_kill_at_any_call_of_a_save_leaves_a_whole_one(tmp_path, victim, saves, step):
    calls = run(saves, 2, tmp_path / "counted", victim, None, killed, timeout=LIMIT)[victim]
    expected = states(tmp_path / "whole", saves)
    found = [kill(tmp_path / str(at), expected, victim, at, saves) for at in range(1, calls + 1, step)]
    assert found == sorted(found)
    assert set(found) <= ({1, 2} if victim == 0 else {1})


def fails(rank, directory):
    learner = make(directory=directory, keep=9, options=BACKGROUND)

    class Full:
        @hookimpl
        def epoch_begin(self):
            if rank == 1 and learner.progress.epochs == 1:
                learner.plugins["checkpoint"]._writer.join()  # the first save has ended
                disk.system = Dies(3, full)

    learner.add(Full())
    with pytest.raises(CheckpointError, match=r"rank 1: cannot write .*part-0001.*ENOSPC.* Free some space"):
        learner.fit(loader(2), epochs=3)


def test_failure_of_one_process_is_that_of_all_and_leaves_the_save_before(tmp_path):
    run(fails, 2, tmp_path, timeout=LIMIT)
    assert [each.number for each in listing(tmp_path)] == [1]
    assert [name for name in os.listdir(tmp_path) if name.startswith(".tmp")] == []


class Once:
    """One call of the second save fails in one process, or each of all that follow."""

    def __init__(self, learner, call, number, times):
        self.learner, self.call, self.number, self.left = learner, call, number, times

    @hookimpl
    def epoch_begin(self):
        if self.learner.progress.epochs == 1:
            self.learner.plugins["checkpoint"]._writer.join()  # the first save has ended
            disk.system = Dies(self.call, self.fail)

    def fail(self):
        if self.left:
            self.left -= 1
            raise OSError(self.number, os.strerror(self.number))


def fails_and_goes_on(rank, directory, victim, call, number, times, background):
    learner = make(directory=directory, keep=9, options=SaveOptions(background=background, at_end=False))
    if rank == victim:
        learner.add(Once(learner, call, number, times))
    error = None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            learner.fit(loader(2), epochs=5)
        except CheckpointError as raised:
            error = str(raised)
    return error, [str(each.message) for each in caught if "save failed" in str(each.message)]


@pytest.mark.parametrize("background", [False, True], ids=["sync", "background"])
@pytest.mark.parametrize(
    ("victim", "call", "number"),
    [(0, "rename", "EIO"), (1, "open", "ESTALE"), (1, "fsync", "EIO"), (0, "mkdir", "EIO")],
)
def test_save_that_fails_once_in_one_process_is_tried_again_by_all(tmp_path, victim, call, number, background):
    for error, warned in run(
        fails_and_goes_on, 2, tmp_path, victim, call, getattr(errno, number), 1, background, timeout=LIMIT
    ):
        assert error is None
        (text,) = warned
        assert re.match(rf"a save failed and is tried again \(1 of 2 times\): rank {victim}: .*{number}", text)
    assert [each.about["progress"]["epochs"] for each in listing(tmp_path)] == [5, 4, 3, 1]


@pytest.mark.parametrize(("number", "times", "warned_of"), [("EIO", 99, 2), ("ENOSPC", 1, 0)])
def test_save_that_fails_too_often_or_for_good_ends_the_run_in_all_processes(tmp_path, number, times, warned_of):
    for error, warned in run(
        fails_and_goes_on, 2, tmp_path, 1, "fsync", getattr(errno, number), times, False, timeout=LIMIT
    ):
        assert "rank 1: cannot write" in error
        assert number in error
        assert len(warned) == warned_of


def fails_in_one_piece(rank, directory, number, times, background):
    disk_before = disk.system
    options = SaveOptions(background=background, at_end=False)
    saver = ShardedCheckpoint(directory, keep=9, options=options)
    plugins = [saver] if rank is None else [DDP(timeout=LIMIT), saver]
    learner = Learner(net(), nn.MSELoss(), adam, plugins=plugins, standard=False)
    if not rank:
        learner.add(Once(learner, "rename", number, times))
    error = None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            learner.fit(loader(1 if rank is None else 2), epochs=5)
        except CheckpointError as raised:
            error = str(raised)
    disk.system = disk_before
    return error, [str(each.message) for each in caught if "save failed" in str(each.message)]


@pytest.mark.parametrize("background", [False, True], ids=["sync", "background"])
@pytest.mark.parametrize("processes", [1, 2])
def test_save_of_a_model_in_one_piece_that_fails_once_is_tried_again(tmp_path, processes, background):
    if processes == 1:
        found = [fails_in_one_piece(None, tmp_path, errno.EIO, 1, background)]
    else:
        found = run(fails_in_one_piece, processes, tmp_path, errno.EIO, 1, background, timeout=LIMIT)
    assert [error for error, _ in found] == [None] * processes
    ((text,), *others) = (warned for _, warned in found)
    assert text.startswith("a save failed and is tried again (1 of 2 times): cannot write")
    assert others == [[]] * (processes - 1)
    assert [each.about["progress"]["epochs"] for each in listing(tmp_path)] == [5, 4, 3, 1]


@pytest.mark.parametrize(("number", "times", "warned_of"), [(errno.EIO, 99, 2), (errno.ENOSPC, 1, 0)])
def test_save_of_a_model_in_one_piece_that_fails_for_good_raises(tmp_path, number, times, warned_of):
    error, warned = fails_in_one_piece(None, tmp_path, number, times, background=False)
    assert "cannot write" in error
    assert len(warned) == warned_of


def resumes(rank, directory):
    learner = make(directory=directory, resume="auto", keep=9)
    says = pytest.warns(UserWarning, match=r"part-0001-state.safetensors has changed .* is passed over")
    with says if rank == 0 else nullcontext():
        learner.fit(loader(2), epochs=2)
    return learner.progress.epochs, whole(learner)


@pytest.mark.slow
def test_part_that_one_process_finds_damaged_is_passed_over_by_all(tmp_path):
    whole_run = run(trains, 2, 2, tmp_path, 2, {}, timeout=LIMIT)[0]
    newest = listing(tmp_path)[0]
    assert newest.number == 2
    file = newest.path / "part-0001-state.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(CorruptCheckpointError, match=r"part-0001-state\.safetensors has changed"):
        load(make(), newest.path)
    for epochs, found in run(resumes, 2, tmp_path, timeout=LIMIT):
        assert epochs == 2
        assert differing(found, whole_run) == []


# With others


def averages(rank, directory):
    seen = []

    class Look:
        @hookimpl(phase=ValidationPhase, reads=("*",))
        def step_end(self, learner, step):
            if step.index == 2:
                parts = learner.state_dict(whole=False)["models"]["model"]
                seen.append((learner.state_dict()["models"]["model"], parts, learner.model.state_dict()))

    learner = make(WeightAverage(0.5), Look(), directory=directory)
    learner.fit(loader(2), loader(2), epochs=1)
    ((weights, parts, average),) = seen
    assert differing(gathered(parts), weights) == []  # not the average, which stands in their place
    assert differing(gathered(average), weights) == []  # which is gone by now
    expected = learner.state_dict()["plugins"]["weight_average"]["model"]["tensors"]
    assert len(differing(expected, weights)) == 6
    other = make(WeightAverage(0.5))
    load(other, directory)
    assert differing(other.state_dict()["plugins"]["weight_average"]["model"]["tensors"], expected) == []


def test_average_is_saved_in_parts_and_never_as_the_weights(tmp_path):
    run(averages, 2, tmp_path, timeout=LIMIT)


def test_checkpoint_of_a_model_in_one_piece_is_an_ordinary_one(tmp_path):
    learner = make(directory=tmp_path)
    learner.fit(loader(), epochs=1)
    names = sorted(listing(tmp_path)[0].files)
    assert names == ["model.safetensors", "state.json", "state.safetensors", "structure.json"]
    other = make()
    checkpoint.load(other, tmp_path)
    assert differing(whole(learner), whole(other)) == []


def test_checkpoint_in_parts_is_refused_by_who_cannot_read_it(tmp_path):
    run(trains, 2, 2, tmp_path, 1, {}, timeout=LIMIT)
    with pytest.raises(CheckpointError, match=r"holds the parts of several processes\. Load it by ShardedCheckpoint"):
        checkpoint.load(make(), tmp_path)
    with pytest.raises(CheckpointError, match="holds the parts of several processes"):
        checkpoint.load_weights(make().model, tmp_path, strict=False)
    plugins = [Checkpoint(tmp_path, resume="auto")]
    other = Learner(make().model, torch.nn.MSELoss(), sgd, plugins=plugins, standard=False)
    with pytest.raises(CheckpointError, match="loopkit sharded export"):
        other.fit(loader(), epochs=1)


def sees_another_disk(rank, directory):
    if rank == 1:
        os.path.isdir = lambda path: False
    with pytest.raises(CheckpointError, match=r"rank 1 does not see .*give a directory of a file system that all"):
        make(directory=directory).fit(loader(2), epochs=1)


@pytest.mark.slow
def test_directory_that_not_all_processes_see_is_refused_before_the_first_step(tmp_path):
    run(sees_another_disk, 2, tmp_path, timeout=LIMIT)


def test_frozen_weights_that_are_left_out_are_known_by_their_fingerprints(tmp_path):
    def frozen(seed=1):
        plugins = [Freeze("0", saved=False)]
        return Learner(net(seed), nn.MSELoss(), sgd, plugins=plugins, standard=False)

    learner = frozen()
    learner.fit(loader(), epochs=1)
    assert save(learner, tmp_path).about["left_out"]["model"].keys() == {"0.weight", "0.bias"}
    again = frozen()
    load(again, tmp_path)
    assert all(map(torch.equal, learner.model.parameters(), again.model.parameters()))
    with pytest.raises(StateError, match=r"the frozen weights of 0\.weight"):
        load(frozen(seed=2), tmp_path)
