"""Workers of a loader that die or hang: an error soon, which says who, and a checkpoint from which the run goes on."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import time
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import on
from torch.utils.data import DataLoader

from faults.campaign import lines
from faults.runs import Run, finish, make
from loopkit.checkpoint import storage

RUN = Run("loader2", epochs=2, every_updates=100)


def _noted(error):
    return "\n".join([str(error), *getattr(error, "__notes__", ())])


def kill_worker(directory, which, at, hook):
    """Run, kill a worker in a step; returns its pid, and the error with its notes."""
    killed = []

    def kill(learner, phase, step):
        if phase.name == "train" and learner.progress.steps == at and not killed:
            worker = sorted(multiprocessing.active_children(), key=lambda child: child.pid)[which]
            killed.append(worker.pid)
            os.kill(worker.pid, signal.SIGKILL)

    try:
        finish(RUN, Path(directory), on(hook, kill, "kill"))
    except (RuntimeError, OSError, EOFError) as error:
        return killed[0], _noted(error)
    return None


@pytest.mark.parametrize(("which", "at", "hook"), [(0, 3, "step_begin"), (1, 4, "step_end"), (0, 10, "update_end")])
def test_killed_worker_is_an_error_with_its_pid_after_which_the_run_goes_on_exactly(trials, which, at, hook):
    directory = trials.begin()
    pid, text = trials.server.call("faults.test_workers:kill_worker", str(directory), which, at, hook)
    assert f"worker {pid} was killed by SIGKILL" in text
    trials.check_end(RUN, directory, "a killed worker")


class Hanging:
    """A dataset of which one sample takes long the first time, after which its worker is dead, if that is wanted."""

    def __init__(self, dataset, flag, seconds, dies):
        self.dataset, self.flag, self.seconds, self.dies = dataset, flag, seconds, dies

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, index):
        if int(index) == 17 and not self.flag.exists():
            self.flag.touch()
            time.sleep(self.seconds)
            if self.dies:
                os.kill(os.getpid(), signal.SIGKILL)
        return self.dataset[index]


def hang_worker(directory, seconds, dies, timeout):
    """Run with a worker that hangs, or dies, while it is waited for; returns the error with its notes."""
    warnings.simplefilter("error")
    directory = Path(directory)
    learner, train, val = make(RUN, directory / "checkpoints")
    hanging = Hanging(train.dataset, directory / "hung", seconds, dies)
    loader = DataLoader(hanging, batch_size=RUN.batch_size, sampler=train.sampler, num_workers=2)
    try:
        learner.fit(loader, val, epochs=RUN.epochs, loader_timeout=timeout)
    except (RuntimeError, OSError, EOFError) as error:
        return _noted(error)
    return None


@pytest.mark.clock
def test_hung_worker_is_an_error_after_the_timeout_and_the_run_goes_on_exactly(trials):
    directory = trials.begin()
    text = trials.server.call("faults.test_workers:hang_worker", str(directory), 600.0, False, 5.0)
    assert "no batch came within 5 s; a worker hangs" in text
    _went_on_where_it_was(trials, directory)


def test_worker_that_dies_while_it_is_waited_for_is_saved_where_it_was(trials):
    directory = trials.begin()
    text = trials.server.call("faults.test_workers:hang_worker", str(directory), 0.4, True, 300.0)
    assert "was killed by SIGKILL" in text
    _went_on_where_it_was(trials, directory)


def _went_on_where_it_was(trials, directory):
    newest = storage.listing(directory / "checkpoints")[0].about
    assert newest["reason"] == "error"
    trials.check_end(RUN, directory, "the error")
    assert lines(directory)[0] == f"fit_begin {newest['progress']['steps']} {newest['progress']['updates']}"


def test_loader_that_fails_between_steps_is_saved_where_it_was(trials):
    directory = trials.begin()
    run = replace(RUN, data="loader0")
    outcome = trials.server.run("faults.test_workers:fail_loader", run, str(directory))
    assert outcome.code == 1
    assert "ValueError: no such sample" in outcome.said
    newest = storage.listing(directory / "checkpoints")[0]
    assert newest.about["reason"] == "error"
    assert newest.about["progress"]["steps"] == 5
    trials.check_end(run, directory, "a loader that failed")
    assert [line.split()[1:4] for line in lines(directory) if line.startswith("step train")][:3] == [
        ["train", "0", "5"],
        ["train", "0", "6"],
        ["train", "0", "7"],
    ]


def fail_loader(run, directory):
    """Run with a dataset that fails at the sixth batch."""
    learner, train, val = make(run, Path(directory) / "checkpoints")
    dataset = train.dataset

    class Failing:
        def __len__(self):
            return len(dataset)

        def __getitem__(self, index):
            if learner.progress.steps == 5:
                raise ValueError("no such sample")
            return dataset[index]

    learner.fit(DataLoader(Failing(), batch_size=run.batch_size, sampler=train.sampler), val, epochs=run.epochs)


def test_data_that_does_not_fit_the_checkpoint_leaves_it_the_newest(trials):
    directory = trials.begin()
    run = replace(RUN, data="loader0")
    trials.server.run("faults.test_workers:fail_loader", run, str(directory))
    before = storage.listing(directory / "checkpoints")
    outcome = trials.server.run("faults.runs:resume", replace(run, samples=96), str(directory))
    assert outcome.code == 1
    assert "StateError" in outcome.said
    assert storage.listing(directory / "checkpoints") == before


def end_group(directory, number, at):
    """Run, and give a signal to the whole process group, workers included, in a step."""

    def end(learner, phase, step):
        if phase.name == "train" and learner.progress.steps == at:
            subprocess.run(["kill", f"-{number}", "--", f"-{os.getpgrp()}"], start_new_session=True, check=True)
            time.sleep(0.2)  # the workers die meanwhile

    finish(RUN, Path(directory), on("step_begin", end, "end"))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, -2)])
def test_signal_to_the_whole_group_saves_the_step_that_was_running_although_workers_die(trials, number, code):
    directory = trials.begin()
    outcome = trials.server.run("faults.test_workers:end_group", str(directory), int(number), 3)
    assert outcome.code == code, outcome.said
    newest = storage.listing(directory / "checkpoints")[0]
    assert (newest.about["reason"], newest.about["progress"]["steps"]) == (number.name, 4)
    trials.check_end(RUN, directory, "a signal to the group")
