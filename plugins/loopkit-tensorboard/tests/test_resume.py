"""Runs that are killed and go on: one curve, with neither gap nor duplicate."""

import os
import shutil
import signal
import subprocess
import sys

import pytest
from conftest import LogLoss

from loopkit import TrainingPhase, every, hookimpl
from loopkit.plugins import Checkpoint, LogMetrics, LogTo, Metrics
from loopkit_tensorboard import TensorBoard

RUN = """
import os, signal, sys
import torch
from torch import nn
from loopkit import Learner, TrainingPhase, data, every, hookimpl
from loopkit.plugins import Checkpoint, LogMetrics, LogTo, Metrics
from loopkit_tensorboard import TensorBoard

directory, at = sys.argv[1], int(sys.argv[2])

class LogLoss:
    @hookimpl(phase=TrainingPhase, reads=("loss",))
    def step_end(self, learner, step):
        learner.log("step_loss", step.loss)
        if learner.progress.steps == at:
            os.kill(os.getpid(), signal.SIGKILL)

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = data.TensorLoader(torch.randn(40, 3), torch.randn(40, 1), batch_size=4, shuffle=True)
run = Checkpoint(directory + "/checkpoints", save=every(updates=3), resume="auto")
stack = [LogLoss(), Metrics(), LogMetrics(), run, LogTo(TensorBoard(directory + "/a"), every=1)]
learner = Learner(model, nn.MSELoss(), optimizer, plugins=stack, standard=False)
learner.fit(loader, loader, epochs=3)
"""


