"""``loopkit run`` and ``loopkit explain``: in process where that shows it, else as the command is used."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import differences

from loopkit import checkpoint
from loopkit.checkpoint.bundle import find, read_state
from loopkit.commands import cli

PARTS = """
import os
import signal
import torch
from torch import nn
from loopkit import TrainingPhase, hookimpl
from loopkit.data import TensorLoader


def net():
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 1))


def train(batch_size: int = 4):
    x = torch.arange(96.0).reshape(32, 3) / 96
    return TensorLoader(x, x.sum(1, keepdim=True), batch_size=batch_size, shuffle=True)


def fails():
    raise ZeroDivisionError("in the user's code")


class Kill:
    '''Send a signal to this process before a step.'''

    def __init__(self, step: int, signal: str) -> None:
        self.step, self.signal = step, signal

    @hookimpl(phase=TrainingPhase)
    def step_begin(self, learner):
        if learner.progress.steps == self.step:
            os.kill(os.getpid(), getattr(signal, self.signal))
"""
RUN = """\
[model]
call = "parts:net"

[loss]
call = "torch.nn:MSELoss"

[optimizer]
call = "torch.optim:AdamW"
lr = 0.01

[data.train]
call = "parts:train"

[learner]
seed = 0
accumulate = 3

[fit]
epochs = 3

[plugins.schedule.schedule]
call = "loopkit.schedules:cosine"

[plugins.weight_average]
decay = 0.9

