"""The states of phases: collected and put back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from loopkit.base.notes import locate
from loopkit.base.words import STATE, half_a_state
from loopkit.engine.kept.part import Part
from loopkit.engine.kept.undo import all_of, undo_of, undone_by
from loopkit.errors import PhaseError
from loopkit.phases import Phase


class PhaseStates(Part):
    """The states of a learner's phases, and of others that it has run.

    Args:
        phases: The learner's, by name.
    """

    name = "phases"
    what = "the phases"
    optional = True

    def __init__(self, phases: Mapping[str, Phase]) -> None:
        for phase in phases.values():
            _check(phase)
        self._phases = dict(phases)
        self._first = {name: _tensors(phase) for name, phase in phases.items()}
        """By phase: the tensors in ``saved`` when it was first seen."""
        self._waiting: dict[str, Any] = {}
        """Loaded, of phases that were not run yet."""

    @property
    def known(self) -> list[Phase]:
        """The learner's phases, and others that it has run; of several with one name the last one."""
        return list(self._phases.values())

    def use(self, phase: Phase) -> bool:
        """A phase is run; returns whether it is new.

        Raises:
            PhaseError: Another phase of its name was run, and one of them has a state.
        """
        known = self._phases.get(phase.name)
        if known is phase:
            return False
        _check(phase)
        self._add(known, phase)
        return True

    def _add(self, known: Phase | None, phase: Phase) -> None:
        if known is not None and (known.has_state or phase.has_state):
            raise PhaseError(
                f"{phase!r} and {known!r} are two phases of one name, and at least one has a state, which is saved "
                f"under the name: give one of them another, {type(phase).__name__}(name=...)"
            )
        self._phases[phase.name] = phase
        self._first[phase.name] = _tensors(phase)
        if phase.name in self._waiting:
            self._load(phase, self._waiting.pop(phase.name))

    def saved(self, whole: bool = True) -> dict[str, Any]:
        """Return the states by name."""
        states = dict(self._waiting)
        for name, phase in self._phases.items():
            if phase.has_state:
                try:
                    states[name] = phase.state_dict()
                except Exception as error:
                    locate(error, f"in state_dict of phase {name!r}")
                    raise
        return states

    def load(self, saved: Mapping[str, Any]) -> Callable[[], None]:
        """Put states back; those of phases that are not known wait until these are run. Return the undo."""
        undos = [(f"phase {phase.name!r}", undo_of(phase)) for phase in self.known]
        with undone_by(undos):
            self._waiting = {name: state for name, state in saved.items() if name not in self._phases}
            for name, state in saved.items():
                if name in self._phases and self._phases[name].has_state:
                    self._load(self._phases[name], state)
        return all_of(undos)

    def apart(self, saved: Any) -> Any:
        """Return all: each process runs its own phases."""
        return saved

    def _load(self, phase: Phase, state: Any) -> None:
        first = self._first.get(phase.name, {})
        stays = {name: tensor for name, tensor in first.items() if getattr(phase, name, None) is tensor}
        try:
            phase.load_state_dict(state)
            for name, tensor in stays.items():
                _put_in_place(phase, name, tensor)
        except Exception as error:
            locate(error, f"in load_state_dict of phase {phase.name!r}, whose saved state may be of another version")
            raise


def _tensors(phase: Phase) -> dict[str, Tensor]:
    """The tensors that a phase's ``saved`` names, and that are its own."""
    attributes = vars(phase)
    return {name: attributes[name] for name in phase.saved if isinstance(attributes.get(name), Tensor)}


def _put_in_place(phase: Phase, name: str, tensor: Tensor) -> None:
    """Keep a tensor that the phase has not replaced since it was first seen: something else may hold it."""
    loaded = getattr(phase, name)
    if loaded is tensor or not isinstance(loaded, Tensor) or tensor.is_inference() or not tensor.is_leaf:
        return
    if tensor.is_contiguous() and tensor.shape == loaded.shape and tensor.dtype == loaded.dtype:
        with torch.no_grad():
            tensor.copy_(loaded)
        setattr(phase, name, tensor)


def _check(phase: Phase) -> None:
    """Refuse a phase whose state could be saved and not loaded, or the reverse; ``saved`` brings both."""
    own = [name for name in STATE if getattr(type(phase), name) is not getattr(Phase, name)]
    if not phase.saved and (half := half_a_state(own)):
        raise PhaseError(f"phase {phase.name!r} ({type(phase).__name__}) {half}")
