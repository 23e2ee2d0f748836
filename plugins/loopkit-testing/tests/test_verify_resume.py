"""Runs that are really killed; all but one of the processes are forked ones, which need not import torch again."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import warnings
from dataclasses import asdict
from pathlib import Path

import pytest
from helpers import make_learner

from loopkit.checkpoint import listing
from loopkit.commands.scripts import load_function, made
from loopkit.errors import LoopkitError
from loopkit_testing.verify_resume import Run, child, fresh_process, verify_resume

SCRIPT = '''
import functools, os, random, sys, time
import numpy, torch
from loopkit import Learner, hookimpl, every
from loopkit_testing import tiny_problem
from loopkit.plugins import Checkpoint, Metrics, WeightAverage
import neighbour


class Scale:
    """Multiplies gradients by a count of updates."""

    name = "zebra"
    volatile = ("count",)  # else a line names it, before the comparison

    def __init__(self, keeps=True, saves=True, loads=True):
        self.count, self.keeps, self.loads = 0, keeps, loads
        if saves:
            self.state_dict = lambda: {"seen": {"count": self.count if keeps else 0}}
            self.load_state_dict = self.load

    @hookimpl(updates=("grads",))
    def update_begin(self, step):
        self.count += 1
        for param in step.params:
            param.grad.mul_(1 + 0.1 * self.count)

    def load(self, state):
        if self.loads:
            self.count = state["seen"]["count"]


class Counts:
    """Has a state_dict that changes the run."""

    @hookimpl
    def step_begin(self, step):
        step.batch = step.batch[0] + torch.rand(1), step.batch[1]

    def state_dict(self):
        return {"noise": torch.rand(1)}

    def load_state_dict(self, state):
        pass


class Closure:
    @hookimpl
    def fit_begin(self):
        pass

    def state_dict(self):
        return {"fn": lambda: 0}

    def load_state_dict(self, state):
        pass


class Dies:
    @hookimpl
    def fit_begin(self):
        pass

    def load_state_dict(self, state):
        raise ValueError("cannot load this")

    def state_dict(self):
        return {}


def make(*plugins, **options):
    torch.manual_seed(0)
    problem = tiny_problem()
    return problem.learner(plugins=plugins, **options), {"train": problem.train, "val": problem.val, "epochs": 2}


def good():
    return make(Scale(), WeightAverage(decay=0.9), Checkpoint(os.path.join(os.getcwd(), "own"), save=every(updates=3)))


def accumulating():
    return make(Scale(), accumulate=3)


def does_not_load():
    return make(Scale(loads=False))


def saves_nothing():
    return make(Scale(saves=False))


def saves_too_little():
    return make(Scale(keeps=False))


def draws_while_saving():
    return make(Counts())


def cannot_be_saved():
    return make(Closure())


def cannot_be_loaded():
    return make(Dies())


def unseeded():
    learner, fit = make()
    torch.seed()
    return learner, fit


def fails():
    print("before the failure")
    raise ValueError("it was me")


def hangs():
    time.sleep(60)


def alone():
    return make()[0]


def not_yet_called():
    learner, fit = make()
    return functools.partial(learner.fit, fit.pop("train"), **fit)


def number():
    return 3


def pair():
    return 3, {}


not_a_function = 4
'''


def forked(run: Run, timeout: float) -> int:
    """What `fresh_process` does, in a fork of this process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads are running: the children here are short-lived
        process = os.fork()
    if process == 0:
        code = 1
        try:
            file = os.open(Path(run.out) / "output", os.O_WRONLY | os.O_CREAT)
            os.dup2(file, 1)
            os.dup2(file, 2)
            sys.stdout, sys.stderr = (io.TextIOWrapper(io.FileIO(n, "w"), write_through=True) for n in (1, 2))
            try:
                child(json.dumps(asdict(run)))
                code = 0
            except SystemExit as error:
                code = error.code
            except BaseException as error:
                print(f"{type(error).__name__}: {error}", file=sys.stderr)
        finally:
            os._exit(code)
    _, status = os.waitpid(process, 0)
    return os.waitstatus_to_exitcode(status)


@pytest.fixture
def script(tmp_path, monkeypatch):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "some_script.py").write_text(SCRIPT)
    (folder / "neighbour.py").write_text("")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.chdir(tmp_path)
    before = set(sys.modules)
    make_learner()  # torch imports much with the first optimizer: here, and not in every fork
    yield "folder/some_script.py"
    for name in {"some_script", "neighbour", "seen"} - before:
        sys.modules.pop(name, None)
    assert not list((tmp_path / "temporary").glob("loopkit*"))


def outcomes(script, function, *kill_at, **options):
    return list(verify_resume(f"{script}:{function}", kill_at=kill_at, launch=forked, **options))


