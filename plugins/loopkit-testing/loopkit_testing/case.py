"""The arguments of a check, and the silence around it."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch

from loopkit.author import devices, hooks, registry_of
from loopkit.engine.compile.order import Entry
from loopkit.errors import LoopkitError, PluginError
from loopkit.events import Event, StepCancelled, UpdateSkipped
from loopkit.learner import Learner
from loopkit.phases import Phase, PredictionPhase
from loopkit_testing.leftovers import put_back, settings
from loopkit_testing.problems import Problem, tiny_problem


@dataclass(frozen=True)
class Case:
    """A plugin to check, and what to check it with."""

    factory: Callable[[], Any]
    phases: tuple[Phase, ...] = ()
    problem: Callable[[], Problem] = tiny_problem
    volatile: tuple[str, ...] = ()
    name: str | None = None
    """The name of its entry point."""

    def plugins(self) -> list[Any]:
        """A fresh plugin, followed by its companions."""
        if not callable(self.factory):
            raise PluginError(f"{self.factory!r} is no factory: give the class or a function that makes the plugin")
        made = self.factory()
        return list(made) if isinstance(made, (tuple, list)) else [made]

    def ignored(self, plugins: Iterable[Any]) -> tuple[str, ...]:
        """The keys of state whose values need not repeat: the given ones, and ``volatile`` of the classes."""
        return (*self.volatile, *(key for plugin in plugins for key in getattr(plugin, "volatile", ())))

    def repeats(self, name: str, plugins: Iterable[Any]) -> bool:
        """Whether the values that are logged under this name must repeat; a pattern may be of the phase or without."""
        names = (name, name.partition("/")[2])
        return not any(fnmatchcase(each, key) for key in self.ignored(plugins) for each in names)

    @property
    def train_phase(self) -> str:
        """The name of the phase that ``fit`` trains with."""
        return next((phase.name for phase in self.phases if phase.training), "train")

    @property
    def val_phase(self) -> str:
        """The name of the phase that ``fit`` validates with."""
        fits = (p.name for p in self.phases if not p.training and not isinstance(p, PredictionPhase))
        return next(fits, "val")

    def accumulates(self) -> bool:
        """Whether the phases themselves take ``accumulate``; one with a closure does not."""
        if not self.phases:
            return True
        try:
            self.bench([], accumulate=2).train(epochs=1, short=True)
        except LoopkitError:
            return False
        return True

    def predicts(self) -> bool:
        """Whether the problem's own model predicts its batches."""
        try:
            self.bench([]).predict(self.problem().train[:1])
        except Exception:
            return False
        return True

    def bench(self, plugins: Iterable[Any], **options: Any) -> Bench:
        """A quiet learner for a fresh problem."""
        options = {"phases": self.fresh_phases(), "standard": False, **options}
        return Bench(self, self.problem(), plugins=plugins, **options)

    def fresh_phases(self) -> tuple[Phase, ...]:
        """The phases as they were given, each a copy if it can be copied: no fit starts with the state of another."""
        return tuple(map(_copied, self.phases))


def _copied(phase: Phase) -> Phase:
    try:
        return copy.deepcopy(phase)
    except (TypeError, RuntimeError):  # it holds a lock, a file, a tensor with a graph
        return phase


class Bench(Learner):
    """A learner with the problem that it is for."""

    def __init__(self, case: Case, problem: Problem, **options: Any) -> None:
        self.case = case
        self.problem = problem
        super().__init__(problem.model, problem.loss_fn, problem.optimizer, **options)

    def train(
        self,
        epochs: int = 2,
        max_steps: int | None = None,
        times: int = 1,
        load: Callable[[list[Any]], Any] | None = None,
        short: bool = False,
        **options: Any,
    ) -> None:
        """Fit on data that no earlier fit can have changed.

        Args:
            epochs: As for ``fit``.
            max_steps: Likewise.
            times: How often an epoch goes over the data for training.
            load: Makes the loader of a list of batches; by default the problem's.
            short: Take three batches for training and one for validation: a first, a middle and a last step.
            options: Further ones of ``fit``.
        """
        data = self.problem.train * times, self.problem.val
        if short:
            data = data[0][:3], data[1] and data[1][:1]
        made = load or self.problem.load or list
        train, val = (None if each is None else made(each) for each in copy.deepcopy(data))
        valid = None if val is None else {self.case.val_phase: val}
        if self.result is not None and self.result.reason == "error":
            self.forget()  # checks let fits fail on purpose, and need not be told
        self.fit({self.case.train_phase: train}, valid, epochs=epochs, max_steps=max_steps, **options)

    def events(self) -> list[type[Event]]:
        """The events that come in every epoch of the training phase."""
        events = dict.fromkeys(self.phases[self.case.train_phase].events())
        return [event for event in events if event not in (StepCancelled, UpdateSkipped)]


def entries(learner: Learner, plugin: str) -> list[tuple[str, Entry]]:
    """The hooks of the plugin with this name, and what it declares for each."""
    registry = registry_of(learner)
    found = ((hook, impl.entry) for hook in hooks() for impl in registry.implementations(hook))
    return [(hook, entry) for hook, entry in found if entry.plugin == plugin]


def changed_by(learner: Learner, plugin: str) -> list[str]:
    """The states that a plugin's hooks declare to update or write."""
    return [state for _, entry in entries(learner, plugin) for state in (*entry.updates, *entry.writes)]


Check = Callable[[Case], list[str]]
"""Returns a message for each broken promise."""


def refuses_model(error: BaseException) -> bool:
    """Whether a plugin has rejected a model in ``setup_model``, which is its right."""
    notes = getattr(error, "__notes__", ())
    return isinstance(error, PluginError) and any("in setup_model of plugin" in note for note in notes)


def described(error: BaseException) -> str:
    """An error with the place that the engine noted on it."""
    notes = [note for note in getattr(error, "__notes__", ()) if note.startswith("loopkit: ")]
    where = f" ({notes[0].removeprefix('loopkit: ')})" if notes else ""
    inner = f" [{'; '.join(map(described, error.exceptions))}]" if isinstance(error, BaseExceptionGroup) else ""
    return f"raised {type(error).__name__}: {error}{inner}{where}"


@contextmanager
def alone() -> Iterator[None]:
    """Seed the generators, and use one thread, which is fastest for tiny tensors; put all back afterwards.

    What a plugin that breaks a promise has left behind in the process is put back as well.
    """
    python = random.getstate()
    numpy = sys.modules["numpy"].random if "numpy" in sys.modules else None
    state = None if numpy is None else numpy.get_state()
    before = settings()
    with torch.random.fork_rng(devices=[]):
        try:
            torch.set_num_threads(1)
            seed_all()
            yield
        finally:
            put_back(before)
            random.setstate(python)
            if numpy is not None:
                numpy.set_state(state)


def seed_all() -> None:
    """Seed the generators of torch, Python and NumPy."""
    (torch if devices.accelerator() else torch.default_generator).manual_seed(
        0
    )  # torch's notes the stack for later devices
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
