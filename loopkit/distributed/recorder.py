"""The collectives of a process, from torch's flight recorder, as a file."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

FILES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
"""Torch's variables for where such files are; each rank's number is appended."""
FRESH = 60.0
"""Seconds: an older file belongs to another failure."""


def recorded(rank: int) -> str:
    """Which file has the last collectives of this process, in words; "" where torch has recorded none.

    Gloo's are written now, as JSON. torch itself writes NCCL's when a collective times out.
    """
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    prefix = next((os.environ[name] for name in FILES if os.environ.get(name)), f"{cache}/torch/comm_lib_trace_rank_")
    c10d: Any = torch._C._distributed_c10d
    try:
        path = Path(f"{prefix}{rank}")
        if "nccl" not in dist.get_backend():
            path = Path(f"{path}.json")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(c10d._dump_fr_trace_json(True, False))  # finished ones, too
        fresh = time.time() - path.stat().st_mtime < FRESH
    except (AttributeError, OSError, RuntimeError, TypeError, ValueError):
        return ""  # no recorder, nowhere to write, no process group
    return f". The last exchanges of rank {rank} are in {path}" if fresh else ""