def problem(script, function, *kill_at, **options):
    """The problem of the last comparison, the only one that failed."""
    found = outcomes(script, function, *kill_at, **options)
    assert [bool(each.problem) for each in found] == [False] * (len(found) - 1) + [True]
    return found[-1].problem


def test_a_run_that_resumes_exactly_is_verified(script, tmp_path):
    found = outcomes(script, "good", 1, 8)
    assert [str(each) for each in found] == [
        "two runs of 8 steps, the second one saving every update"
        " (left out, as the result does not depend on them: generators.python): the same in every bit",
        "killed by SIGKILL at step 1, resumed at step 1: the same in every bit",
        "killed by SIGKILL at step 8, resumed at step 8: the same in every bit",
    ]
    assert not (tmp_path / "own").exists(), "the learner's own plugin for checkpoints was at work"


def test_steps_to_kill_at_are_spread_over_the_run_and_epochs_can_be_given(script):
    found = outcomes(script, "good", epochs=3)
    assert [each.what.split(",")[0] for each in found[1:]] == [f"killed by SIGKILL at step {n}" for n in (3, 6, 9)]
    assert not any(each.problem for each in found)


def test_a_run_ends_by_sigterm_where_it_is(script):
    (_, found) = outcomes(script, "accumulating", 5, signal_name="TERM")
    assert str(found) == "killed by SIGTERM at step 5, resumed at step 5: the same in every bit"


def test_a_killed_window_resumes_at_the_last_update(script):
    (_, found) = outcomes(script, "accumulating", 5)
    assert str(found) == "killed by SIGKILL at step 5, resumed at step 4: the same in every bit"


def test_a_run_that_is_killed_before_its_first_update_begins_anew(script):
    (_, found) = outcomes(script, "accumulating", 2)
    assert str(found).endswith("at step 2, started again as no state was saved yet: the same in every bit")


def test_a_plugin_that_does_not_load_its_state_is_named(script):
    lines = problem(script, "does_not_load", 3).splitlines()
    assert lines[0] == "DIFFERENT. The first plugin whose state differs is 'zebra', right after it was loaded"
    assert lines[1] == "plugins.zebra.seen.count: 8 / 5"
    assert "plugins.zebra 1" in lines[-1]


@pytest.mark.parametrize("function", ["saves_nothing", "saves_too_little"])
def test_a_plugin_whose_saved_state_shows_nothing_is_a_suspect(script, function):
    lines = problem(script, function, 3).splitlines()
    assert lines[0].startswith("DIFFERENT. Before the state of any plugin, models.model differs, after step 4: the")
    assert lines[1].startswith("models.model.0.bias: 1 of 8 values differ, first at [5]: 0.42979")
    assert lines[2] == "What else differs then: models.model, optimizers.optimizer"
    assert lines[3].endswith("not saved, first in plugins that are not loopkit's own: zebra")
    assert lines[4].startswith("Items that differ at the end: models.model 8, optimizers.optimizer 6")


def test_a_script_that_is_not_seeded_is_found_first(script):
    text = problem(script, "unseeded", 3)
    assert text.startswith("DIFFERENT. the script itself is not reproducible: seed it. Two uninterrupted runs")


def test_a_state_dict_with_side_effects_is_found(script):
    assert "saving the state changes the run" in problem(script, "draws_while_saving", 3)


def test_a_state_that_cannot_be_saved_or_loaded_is_a_problem(script):
    with pytest.raises(LoopkitError, match=r"the run fails by itself \(exit code 1\)") as caught:
        outcomes(script, "cannot_be_saved", 3)
    assert "plugins.closure.state" in caught.value.__notes__[0] or "fn" in caught.value.__notes__[0]
    text = problem(script, "cannot_be_loaded", 3)
    assert text.startswith("it could not be resumed (exit code 1)")
    assert "cannot load this" in text


def test_a_run_that_fails_by_itself_is_no_verdict_and_shows_its_output(script):
    with pytest.raises(LoopkitError, match=r"the run fails by itself \(exit code 1\)") as caught:
        outcomes(script, "fails", 3)
    assert "before the failure" in caught.value.__notes__[0]
    assert "ValueError: it was me" in caught.value.__notes__[0]


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("folder/some_script.py", "'folder/some_script.py' names no function: write path/to/script.py:make_learner"),
        ("folder/sone_script.py:good", "sone_script.py is no file (did you mean 'some_script.py'?)"),
        ("folder/some_script.py:goood", "has no function 'goood' (did you mean 'good'?): define it"),
        ("folder/some_script.py:not_a_function", "has no function, but int, 'not_a_function'"),
        ("folder/some_script.py:number", "returned int: it must return partial(learner.fit"),
        ("folder/some_script.py:pair", "returned tuple of int, dict: it must return partial("),
        ("folder/some_script.py:alone", "returned only a Learner, without the arguments of its fit"),
    ],
)
def test_a_wrong_target_is_refused(script, target, message):
    with pytest.raises(LoopkitError) as caught:
        list(verify_resume(target, launch=forked))
    assert message in str(caught.value)


