"""set_at_begin: attributes of data that a hook sets from the counters whenever an epoch begins or resumes."""

from __future__ import annotations

import dis
import types
from collections.abc import Iterable
from itertools import takewhile
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, Dataset, Sampler

from loopkit.base.generators import is_generator
from loopkit.engine.kept.witness.libraries import is_shipped
from loopkit.engine.kept.witness.walk import Found
from loopkit.plugin import unwrapped

COUNTERS = frozenset({"progress", "number"})
"""Names of the counters of a learner and of an epoch."""
OTHER = frozenset(
    {"random", "rand", "randn", "randint", "randperm", "choice", "uniform", "integers", "time", "monotonic"}
)
"""Names in code whose result differs when it runs again."""
READS = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_GLOBAL")
TRAINING = (None, "training")


class Code(NamedTuple):
    """The attributes that a function sets whenever it runs, and the names that it reads: always, and perhaps."""

    stored: frozenset[str]
    always: frozenset[str]
    read: frozenset[str]


def is_set_at_begin(found: Found, plugins: Iterable[Any], phase: str) -> bool:
    """Whether hooks of `epoch_begin` set an attribute of data anew in each epoch of a training phase.

    Args:
        found: The attribute.
        plugins: The plugins of the learner.
        phase: The name of the phase.
    """
    if not isinstance(found.key, str) or not is_data(found.owner) or is_generator(found.value):
        return False
    return any(_sets(code, found) for plugin in plugins if (code := _begin(plugin, phase)) is not None)


def is_data(value: Any) -> bool:
    """Whether an object is a loader, sampler or data set, by its class."""
    if isinstance(value, (DataLoader, Dataset, Sampler)):
        return True
    methods = {name for base in type(value).__mro__[:-1] for name in vars(base)}
    return bool(methods & {"__getitem__", "__iter__"}) and "state_dict" not in methods


def _begin(plugin: Any, phase: str) -> Code | None:
    """The code of a plugin's ``epoch_begin``, if it is called in a training phase and reads counters."""
    hook = getattr(type(plugin), "epoch_begin", None)
    options = getattr(hook, "loopkit_options", None)
    if (
        unwrapped(plugin) is not plugin
        or is_shipped(plugin)
        or options is None
        or options.phase not in (*TRAINING, phase)
    ):
        return None
    code = _code(hook)
    return code if code is not None and code.read & COUNTERS and not code.read & OTHER else None


def _sets(code: Code, found: Found) -> bool:
    """Whether a hook sets an attribute, or calls a method of its owner that does, without reading it."""
    setters = [vars(base)[name] for base in type(found.owner).__mro__ for name in code.always & vars(base).keys()]
    codes = [code, *filter(None, map(_code, setters))]
    return any(found.key in each.stored - each.read and not each.read & OTHER for each in codes)


def _code(function: Any) -> Code | None:
    """The names in a function's code; None if it has none, or the function is a constructor."""
    function = getattr(function, "__wrapped__", function)
    if not isinstance(function, types.FunctionType) or function.__name__ == "__init__":
        return None
    instructions = list(dis.get_instructions(function))
    straight = list(takewhile(lambda each: not _may_skip(each.opname), instructions))
    return Code(_names(straight, ("STORE_ATTR",)), _names(straight, READS), _names(instructions, READS))


def _may_skip(opname: str) -> bool:
    """Whether the instructions after this one may be left out: those of a branch or a loop."""
    return "_IF_" in opname or opname == "FOR_ITER"


def _names(instructions: Iterable[dis.Instruction], opnames: tuple[str, ...]) -> frozenset[str]:
    return frozenset(str(each.argval) for each in instructions if each.opname in opnames)