def killed(directory, at):
    """Run until it kills itself, after so many steps."""
    command = [sys.executable, "-W", "error", "-c", RUN, str(directory), str(at)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == -signal.SIGKILL, done.stderr


@pytest.fixture
def run(monkeypatch):
    """Run to the end, in this process."""

    def whole(directory):
        monkeypatch.setattr(sys, "argv", ["run", str(directory), "0"])
        exec(RUN, {})

    return whole


def curves(events):
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def check_kills(directory, run, read, *kills):
    """Kill a run after each of so many steps, let it end, and compare its curves with those of one that was not."""
    run(directory / "straight")
    for at in kills:
        killed(directory / "killed", at)
    run(directory / "killed")
    expected = curves(read(directory / "straight" / "a"))
    assert [step for step, _ in expected["train/step_loss"]] == [*range(1, 31)]
    assert [step for step, _ in expected["val/loss"]] == [10, 20, 30]
    assert curves(read(directory / "killed" / "a")) == expected


def test_a_run_that_is_killed_shows_the_curves_of_one_that_is_not(tmp_path, run, read):
    check_kills(tmp_path, run, read, 11, 25)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_that_is_killed_at_any_step_shows_the_same_curves(tmp_path, run, read):
    check_kills(tmp_path, run, read, *range(4, 31))


def test_what_was_killed_before_its_first_checkpoint_is_set_aside(tmp_path, run, read):
    killed(tmp_path, 2)
    run(tmp_path)
    assert [step for step, _ in curves(read(tmp_path / "a-1"))["train/step_loss"]] in ([1], [1, 2])
    assert [step for step, _ in curves(read(tmp_path / "a"))["train/step_loss"]] == [*range(1, 31)]


class Stop:
    """Ends a fit without a save, as a crash does."""

    def __init__(self, at):
        self.at = at

    @hookimpl(phase=TrainingPhase, after=("log",))
    def step_end(self, learner):
        if learner.progress.steps == self.at:
            raise KeyboardInterrupt


@pytest.fixture
def fit(make_learner, batches, tmp_path):
    """Fit three epochs of five steps, from the newest checkpoint on; returns the backend."""

    def start(at=0, resume="auto", directory=tmp_path / "a"):
        backend = TensorBoard(directory)
        run = Checkpoint(tmp_path / "checkpoints", save=every(updates=2), resume=resume)
        learner = make_learner(LogLoss(), Metrics(), LogMetrics(), run, Stop(at), LogTo(backend, every=1))
        try:
            learner.fit(batches, batches, epochs=3, on_interrupt=None)
        except KeyboardInterrupt:
            assert at
        return backend

    return start


def steps(read, directory, tag="train/loss"):
    return [event.step for event in read(directory).Scalars(tag)]


def names(directory):
    return sorted(path.name for path in directory.iterdir())


def test_each_start_has_a_file_and_the_later_ones_are_cut(fit, tmp_path, read):
    fit(5)
    (first,) = names(tmp_path / "a")
    before = (tmp_path / "a" / first).stat().st_size
    fit(9)
    assert names(tmp_path / "a")[0] == first
    assert len(names(tmp_path / "a")) == 2
    assert (tmp_path / "a" / first).stat().st_size < before
    assert steps(read, tmp_path / "a") == [*range(1, 10)]


def test_the_mean_of_a_pass_is_told_from_the_values_of_its_steps(fit, tmp_path, read):
    fit(7)
    fit()
    assert steps(read, tmp_path / "a", "train/loss (train/loss)") == [5, 10, 15]
    assert steps(read, tmp_path / "a") == [*range(1, 16)]


def test_a_torn_end_is_cut(fit, tmp_path, read):
    fit(5)
    (path,) = (tmp_path / "a").iterdir()
    with path.open("ab") as file:
        file.write(b"torn")
    fit()
    assert steps(read, tmp_path / "a") == [*range(1, 16)]


def test_a_run_that_has_nothing_to_add_leaves_the_files_as_they_are(fit, tmp_path):
    fit()
    before = {path: path.read_bytes() for path in (tmp_path / "a").iterdir()}
    fit()
    assert {path: path.read_bytes() for path in (tmp_path / "a").iterdir()} == before


def test_a_file_that_has_lost_its_end_goes_on_with_a_warning(fit, tmp_path, read):
    fit(5)
    (path,) = (tmp_path / "a").iterdir()
    sizes = [path.stat().st_size]
    os.truncate(path, sizes[0] // 2)
    with pytest.warns(UserWarning, match=r"ends at byte .* before byte .*: the bytes between are missing"):
        fit()
    found = steps(read, tmp_path / "a")
    assert found[-11:] == [*range(5, 16)]
    assert found == sorted(set(found))


def test_a_file_that_is_gone_is_begun_anew_with_a_warning(fit, tmp_path, read):
    fit(5)
    with pytest.warns(UserWarning, match=r"has no file events\.out.*: it begins at step 5"):
        fit(directory=tmp_path / "b")
    assert steps(read, tmp_path / "b") == [*range(5, 16)]
    assert steps(read, tmp_path / "a") == [*range(1, 6)]


def test_an_earlier_checkpoint_cuts_several_files(fit, tmp_path, read):
    fit(5)
    fit(9)
    fit(13)
    assert len(names(tmp_path / "a")) == 3
    shutil.rmtree(sorted((tmp_path / "checkpoints").glob("0*"))[-1])
    fit(resume=sorted((tmp_path / "checkpoints").glob("0*"))[0])
    assert steps(read, tmp_path / "a") == [*range(1, 16)]


def test_the_kinds_of_tags_are_kept(fit, tmp_path):
    backend = fit(7)
    state = backend.state_dict()
    assert state["shown"]["train/loss"] == ["value", "loss"]
    assert state["shown"]["train/loss (train/loss)"] == ["value", "train/loss"]
    other = TensorBoard(tmp_path / "a")
    other.load_state_dict(state)
    assert other.state_dict() == state


def test_a_second_fit_goes_on(make_learner, batches, tmp_path, read):
    learner = make_learner(LogLoss(), LogTo(TensorBoard(tmp_path)))
    learner.fit(batches, epochs=1)
    learner.fit(batches, epochs=2)
    assert len(names(tmp_path)) == 2
    assert steps(read, tmp_path) == [*range(1, 16)]


def test_a_loaded_state_goes_on_in_another_learner(make_learner, batches, tmp_path, read):
    learner = make_learner(LogLoss(), LogTo(TensorBoard(tmp_path)))
    learner.fit(batches, epochs=1)
    state = learner.state_dict()
    again = make_learner(LogLoss(), LogTo(TensorBoard(tmp_path)))
    again.load_state_dict(state)
    again.fit(batches, epochs=2)
    assert steps(read, tmp_path)[:10] == [*range(1, 11)]
