"""A check of plugins that replace, wrap or reorder the data of a phase."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from loopkit.author import describe, plugin_name, registry_of
from loopkit.learner import Learner
from loopkit_testing.bits import difference, plain, weights
from loopkit_testing.case import Bench, Case, changed_by, described, entries, seed_all
from loopkit_testing.checks.state import resumed

MANY = 1000
"""An epoch with more batches is counted no further."""


class _Batches(Dataset[Any]):
    """Batches by their index."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> Any:
        return self.batches[index]


def shuffled(batches: list[Any]) -> DataLoader[Any]:
    """A loader of these batches, in another order in each epoch."""
    generator = torch.Generator().manual_seed(7)
    return DataLoader(_Batches(batches), batch_size=None, shuffle=True, generator=generator)


def data_wrapped(case: Case) -> list[str]:
    """Data that a plugin replaces, wraps or reorders are the same at each call, as long as they say, and resume.

    It is for a plugin with ``setup_data``, and for one that declares a change of ``data``. The data are shuffled
    loaders of torch, unless the problem has ``load``. ``setup_data`` is called again with the same loader, and with
    what it has returned; two epochs are counted; a run that is killed ends with the bits of one that went through.
    """
    plugins = case.plugins()
    name = plugin_name(plugins[0])
    learner = case.bench(plugins)
    sets_up = any(hook == "setup_data" for hook, _ in entries(learner, name))
    if not sets_up and "data" not in [state.partition(".")[0] for state in changed_by(learner, name)]:
        return []
    load = case.problem().load or shuffled
    try:
        broken = _set_up(learner, load) if sets_up else []
    except Exception as error:
        return [f"setup_data, called with {describe(load(list(learner.problem.train)))}, {described(error)}"]
    return broken or _trained_twice(case, load) or resumed(case, load)


def _set_up(learner: Bench, load: Any) -> list[str]:
    """Messages on what all plugins together return for the data of training and validation."""
    problem = copy.deepcopy((learner.problem.train, learner.problem.val))
    for phase, batches in zip((learner.case.train_phase, learner.case.val_phase), problem, strict=True):
        if batches is None:
            continue
        given = load(batches)
        made = _asked(learner, phase, given)
        if broken := _not_the_same(learner, phase, given, made) or _miscounted(made, phase):
            return [broken]
    return []


def _asked(learner: Learner, phase: str, given: Any) -> Any:
    """Call ``setup_data`` of each plugin, as the engine does."""
    registry, data = registry_of(learner), given
    for impl in registry.plan(learner.phases[phase]).setup_data:
        data = registry.call(impl, phase=learner.phases[phase], data=data)
    return data


def _not_the_same(learner: Learner, phase: str, given: Any, made: Any) -> str:
    """A message if the same data are set up in another way when the hook is called again."""
    if _asked(learner, phase, given) is not made:
        return (
            f"setup_data of phase {phase!r} returns another object for the same loader when it is called again, as it "
            f"is after a plugin was added and in each epoch of learner.run: the position in the first one is lost. "
            f"Keep what you returned for a loader, and return it again"
        )
    if _asked(learner, phase, made) is not made:
        return (
            f"setup_data of phase {phase!r} wraps {describe(made)} again, which it has returned itself: return data "
            f"that you wrapped already as they are"
        )
    return ""


def _miscounted(made: Iterable[Any], phase: str) -> str:
    """A message if two epochs do not have as many batches as the length says, or as each other."""
    counts = [sum(1 for _ in islice(iter(made), MANY)) for _ in range(2)]
    length: int | None = None
    try:
        length = len(made)  # type: ignore[arg-type]
    except TypeError:
        if counts[0] == counts[1]:
            return ""
    if length is not None and counts == [length, length]:
        return ""
    said = "a second epoch has as many" if length is None else f"len() is {length}"
    return (
        f"what setup_data returned for phase {phase!r} gives {counts[0]} batches, then {counts[1]}, and {said}: "
        f"__iter__ must begin anew each time, and __len__ return the number of batches of an epoch"
    )


def _trained_twice(case: Case, load: Any) -> list[str]:
    """A message if two runs from the same seed differ."""
    found = []
    for _ in range(2):
        seed_all()
        learner = case.bench(case.plugins())
        seed_all()
        try:
            learner.train(load=load)
        except Exception as error:
            return [f"with shuffled loaders of torch for the data, the fit {described(error)}"]
        found.append(plain(weights(learner)))
    first, second = found
    if path := difference(first, second, "weights", ()):
        return [
            f"two runs with the same seeds and loaders end with other weights: {path} differs. The order of the data "
            f"must follow from generators that are seeded, or from the plugin's state"
        ]
    return []
