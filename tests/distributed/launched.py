"""Functions that `loopkit.launch` starts: the new processes import them by name."""

from __future__ import annotations

import os
import signal
import sys
import time

import torch

from loopkit.distributed import join


def together(factor):
    joined = join("gloo", timeout=60)
    tensor = torch.tensor([1.0 + joined.rank]) * factor
    torch.distributed.all_reduce(tensor)
    return {"rank": joined.rank, "sum": tensor, "size": joined.size, "pid": os.getpid()}


def fails(how):
    rank = int(os.environ["RANK"])
    if rank == 1 and how == "raise":
        raise ValueError("the data is bad")
    if rank == 1 and how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1 and how == "exit":
        sys.exit(3)
    if rank == 1 and how == "return":
        return lambda: None
    if how == "exit quietly":
        sys.exit(0)
    if how != "return":
        time.sleep(60)
    return None


def after_restart(directory):
    restart = os.environ["TORCHELASTIC_RESTART_COUNT"]
    joined = join("gloo", timeout=60)
    said = joined.gather((joined.rank, restart))
    if restart == "0":
        raise ValueError("the first time")
    return said
