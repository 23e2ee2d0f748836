"""Seeds and deterministic algorithms."""

from __future__ import annotations

import os
import random
import sys

import torch


def seed_everything(seed: int, deterministic: bool = False) -> None:
    """Seed Python's, NumPy's (if it is imported) and torch's generators on every device.

    Args:
        seed: From 0 to 2**32 - 1.
        deterministic: Also make torch refuse operations that have no deterministic form, choose deterministic
            convolutions, and switch off the search for the fastest ones. On CUDA set the environment variable
            ``CUBLAS_WORKSPACE_CONFIG=:4096:8`` before the process starts; it is set here if nothing has set it,
            which is in time only if cuBLAS was not used yet.

    Raises:
        ValueError: The seed is out of range.
    """
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed is {seed}: it must be from 0 to 2**32 - 1")
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    torch.manual_seed(seed)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.deterministic = True
        torch.backends.cudnn.benchmark = False
