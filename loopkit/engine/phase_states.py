"""The states of phases: collected, put back, and missed where a phase changes without one."""

from __future__ import annotations

from collections.abc import Mapping, Sized
from typing import Any

import torch
from torch import Tensor, nn

from loopkit.errors import PhaseError
from loopkit.notes import locate, warn
from loopkit.phases import Phase
from loopkit.words import STATE, half_a_state


class PhaseStates:
    """The states of a learner's phases, and of others that it has run.

    Args:
        phases: The learner's, by name.
    """

    def __init__(self, phases: Mapping[str, Phase]) -> None:
        for phase in phases.values():
            _check(phase)
        self._phases = dict(phases)
        self._waiting: dict[str, Any] = {}
        """Loaded, of phases that were not run yet."""
        self._begun: dict[str, dict[str, Any] | None] = {}
        """How the attributes of the phases were when each was first run in this fit; None of those with a state."""
        self._warned: set[str] = set()
        """The phases of which this fit has warned."""

    def use(self, phase: Phase) -> None:
        """A phase is run.

        Raises:
            PhaseError: Another phase of its name was run, and one of them has a state.
        """
        known = self._phases.get(phase.name)
        if known is not phase:
            _check(phase)
            self._add(known, phase)
        if phase.name not in self._begun:
            self._begun[phase.name] = None if phase.has_state else _looks(phase)

    def _add(self, known: Phase | None, phase: Phase) -> None:
        if known is not None and (known.has_state or phase.has_state):
            raise PhaseError(
                f"{phase!r} and {known!r} are two phases of one name, and at least one has a state, which is saved "
                f"under the name: give one of them another, {type(phase).__name__}(name=...)"
            )
        self._phases[phase.name] = phase
        if phase.name in self._waiting:
            self._load(phase, self._waiting.pop(phase.name))

    def begin(self) -> None:
        """A fit begins: from here on changes of phases without a state count."""
        self._begun.clear()
        self._warned.clear()

    def collect(self) -> dict[str, Any]:
        """The states by name; warns, once, of phases that have changed and have none."""
        self._warn()
        states = dict(self._waiting)
        for name, phase in self._phases.items():
            if phase.has_state:
                try:
                    states[name] = phase.state_dict()
                except Exception as error:
                    locate(error, f"in state_dict of phase {name!r}")
                    raise
        return states

    def load(self, states: Mapping[str, Any]) -> None:
        """Put states back; those of phases that are not known wait until these are run."""
        self._waiting = {name: state for name, state in states.items() if name not in self._phases}
        for name, state in states.items():
            if name in self._phases and self._phases[name].has_state:
                self._load(self._phases[name], state)
        self.begin()

    @staticmethod
    def _load(phase: Phase, state: Any) -> None:
        try:
            phase.load_state_dict(state)
        except Exception as error:
            locate(error, f"in load_state_dict of phase {phase.name!r}, whose saved state may be of another version")
            raise

    def _warn(self) -> None:
        for name, message in self.missing().items():
            if name not in self._warned:
                self._warned.add(name)
                warn(message)

    def missing(self) -> dict[str, str]:
        """Of phases without a state: which of their attributes have changed since the fit began, in words."""
        messages = {}
        for name, before in self._begun.items():
            if before is None:
                continue
            now = _looks(self._phases[name])
            changed = [key for key, value in now.items() if key not in before or not _alike(before[key], value)]
            if changed:
                listed = ", ".join(f"{key!r}" for key in changed)
                kind = type(self._phases[name]).__name__
                messages[name] = (
                    f"phase {name!r} ({kind}) has changed its {listed} since the fit began, and no checkpoint holds "
                    f"that: a run that is resumed goes on without. Give the class saved = ({listed},), or state_dict "
                    f"and load_state_dict; for a cache, volatile = ({listed},)"
                )
        return messages


def _check(phase: Phase) -> None:
    """Refuse a phase whose state could be saved and not loaded, or the reverse; ``saved`` brings both."""
    own = [name for name in STATE if getattr(type(phase), name) is not getattr(Phase, name)]
    if not phase.saved and (half := half_a_state(own)):
        raise PhaseError(f"phase {phase.name!r} ({type(phase).__name__}) {half}")


def _looks(phase: Phase) -> dict[str, tuple[Any, int]]:
    """The phase's own attributes: each with its version if it is a tensor, with its length if it is a container."""
    return {
        name: (value, value._version if isinstance(value, Tensor) else len(value) if isinstance(value, Sized) else 0)
        for name, value in vars(phase).items()
        if name not in phase.volatile
        and not isinstance(value, (nn.Module, torch.optim.Optimizer))
        and not callable(value)
    }


def _alike(before: tuple[Any, int], now: tuple[Any, int]) -> bool:
    return before[0] is now[0] and before[1] == now[1]