[plugins.checkpoint]
directory = "runs/a"
save = { call = "loopkit:every", updates = 2 }
resume = "auto"
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working directory, with run.toml and the module that it names."""
    (tmp_path / "parts.py").write_text(PARTS)
    (tmp_path / "run.toml").write_text(RUN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    sys.modules.pop("parts", None)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in the processes that tests start: other threads, other bits
    yield tmp_path
    torch.set_num_threads(threads)
    sys.modules.pop("parts", None)


def process(*words, **environment):
    """Run the command in a process of its own, in the working directory."""
    command = [str(Path(sys.executable).with_name("loopkit")), *map(str, words)]
    given = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(command, env=given, capture_output=True, text=True, timeout=100, check=False)


def sets(**values):
    return [word for key, value in values.items() for word in ("--set", f"{key.replace('__', '.')}={value}")]


def run(capsys, *words):
    code = cli.main([str(word) for word in words])
    captured = capsys.readouterr()
    return code, captured.out.splitlines(), captured.err.splitlines()


def test_run_prints_the_result(folder, capsys):
    code, out, _ = run(capsys, "run", "run.toml", *sets(fit__epochs=1))
    assert code == 0
    assert out[-1].startswith("finished: 1 epoch, 3 updates, 32 samples in ")
    assert (folder / "runs/a/config.toml").exists()


def test_explain_prints_the_plan_and_makes_no_data(folder, capsys):
    code, out, err = run(capsys, "explain", "run.toml", "--phase", "train", *sets(data__train__batch_size=0))
    assert (code, err) == (0, [])
    assert [line for line in out if line.startswith("phase ")] == ["phase 'train'"]
    assert any(line.split()[:2] == ["1.", "schedule"] for line in out)
    assert not (folder / "runs").exists()


def test_explain_of_an_unknown_phase(folder, capsys):
    code, out, err = run(capsys, "explain", "run.toml", "--phase", "trian")
    assert (code, out, len(err)) == (2, [], 1)
    assert err[0].startswith("loopkit: error: no phase is called 'trian' (did you mean 'train'?)")


@pytest.mark.parametrize("command", ["run", "explain"])
def test_one_problem_is_one_line(command, folder, capsys):
    code, out, err = run(capsys, command, "run.toml", *sets(fit__epochs=0))
    assert (code, out, err) == (
        2,
        [],
        ["loopkit: error: --set fit.epochs=0: epochs is 0: it counts from 1, or is inf"],
    )


@pytest.mark.parametrize("command", ["run", "explain"])
def test_help_is_the_docstring(command, capsys):
    code, out, err = run(capsys, command, "--help")
    assert (code, err) == (0, [])
    assert out[0].startswith(f"usage: loopkit {command} [-h]")
    assert any(line.startswith("Exit code: 0; 2 after an error") for line in out)


def test_several_problems_are_a_line_each(folder, capsys):
    (folder / "run.toml").write_text(RUN.replace("lr =", "learning_rate =").replace("epochs", "epohs"))
    code, out, err = run(capsys, "run", "run.toml")
    assert (code, out) == (2, [])
    assert err[0] == "loopkit: error: 3 problems in run.toml:"
    assert [line.split(": ")[0] for line in err[1:]] == ["run.toml:9", "run.toml:18", "run.toml:19"]


def test_error_of_the_users_code_keeps_its_traceback_and_names_the_section(folder, capsys):
    code, out, err = run(capsys, "run", "run.toml", *sets(data__train__call="parts:fails"))
    assert (code, out) == (2, [])
    assert err[0] == "Traceback (most recent call last):"
    assert f'  File "{folder / "parts.py"}", line 20, in fails' in err
    assert err[-2:] == [
        "ZeroDivisionError: in the user's code",
        "loopkit: run.toml:11: [data.train], parts:fails raised this, with --set data.train.call=parts:fails",
    ]
    assert not (folder / "runs").exists()


def test_error_of_a_plugin_is_a_line_and_its_section(folder, capsys):
    code, _, err = run(capsys, "run", "run.toml", *sets(plugins__checkpoint__keep=-1))
    assert (code, err) == (
        2,
        [
            "loopkit: error: Checkpoint: keep is -1: it is a whole number, from 1",
            "loopkit: run.toml:27: [plugins.checkpoint], Checkpoint raised this, with --set plugins.checkpoint.keep=-1",
        ],
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_full_disk_under_the_output_is_an_error_in_a_line(folder, capsys, monkeypatch):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert cli.main(["explain", "run.toml"]) == 2
    assert capsys.readouterr().err == "loopkit: error: [Errno 28] No space left on device\n"


def test_run_without_a_loss_says_what_to_write(folder, capsys):
    (folder / "run.toml").write_text(RUN.replace('[loss]\ncall = "torch.nn:MSELoss"\n', ""))
    code, _, err = run(capsys, "run", "run.toml")
    assert code == 2
    assert any(line.endswith("give Learner(loss_fn=...), or [loss] in a file") for line in err)


def final(directory):
    return read_state(find(Path(directory).absolute()))


def test_killed_run_goes_on_exactly(folder, capsys):
    """The command, in a process of its own, is killed in the middle of an accumulation window of the second epoch."""
    kill, not_yet = (
        sets(plugins__kill=f'{{call = "parts:Kill", step = {step}, signal = "SIGKILL"}}') for step in (13, 99)
    )
    assert process("run", "run.toml", *kill).returncode == -signal.SIGKILL
    assert checkpoint.listing(folder / "runs/a")
    with pytest.warns(UserWarning, match="was 13, is 99"):
        assert run(capsys, "run", "run.toml", *not_yet)[0] == 0
    assert run(capsys, "run", "run.toml", *sets(plugins__checkpoint__directory="runs/whole"))[0] == 0
    one, other = final("runs/whole"), final("runs/a")
    assert list(differences(one, other)) == []


@pytest.mark.slow
def test_signal_ends_the_run_as_a_fit_does_and_it_goes_on_exactly(folder):
    term = process("run", "run.toml", *sets(plugins__kill='{call = "parts:Kill", step = 7, signal = "SIGTERM"}'))
    assert term.returncode == 143, term.stderr
    end = process("run", "run.toml", *sets(plugins__kill='{call = "parts:Kill", step = 12, signal = "SIGINT"}'))
    assert end.returncode == 130, end.stderr
    assert process("run", "run.toml").returncode == 0
    assert process("run", "run.toml", *sets(plugins__checkpoint__directory="runs/whole")).returncode == 0
    assert list(differences(final("runs/whole"), final("runs/a"))) == []


def test_saved_configuration_trains_the_same(folder, capsys):
    assert run(capsys, "run", "run.toml", *sets(fit__epochs=2, optimizer__lr=0.02))[0] == 0
    saved = Path("runs/a/config.toml").read_text()
    Path("copy.toml").write_text(saved.replace("runs/a", "runs/b"))
    assert run(capsys, "run", "copy.toml")[0] == 0
    assert list(differences(final("runs/a"), final("runs/b"))) == []


@pytest.mark.slow
def test_several_processes_say_the_result_once(folder):
    script = "import sys\nfrom loopkit.commands.cli import main\nsys.exit(main(sys.argv[1:]))\n"
    Path("main.py").write_text(script)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "main.py"]
    words = ["run", "run.toml", *sets(plugins__ddp="{}", fit__epochs=1)]
    done = subprocess.run(
        [*torchrun, *words],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("finished: 1 epoch") == 1
    assert Path("runs/a/config.toml").exists()


@pytest.mark.parametrize(
    "words",
    [["--set", "optimizer.lr", "0.1"], ["--set", "optimizer.lr", "=", "0.1"], ["--set", "optimizer.lr", "=0.1"]],
    ids=" ".join,
)
@pytest.mark.parametrize("command", ["run", "explain"])
@pytest.mark.parametrize("first", [True, False], ids=["before the file", "behind it"])
def test_override_in_two_words_is_named_with_the_one_to_write(capsys, command, words, first):
    given = [command, *words, "run.toml"] if first else [command, "run.toml", *words]
    assert cli.main(given) == 2
    said = capsys.readouterr().err.splitlines()
    assert said[-1].endswith("error: --set optimizer.lr has no '=': write --set optimizer.lr=0.1")
