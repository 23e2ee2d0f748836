"""libraries: the packages whose code holds nothing of the user's that a run changes."""

from __future__ import annotations

import sys
from typing import Any

PACKAGES = frozenset({*sys.stdlib_module_names, "datasets", "loopkit", "numpy", "torch", "torchdata", "webdataset"})


def is_library(module: str) -> bool:
    """Whether a module is of Python, of loopkit or its distributions, or of a library of data and tensors.

    >>> is_library("torch.utils.data"), is_library("script")
    (True, False)
    """
    package = module.partition(".")[0]
    return package in PACKAGES or package.startswith("loopkit_")


def is_shipped(plugin: Any) -> bool:
    """Whether a plugin is of loopkit or of one of its distributions, which have tests of their states."""
    home = type(plugin).__module__.partition(".")[0]
    return home == "loopkit" or home.startswith("loopkit_")
