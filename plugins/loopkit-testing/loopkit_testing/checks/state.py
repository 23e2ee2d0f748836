"""Checks of saved state."""

from __future__ import annotations

import copy
import random
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from loopkit.author import bundle, disk, plugin_name
from loopkit.hooks import hookimpl
from loopkit.learner import Learner
from loopkit.phases import Phase
from loopkit_testing.bits import difference, not_allowed, plain, weights
from loopkit_testing.case import Case, described, seed_all
from loopkit_testing.diff import differences

if TYPE_CHECKING:
    from loopkit import Epoch

EPOCHS = 3
DRAWN = {"training step": 2, "other step": 1, "epoch": 1}
"""How many places of each kind are drawn."""


def state_round_trip(case: Case) -> list[str]:
    """Saved state has only the allowed kinds, is a copy, and resuming from it changes no bit.

    Allowed are None, booleans, numbers, strings, lists, tuples, dicts with string or int keys, and tensors. The state
    is saved between two fits; together with the weights, optimizers, counters, metrics and generators, and the state
    of the companions and phases, it goes into a fresh learner. A plugin without state keeps it.
    """
    plugins = case.plugins()
    plugin, ignored = plugins[0], case.ignored(plugins)
    methods = [name for name in ("state_dict", "load_state_dict") if callable(getattr(plugin, name, None))]
    if not methods:
        return []
    if len(methods) == 1:
        return [f"it has only {methods[0]}: state_dict and load_state_dict go together"]

    straight = case.bench(plugins)
    straight.train()
    saved = {name: p.state_dict() for name, p in straight.plugins.items() if hasattr(p, "state_dict")}
    state = saved[plugin_name(plugin)]
    if broken := not_allowed(state, "state_dict()"):
        return broken
    if path := difference(plain(state), plain(plugin.state_dict()), "state_dict()", ignored):
        return [f"called twice in a row it returns something else: {path} differs. It must not change the plugin"]
    copied = copy.deepcopy(saved)
    phases = replace(case, phases=tuple(straight.phases[each.name] for each in case.phases)).fresh_phases()
    rest = copy.deepcopy(
        (
            {name: model.state_dict() for name, model in straight.models.items()},
            {name: optimizer.state_dict() for name, optimizer in straight.optimizers.items()},
            straight.progress,
            straight.metrics,
        )
    )
    seed_all()
    straight.train()
    broken = []
    if path := difference(copied[plugin_name(plugin)], state, "state_dict()", ()):
        broken.append(
            f"what it returned was changed by later training, at {path}: return copies (tensor.clone(), list(...))"
        )

    fresh = case.plugins()
    resumed = case.bench(fresh, phases=phases)
    given = copy.deepcopy(copied)
    for name, other in resumed.plugins.items():
        if name in given:
            other.load_state_dict(given[name])
    again = copy.deepcopy(fresh[0].state_dict())
    if path := difference(copied[plugin_name(plugin)], again, "state_dict()", ignored):
        return [
            *broken,
            f"a fresh plugin that has loaded the state does not return it again: {path} differs. load_state_dict takes "
            f"over all that state_dict returns",
        ]
    models, optimizers, progress, metrics = rest
    for name, model in resumed.models.items():
        model.load_state_dict(models[name])
    for name, optimizer in resumed.optimizers.items():
        optimizer.load_state_dict(optimizers[name])
    for counter in fields(progress):
        setattr(resumed.progress, counter.name, getattr(progress, counter.name))
    resumed.metrics.update(metrics)
    seed_all()
    resumed.train()
    if path := difference(copied[plugin_name(plugin)], given[plugin_name(plugin)], "state", ()):
        broken.append(
            f"what load_state_dict was given was changed by later training, at {path}: keep copies (tensor.clone(), "
            f"list(...))"
        )
    if path := difference(weights(straight), weights(resumed), "weights", ()):
        broken.append(f"resuming from saved state gives other parameters than an uninterrupted run: {path} differs")
    if path := difference(plugin.state_dict(), fresh[0].state_dict(), "state_dict()", ignored):
        broken.append(f"resuming from saved state gives another state than an uninterrupted run: {path} differs")
    return broken


def exact_resume(case: Case) -> list[str]:
    """A run that is killed and resumes from its saved state ends with the bits of an uninterrupted run.

    A fit of three epochs is killed at places that are drawn, by a fixed seed, among the ends of its steps and epochs;
    and at two of them one after the other; and one with accumulation, within a window. Right before, it is saved as a
    checkpoint on the disk; then the plugins, the model and all else are made anew, loaded and fitted on. Compared are
    the whole of ``learner.state_dict()`` at the end, and what was given to ``learner.log``, but for ``volatile`` names.
    """
    return resumed(case)


def resumed(case: Case, load: Callable[[list[Any]], Any] | None = None) -> list[str]:
    """Messages on runs that were killed and resumed.

    Args:
        case: The plugin.
        load: Makes the loader of a list of batches; by default the problem's.
    """
    with _never_synced():
        return _resumed(case, load)