@pytest.mark.parametrize("at", [0, 9])
def test_a_step_that_the_run_does_not_have_is_refused(script, at):
    with pytest.raises(LoopkitError, match=f"kill_at is {at}: the run has 8 steps"):
        outcomes(script, "good", at)


def test_a_script_sees_what_python_gives_it(tmp_path, script):
    path = tmp_path / "folder" / "seen.py"
    path.write_text("import sys, neighbour\nseen = sys.path[0], sys.argv, __name__, __file__\ndef f(): return seen")
    folder, argv, name, file = load_function(f"{path}:f")()
    assert (folder, argv, name, file) == (str(path.parent), [str(path)], "seen", str(path))
    assert sys.modules["seen"].f is not None
    assert not (tmp_path / "folder" / "__pycache__" / "seen.cpython-311.pyc").exists()


def test_made_takes_a_learner_alone(script):
    learner, fit = made(f"{script}:alone")
    assert type(learner) is type(make_learner())
    assert fit is None


def test_made_takes_a_fit_that_is_not_called_yet(script):
    learner, fit = made(f"{script}:not_yet_called")
    assert type(learner) is type(make_learner())
    assert fit.keys() == made(f"{script}:good")[1].keys()


def test_fresh_process_is_stopped_when_it_takes_too_long(tmp_path, script):
    out = tmp_path / "out"
    out.mkdir()
    with pytest.raises(LoopkitError, match=r"a process took longer than 0.3 s"):
        fresh_process(Run(f"{script}:hangs", str(out)), 0.3)


def test_a_fresh_process_really_dies_after_saving_the_step(tmp_path, script):
    out = tmp_path / "out"
    out.mkdir()
    run = Run(os.path.abspath(script) + ":good", str(out), checkpoints=str(tmp_path / "saved"), kill_at=2)
    assert fresh_process(run, 100) == -signal.SIGKILL, (out / "output").read_text()
    assert [manifest.about["progress"]["steps"] for manifest in listing(tmp_path / "saved")] == [2, 1]
    assert len((out / "trace").read_text().splitlines()) == 1


@pytest.mark.slow
def test_fresh_processes_are_really_killed_and_resumed(script):
    """The whole command in processes of its own, of which torch is imported in each."""
    command = [sys.executable, "-m", "loopkit", "verify-resume", f"{script}:does_not_load", "--kill-at", "3"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert "killed by SIGKILL at step 3, resumed at step 3: DIFFERENT. The first plugin" in done.stdout
    assert "'zebra'" in done.stdout
    assert done.stdout.splitlines()[-1] == "NOT VERIFIED: this run does not resume exactly"


REINFORCES = """
import warnings
import torch
from loopkit import TrainingPhase
from loopkit_testing import tiny_problem

warnings.simplefilter("default")


class Reinforces(TrainingPhase):
    def __init__(self):
        super().__init__()
        self.baseline = 0.0

    def loss(self, learner, outputs, targets):
        self.baseline = 0.5 * self.baseline + 0.5 * float(outputs.detach().mean())
        return learner.loss_fn(outputs, targets) + self.baseline * outputs.mean()


def make():
    torch.manual_seed(0)
    problem = tiny_problem()
    return problem.learner(phases=[Reinforces()]), {"train": problem.train, "val": problem.val, "epochs": 2}
"""


def test_verify_resume_points_at_a_phase_that_keeps_unsaved_state(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    (tmp_path / "reinforces.py").write_text(REINFORCES)
    *_, found = verify_resume(f"{tmp_path}/reinforces.py:make", kill_at=[3], launch=forked)
    assert found.problem.startswith("DIFFERENT")
    assert "phase 'train'" in found.problem
    assert "baseline" in found.problem


COUNTS = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from loopkit import Learner

class Batches:
    volatile = ("epoch",)  # else a line names it
    epoch = 0

    def __len__(self):
        return 3

    def __iter__(self):
        self.epoch += 1
        order = torch.randperm(12, generator=torch.Generator().manual_seed(self.epoch))
        return iter(order.view(3, 4).tolist())

def make():
    model = nn.Linear(2, 1)
    learner = Learner(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), 0.1), seed=0)
    data = TensorDataset(torch.arange(24.0).view(12, 2), torch.ones(12, 1))
    return learner, {"train": DataLoader(data, batch_sampler=Batches()), "epochs": 3}
"""


def test_verify_resume_names_the_data_as_the_cause(tmp_path):
    (tmp_path / "counts.py").write_text(COUNTS)
    *_, found = verify_resume(f"{tmp_path}/counts.py:make", kill_at=[5], launch=forked)
    assert found.problem.startswith("the data are the cause, which give other batches in the resumed process")
