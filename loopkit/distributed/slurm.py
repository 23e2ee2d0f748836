"""Start under SLURM: ``srun python -m loopkit.distributed.slurm train.py``, one task for each process.

It sets torchrun's variables from srun's, and starts Python with the arguments that it got.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping

from loopkit.errors import WorldError

PORTS = 10000, 20000
"""From where the port is chosen, by the numbers of the job and of its step."""
NEEDED = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_STEP_NODELIST")
"""sbatch sets the first three for its script, too, and the last only srun."""


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """torchrun's variables for a task of srun; a ``MASTER_ADDR`` or ``MASTER_PORT`` that is set stays.

    Args:
        environ: The task's environment. Rank 0 is on the first host of ``SLURM_STEP_NODELIST``, as srun places it
            unless ``--distribution`` changes that.

    Raises:
        WorldError: The environment is not from a task of srun.
    """
    if missing := [name for name in NEEDED if name not in environ]:
        raise WorldError(
            f"the environment lacks {', '.join(missing)}, which srun sets for each task: start the script by "
            f"srun python -m loopkit.distributed.slurm train.py"
        )
    first, last = PORTS
    number = int(re.sub(r"\D", "", environ.get("SLURM_JOB_ID", "")) or 0) + 997 * int(environ.get("SLURM_STEP_ID", 0))
    found = {
        "RANK": environ["SLURM_PROCID"],
        "WORLD_SIZE": environ["SLURM_NTASKS"],
        "LOCAL_RANK": environ["SLURM_LOCALID"],
        "MASTER_ADDR": environ.get("MASTER_ADDR") or hosts(environ["SLURM_STEP_NODELIST"])[0],
        "MASTER_PORT": environ.get("MASTER_PORT") or str(first + number % (last - first)),
    }
    if tasks := environ.get("SLURM_STEP_TASKS_PER_NODE"):
        found["LOCAL_WORLD_SIZE"] = str(counts(tasks)[int(environ.get("SLURM_NODEID", "0"))])
    return found


def hosts(nodes: str) -> list[str]:
    """The hosts of a list of SLURM, in its order: ``"a[01-02,7],b"`` is a01, a02, a7 and b.

    Raises:
        WorldError: It is not such a list.
    """
    found = []
    for part in re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", nodes):
        names = [""]
        for text, ranges in re.findall(r"([^\[\]]+)|\[([^\[\]]*)\]", part):
            names = [name + each for name in names for each in ([text] if text else _numbers(ranges, nodes))]
        found += names
    if not found or nodes.count("[") != nodes.count("]"):
        raise WorldError(f"SLURM's list of hosts is {nodes!r}, which names none: set MASTER_ADDR to the host of rank 0")
    return found


def _numbers(ranges: str, nodes: str) -> list[str]:
    found = []
    for each in ranges.split(","):
        low, _, high = each.partition("-")
        if not (low.isdecimal() and (high or low).isdecimal()):
            raise WorldError(
                f"SLURM's list of hosts is {nodes!r}, with {each!r}: set MASTER_ADDR to the host of rank 0"
            )
        found += [str(number).zfill(len(low)) for number in range(int(low), int(high or low) + 1)]
    return found


def counts(tasks: str) -> list[int]:
    """The tasks of each host, as SLURM writes them: ``"2(x3),1"`` is 2, 2, 2, 1."""
    found = []
    for each in tasks.split(","):
        count, _, times = each.partition("(x")
        found += [int(count)] * int(times.rstrip(")") or 1)
    return found


if __name__ == "__main__":
    usage = "usage: srun python -m loopkit.distributed.slurm train.py [arguments of train.py]"
    if sys.argv[1:2] in (["-h"], ["--help"]):
        print(usage)
        sys.exit()
    if len(sys.argv) < 2:
        print(usage, file=sys.stderr)
        sys.exit(2)
    try:
        os.environ.update(variables(os.environ))
    except WorldError as error:
        sys.exit(f"loopkit: error: {error}")
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
