"""torchrun starts all processes again when one was killed: the run goes on, and ends with the same bits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).with_name("elastic.py")
LIMIT = 110.0
NOBODY = -1


def torchrun(processes: int, victim: int, directory: Path) -> list[list[str]]:
    """What each process says at its end: digest, restarts, steps."""
    directory.mkdir()
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    environment["TORCH_FR_DUMP_TEMP_FILE"] = f"{directory}/rank_"
    run = (sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}")
    command = (*run, "--max-restarts=1", "--monitor-interval=0.1", str(SCRIPT), str(victim), str(directory))
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as process:
        try:
            output, _ = process.communicate(timeout=LIMIT)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, output
    return [(directory / f"end-{rank}").read_text().split() for rank in range(processes)]


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_run_whose_process_is_killed_ends_as_the_one_that_was_not(processes, tmp_path):
    straight = torchrun(processes, NOBODY, tmp_path / "straight")
    assert len({tuple(said) for said in straight}) == 1
    assert straight[0][1] == "0"
    for victim in {0, processes - 1}:  # rank 0 saves, and holds the store of the processes
        killed = torchrun(processes, victim, tmp_path / f"killed-{victim}")
        assert killed == [[straight[0][0], "1", straight[0][2]]] * processes
