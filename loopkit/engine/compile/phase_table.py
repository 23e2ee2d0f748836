"""PhaseTable: the phases of a learner by name, and which of them trains, validates and predicts."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from loopkit.base.named import Named
from loopkit.base.words import nearest
from loopkit.errors import PhaseError
from loopkit.phases import Phase, PredictionPhase, SupervisedPhase, TrainingPhase, ValidationPhase


def _trains(phase: Phase) -> bool:
    return phase.training


def _validates(phase: Phase) -> bool:
    return not phase.training and not isinstance(phase, PredictionPhase)


def _predicts(phase: Phase) -> bool:
    return isinstance(phase, PredictionPhase)


FITS: dict[str, Callable[[Phase], bool]] = {"train": _trains, "val": _validates, "predict": _predicts}
"""Which phases can play a role; the standard phase of each has its name."""

STANDARD_STEPS = {TrainingPhase.step, ValidationPhase.step}
"""The steps that call ``unpack``, ``forward`` and ``loss``."""


def _check_methods(phase: Phase) -> None:
    """Raise for a method of a phase that cannot be called as the engine, or the standard step, calls it."""
    expected: dict[str, tuple[str, ...]] = {"step": ("learner", "step")}
    if isinstance(phase, SupervisedPhase) and type(phase).step in STANDARD_STEPS:
        expected |= {"unpack": ("batch",), "forward": ("learner", "inputs"), "loss": ("learner", "outputs", "targets")}
    for name, arguments in expected.items():
        try:
            shape = inspect.signature(getattr(phase, name))
        except (TypeError, ValueError):  # of a function that does not know its arguments
            continue
        try:
            shape.bind(*arguments)
        except TypeError:
            raise PhaseError(
                f"{type(phase).__name__}.{name} takes {shape}, and is called with ({', '.join(arguments)}): write "
                f"def {name}({', '.join(('self', *arguments))})"
            ) from None


class PhaseTable(Named[Phase]):
    """The phases by name: the standard ones, and the user's, which replace them.

    Args:
        given: The user's.

    Raises:
        PhaseError: It holds something else, or two of one name.
    """

    def __init__(self, given: Iterable[Phase]) -> None:
        if not isinstance(given, Iterable) or isinstance(given, str):
            raise PhaseError(f"phases is {given!r:.80}: give a list, phases=[...]")
        standard = TrainingPhase(), ValidationPhase(), PredictionPhase()
        super().__init__("phase", {phase.name: phase for phase in standard})
        self.given = list(given)
        """The user's."""
        for phase in self.given:
            if not isinstance(phase, Phase):
                raise PhaseError(f"phases holds {phase!r}: it takes instances of loopkit.Phase")
            if [each.name for each in self.given].count(phase.name) > 1:
                raise PhaseError(f"two phases are called {phase.name!r}: give one Phase(name=...)")
            _check_methods(phase)
            self[phase.name] = phase

    @property
    def own(self) -> list[Phase]:
        """The phases of the user's own: all but the standard ones under their own names."""
        standard = (TrainingPhase, ValidationPhase, PredictionPhase)
        return [each for each in self.values() if type(each) not in standard or each.name != type(each).name]

    def find(self, phase: str | Phase) -> Phase:
        """The phase, or the one of this name."""
        if isinstance(phase, Phase):
            return phase
        if isinstance(phase, str) and phase in self:
            return self[phase]
        names = ", ".join(self)
        hint = nearest(phase, self) if isinstance(phase, str) else ""
        more = "Give Learner(phases=[...]) more"
        if isinstance(phase, str) and not hint:
            more += (
                f": ValidationPhase({phase!r}) for another validation set, as fit(train, {{{phase!r}: ...}}) makes it"
            )
        raise PhaseError(f"no phase is called {phase!r}{hint}; there are: {names}. {more}")

    def of(self, role: str, given: str | Phase | None, argument: str = "phase=...") -> Phase:
        """The phase that was asked for, else the only one of the user's for this role, else the standard one."""
        if given is not None:
            return self.find(given)
        own = [phase for phase in self.given if FITS[role](phase)]
        if len(own) > 1:
            names = ", ".join(repr(phase.name) for phase in own)
            raise PhaseError(f"the learner has several such phases ({names}): say which with {argument}")
        return own[0] if own else self[role]

    def training(self, given: Any) -> tuple[Phase, Any]:
        """The phase that ``fit(train)`` runs, and its data."""
        if not isinstance(given, Mapping):
            return self.of("train", None, "fit({name: data})"), given
        if len(given) != 1:
            raise PhaseError(f"train is a mapping of {len(given)} names: one phase trains, so give {{'train': loader}}")
        ((name, data),) = given.items()
        return self.find(name), data

    def validating(self, given: Any) -> list[tuple[Phase, Any]]:
        """The phases that ``fit(train, val)`` validates with, and their data; missing ones are made."""
        if not isinstance(given, Mapping):
            return [(self.of("val", None, "fit(train, {name: data})"), given)]
        if not given:
            raise PhaseError("val is an empty mapping: give {'val': loader}, or leave val out")
        for name in given:
            if isinstance(name, str) and name and name not in self:
                self[name] = ValidationPhase(name)
        phases = [self.find(name) for name in given]
        for phase in phases:
            if not _validates(phase):
                does = "trains" if phase.training else "predicts"
                raise PhaseError(f"val is {{{phase.name!r}: ...}}, but that phase {does}: give the name of another one")
        return list(zip(phases, given.values(), strict=True))
