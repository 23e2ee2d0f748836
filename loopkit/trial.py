"""Trials: a learner of copies, and afterwards everything that it shares with the original as it was."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from loopkit import devices
from loopkit.data import Loader, ResumableSampler
from loopkit.learner import Learner

if TYPE_CHECKING:
    from loopkit.phases import Phase

T = TypeVar("T")

KEPT = ("clip", "device", "eval_mode", "freeze", "memory_format", "mixed_precision", "noise")
"""What the plugins provide that a copy trains with, too; the others watch, save, stop or schedule."""


def copied(
    learner: Learner, words: Collection[str], phase: str | Phase | None, added: Sequence[Any] = ()
) -> tuple[Learner, str | None]:
    """A learner of deep copies, and the name of the phase.

    Args:
        learner: What to copy.
        words: The names of the plugins that are copied, or what they provide.
        phase: A phase, which need not be one of the learner's, or its name.
        added: More plugins.
    """
    kept = {n: p for n, p in learner.plugins.items() if n in words or getattr(p, "provides", "") in words}
    known = {*kept, *(getattr(plugin, "provides", "") for plugin in kept.values())}
    memo: dict[int, Any] = {}
    models = copy.deepcopy(learner.models, memo)
    optimizers = {name: _copy_optimizer(each, memo) for name, each in learner.optimizers.items()}
    loss_fn, phases, phase, plugins = copy.deepcopy(
        (learner.loss_fn, learner.phases.given, phase, list(kept.values())), memo
    )
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


def _copy_optimizer(optimizer: Optimizer, memo: dict[int, Any]) -> Optimizer:
    """A deep copy that also has what torch leaves out: attributes which a class adds to the standard ones.

    Not ``step``: an instance has it if a scheduler put it there, and it would step the original.
    """
    copied = copy.deepcopy(optimizer, memo)
    for name in vars(optimizer).keys() - vars(copied).keys() - {"step"}:
        setattr(copied, name, copy.deepcopy(vars(optimizer)[name], memo))
    return copied


def own_position(data: Any) -> Any:
    """The same data, in an object of its own where iterations over it move something in the object."""
    if isinstance(data, Loader):
        data = copy.copy(data)
        data._place = copy.copy(data._place)
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
    if "numpy" in sys.modules:
        numpy = sys.modules["numpy"].random
        keep(numpy.set_state, numpy.get_state())
    keep(torch.set_rng_state, torch.get_rng_state())
    keep(devices.set_generator_states, devices.generator_states())
    for sampler in _held(data, ResumableSampler):
        keep(vars(sampler).update, {**vars(sampler), "_place": copy.copy(vars(sampler)["_place"])})
    for generator in _held(data, torch.Generator):
        keep(generator.set_state, generator.get_state())
    if hasattr(data, "state_dict") and hasattr(data, "load_state_dict") and not isinstance(data, (Loader, DataLoader)):
        keep(data.load_state_dict, copy.deepcopy(data.state_dict()))
    params = {p for model in learner.models.values() for p in model.parameters()}
    params |= {p for each in learner.optimizers.values() for group in each.param_groups for p in group["params"]}
    gradients = [(p, p.grad) for p in params]
    try:
        for p in params:
            p.grad = None
        yield
    finally:
        for p, gradient in gradients:
            p.grad = gradient
        for each in restore:
            each()


def _held(data: Any, kind: type[T]) -> list[T]:
    """The generators, or resumable samplers, that a loader and its samplers hold."""
    batch_sampler = getattr(data, "batch_sampler", None)
    holders = [data, getattr(data, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)]
    found = [value for holder in holders for value in (holder, *getattr(holder, "__dict__", {}).values())]
    unique = {id(value): value for value in found if isinstance(value, kind)}
    return list(unique.values())
