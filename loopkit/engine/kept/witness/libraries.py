"""libraries: the packages whose code holds nothing of the user's that a run changes."""

from __future__ import annotations

import sys
from typing import Any

from loopkit.plugin import unwrapped

SHIPPED = frozenset(
    {
        "loopkit",
        "loopkit_callbacks",
        "loopkit_control",
        "loopkit_data",
        "loopkit_export",
        "loopkit_files",
        "loopkit_huggingface",
        "loopkit_insight",
        "loopkit_local",
        "loopkit_metrics",
        "loopkit_mlflow",
        "loopkit_monitor",
        "loopkit_optuna",
        "loopkit_ray",
        "loopkit_recipes",
        "loopkit_remote",
        "loopkit_sharded",
        "loopkit_tensorboard",
        "loopkit_testing",
        "loopkit_wandb",
        "loopkit_whole_step",
    }
)
"""The packages of loopkit and its distributions; others may begin with `loopkit_` as well."""
PACKAGES = frozenset({*sys.stdlib_module_names, *SHIPPED, "datasets", "numpy", "torch", "torchdata", "webdataset"})


def is_library(module: str) -> bool:
    """Whether a module is of Python, of loopkit or its distributions, or of a library of data and tensors.

    >>> is_library("torch.utils.data"), is_library("script")
    (True, False)
    """
    return module.partition(".")[0] in PACKAGES


def is_shipped(plugin: Any) -> bool:
    """Whether a plugin, or the one that it wraps, is of loopkit or its distributions, which test their states."""
    return type(unwrapped(plugin)).__module__.partition(".")[0] in SHIPPED
