"""Variables of srun become those of torchrun; SLURM itself was not run."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from loopkit.distributed.slurm import counts, hosts, variables
from loopkit.errors import WorldError

TASK = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "7",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_NODELIST": "gpu[08-10,12]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURM_JOB_ID": "4217123",
}


@pytest.mark.parametrize(
    ("nodes", "found"),
    [
        ("node7", ["node7"]),
        ("a,b", ["a", "b"]),
        ("gpu[08-10,12]", ["gpu08", "gpu09", "gpu10", "gpu12"]),
        ("n[9-11]", ["n9", "n10", "n11"]),
        ("a[1-2]-ib,login,b[003]", ["a1-ib", "a2-ib", "login", "b003"]),
        ("r[1-2]n[0-1]", ["r1n0", "r1n1", "r2n0", "r2n1"]),
    ],
)
def test_hosts_of_a_list(nodes, found):
    assert hosts(nodes) == found


@pytest.mark.parametrize("nodes", ["", "a[", "a[1-x]", "a[]"])
def test_list_that_cannot_be_read_is_refused(nodes):
    with pytest.raises(WorldError, match="set MASTER_ADDR"):
        hosts(nodes)


def test_tasks_of_each_host():
    assert counts("2(x3),1") == [2, 2, 2, 1]


def test_variables_of_a_task():
    assert variables(TASK) == {
        "RANK": "5",
        "WORLD_SIZE": "7",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "gpu08",
        "MASTER_PORT": "17123",
    }


def test_address_that_is_set_stays():
    found = variables({**TASK, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"})
    assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == ("10.0.0.1", "29500")


def test_environment_that_is_not_a_task_is_refused():
    with pytest.raises(WorldError, match="lacks SLURM_PROCID, SLURM_STEP_NODELIST"):
        variables({"SLURM_NTASKS": "2", "SLURM_LOCALID": "0"})


def test_script_of_a_job_without_srun_is_refused():
    of_sbatch = {name: value for name, value in TASK.items() if "STEP" not in name}
    with pytest.raises(WorldError, match="lacks SLURM_STEP_NODELIST, which srun sets"):
        variables({**of_sbatch, "SLURM_NODELIST": "gpu[08-10,12]"})


def test_steps_of_one_job_have_ports_of_their_own():
    assert variables({**TASK, "SLURM_STEP_ID": "1"})["MASTER_PORT"] == "18120"


@pytest.mark.slow
def test_script_is_started_with_the_variables_and_its_arguments():
    code = "import os, sys; print(os.environ['RANK'], os.environ['MASTER_ADDR'], sys.argv[1:])"
    command = [sys.executable, "-m", "loopkit.distributed.slurm", "-c", code, "--lr", "0.1"]
    done = subprocess.run(command, env={**os.environ, **TASK}, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "5 gpu08 ['--lr', '0.1']\n"


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--help"], 0, "usage: srun python -m loopkit.distributed.slurm train.py"),
        ([], 2, "usage: srun python -m loopkit.distributed.slurm train.py"),
        (["train.py"], 1, "loopkit: error: the environment lacks SLURM_PROCID"),
    ],
)
def test_command_without_a_task_ends_in_one_line(words, code, said):
    outside = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    command = [sys.executable, "-m", "loopkit.distributed.slurm", *words]
    done = subprocess.run(command, env=outside, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == code
    assert (done.stdout + done.stderr).startswith(said)
    assert "Traceback" not in done.stderr
