"""Trials: a learner of copies, and afterwards everything that it shares with the original as it was."""

from __future__ import annotations

import copy
import gc
import random
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from types import CodeType, FunctionType, ModuleType, NoneType
from typing import TYPE_CHECKING, Any

import numpy
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset

from loopkit.author import devices, free, sharded
from loopkit.data import Loader, ResumableSampler
from loopkit.errors import PluginError
from loopkit.learner import Learner

if TYPE_CHECKING:
    from loopkit.phases import Phase

MOST, LONG = 10_000, 1000
"""Objects of the data that are looked at for generators, and of one list, dict or module."""
LOCKS = {type(make()): make for make in (threading.Lock, threading.RLock)}
"""A copy of an object with a lock has a new lock."""
LEAVES = (Tensor, ModuleType, CodeType, str, bytes, int, float, NoneType)
FOREIGN = ("builtins", "loopkit", "numpy", "random", "torch")
"""Packages whose classes use only generators in their attributes, and the global ones."""
KEPT = ("clip", "device", "eval_mode", "freeze", "memory_format", "mixed_precision", "noise")
"""The ``provides`` of plugins that a copy keeps; the other plugins watch, save, stop or schedule."""


def copied(
    learner: Learner, words: Collection[str], phase: str | Phase | None, added: Sequence[Any] = ()
) -> tuple[Learner, str | None]:
    """A learner of deep copies, and the name of the phase.

    Args:
        learner: The learner to copy.
        words: The names of the plugins that are copied, or what they provide.
        phase: A phase, which need not be one of the learner's, or its name.
        added: More plugins.
    """
    kept = {n: p for n, p in learner.plugins.items() if n in words or getattr(p, "provides", "") in words}
    known = {*kept, *(getattr(plugin, "provides", "") for plugin in kept.values())}
    held = reached([learner.loss_fn, learner.phases.given, *kept.values(), *learner.models.values()])
    memo: dict[int, Any] = {id(each): LOCKS[type(each)]() for each in held if type(each) in LOCKS}
    models = copy.deepcopy(dict(learner.models), memo)  # without what is wrapped around them
    optimizers = {name: _copy_optimizer(each, memo) for name, each in learner.optimizers.items()}
    loss_fn, phases, phase = copy.deepcopy((learner.loss_fn, learner.phases.given, phase), memo)
    plugins = [_copy_plugin(name, plugin, memo) for name, plugin in kept.items()]
    if phase is not None and not isinstance(phase, str):
        phases, phase = [*(each for each in phases if each.name != phase.name), phase], phase.name
    made = Learner(
        models if isinstance(learner.model, Mapping) else models["model"],
        loss_fn,
        optimizers if isinstance(learner.optimizer, Mapping) else optimizers.get("optimizer"),
        plugins=[*plugins, *added],
        phases=phases,
        accumulate=learner.accumulate,
        standard=False,
        order=[[word for word in chain if word in known] for chain in learner.options.order],
    )
    return made, phase


def _copy_plugin(name: str, plugin: Any, memo: dict[int, Any]) -> Any:
    try:
        copied = copy.deepcopy(plugin, memo)
        free(copied)  # it belongs to the copy of the learner
        return copied
    except (TypeError, RuntimeError) as error:
        raise TypeError(f"plugin {name!r}: {error}") from error


def _copy_optimizer(optimizer: Optimizer, memo: dict[int, Any]) -> Optimizer:
    """A deep copy that also has what torch leaves out: attributes which a class adds to the standard ones.

    Not ``step``: an instance has it if a scheduler put it there, and it would step the original.
    """
    copied = copy.deepcopy(optimizer, memo)
    for name in vars(optimizer).keys() - vars(copied).keys() - {"step"}:
        setattr(copied, name, copy.deepcopy(vars(optimizer)[name], memo))
    return copied


def can_begin_again(data: Any) -> bool:
    """Whether data have a place that can be put back."""
    if isinstance(data, (Loader, Sequence)) or callable(getattr(data, "load_state_dict", None)):
        return True
    return isinstance(data, DataLoader) and not isinstance(data.dataset, IterableDataset)


def refuse_sharded(what: str, learner: Learner) -> None:
    """Raise for parameters that cannot be copied.

    Raises:
        PluginError: They are sharded.
    """
    if any(sharded.is_sharded(p) for model in learner.models.values() for p in model.parameters()):
        raise PluginError(f"{what}: the parameters are sharded, and cannot be copied")


def own_position(data: Any) -> Any:
    """The same data, in a copy where iterating moves the object's state."""
    if isinstance(data, Loader):
        data = copy.copy(data)
    elif isinstance(data, DataLoader):
        data = copy.copy(data)
        data._iterator = None  # persistent workers
    return data


@contextmanager
def as_before(learner: Learner, data: Any) -> Iterator[None]:
    """Put back afterwards what a copy shares with the learner: generators, position, gradients."""
    restore: list[Callable[[], Any]] = []

    def keep(restorer: Callable[[Any], Any], state: Any) -> None:
        restore.append(lambda: restorer(state))

    keep(random.setstate, random.getstate())
    keep(numpy.random.set_state, numpy.random.get_state())
    keep(torch.set_rng_state, torch.get_rng_state())
    keep(devices.set_generator_states, devices.generator_states())
    for each in reached(data):
        if isinstance(each, ResumableSampler):
            keep(vars(each).update, vars(copy.copy(each)))
        elif isinstance(each, torch.Generator):
            keep(each.set_state, each.get_state())
        elif isinstance(each, random.Random) and not isinstance(each, random.SystemRandom):
            keep(each.setstate, each.getstate())
        elif isinstance(each, numpy.random.RandomState):
            keep(each.set_state, each.get_state(legacy=False))
        elif isinstance(each, numpy.random.Generator):
            keep(partial(setattr, each.bit_generator, "state"), each.bit_generator.state)
    if hasattr(data, "state_dict") and hasattr(data, "load_state_dict") and not isinstance(data, (Loader, DataLoader)):
        keep(data.load_state_dict, copy.deepcopy(data.state_dict()))
    params = {p for model in learner.models.values() for p in model.parameters()}
    params |= {p for each in learner.optimizers.values() for group in each.param_groups for p in group["params"]}
    for p in params:
        keep(partial(setattr, p, "grad"), p.grad)
        p.grad = None
    try:
        yield
    finally:
        for put_back in restore:
            put_back()


def reached(data: Any) -> list[Any]:
    """The data and what they lead to: attributes, items, functions, classes and their modules; `MOST` objects."""
    found, seen = [data], {id(data)}
    for each in found:
        for value in islice(gc.get_referents(each), LONG):
            if id(value) not in seen and not isinstance(value, LEAVES) and not _is_foreign(value) and len(found) < MOST:
                seen.add(id(value))
                found.append(value)
    return found


def _is_foreign(value: Any) -> bool:
    """Whether it is a class or a function that uses only the global generators."""
    return isinstance(value, (type, FunctionType)) and str(value.__module__).partition(".")[0] in FOREIGN
