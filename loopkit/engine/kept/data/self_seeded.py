"""self_seeded: shuffles that seed themselves from the clock, so that no checkpoint and no seed reach them."""

from __future__ import annotations

import inspect
import types
from typing import Any

from torch.utils.data import DataLoader

from loopkit.engine.kept.witness.walk import Found, walk

DEEP = 12
GENERATORS = ("rng", "seed")
"""The arguments by which webdataset's shuffles are seeded."""


def self_seeded(data: Any) -> str:
    """Name the shuffles of webdataset in data that seed themselves; empty if there is none."""
    if not isinstance(data, DataLoader):
        return ""
    found = [name for each in walk(data.dataset, deep=DEEP, enter=_is_open) if (name := _name(each.value))]
    if not found:
        return ""
    return (
        f"{found[0]} in the data of {type(data).__name__} seeds itself from the clock, and no checkpoint holds that: a "
        f"run that resumes in mid-epoch sees other data, and only warns. Give {found[0]}(..., rng=random.Random(0))"
    )


def _name(value: Any) -> str:
    """The name of a shuffle that seeds itself, as its user calls it."""
    attributes = vars(value) if hasattr(type(value), "__dict__") and hasattr(value, "__dict__") else {}
    function = attributes.get("f")
    if not isinstance(function, types.FunctionType) or not function.__module__.startswith("webdataset"):
        return ""
    parameters = inspect.signature(function).parameters
    if "rng" not in parameters:
        return ""
    try:
        given = inspect.signature(function).bind_partial(None, *attributes["args"], **attributes["kw"]).arguments
    except (KeyError, TypeError):
        return ""
    seeded = any(given.get(name) is not None for name in GENERATORS)
    return "" if seeded else function.__name__.lstrip("_")


def _is_open(found: Found) -> bool:
    return not isinstance(found.value, (list, tuple, dict)) or len(found.value) <= 1_000