def _resumed(case: Case, load: Callable[[list[Any]], Any] | None) -> list[str]:
    whole = _run(case, [], load=load)
    drawn = _draw(whole.kinds, DRAWN)
    runs = [(whole, 1, [place]) for place in drawn]
    if len(drawn) > 1:
        runs.append((whole, 1, [drawn[0], drawn[-1]]))
    if case.accumulates():
        accumulated = _run(case, [], accumulate=2, load=load)
        runs += [(accumulated, 2, [place]) for place in _draw(accumulated.kinds, {"open window": 1})]
    broken: dict[str, str] = {}
    for whole, accumulate, kills in runs:
        again = _run(case, kills, accumulate, load)
        where = " and ".join(whole.places[place] for place in kills)
        if again.refused:
            return [f"killed {where}, it could not resume: {again.refused}"]
        found = differences(whole.state, again.state, ignore=whole.ignored)
        own = [each for each in found if each.part.startswith("plugins.")]
        if found:
            first = (own or found)[0]
            broken.setdefault(
                first.part,
                f"killed {where}, then made anew and loaded, the run ends with other bits than one that went through: "
                f"{first}. Values that a plugin keeps from step to step belong into epoch.store(self) or state_dict; "
                f"fit_begin and epoch_begin come again in a resumed run; learner.current.resumed and epoch.resumed are "
                f"True there",
            )
        elif path := difference(whole.logged, again.logged, "logged", whole.ignored):
            broken.setdefault(
                "logged",
                f"killed {where}, then made anew and loaded, the run logs something else than one that went through: "
                f"{path} differs",
            )
    return list(broken.values())


class _Unsynced(disk.System):
    """Does not wait for the disk: the runs that are killed here do not lose power."""

    def fsync(self, file: int) -> None:
        """Leave it to the system when the bytes go to the disk."""


@contextmanager
def _never_synced() -> Iterator[None]:
    mine, disk.system = disk.system, _Unsynced()
    try:
        yield
    finally:
        disk.system = mine


def _draw(kinds: Sequence[str], counts: Mapping[str, int]) -> list[int]:
    """Some numbers of places, in order, by their kinds."""
    draw = random.Random(0)
    drawn: list[int] = []
    for kind, count in counts.items():
        found = [number for number, each in enumerate(kinds) if each == kind]
        drawn += draw.sample(found, min(count, len(found)))
    return sorted(drawn)


@dataclass
class _Run:
    """The result of a fit, in one piece or in several."""

    places: list[str] = field(default_factory=list)
    """Where it could have been killed."""
    kinds: list[str] = field(default_factory=list)
    state: dict[str, Any] = field(default_factory=dict)
    logged: list[Any] = field(default_factory=list)
    ignored: tuple[str, ...] = ()
    refused: str = ""


class _Killed(BaseException):
    """No plugin may catch it."""


class _Kill:
    """Save and kill the fit at one place; write down all that is logged before."""

    name = "~~kill"
    volatile = ("*",)

    def __init__(self, run: _Run, at: int | None, directory: str) -> None:
        self.run, self.at, self.directory = run, at, directory

    @hookimpl(reads=("*",))
    def step_end(self, learner: Learner, phase: Phase, epoch: Epoch, step: Any) -> None:
        where = f"after step {step.index} of phase {phase.name!r} in epoch {epoch.number}"
        kind = "training step" if phase.training else "other step"
        if phase.training and (step.index + 1) % learner.accumulate and not step.last:
            kind, where = "open window", f"{where} with accumulate={learner.accumulate}"
        self._place(learner, where, kind)

    @hookimpl(reads=("*",))
    def phase_end(self, learner: Learner, phase: Phase, epoch: Epoch) -> None:
        self._place(learner, f"after phase {phase.name!r} in epoch {epoch.number}", "epoch")

    def _place(self, learner: Learner, where: str, kind: str) -> None:
        if learner.current is not None and not learner.current.can_save:
            return  # in an epoch that a hook runs
        self.run.places.append(where)
        self.run.kinds.append(kind)
        if len(self.run.places) - 1 == self.at:
            bundle.save(learner, self.directory)
            raise _Killed


class _Records:
    """Write down what is logged and must repeat."""

    name = "~~records"
    volatile = ("*",)

    def __init__(self, logged: list[Any], repeats: Callable[[str], bool]) -> None:
        self.logged, self.repeats = logged, repeats

    @hookimpl
    def log_value(self, record: Any) -> None:
        if not self.repeats(record.name):
            return
        said = (record.name, record.phase, record.epoch, record.step, record.update)
        self.logged.append({record.name: (*said, plain(record.value))})


def _run(case: Case, kills: Sequence[int], accumulate: int = 1, load: Callable[[list[Any]], Any] | None = None) -> _Run:
    """Fit, killed and resumed at each of these places."""
    run = _Run()
    seed_all()
    with warnings.catch_warnings(), tempfile.TemporaryDirectory(prefix="loopkit-testing-") as directory:
        warnings.simplefilter("ignore")  # such as that so short a fit is of no use
        for index, at in enumerate((*kills, None)):
            plugins = case.plugins()
            run.ignored = case.ignored(plugins)
            watch = [_Kill(run, at, directory), _Records(run.logged, partial(case.repeats, plugins=plugins))]
            learner = case.bench([*plugins, *watch], accumulate=accumulate)
            if index:
                seed_all()
                try:
                    bundle.load(learner, directory)
                except Exception as error:
                    run.refused = described(error)
                    return run
            try:
                learner.train(epochs=EPOCHS, load=load)
            except _Killed:
                continue
            except Exception as error:
                if not index:
                    raise
                run.refused = described(error)
                return run
            run.state = copy.deepcopy(learner.state_dict())
    return run
