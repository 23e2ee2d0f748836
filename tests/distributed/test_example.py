"""The example and the page on several processes: one script, and the output that the page shows."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from pages import SHAPE, agrees, blocks
from torch import nn

from distributed.processes import run
from loopkit import Learner, TrainingPhase, ValidationPhase
from loopkit.plugins import DDP

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "data_parallel.py"
PAGE = blocks((ROOT / "docs" / "distributed.md").read_text())
LAUNCH = (sys.executable, str(EXAMPLE), "--processes")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(EXAMPLE))


def shown(comment: str) -> str:
    (found,) = [block.text for block in PAGE if block.comment == comment]
    return found


def started(*command: str, directory: Path) -> subprocess.CompletedProcess[str]:
    """Run a command in this directory, and end it with all that it has started if it takes too long."""
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TMPDIR": str(directory)}
    with subprocess.Popen(
        command,
        cwd=directory,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=110)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(command, process.returncode, output)


def figures(output: str) -> list[str]:
    """The last line's metrics."""
    return re.findall(r"\w+/\w+ [\d.]+", output.strip().splitlines()[-1])


def tidy(output: str) -> str:
    """Without the path of the temporary directory, and a warning of torchrun's."""
    lines = [line for line in output.splitlines() if "torch/distributed/run.py" not in line]
    return "\n".join(re.sub(r"/\S+/tmp\w+", "/tmp/tmpN", line) for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize("command", [(*LAUNCH, "2"), TORCHRUN], ids=["launch", "torchrun"])
def test_example_prints_what_the_page_shows(command, tmp_path):
    done = started(*command, directory=tmp_path)
    assert done.returncode == 0, done.stdout
    expected = tidy(shown("printed by two processes"))
    assert agrees(expected, tidy(done.stdout), SHAPE), done.stdout
    assert figures(done.stdout) == figures(shown("output: examples/data_parallel.py"))  # of one process


@pytest.mark.slow
def test_example_goes_on_with_another_number_of_processes(tmp_path):
    arguments = "--checkpoints", str(tmp_path / "runs")
    first = started(*LAUNCH, "2", *arguments, "--epochs", "1", directory=tmp_path)
    again = started(*LAUNCH, "1", *arguments, "--epochs", "2", directory=tmp_path)
    assert (first.returncode, again.returncode) == (0, 0), first.stdout + again.stdout
    assert "resumed" in again.stdout
    assert "epoch 2/2" in again.stdout
    assert "epoch 1/2" not in again.stdout
    assert "UserWarning" not in again.stdout


@pytest.mark.slow
def test_failure_reads_as_the_page_shows(tmp_path):
    (script,) = [block.text for block in PAGE if block.comment.startswith("no-run: two processes")]
    (tmp_path / "fails.py").write_text(script)
    by_launch = started(sys.executable, "fails.py", directory=tmp_path)
    assert by_launch.returncode == 1
    assert shown("failure: launch").strip() in by_launch.stdout
    namespace = {"__name__": "fails"}
    exec(script, namespace)
    ends = run(lambda rank: namespace["train"](), 2, timeout=60, check=False)
    assert shown("failure: peer").strip() in ends[0].error
    assert "ValueError: the label 17 is not known" in ends[1].error


class OwnPhase(TrainingPhase):
    def step(self, learner, step):
        step.loss = learner.model(step.batch).sum()
        step.backward(step.loss)
        step.update()


def _explained(rank, phase):
    phases = [phase(), ValidationPhase()]
    learner = Learner(nn.Linear(4, 3), nn.MSELoss(), torch.optim.SGD, plugins=[DDP()], phases=phases)
    return str(learner.explain("train"))


@pytest.mark.parametrize("phase", [TrainingPhase, OwnPhase])
def test_explain_says_what_the_page_shows(phase):
    for said in run(_explained, 2, phase):
        assert shown(f"explained: {phase.__name__}").strip() in said
